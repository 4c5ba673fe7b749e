// A warp a batch row: its lanes take the row's sampled tokens and the end tokens side by side, so
// that what a captured step waits for here is two loads behind each other, whatever their counts.
#include <quire/kernels/stop_rows.h>

#include <cstdint>

#include <quire/kernels/stop_rule.h>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Whether `token` is an end token. Every lane of the warp asks at once.
__device__ bool is_end_token(const StopRowsParams& params, int lane, std::int32_t token) {
  bool found = false;
  for (std::int32_t first = 0; first < params.end_count; first += kLanes) {
    const std::int32_t count = min_of(params.end_count - first, kLanes);
    const std::int32_t end_token = lane < count ? params.end_tokens[first + lane] : 0;
    for (int i = 0; i < count; ++i) found |= token == __shfl_sync(kAllLanes, end_token, i);
  }
  return found;
}

// The same in every lane. Looks at all places of the row: how many are kept is still on its way.
__device__ std::int32_t first_end_token(const StopRowsParams& params, std::int64_t batch_row,
                                        int lane) {
  if (params.end_count == 0) return kNoEndToken;
  const std::int32_t* tokens = params.tokens + batch_row * params.tokens_stride;
  for (std::int64_t first = 0; first < params.tokens_per_row; first += kLanes) {
    const std::int64_t place = first + lane;
    const bool is_there = place < params.tokens_per_row;
    const bool ends = is_end_token(params, lane, is_there ? tokens[place] : 0) && is_there;
    const unsigned found = __ballot_sync(kAllLanes, ends);
    if (found != 0) return static_cast<std::int32_t>(first) + __ffs(static_cast<int>(found)) - 1;
  }
  return kNoEndToken;
}

__global__ void __launch_bounds__(kThreads)
    stop_rows_kernel(const __grid_constant__ StopRowsParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t batch_row = thread / kLanes;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  if (batch_row >= params.rows) return;
  const BatchRowRecord record = params.records[batch_row];
  const std::int32_t kept = params.kept != nullptr ? params.kept[batch_row] : record.live_tokens;
  const std::int64_t limit = length_limit_of(params, record);
  const std::int32_t end_at = first_end_token(params, batch_row, lane);
  if (lane != 0) return;
  write_stopped_row(params, batch_row,
                    stopped_row(record, kept, params.tokens_per_row, end_at, limit));
}

}  // namespace

void launch_stop_rows(const StopRowsParams& params, Pdl pdl, cudaStream_t stream) {
  constexpr std::int64_t kRowsPerBlock = kThreads / kLanes;
  launch(stop_rows_kernel, linear_grid(ceil_div(std::int64_t{params.rows}, kRowsPerBlock)),
         dim3(kThreads), 0, stream, pdl != Pdl::kOff, params);
}

void load_stop_rows_kernel() { load_kernel(stop_rows_kernel); }

}  // namespace quire::cuda
