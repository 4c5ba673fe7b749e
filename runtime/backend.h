// What a machine must be able to do. Two implementations: CUDA, and the host (plain C++ on ordinary
// memory, with a stream that is a queue). A backend allocates and enqueues; it decides nothing.
//
// Nothing blocks unless its name says `wait`; construction and destruction may. Whatever is
// enqueued may be captured, `apply` and `clear` apart; what allocates or waits may not.
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/base/stream_view.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace quire {

enum class BackendKind { kHost, kCuda };

// How a launch relates to the kernel in front of it on the stream (docs/PDL.md).
enum class Pdl {
  kOff,       // plain: a full edge, always right
  kWaitOnly,  // programmatic; everything is loaded after the wait
  kPrologue,  // programmatic; records, weights and seat state of earlier steps load before the wait
};

// The step in which the CUDA backend's pools grow: a maximum that is no multiple of it would refuse
// the last bytes of the budget. The host's pools take what is asked.
inline constexpr std::int64_t kCudaPoolGranularityBytes = std::int64_t{32} << 20;

class MemoryPool;
class Stream;
class Event;
class GraphExec;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendKind kind() const = 0;

  // Throws UsageError when the stream belongs to another backend or another device.
  virtual void check_stream(StreamView stream) const = 0;
  // Throws UsageError when `pointer` is no memory that this backend's operations can reach.
  virtual void check_memory(const void* pointer, const char* what) const = 0;

  // Streams, events and graphs through handles; use the owners of runtime/owners.h.
  virtual StreamView make_stream() = 0;
  virtual void destroy_stream(StreamView stream) noexcept = 0;
  virtual void wait(StreamView stream) = 0;  // throws what a task of the stream threw
  // For destructors: everything enqueued on any stream of this machine is done when it returns.
  virtual void wait_for_all() noexcept = 0;
  virtual void* make_event() = 0;
  virtual void destroy_event(void* event) noexcept = 0;
  virtual void record(void* event, StreamView stream) = 0;
  virtual void join(StreamView stream, void* event) = 0;  // later work of the stream waits for it
  virtual void wait_event(void* event) = 0;
  virtual void begin_capture(StreamView stream) = 0;
  virtual void* end_capture(StreamView stream) = 0;  // an executable graph
  virtual void abort_capture(StreamView stream) noexcept = 0;
  virtual bool is_capturing(StreamView stream) const = 0;
  virtual void launch_graph(void* graph, StreamView stream) = 0;
  virtual void destroy_graph(void* graph) noexcept = 0;

  // A pool that never holds more than `budget_bytes` (rounded up to the pool's granularity).
  virtual void* make_pool(std::int64_t budget_bytes) = 0;
  virtual void destroy_pool(void* pool) noexcept = 0;
  virtual std::byte* allocate(void* pool, std::int64_t bytes, StreamView stream) = 0;
  virtual void free(void* pool, std::byte* memory, StreamView stream) noexcept = 0;
  virtual void copy(void* to, const void* from, std::int64_t bytes, StreamView stream) = 0;
  virtual void fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) = 0;

  // Computes the known answers of SPEC 3.7 on this machine, `count` words of 32 bits (blocks).
  virtual std::vector<std::uint32_t> wait_for_known_answers() = 0;

  // Every kernel is loaded, so that a capture or a first launch loads nothing.
  virtual void load_kernels() = 0;

  // The operations. Launched plainly where no mode is given.
  virtual void apply(const ApplyParams& params, StreamView stream) = 0;
  virtual void clear(const ClearParams& params, StreamView stream) = 0;
  virtual void plan(const PlanParams& params, StreamView stream) = 0;
  virtual void append(const AppendParams& params, Pdl pdl, StreamView stream) = 0;
  virtual void commit(const CommitParams& params, Pdl pdl, StreamView stream) = 0;
  // UsageError where a parameter is out of range.
  virtual void stop_rows(const StopRowsParams& params, Pdl pdl, StreamView stream) = 0;
  virtual void plan_records(const RecordPlanParams& params, StreamView stream) = 0;
  virtual void compress_c4_decode(const CompressC4DecodeParams& params, Pdl pdl,
                                  StreamView stream) = 0;
  virtual void compress_c4_prefill(const CompressC4PrefillParams& params, Pdl pdl,
                                   StreamView stream) = 0;
  virtual void store_flashmla(const StoreParams& params, Pdl pdl, StreamView stream) = 0;
  virtual void store_indexer(const StoreParams& params, Pdl pdl, StreamView stream) = 0;

  // The read side. UsageError where a parameter is out of range.
  virtual void translate_picks(const TranslatePicksParams& params, Pdl pdl,
                               StreamView stream) = 0;
  virtual void gather_main(const GatherMainParams& params, Pdl pdl, StreamView stream) = 0;
  virtual void gather_indexer(const GatherIndexerParams& params, Pdl pdl, StreamView stream) = 0;
};

// The host backend is always there.
std::unique_ptr<Backend> make_host_backend();

// Throws UsageError that says why where the library was built without CUDA, or no such device is
// there; CudaError where the device refuses.
std::unique_ptr<Backend> make_cuda_backend(int device = 0);

// Number of devices that make_cuda_backend would take; 0 without CUDA. Never throws.
int cuda_device_count() noexcept;

// CUDA where a device is, the host otherwise.
std::unique_ptr<Backend> make_default_backend();

}  // namespace quire
