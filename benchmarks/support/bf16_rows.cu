#include "benchmarks/support/bf16_rows.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/cuda/check.h>

namespace quire::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 1024;
constexpr int kPerVector = 8;

struct alignas(16) Vector {
  __nv_bfloat16 values[kPerVector];
};

__global__ void __launch_bounds__(kThreads)
    fill_bf16_kernel(Vector* to, std::int64_t vectors, float scale, std::uint32_t seed) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < vectors; i += step) {
    Vector vector;
#pragma unroll
    for (int k = 0; k < kPerVector; ++k) {
      auto x = (static_cast<std::uint32_t>(i * kPerVector + k) ^ seed) * 0x9E3779B9u;
      x ^= x >> 15;
      x *= 0x846CA68Bu;
      x ^= x >> 13;
      vector.values[k] =
          __float2bfloat16(static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f * scale);
    }
    to[i] = vector;
  }
}

}  // namespace

void fill_random_bf16(void* to, std::int64_t count, float scale, std::uint32_t seed,
                      const Stream& stream) {
  QUIRE_CHECK(count % kPerVector == 0, "fill_random_bf16: ", count,
              " values; supported: multiples of ", kPerVector);
  fill_bf16_kernel<<<kBlocks, kThreads, 0, stream.view().cuda()>>>(static_cast<Vector*>(to),
                                                                   count / kPerVector, scale, seed);
  QUIRE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace quire::bench
