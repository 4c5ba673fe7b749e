#include "benchmarks/support/traffic.h"

#include <cuda_runtime_api.h>

#include <quire/runtime/cuda/check.h>
#include <quire/kernels/pdl.cuh>

namespace quire::bench {
namespace {

constexpr int kThreads = 512;
constexpr std::int64_t kVectors = 4;  // 16-byte loads of a thread in flight
constexpr std::int64_t kCeilingBytes = std::int64_t{1} << 30;
constexpr int kChain = 257;

unsigned blocks() { return static_cast<unsigned>(this_device().multiprocessors) * 4; }

__device__ std::int64_t grid_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ std::int64_t grid_threads() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

// `sink` is never written: no sum of random words comes out as the key.
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint4* from, std::int64_t count, std::uint32_t* sink) {
  std::uint32_t sum = 0;
  const std::int64_t step = grid_threads() * kVectors;
  for (std::int64_t i = grid_thread(); i < count; i += step) {
    uint4 x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const std::int64_t at = i + k * grid_threads();
      x[k] = at < count ? from[at] : uint4{};
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) sum += x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
  }
  if (sum == 0x9E3779B9u && count < 0) *sink = sum;
}

__global__ void __launch_bounds__(kThreads) write_kernel(uint4* to, std::int64_t count) {
  for (std::int64_t i = grid_thread(); i < count; i += grid_threads()) {
    const auto x = static_cast<std::uint32_t>(i);
    to[i] = make_uint4(x, ~x, x * 3, x * 5);
  }
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(float* to, std::int64_t count, std::uint32_t seed) {
  for (std::int64_t i = grid_thread(); i < count; i += grid_threads()) {
    auto x = (static_cast<std::uint32_t>(i) ^ seed) * 0x9E3779B9u;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 13;
    to[i] = static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-30f;
  }
}

// Volatile, so that no store is left out.
__global__ void __launch_bounds__(kThreads) touch_kernel(volatile float* at, std::int64_t count) {
  for (std::int64_t i = grid_thread(); i < count; i += grid_threads()) at[i] = at[i];
}

__global__ void empty_plain() {}
__global__ void empty_wait() { cuda::pdl_wait(); }
__global__ void empty_wait_trigger() {
  cuda::pdl_wait();
  cuda::pdl_trigger();
}

void launch_empty(void (*kernel)(), bool programmatic, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(128);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  QUIRE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel));
}

Distribution time_of_empty(Empty kind, Backend& backend, const Stream& stream) {
  const auto chain = [&](int length) {
    return capture(backend, stream, [&] {
      for (int i = 0; i < length; ++i) enqueue_empty(kind, stream);
    });
  };
  const GraphExec many = chain(kChain);
  const GraphExec one = chain(1);
  return time_of_copy(many, one, kChain - 1, stream);
}

}  // namespace

Device this_device() {
  int device = 0;
  QUIRE_CUDA_CHECK(cudaGetDevice(&device));
  cudaDeviceProp properties{};
  QUIRE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  int clock_khz = 0;
  QUIRE_CUDA_CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
  return {properties.name, properties.multiProcessorCount, properties.l2CacheSize, clock_khz};
}

ColdCache::ColdCache(Backend& backend, const Stream& stream)
    : pool_(backend, 3 * this_device().l2_bytes),
      memory_(pool_, 3 * this_device().l2_bytes, stream) {
  fill_random(reinterpret_cast<float*>(memory_.data()), memory_.bytes() / 4, 1, stream);
}

void ColdCache::enqueue(const Stream& stream) const {
  read_kernel<<<blocks(), kThreads, 0, stream.view().cuda()>>>(
      reinterpret_cast<const uint4*>(memory_.data()), memory_.bytes() / 16, nullptr);
  QUIRE_CUDA_CHECK(cudaGetLastError());
}

void fill_random(float* to, std::int64_t count, std::uint32_t seed, const Stream& stream) {
  fill_kernel<<<blocks(), kThreads, 0, stream.view().cuda()>>>(to, count, seed);
  QUIRE_CUDA_CHECK(cudaGetLastError());
}

void touch(float* at, std::int64_t count, const Stream& stream) {
  touch_kernel<<<blocks(), kThreads, 0, stream.view().cuda()>>>(at, count);
  QUIRE_CUDA_CHECK(cudaGetLastError());
}

void enqueue_empty(Empty kind, const Stream& stream) {
  switch (kind) {
    case Empty::kPlain:
      return launch_empty(empty_plain, false, stream.view().cuda());
    case Empty::kWait:
      return launch_empty(empty_wait, true, stream.view().cuda());
    case Empty::kWaitTrigger:
      return launch_empty(empty_wait_trigger, true, stream.view().cuda());
  }
}

Ceilings measure_ceilings(Backend& backend, const Stream& stream) {
  MemoryPool pool(backend, 2 * kCeilingBytes);
  Memory memory(pool, 2 * kCeilingBytes, stream);
  fill_random(reinterpret_cast<float*>(memory.data()), memory.bytes() / 4, 2, stream);
  auto* data = reinterpret_cast<uint4*>(memory.data());
  const cudaStream_t handle = stream.view().cuda();
  const auto rate = [&](double bytes, const std::function<void()>& enqueue) {
    const GraphExec graph = capture(backend, stream, enqueue);
    return bytes / time_of(graph, stream).median;
  };
  constexpr auto kBytes = static_cast<double>(kCeilingBytes);
  Ceilings ceilings;
  ceilings.copy =
      2 * kBytes /
      time_of_eager(
          [&] {
            backend.copy(memory.data() + kCeilingBytes, memory.data(), kCeilingBytes, stream);
          },
          stream)
          .median;
  ceilings.read = rate(2 * kBytes, [&] {
    read_kernel<<<blocks(), kThreads, 0, handle>>>(data, memory.bytes() / 16, nullptr);
    QUIRE_CUDA_CHECK(cudaGetLastError());
  });
  ceilings.write = rate(2 * kBytes, [&] {
    write_kernel<<<blocks(), kThreads, 0, handle>>>(data, memory.bytes() / 16);
    QUIRE_CUDA_CHECK(cudaGetLastError());
  });
  ceilings.empty_plain = time_of_empty(Empty::kPlain, backend, stream);
  ceilings.empty_wait = time_of_empty(Empty::kWait, backend, stream);
  ceilings.empty_trigger = time_of_empty(Empty::kWaitTrigger, backend, stream);
  return ceilings;
}

}  // namespace quire::bench
