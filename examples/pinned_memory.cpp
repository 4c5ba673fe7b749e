#include "examples/pinned_memory.h"

#include <cstring>
#include <new>

#include <quire/runtime/base/errors.h>

#ifdef QUIRE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace quire::serving {
namespace {

constexpr std::align_val_t kAlignment{256};

std::byte* allocate(BackendKind kind, std::size_t bytes) {
#ifdef QUIRE_WITH_CUDA
  if (kind == BackendKind::kCuda) {
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
    if (error != cudaSuccess) {
      throw CudaError(error,
                      concat("cudaHostAlloc of ", bytes, " bytes: ", cudaGetErrorString(error)));
    }
    return static_cast<std::byte*>(memory);
  }
#endif
  (void)kind;
  return static_cast<std::byte*>(::operator new(bytes, kAlignment));
}

}  // namespace

PinnedMemory::PinnedMemory(const Backend& backend, std::int64_t bytes)
    : kind_(backend.kind()), data_(allocate(kind_, static_cast<std::size_t>(bytes))) {
  std::memset(data_, 0, static_cast<std::size_t>(bytes));
}

PinnedMemory::~PinnedMemory() {
#ifdef QUIRE_WITH_CUDA
  if (kind_ == BackendKind::kCuda) {
    cudaFreeHost(data_);
    return;
  }
#endif
  ::operator delete(data_, kAlignment);
}

}  // namespace quire::serving
