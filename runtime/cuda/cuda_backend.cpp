// The CUDA backend: every verb on one device. Streams are non-blocking, events carry no timing,
// memory comes from explicit pools, captures are thread-local. Nothing here is process-wide, and
// each call restores the current device.
#include <cstdint>
#include <limits>
#include <memory>

#include <cuda_runtime_api.h>

#include <quire/kernels/append.h>
#include <quire/kernels/compress_c4.h>
#include <quire/kernels/known_answers_launch.h>
#include <quire/kernels/read_side.h>
#include <quire/kernels/stop_rows.h>
#include <quire/kernels/store.h>
#include <quire/planner/device_planner.h>
#include <quire/runtime/backend.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>
#include <quire/runtime/cuda/check.h>
#include <quire/runtime/cuda/cuda_graph.h>
#include <quire/runtime/cuda/device_guard.h>
#include <quire/runtime/operation_checks.h>

namespace quire {
namespace {

using cuda::CudaGraph;
using cuda::DeviceGuard;
using cuda::ignore;

struct CudaPool {
  cudaMemPool_t pool = nullptr;
  std::int64_t budget = 0;
};

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device) : device_(device) {
    const DeviceGuard guard(device_);
    int pools = 0;
    QUIRE_CUDA_CHECK(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device_));
    QUIRE_CHECK(pools != 0, "CUDA device ", device_, " has no memory pools, which Quire needs");
  }

  BackendKind kind() const override { return BackendKind::kCuda; }
  void check_stream(StreamView stream) const override { checked(stream); }
  void check_memory(const void* pointer, const char* what) const override;

  StreamView make_stream() override;
  void destroy_stream(StreamView stream) noexcept override {
    const DeviceGuard guard(device_, DeviceGuard::Quietly{});
    ignore(cudaStreamDestroy(stream.cuda()));
  }
  void wait(StreamView stream) override {
    const DeviceGuard guard(device_);
    QUIRE_CUDA_CHECK(cudaStreamSynchronize(checked(stream)));
  }
  void wait_for_all() noexcept override {
    const DeviceGuard guard(device_, DeviceGuard::Quietly{});
    ignore(cudaDeviceSynchronize());
  }

  void* make_event() override;
  void destroy_event(void* event) noexcept override {
    const DeviceGuard guard(device_, DeviceGuard::Quietly{});
    ignore(cudaEventDestroy(event_of(event)));
  }
  void record(void* event, StreamView stream) override {
    const DeviceGuard guard(device_);
    QUIRE_CUDA_CHECK(cudaEventRecord(event_of(event), checked(stream)));
  }
  void join(StreamView stream, void* event) override {
    const DeviceGuard guard(device_);
    QUIRE_CUDA_CHECK(cudaStreamWaitEvent(checked(stream), event_of(event), cudaEventWaitDefault));
  }
  void wait_event(void* event) override {
    const DeviceGuard guard(device_);
    QUIRE_CUDA_CHECK(cudaEventSynchronize(event_of(event)));
  }

  void begin_capture(StreamView stream) override;
  void* end_capture(StreamView stream) override;
  void abort_capture(StreamView stream) noexcept override;
  bool is_capturing(StreamView stream) const override;
  void launch_graph(void* graph, StreamView stream) override {
    const DeviceGuard guard(device_);
    QUIRE_CUDA_CHECK(cudaGraphLaunch(static_cast<CudaGraph*>(graph)->exec, checked(stream)));
  }
  void destroy_graph(void* graph) noexcept override;

  void* make_pool(std::int64_t budget_bytes) override;
  void destroy_pool(void* pool) noexcept override;
  std::byte* allocate(void* pool, std::int64_t bytes, StreamView stream) override;
  void free(void* pool, std::byte* memory, StreamView stream) noexcept override;
  void copy(void* to, const void* from, std::int64_t bytes, StreamView stream) override;
  void fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) override;

  std::vector<std::uint32_t> wait_for_known_answers() override;
  void load_kernels() override;

  void apply(const ApplyParams& params, StreamView stream) override {
    const DeviceGuard guard(device_);
    cuda::launch_apply(params, checked(stream));
  }
  void clear(const ClearParams& params, StreamView stream) override {
    const DeviceGuard guard(device_);
    cuda::launch_clear(params, checked(stream));
  }
  void plan(const PlanParams& params, StreamView stream) override {
    const DeviceGuard guard(device_);
    cuda::launch_plan(params, checked(stream));
  }
  void append(const AppendParams& params, Pdl pdl, StreamView stream) override {
    const DeviceGuard guard(device_);
    cuda::launch_append(params, pdl, checked(stream));
  }
  void commit(const CommitParams& params, Pdl pdl, StreamView stream) override {
    const DeviceGuard guard(device_);
    cuda::launch_commit(params, pdl, checked(stream));
  }
  void stop_rows(const StopRowsParams& params, Pdl pdl, StreamView stream) override {
    check(params);
    const DeviceGuard guard(device_);
    cuda::launch_stop_rows(params, pdl, checked(stream));
  }
  void plan_records(const RecordPlanParams& params, StreamView stream) override {
    check(params);
    const DeviceGuard guard(device_);
    cuda::launch_plan_records(params, checked(stream));
  }
  void compress_c4_decode(const CompressC4DecodeParams& params, Pdl pdl,
                          StreamView stream) override {
    check(params);
    if (params.batch == 0) return;
    const DeviceGuard guard(device_);
    cuda::launch_compress_c4_decode(params, pdl, checked(stream));
  }
  void compress_c4_prefill(const CompressC4PrefillParams& params, Pdl pdl,
                           StreamView stream) override {
    check(params);
    if (params.compress_capacity == 0 && params.write_capacity == 0) return;
    const DeviceGuard guard(device_);
    cuda::launch_compress_c4_prefill(params, pdl, checked(stream));
  }
  void store_flashmla(const StoreParams& params, Pdl pdl, StreamView stream) override {
    check_store_flashmla(params);
    if (params.rows == 0) return;
    const DeviceGuard guard(device_);
    cuda::launch_store_flashmla(params, pdl, checked(stream));
  }
  void store_indexer(const StoreParams& params, Pdl pdl, StreamView stream) override {
    check_store_indexer(params);
    if (params.rows == 0) return;
    const DeviceGuard guard(device_);
    cuda::launch_store_indexer(params, pdl, checked(stream));
  }
  void translate_picks(const TranslatePicksParams& params, Pdl pdl, StreamView stream) override {
    check(params);
    const DeviceGuard guard(device_);
    cuda::launch_translate_picks(params, pdl, checked(stream));
  }
  void gather_main(const GatherMainParams& params, Pdl pdl, StreamView stream) override {
    check(params);
    const DeviceGuard guard(device_);
    cuda::launch_gather_main(params, pdl, checked(stream));
  }
  void gather_indexer(const GatherIndexerParams& params, Pdl pdl, StreamView stream) override {
    check(params);
    const DeviceGuard guard(device_);
    cuda::launch_gather_indexer(params, pdl, checked(stream));
  }

 private:
  cudaStream_t checked(StreamView stream) const;

  int device_;
};

cudaStream_t CudaBackend::checked(StreamView stream) const {
  QUIRE_CHECK(!stream.is_host(), "the CUDA backend was given a stream of the host backend");
  const cudaStream_t handle = stream.cuda();
  QUIRE_CHECK(handle != nullptr && handle != cudaStreamLegacy,
              "the CUDA backend was given the legacy default stream; make a stream of your own");
  if (handle == cudaStreamPerThread) return handle;  // of whichever device is current: ours
  // A capturing stream refuses to name its device; launches on a foreign one fail by themselves.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  QUIRE_CUDA_CHECK(cudaStreamIsCapturing(handle, &status));
  if (status != cudaStreamCaptureStatusNone) return handle;
  int device = -1;
  QUIRE_CUDA_CHECK(cudaStreamGetDevice(handle, &device));
  QUIRE_CHECK(device == device_, "the stream belongs to CUDA device ", device,
              ", this backend to device ", device_);
  return handle;
}

void CudaBackend::check_memory(const void* pointer, const char* what) const {
  QUIRE_CHECK(pointer != nullptr, what, " is null");
  const DeviceGuard guard(device_);
  cudaPointerAttributes found{};
  QUIRE_CUDA_CHECK(cudaPointerGetAttributes(&found, pointer));
  switch (found.type) {
    case cudaMemoryTypeManaged: return;
    case cudaMemoryTypeHost:
      QUIRE_CHECK(found.devicePointer != nullptr, what, " at ", pointer,
                  " is pinned host memory that is not mapped for the device");
      return;
    case cudaMemoryTypeDevice:
      QUIRE_CHECK(found.device == device_, what, " at ", pointer, " is memory of CUDA device ",
                  found.device, ", this backend is of device ", device_);
      return;
    default: break;
  }
  throw UsageError(concat(what, " at ", pointer,
                          " is ordinary host memory; supported: device, managed or pinned memory"));
}

StreamView CudaBackend::make_stream() {
  const DeviceGuard guard(device_);
  cudaStream_t stream = nullptr;
  QUIRE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void* CudaBackend::make_event() {
  const DeviceGuard guard(device_);
  cudaEvent_t event = nullptr;
  QUIRE_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

// --- Graphs ---

void CudaBackend::begin_capture(StreamView stream) {
  const DeviceGuard guard(device_);
  QUIRE_CHECK(!is_capturing(stream), "begin_capture on a stream that is capturing already");
  QUIRE_CUDA_CHECK(cudaStreamBeginCapture(checked(stream), cudaStreamCaptureModeThreadLocal));
}

void* CudaBackend::end_capture(StreamView stream) {
  const DeviceGuard guard(device_);
  QUIRE_CHECK(is_capturing(stream), "end_capture on a stream that is not capturing");
  auto captured = std::make_unique<CudaGraph>();
  QUIRE_CUDA_CHECK(cudaStreamEndCapture(checked(stream), &captured->graph));
  try {
    QUIRE_CUDA_CHECK(cudaGraphInstantiate(&captured->exec, captured->graph, 0));
  } catch (...) {
    ignore(cudaGraphDestroy(captured->graph));
    throw;
  }
  return captured.release();
}

void CudaBackend::abort_capture(StreamView stream) noexcept {
  const DeviceGuard guard(device_, DeviceGuard::Quietly{});
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ignore(cudaStreamIsCapturing(stream.cuda(), &status));
  if (status == cudaStreamCaptureStatusNone) return;
  cudaGraph_t graph = nullptr;
  ignore(cudaStreamEndCapture(stream.cuda(), &graph));  // fails where the capture is invalid
  if (graph != nullptr) ignore(cudaGraphDestroy(graph));
}

bool CudaBackend::is_capturing(StreamView stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  QUIRE_CUDA_CHECK(cudaStreamIsCapturing(checked(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

void CudaBackend::destroy_graph(void* graph) noexcept {
  const DeviceGuard guard(device_, DeviceGuard::Quietly{});
  const std::unique_ptr<CudaGraph> owned(static_cast<CudaGraph*>(graph));
  ignore(cudaGraphExecDestroy(owned->exec));
  ignore(cudaGraphDestroy(owned->graph));
}

// --- Memory ---

void set_pool_flag(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
  int off = 0;
  QUIRE_CUDA_CHECK(cudaMemPoolSetAttribute(pool, attribute, &off));
}

void* CudaBackend::make_pool(std::int64_t budget_bytes) {
  QUIRE_CHECK(budget_bytes > 0, "a pool's budget must be positive, got ", budget_bytes, " bytes");
  const DeviceGuard guard(device_);
  auto made = std::make_unique<CudaPool>();
  made->budget = round_up(budget_bytes, kCudaPoolGranularityBytes);
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.handleTypes = cudaMemHandleTypeNone;  // exportable pools cannot be trimmed
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device_;
  props.maxSize = static_cast<std::size_t>(made->budget);
  QUIRE_CUDA_CHECK(cudaMemPoolCreate(&made->pool, &props));
  try {
    std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
    QUIRE_CUDA_CHECK(
        cudaMemPoolSetAttribute(made->pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    set_pool_flag(made->pool, cudaMemPoolReuseAllowOpportunistic);
    set_pool_flag(made->pool, cudaMemPoolReuseAllowInternalDependencies);
  } catch (...) {
    ignore(cudaMemPoolDestroy(made->pool));
    throw;
  }
  return made.release();
}

void CudaBackend::destroy_pool(void* pool) noexcept {
  const DeviceGuard guard(device_, DeviceGuard::Quietly{});
  const std::unique_ptr<CudaPool> owned(static_cast<CudaPool*>(pool));
  ignore(cudaMemPoolDestroy(owned->pool));
}

std::byte* CudaBackend::allocate(void* pool, std::int64_t bytes, StreamView stream) {
  QUIRE_CHECK(bytes > 0, "an allocation must be positive, got ", bytes, " bytes");
  const DeviceGuard guard(device_);
  QUIRE_CHECK(!is_capturing(stream), "an allocation on a stream that is capturing");
  const CudaPool& from = *static_cast<CudaPool*>(pool);
  void* memory = nullptr;
  const cudaError_t code =
      cudaMallocFromPoolAsync(&memory, static_cast<std::size_t>(bytes), from.pool, checked(stream));
  if (code == cudaErrorMemoryAllocation) {
    ignore(code);  // not sticky: the engine goes on
    throw CudaError(code, concat("allocation of ", bytes, " bytes from a pool of ", from.budget,
                                 " bytes on CUDA device ", device_, ": ",
                                 cudaGetErrorString(code)));
  }
  cuda::check(code, "cudaMallocFromPoolAsync");
  return static_cast<std::byte*>(memory);
}

void CudaBackend::free(void*, std::byte* memory, StreamView stream) noexcept {
  const DeviceGuard guard(device_, DeviceGuard::Quietly{});
  ignore(cudaFreeAsync(memory, stream.cuda()));
}

void CudaBackend::copy(void* to, const void* from, std::int64_t bytes, StreamView stream) {
  QUIRE_CHECK(bytes >= 0, "copy of ", bytes, " bytes");
  const DeviceGuard guard(device_);
  QUIRE_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                                   checked(stream)));
}

void CudaBackend::fill(void* to, std::uint8_t value, std::int64_t bytes, StreamView stream) {
  QUIRE_CHECK(bytes >= 0, "fill of ", bytes, " bytes");
  const DeviceGuard guard(device_);
  QUIRE_CUDA_CHECK(
      cudaMemsetAsync(to, value, static_cast<std::size_t>(bytes), checked(stream)));
}

// --- Kernels ---

std::vector<std::uint32_t> CudaBackend::wait_for_known_answers() {
  const DeviceGuard guard(device_);
  const StreamView stream = make_stream();
  try {
    auto answers = cuda::wait_for_known_answers(stream.cuda());
    destroy_stream(stream);
    return answers;
  } catch (...) {
    destroy_stream(stream);
    throw;
  }
}

void CudaBackend::load_kernels() {
  const DeviceGuard guard(device_);
  cuda::load_decode_append_kernels();
  cuda::load_ragged_append_kernels();
  cuda::load_compress_c4_kernels();
  cuda::load_store_kernels();
  cuda::load_read_side_kernels();
  cuda::load_stop_rows_kernel();
  cuda::load_known_answers_kernel();
  cuda::load_planner_kernels();
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int device) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  ignore(code);
  QUIRE_CHECK(code == cudaSuccess, "no CUDA device can be used: ", cudaGetErrorString(code));
  QUIRE_CHECK(device >= 0 && device < count, "CUDA device ", device, " does not exist; there are ",
              count, " devices");
  return std::make_unique<CudaBackend>(device);
}

int cuda_device_count() noexcept {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  ignore(code);
  return code == cudaSuccess ? count : 0;
}

}  // namespace quire
