// The one way in which Quire launches a kernel: parameters as one struct, by value; the
// programmatic attribute only for code that executes the wait; and, during a capture, a look at the
// node that came of it, whoever owns the capture.
#pragma once

#include <cuda_runtime_api.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>
#include <quire/runtime/cuda/check.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire::cuda {

// nvcc lists the targets of the build, oldest first: 900 is sm_90.
template <class... Targets>
constexpr int oldest_of(int oldest, Targets...) {
  return oldest;
}
#ifdef __CUDA_ARCH_LIST__
inline constexpr bool kEveryTargetWaits = oldest_of(__CUDA_ARCH_LIST__) >= 900;
#else
inline constexpr bool kEveryTargetWaits = false;
#endif

// Does the code that the device runs for this kernel contain the wait? Code for an older target,
// compiled further by the driver or not, has an empty one. Where every target of the build is
// recent enough, nothing is asked.
inline bool waits_for_predecessor(const void* kernel) {
  if constexpr (kEveryTargetWaits) return true;
  cudaFuncAttributes attributes{};
  QUIRE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
}

// The last node of a capturing stream is the launch just made: it must be a kernel, and behind full
// edges only where the launch was plain. Nothing to do on a stream that does not capture.
inline void check_captured_node(cudaStream_t stream, bool programmatic) {
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* last = nullptr;
  const cudaGraphEdgeData* ahead = nullptr;
  std::size_t count = 0;
  QUIRE_CUDA_CHECK(
      cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &last, &ahead, &count));
  if (status != cudaStreamCaptureStatusActive) return;
  if (count != 1) {
    throw BrokenInvariant(concat("a captured launch left ", count, " nodes at the stream's end"));
  }
  const cudaGraphNode_t node = last[0];
  cudaGraphNodeType type{};
  QUIRE_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
  if (type != cudaGraphNodeTypeKernel) {
    throw BrokenInvariant(concat("a captured launch became a node of type ", static_cast<int>(type),
                                 ", not a kernel"));
  }
  if (programmatic) return;
  std::size_t edge_count = 0;
  QUIRE_CUDA_CHECK(cudaGraphNodeGetDependencies(node, nullptr, nullptr, &edge_count));
  if (edge_count == 0) return;
  std::vector<cudaGraphNode_t> from(edge_count);
  std::vector<cudaGraphEdgeData> edges(edge_count);
  QUIRE_CUDA_CHECK(cudaGraphNodeGetDependencies(node, from.data(), edges.data(), &edge_count));
  for (const cudaGraphEdgeData& edge : edges) {
    if (edge.type == cudaGraphDependencyTypeProgrammatic) {
      throw BrokenInvariant("a plain launch was captured behind a programmatic edge");
    }
  }
}

// Enqueues; does not block; may be captured. A grid without blocks launches nothing. Throws
// CudaError where CUDA refuses, BrokenInvariant where the capture holds something else than asked.
template <class Params>
void launch(void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, bool programmatic, const Params& params) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const void* function = reinterpret_cast<const void*>(kernel);
  const bool chained = programmatic && waits_for_predecessor(function);

  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = chained ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  QUIRE_CUDA_CHECK(cudaLaunchKernelExC(&config, function, arguments));
  check_captured_node(stream, chained);
}

// Number of blocks as a grid's x, which holds 31 bits.
inline dim3 linear_grid(std::int64_t blocks) {
  QUIRE_CHECK(blocks <= INT32_MAX, "a launch of ", blocks, " blocks; at most ", INT32_MAX);
  return dim3(static_cast<unsigned>(max_of<std::int64_t>(blocks, 0)), 1, 1);
}

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  QUIRE_CUDA_CHECK(cudaGetDevice(&device));
  QUIRE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// More than 48 KiB of dynamic shared memory a block must be asked for, on every device. Cheap, and
// may be called during a capture.
template <class Params>
void allow_shared_bytes(void (*kernel)(Params), std::size_t bytes) {
  QUIRE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
}

// Loads the kernel's code on the current device.
template <class Params>
void load_kernel(void (*kernel)(Params)) {
  cudaFuncAttributes attributes{};
  QUIRE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}

}  // namespace quire::cuda
