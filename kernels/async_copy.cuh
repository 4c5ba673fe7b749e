// Copies from global to shared memory that run beside the thread: only ever after the wait. What a
// warp copies begins at a line (kLineBytes) on both sides: one that crosses lines in shared memory
// is moved twice.
#pragma once

#include <cstddef>

namespace quire::cuda {

// `kKept`: in the first-level cache too, for the blocks beside. Eight bytes always are.
template <int kBytes, bool kKept>
__device__ inline void copy_to_shared(std::byte* to, const void* from) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const std::size_t global = __cvta_generic_to_global(from);
  if constexpr (kBytes == 16 && !kKept) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes)
                 : "memory");
  }
}

// What was copied since the last call is one group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when all groups of this thread but the youngest `kPending` have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace quire::cuda
