// A backend that takes every operation and does nothing: what is left of a call is its cost on the
// host, and a test overrides what it wants to see. Memory, streams, events and graphs are the host
// backend's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <quire/runtime/backend.h>

namespace quire::test {

class IdleBackend : public Backend {
 public:
  BackendKind kind() const override { return BackendKind::kHost; }
  void check_stream(StreamView stream) const override { host_->check_stream(stream); }
  void check_memory(const void* pointer, const char* what) const override {
    host_->check_memory(pointer, what);
  }

  StreamView make_stream() override { return host_->make_stream(); }
  void destroy_stream(StreamView stream) noexcept override { host_->destroy_stream(stream); }
  void wait(StreamView stream) override { host_->wait(stream); }
  void wait_for_all() noexcept override { host_->wait_for_all(); }
  void* make_event() override { return host_->make_event(); }
  void destroy_event(void* event) noexcept override { host_->destroy_event(event); }
  void record(void* event, StreamView stream) override { host_->record(event, stream); }
  void join(StreamView stream, void* event) override { host_->join(stream, event); }
  void wait_event(void* event) override { host_->wait_event(event); }
  void begin_capture(StreamView stream) override { host_->begin_capture(stream); }
  void* end_capture(StreamView stream) override { return host_->end_capture(stream); }
  void abort_capture(StreamView stream) noexcept override { host_->abort_capture(stream); }
  bool is_capturing(StreamView stream) const override { return host_->is_capturing(stream); }
  void launch_graph(void* graph, StreamView stream) override { host_->launch_graph(graph, stream); }
  void destroy_graph(void* graph) noexcept override { host_->destroy_graph(graph); }

  void* make_pool(std::int64_t budget_bytes) override { return host_->make_pool(budget_bytes); }
  void destroy_pool(void* pool) noexcept override { host_->destroy_pool(pool); }
  std::byte* allocate(void* pool, std::int64_t bytes, StreamView stream) override {
    return host_->allocate(pool, bytes, stream);
  }
  void free(void* pool, std::byte* memory, StreamView stream) noexcept override {
    host_->free(pool, memory, stream);
  }
  void copy(void* to, const void* from, std::int64_t bytes, StreamView stream) override {
    host_->copy(to, from, bytes, stream);
  }
  void fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) override {
    host_->fill(to, value, bytes, stream);
  }
  std::vector<std::uint32_t> wait_for_known_answers() override {
    return host_->wait_for_known_answers();
  }

  void load_kernels() override {}
  void apply(const ApplyParams&, StreamView) override {}
  void clear(const ClearParams&, StreamView) override {}
  void plan(const PlanParams&, StreamView) override {}
  void append(const AppendParams&, Pdl, StreamView) override {}
  void commit(const CommitParams&, Pdl, StreamView) override {}
  void stop_rows(const StopRowsParams&, Pdl, StreamView) override {}
  void plan_records(const RecordPlanParams&, StreamView) override {}
  void compress_c4_decode(const CompressC4DecodeParams&, Pdl, StreamView) override {}
  void compress_c4_prefill(const CompressC4PrefillParams&, Pdl, StreamView) override {}
  void store_flashmla(const StoreParams&, Pdl, StreamView) override {}
  void store_indexer(const StoreParams&, Pdl, StreamView) override {}
  void translate_picks(const TranslatePicksParams&, Pdl, StreamView) override {}
  void gather_main(const GatherMainParams&, Pdl, StreamView) override {}
  void gather_indexer(const GatherIndexerParams&, Pdl, StreamView) override {}

 private:
  std::unique_ptr<Backend> host_ = make_host_backend();
};

}  // namespace quire::test
