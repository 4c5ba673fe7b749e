// The engine's part on CUDA: plain kernels, as an engine that knows nothing of programmatic launch
// would have them.
#include <cuda_runtime_api.h>

#include <quire/runtime/base/errors.h>

#include "tests/soak/feed.h"

namespace quire::soak {
namespace {

constexpr int kThreads = 128;

__global__ void visit_kernel(const __grid_constant__ VisitInput visit, VisitInput* to) {
  *to = visit;
}

// A block copies one input row.
__global__ void feed_kernel(const __grid_constant__ FeedParams params) {
  const FeedInput& input = params.input[blockIdx.y];
  const auto token = static_cast<std::int32_t>(blockIdx.x);
  const auto* from = reinterpret_cast<const uint4*>(source_of(params, input, token));
  auto* to = reinterpret_cast<uint4*>(input.rows + token * input.row_bytes);
  for (std::int64_t i = threadIdx.x; i < input.row_bytes / 16; i += kThreads) {
    to[i] = from != nullptr ? from[i] : make_uint4(~0u, ~0u, ~0u, ~0u);
  }
}

__global__ void sample_kernel(const __grid_constant__ FeedParams params) {
  const auto row = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < params.shape.rows) sample_into(params, row);
}

__global__ void supply_kernel(const __grid_constant__ FeedParams params) {
  const auto row = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < params.shape.rows) supply_row(params, row);
}

unsigned blocks_of_rows(const FeedParams& params) {
  return static_cast<unsigned>((params.shape.rows + kThreads - 1) / kThreads);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw CudaError(error, concat("launch of ", what, ": ", cudaGetErrorString(error)));
  }
}

}  // namespace

void visit_on_cuda(const VisitInput& visit, VisitInput* to, StreamView stream) {
  visit_kernel<<<1, 1, 0, stream.cuda()>>>(visit, to);
  check_launch("visit_kernel");
}

void supply_on_cuda(const FeedParams& params, StreamView stream) {
  supply_kernel<<<blocks_of_rows(params), kThreads, 0, stream.cuda()>>>(params);
  check_launch("supply_kernel");
}

void feed_on_cuda(const FeedParams& params, StreamView stream) {
  const dim3 grid(static_cast<unsigned>(params.shape.tokens), static_cast<unsigned>(params.inputs));
  feed_kernel<<<grid, kThreads, 0, stream.cuda()>>>(params);
  check_launch("feed_kernel");
  if (params.part != FeedPart::kTarget) return;
  sample_kernel<<<blocks_of_rows(params), kThreads, 0, stream.cuda()>>>(params);
  check_launch("sample_kernel");
}

}  // namespace quire::soak
