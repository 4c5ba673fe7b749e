// The host backend: every verb on ordinary memory. What is enqueued becomes a task on a HostStream,
// with its parameters copied by value, as a kernel launch copies them.
//
// Events count their records. A record that is dropped, because a task before it failed, still
// completes: waits and joins end, and the failure comes out of the stream's own wait.
#include <quire/kernels/host/operations.h>
#include <quire/kernels/known_answers.h>
#include <quire/planner/apply_chunks.h>
#include <quire/planner/clear_chunks.h>
#include <quire/runtime/backend.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>
#include <quire/runtime/host/host_stream.h>
#include <quire/runtime/operation_checks.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace quire {
namespace {

constexpr std::int64_t kAlignment = 256;

struct EventState {
  std::mutex mutex;
  std::condition_variable reached;
  std::uint64_t recorded = 0;
  std::uint64_t completed = 0;
  std::weak_ptr<HostCapture> capture;  // of the last record, where that stream was capturing

  void complete(std::uint64_t ticket) {
    {
      const std::lock_guard lock(mutex);
      completed = std::max(completed, ticket);
    }
    reached.notify_all();
  }
  void wait_for(std::uint64_t ticket) {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return completed >= ticket; });
  }
};
using EventHandle = std::shared_ptr<EventState>;
using GraphHandle = std::shared_ptr<const HostGraph>;

// Completes its record when the task that owns it is destroyed, whether it ran or was dropped.
struct RecordToken {
  EventHandle event;
  std::uint64_t ticket = 0;
  explicit RecordToken(EventHandle e) : event(std::move(e)) {}
  RecordToken(const RecordToken&) = delete;
  RecordToken& operator=(const RecordToken&) = delete;
  ~RecordToken() { event->complete(ticket); }
};

struct HostPool {
  std::mutex mutex;
  std::int64_t budget = 0;
  std::int64_t live = 0;
  std::unordered_map<std::byte*, std::int64_t> sizes;
};

// Copies of chunks on their way, used again: once there are as many as are ever queued together, a
// step's update allocates nothing. One that a failed stream drops is not used again.
template <class Params>
class Copies {
 public:
  Params* take(const Params& params) {
    Params* copy = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (free_.empty()) {
        all_.push_back(std::make_unique_for_overwrite<Params>());
        free_.reserve(all_.capacity());
        free_.push_back(all_.back().get());
      }
      copy = free_.back();
      free_.pop_back();
    }
    std::memcpy(copy, &params, static_cast<std::size_t>(used_bytes(params)));
    return copy;
  }
  void give_back(Params* copy) {
    const std::lock_guard lock(mutex_);
    free_.push_back(copy);
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Params>> all_;
  std::vector<Params*> free_;  // has room for all
};

void free_memory(std::byte* memory) noexcept {
  ::operator delete(memory, std::align_val_t(kAlignment));
}

HostStream& host_stream(StreamView stream) {
  QUIRE_CHECK(stream.is_host(),
              "the host backend was given a CUDA stream; it takes streams of Backend::make_stream");
  return *stream.host();
}

EventState& event_state(void* event) { return **static_cast<EventHandle*>(event); }

class HostBackend final : public Backend {
 public:
  BackendKind kind() const override { return BackendKind::kHost; }
  void check_stream(StreamView stream) const override { host_stream(stream); }
  void check_memory(const void* pointer, const char* what) const override {
    QUIRE_CHECK(pointer != nullptr, what, " is null");
  }

  StreamView make_stream() override;
  void destroy_stream(StreamView stream) noexcept override;
  void wait(StreamView stream) override { host_stream(stream).wait(); }
  void wait_for_all() noexcept override;

  void* make_event() override { return new EventHandle(std::make_shared<EventState>()); }
  void destroy_event(void* event) noexcept override { delete static_cast<EventHandle*>(event); }
  void record(void* event, StreamView stream) override;
  void join(StreamView stream, void* event) override;
  void wait_event(void* event) override;

  void begin_capture(StreamView stream) override { host_stream(stream).begin_capture(); }
  void* end_capture(StreamView stream) override {
    return new GraphHandle(host_stream(stream).end_capture());
  }
  void abort_capture(StreamView stream) noexcept override { stream.host()->abort_capture(); }
  bool is_capturing(StreamView stream) const override { return host_stream(stream).capturing(); }
  void launch_graph(void* graph, StreamView stream) override {
    host_stream(stream).launch(*static_cast<GraphHandle*>(graph));
  }
  void destroy_graph(void* graph) noexcept override { delete static_cast<GraphHandle*>(graph); }

  void* make_pool(std::int64_t budget_bytes) override;
  void destroy_pool(void* pool) noexcept override;
  std::byte* allocate(void* pool, std::int64_t bytes, StreamView stream) override;
  void free(void* pool, std::byte* memory, StreamView stream) noexcept override;
  void copy(void* to, const void* from, std::int64_t bytes, StreamView stream) override;
  void fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) override;

  std::vector<std::uint32_t> wait_for_known_answers() override;
  void load_kernels() override {}

  void apply(const ApplyParams& params, StreamView stream) override {
    HostStream& on = host_stream(stream);
    QUIRE_CHECK(!on.capturing(), "apply on a host stream that is capturing");
    ApplyParams* copy = applies_.take(params);
    on.enqueue([this, copy] {  // two words: std::function holds them without the heap
      host::apply(*copy);
      applies_.give_back(copy);
    });
  }
  void clear(const ClearParams& params, StreamView stream) override {
    HostStream& on = host_stream(stream);
    QUIRE_CHECK(!on.capturing(), "clear on a host stream that is capturing");
    ClearParams* copy = clears_.take(params);
    on.enqueue([this, copy] {
      host::clear(*copy);
      clears_.give_back(copy);
    });
  }
  void plan(const PlanParams& params, StreamView stream) override {
    host_stream(stream).enqueue([params] { host::plan(params); });
  }
  void append(const AppendParams& params, Pdl, StreamView stream) override {
    host_stream(stream).enqueue([params] { host::append(params); });
  }
  void commit(const CommitParams& params, Pdl, StreamView stream) override {
    host_stream(stream).enqueue([params] { host::commit(params); });
  }
  void stop_rows(const StopRowsParams& params, Pdl, StreamView stream) override {
    check(params);
    host_stream(stream).enqueue([params] { host::stop_rows(params); });
  }
  void plan_records(const RecordPlanParams& params, StreamView stream) override {
    check(params);
    host_stream(stream).enqueue([params] { host::plan_records(params); });
  }
  void compress_c4_decode(const CompressC4DecodeParams& params, Pdl, StreamView stream) override {
    check(params);
    if (params.batch == 0) return;
    host_stream(stream).enqueue([params] { host::compress_c4_decode(params); });
  }
  void compress_c4_prefill(const CompressC4PrefillParams& params, Pdl, StreamView stream) override {
    check(params);
    if (params.compress_capacity == 0 && params.write_capacity == 0) return;
    host_stream(stream).enqueue([params] { host::compress_c4_prefill(params); });
  }
  void store_flashmla(const StoreParams& params, Pdl, StreamView stream) override {
    check_store_flashmla(params);
    if (params.rows == 0) return;
    host_stream(stream).enqueue([params] { host::store_flashmla(params); });
  }
  void store_indexer(const StoreParams& params, Pdl, StreamView stream) override {
    check_store_indexer(params);
    if (params.rows == 0) return;
    host_stream(stream).enqueue([params] { host::store_indexer(params); });
  }
  void translate_picks(const TranslatePicksParams& params, Pdl, StreamView stream) override {
    check(params);
    host_stream(stream).enqueue([params] { host::translate_picks(params); });
  }
  void gather_main(const GatherMainParams& params, Pdl, StreamView stream) override {
    check(params);
    host_stream(stream).enqueue([params] { host::gather_main(params); });
  }
  void gather_indexer(const GatherIndexerParams& params, Pdl, StreamView stream) override {
    check(params);
    host_stream(stream).enqueue([params] { host::gather_indexer(params); });
  }

 private:
  Copies<ApplyParams> applies_;
  Copies<ClearParams> clears_;
  std::mutex mutex_;
  std::vector<HostStream*> streams_;
};

StreamView HostBackend::make_stream() {
  auto stream = std::make_unique<HostStream>();
  const std::lock_guard lock(mutex_);
  streams_.push_back(stream.get());
  return *stream.release();
}

void HostBackend::destroy_stream(StreamView stream) noexcept {
  {
    const std::lock_guard lock(mutex_);
    std::erase(streams_, stream.host());
  }
  delete stream.host();
}

// Holds are lifted first: a stream may wait for another that is held.
void HostBackend::wait_for_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (HostStream* stream : streams_) stream->resume();
  for (HostStream* stream : streams_) stream->wait_to_drain();
}

void HostBackend::record(void* event, StreamView stream) {
  EventState& state = event_state(event);
  HostStream& on = host_stream(stream);
  // Before anything counts: a record that is counted is one that completes.
  auto token = std::make_shared<RecordToken>(*static_cast<EventHandle*>(event));
  {
    const std::lock_guard lock(state.mutex);
    state.capture = on.capture();
    if (on.capturing()) return;  // the order of the recorded tasks says it all
    token->ticket = ++state.recorded;
  }
  on.enqueue([token = std::move(token)] {});
}

void HostBackend::join(StreamView stream, void* event) {
  EventState& state = event_state(event);
  HostStream& on = host_stream(stream);
  std::shared_ptr<HostCapture> capture;
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(state.mutex);
    capture = state.capture.lock();
    ticket = state.recorded;
  }
  if (capture != nullptr) {
    on.fork_into(std::move(capture));
    return;
  }
  QUIRE_CHECK(!on.capturing(),
              "a capturing host stream was joined with an event that was recorded "
              "outside of the capture");
  on.enqueue([handle = *static_cast<EventHandle*>(event), ticket] { handle->wait_for(ticket); });
}

void HostBackend::wait_event(void* event) {
  EventState& state = event_state(event);
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(state.mutex);
    ticket = state.recorded;
  }
  state.wait_for(ticket);
}

void* HostBackend::make_pool(std::int64_t budget_bytes) {
  QUIRE_CHECK(budget_bytes > 0, "a pool's budget must be positive, got ", budget_bytes, " bytes");
  auto pool = std::make_unique<HostPool>();
  pool->budget = round_up(budget_bytes, kAlignment);
  return pool.release();
}

void HostBackend::destroy_pool(void* pool) noexcept {
  auto* state = static_cast<HostPool*>(pool);
  for (const auto& [memory, bytes] : state->sizes) free_memory(memory);
  delete state;
}

std::byte* HostBackend::allocate(void* pool, std::int64_t bytes, StreamView stream) {
  QUIRE_CHECK(bytes > 0, "an allocation must be positive, got ", bytes, " bytes");
  QUIRE_CHECK(!is_capturing(stream), "an allocation on a stream that is capturing");
  auto& state = *static_cast<HostPool*>(pool);
  const std::int64_t size = round_up(bytes, kAlignment);
  const std::lock_guard lock(state.mutex);
  QUIRE_CHECK(size <= state.budget - state.live, "allocation of ", bytes,
              " bytes exceeds the pool's budget: ", state.budget, " bytes, ", state.live,
              " in use");
  std::unique_ptr<std::byte, decltype(&free_memory)> memory(
      static_cast<std::byte*>(::operator new(static_cast<std::size_t>(size),
                                             std::align_val_t(kAlignment), std::nothrow)),
      free_memory);
  if (memory == nullptr) throw Error(concat("the host has no ", bytes, " bytes of memory left"));
  state.sizes.emplace(memory.get(), size);
  state.live += size;
  return memory.release();
}

// The budget is given back at once: what is allocated next on the stream may count on it. The
// memory itself lives until the stream has passed this point.
void HostBackend::free(void* pool, std::byte* memory, StreamView stream) noexcept {
  auto& state = *static_cast<HostPool*>(pool);
  {
    const std::lock_guard lock(state.mutex);
    const auto found = state.sizes.find(memory);
    if (found == state.sizes.end()) return;
    state.live -= found->second;
    state.sizes.erase(found);
  }
  try {
    const std::shared_ptr<std::byte> owner(memory, free_memory);
    stream.host()->enqueue([owner] {});
  } catch (...) {  // no memory for the task: the owner has freed what it could not pass on
  }
}

void HostBackend::copy(void* to, const void* from, std::int64_t bytes, StreamView stream) {
  QUIRE_CHECK(bytes >= 0, "copy of ", bytes, " bytes");
  host_stream(stream).enqueue(
      [to, from, bytes] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
}

void HostBackend::fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) {
  QUIRE_CHECK(bytes >= 0, "fill of ", bytes, " bytes");
  host_stream(stream).enqueue(
      [to, value, bytes] { std::memset(to, value, static_cast<std::size_t>(bytes)); });
}

std::vector<std::uint32_t> HostBackend::wait_for_known_answers() { return host::known_answers(); }

}  // namespace

std::unique_ptr<Backend> make_host_backend() { return std::make_unique<HostBackend>(); }

}  // namespace quire
