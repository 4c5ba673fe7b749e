// Host memory that a copy engine can reach, so that copies into it need no wait: what an engine
// keeps for the results of visits. Ordinary memory where the backend is the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/runtime/backend.h>

namespace quire::serving {

class PinnedMemory {
 public:
  // Zeroed. Blocks. CudaError where the driver refuses.
  PinnedMemory(const Backend& backend, std::int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }

 private:
  BackendKind kind_;
  std::byte* data_ = nullptr;
};

}  // namespace quire::serving
