// The stand-in model on CUDA: plain kernels, as an engine that knows nothing of programmatic launch
// would have them.
#include <cuda_runtime_api.h>

#include <quire/runtime/base/errors.h>

#include "examples/stand_in_rows.h"

namespace quire::serving {
namespace {

constexpr int kThreads = 256;

__global__ void rows_kernel(const __grid_constant__ StandInParams params) {
  const auto t = static_cast<std::int32_t>(blockIdx.x);
  const RowToken row = token_of_row(params, t);
  const auto key = [&](RowPart part) {
    return row_key(row.token, row.position, params.layer, part);
  };
  const auto c0 = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t at = t;
  const std::uint32_t window_key = key(RowPart::kWindow);
  for (std::int32_t c = c0; c < 512; c += kThreads) {
    params.window[at * 512 + c] = row_element_bf16(row, window_key, c);
  }
  const auto fill = [&](RowPart part, std::int32_t width, float* rows) {
    const std::uint32_t part_key = key(part);
    for (std::int32_t c = c0; c < width; c += kThreads) {
      rows[at * width + c] = row_element(row, part_key, c);
    }
  };
  if (params.kind == LayerKind::kCsa) {
    fill(RowPart::kCsa, 2048, params.csa);
    fill(RowPart::kIndexer, 512, params.indexer);
  } else if (params.kind == LayerKind::kHca) {
    fill(RowPart::kHca, 1024, params.hca);
  }
}

__global__ void batch_rows_kernel(const __grid_constant__ StandInParams params, StandInOp op) {
  const auto row = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < params.shape.rows) run_for_row(op, params, row);
}

__global__ void begin_kernel(const __grid_constant__ StandInParams params, std::int32_t seat,
                             std::uint32_t seed, std::int32_t prompt_tokens,
                             std::int32_t tokens_max) {
  begin_seat(params, seat, seed, prompt_tokens, tokens_max);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw CudaError(error, concat("launch of ", what, ": ", cudaGetErrorString(error)));
  }
}

}  // namespace

void run_stand_in_cuda(StandInOp op, const StandInParams& params, CUstream_st* stream) {
  if (op == StandInOp::kRows) {
    rows_kernel<<<static_cast<unsigned>(params.shape.tokens), kThreads, 0, stream>>>(params);
    check_launch("rows_kernel");
    return;
  }
  const int blocks = (params.shape.rows + kThreads - 1) / kThreads;
  batch_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, op);
  check_launch("batch_rows_kernel");
}

void begin_stand_in_cuda(const StandInParams& params, SeatId seat, const SeatRequest& request,
                         CUstream_st* stream) {
  begin_kernel<<<1, 1, 0, stream>>>(params, seat.value, request.seed,
                                    static_cast<std::int32_t>(request.prompt_tokens),
                                    static_cast<std::int32_t>(request.tokens_max));
  check_launch("begin_kernel");
}

}  // namespace quire::serving
