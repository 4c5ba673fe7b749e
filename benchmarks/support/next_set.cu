#include "benchmarks/support/next_set.h"

#include <cuda_runtime_api.h>

#include <quire/runtime/cuda/check.h>

namespace quire::bench {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) next_set_kernel(NextSet params) {
  const std::int32_t set = *params.set;
  for (int r = static_cast<int>(threadIdx.x); r < params.batch; r += kThreads) {
    const std::int32_t seat = params.seats[set * params.batch + r];
    params.plan.row_seats[r] = seat;
    if (params.table.length[seat] >= params.table.limit[seat]) {
      params.table.length[seat] -= params.decoded;
    }
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  *params.set = set + 1 < params.sets ? set + 1 : 0;
  params.plan.header->steps_left = 1;
}

}  // namespace

void enqueue_next_set(const NextSet& params, const Stream& stream) {
  next_set_kernel<<<1, kThreads, 0, stream.view().cuda()>>>(params);
  QUIRE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace quire::bench
