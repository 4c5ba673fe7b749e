// A backend that passes everything on to another one, fails where a test wants it, and counts what
// lives (streams, events, graphs, pools, allocations) and what is called. What throws has done
// nothing, as a CUDA call that returns an error has done nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include <quire/runtime/backend.h>

namespace quire::test {

// What a call is for; faults are armed by kind.
enum class Verb : std::uint32_t {
  kMake = 1,  // streams, events, pools
  kAllocate = 2,
  kWait = 4,
  kMemory = 8,      // copies and fills
  kCapture = 16,    // begin and end
  kGraph = 32,      // launches of graphs
  kUpdate = 64,     // apply, clear
  kLaunch = 128,    // plan, append, commit
  kQuestion = 256,  // load_kernels, known answers
  kOrder = 512,     // records and joins of events: counted, never failed
};
constexpr std::uint32_t operator|(Verb a, Verb b) {
  return static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b);
}
inline constexpr std::uint32_t kEveryVerb = 511;

class Fault : public std::runtime_error {
 public:
  Fault() : std::runtime_error("an injected fault") {}
};

class FaultyBackend final : public Backend {
 public:
  explicit FaultyBackend(Backend& real) : real_(real) {}

  // Asked before every call of a kind in `verbs`; true makes it fail.
  void fail_when(std::uint32_t verbs, std::function<bool()> fails) {
    verbs_ = verbs;
    fails_ = std::move(fails);
  }
  // The call `n` (from 0) of these kinds fails, counted from now; all others work.
  void fail_at(std::int64_t n, std::uint32_t verbs) {
    fired_ = false;
    fail_when(verbs, [this, n, at = std::int64_t{0}]() mutable {
      const bool now = at++ == n;
      fired_ = fired_ || now;
      return now;
    });
  }
  void fail_never() { fails_ = nullptr; }
  bool fired() const { return fired_; }  // since fail_at

  // Calls of each kind so far; kinds that were never called are not in it.
  std::map<Verb, std::int64_t> calls() const { return calls_; }

  struct Living {
    std::int64_t streams = 0, events = 0, graphs = 0, pools = 0, allocations = 0, captures = 0;
    friend bool operator==(const Living&, const Living&) = default;
  };
  Living living() const {
    Living now = made_;
    now.allocations = static_cast<std::int64_t>(allocations_.size());
    return now;
  }

  BackendKind kind() const override { return real_.kind(); }
  void check_stream(StreamView stream) const override { real_.check_stream(stream); }
  void check_memory(const void* pointer, const char* what) const override {
    real_.check_memory(pointer, what);
  }

  StreamView make_stream() override {
    may_fail(Verb::kMake);
    const StreamView stream = real_.make_stream();
    ++made_.streams;
    return stream;
  }
  void destroy_stream(StreamView stream) noexcept override {
    --made_.streams;
    real_.destroy_stream(stream);
  }
  void wait(StreamView stream) override {
    may_fail(Verb::kWait);
    real_.wait(stream);
  }
  void wait_for_all() noexcept override { real_.wait_for_all(); }
  void* make_event() override {
    may_fail(Verb::kMake);
    void* event = real_.make_event();
    ++made_.events;
    return event;
  }
  void destroy_event(void* event) noexcept override {
    --made_.events;
    real_.destroy_event(event);
  }
  void record(void* event, StreamView stream) override {
    ++calls_[Verb::kOrder];
    real_.record(event, stream);
  }
  void join(StreamView stream, void* event) override {
    ++calls_[Verb::kOrder];
    real_.join(stream, event);
  }
  void wait_event(void* event) override {
    may_fail(Verb::kWait);
    real_.wait_event(event);
  }
  void begin_capture(StreamView stream) override {
    may_fail(Verb::kCapture);
    real_.begin_capture(stream);
    ++made_.captures;
  }
  void* end_capture(StreamView stream) override {
    may_fail(Verb::kCapture);
    void* graph = real_.end_capture(stream);
    --made_.captures;
    ++made_.graphs;
    return graph;
  }
  void abort_capture(StreamView stream) noexcept override {
    --made_.captures;
    real_.abort_capture(stream);
  }
  bool is_capturing(StreamView stream) const override { return real_.is_capturing(stream); }
  void launch_graph(void* graph, StreamView stream) override {
    may_fail(Verb::kGraph);
    real_.launch_graph(graph, stream);
  }
  void destroy_graph(void* graph) noexcept override {
    --made_.graphs;
    real_.destroy_graph(graph);
  }

  void* make_pool(std::int64_t budget_bytes) override {
    may_fail(Verb::kMake);
    void* pool = real_.make_pool(budget_bytes);
    ++made_.pools;
    return pool;
  }
  void destroy_pool(void* pool) noexcept override {
    --made_.pools;
    real_.destroy_pool(pool);
  }
  std::byte* allocate(void* pool, std::int64_t bytes, StreamView stream) override {
    may_fail(Verb::kAllocate);
    std::byte* memory = real_.allocate(pool, bytes, stream);
    allocations_.insert(memory);
    return memory;
  }
  void free(void* pool, std::byte* memory, StreamView stream) noexcept override {
    allocations_.erase(memory);
    real_.free(pool, memory, stream);
  }
  void copy(void* to, const void* from, std::int64_t bytes, StreamView stream) override {
    may_fail(Verb::kMemory);
    real_.copy(to, from, bytes, stream);
  }
  void fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) override {
    may_fail(Verb::kMemory);
    real_.fill(to, value, bytes, stream);
  }
  std::vector<std::uint32_t> wait_for_known_answers() override {
    may_fail(Verb::kQuestion);
    return real_.wait_for_known_answers();
  }
  void load_kernels() override {
    may_fail(Verb::kQuestion);
    real_.load_kernels();
  }

  void apply(const ApplyParams& params, StreamView stream) override {
    may_fail(Verb::kUpdate);
    real_.apply(params, stream);
  }
  void clear(const ClearParams& params, StreamView stream) override {
    may_fail(Verb::kUpdate);
    real_.clear(params, stream);
  }
  void plan(const PlanParams& params, StreamView stream) override {
    may_fail(Verb::kLaunch);
    real_.plan(params, stream);
  }
  void append(const AppendParams& params, Pdl pdl, StreamView stream) override {
    may_fail(Verb::kLaunch);
    real_.append(params, pdl, stream);
  }
  void commit(const CommitParams& params, Pdl pdl, StreamView stream) override {
    may_fail(Verb::kLaunch);
    real_.commit(params, pdl, stream);
  }
  // The single operations hold no state: nothing to see when they fail.
  void stop_rows(const StopRowsParams& params, Pdl pdl, StreamView stream) override {
    real_.stop_rows(params, pdl, stream);
  }
  void plan_records(const RecordPlanParams& params, StreamView stream) override {
    real_.plan_records(params, stream);
  }
  void compress_c4_decode(const CompressC4DecodeParams& params, Pdl pdl,
                          StreamView stream) override {
    real_.compress_c4_decode(params, pdl, stream);
  }
  void compress_c4_prefill(const CompressC4PrefillParams& params, Pdl pdl,
                           StreamView stream) override {
    real_.compress_c4_prefill(params, pdl, stream);
  }
  void store_flashmla(const StoreParams& params, Pdl pdl, StreamView stream) override {
    real_.store_flashmla(params, pdl, stream);
  }
  void store_indexer(const StoreParams& params, Pdl pdl, StreamView stream) override {
    real_.store_indexer(params, pdl, stream);
  }
  void translate_picks(const TranslatePicksParams& params, Pdl pdl, StreamView stream) override {
    real_.translate_picks(params, pdl, stream);
  }
  void gather_main(const GatherMainParams& params, Pdl pdl, StreamView stream) override {
    real_.gather_main(params, pdl, stream);
  }
  void gather_indexer(const GatherIndexerParams& params, Pdl pdl, StreamView stream) override {
    real_.gather_indexer(params, pdl, stream);
  }

 private:
  void may_fail(Verb verb) {
    ++calls_[verb];
    if (fails_ && (verbs_ & static_cast<std::uint32_t>(verb)) != 0 && fails_()) throw Fault();
  }

  Backend& real_;
  std::uint32_t verbs_ = 0;
  std::function<bool()> fails_;
  bool fired_ = false;
  Living made_;
  std::map<Verb, std::int64_t> calls_;
  std::set<std::byte*> allocations_;
};

}  // namespace quire::test
