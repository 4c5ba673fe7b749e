// Picks the backend of a machine that was not asked for another.
#include <quire/runtime/backend.h>

namespace quire {

std::unique_ptr<Backend> make_default_backend() {
  return cuda_device_count() > 0 ? make_cuda_backend() : make_host_backend();
}

}  // namespace quire
