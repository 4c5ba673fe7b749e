// Turns a failed CUDA call into a CudaError with the call, its place and its code.
#pragma once

#include <cuda_runtime_api.h>
#include <quire/runtime/base/errors.h>

#include <source_location>

namespace quire::cuda {

inline void check(cudaError_t code, const char* call,
                  const std::source_location& place = std::source_location::current()) {
  if (code == cudaSuccess) return;
  throw CudaError(code, concat(call, " failed at ", place.file_name(), ":", place.line(), ": ",
                               cudaGetErrorName(code), " (", static_cast<int>(code), "), ",
                               cudaGetErrorString(code)));
}

}  // namespace quire::cuda

#define QUIRE_CUDA_CHECK(call) ::quire::cuda::check((call), #call)
