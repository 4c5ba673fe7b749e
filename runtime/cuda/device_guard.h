// Makes a device current for one scope. The engine finds its own current device again afterwards.
#pragma once

#include <cuda_runtime_api.h>
#include <quire/runtime/cuda/check.h>

namespace quire::cuda {

// For paths that must not throw: drops the error, also from the thread's last error, where the
// engine would meet it. At exit the driver may be gone already (cudaErrorCudartUnloading).
inline void ignore(cudaError_t code) noexcept {
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    QUIRE_CUDA_CHECK(cudaGetDevice(&before_));
    if (before_ == device) return;
    QUIRE_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  struct Quietly {};
  DeviceGuard(int device, Quietly) noexcept {
    changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device &&
               cudaSetDevice(device) == cudaSuccess;
  }
  ~DeviceGuard() {
    if (changed_) ignore(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace quire::cuda
