// A kernel that takes its time.
#pragma once

#include <cstdint>

namespace quire::test {

// No load or store moves across.
__device__ inline void sleep_us(int microseconds) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - start < static_cast<std::uint64_t>(microseconds) * 1000u);
}

}  // namespace quire::test
