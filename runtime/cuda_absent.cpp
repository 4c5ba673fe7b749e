// Stands in for the CUDA backend in builds without the toolkit.
#ifndef QUIRE_WITH_CUDA
#include <quire/runtime/backend.h>
#include <quire/runtime/base/errors.h>

namespace quire {

std::unique_ptr<Backend> make_cuda_backend(int device) {
  throw UsageError(concat("CUDA device ", device,
                          " was asked for, but this library was built without CUDA; install the "
                          "CUDA toolkit and configure with -DQUIRE_CUDA=ON"));
}

int cuda_device_count() noexcept { return 0; }

}  // namespace quire
#endif
