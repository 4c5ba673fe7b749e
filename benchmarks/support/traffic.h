// Kernels that stand for the rest of an engine, and the ceilings that figures are measured against.
#pragma once

#include <cstdint>
#include <string>

#include <quire/runtime/owners.h>

#include "benchmarks/support/timing.h"

namespace quire::bench {

// What one H200 has; others are asked.
struct Device {
  std::string name;
  int multiprocessors = 0;
  std::int64_t l2_bytes = 0;
  int clock_khz = 0;
};
Device this_device();

// Reads three times the L2 and leaves nothing of what was there before. Owns the memory it reads.
class ColdCache {
 public:
  ColdCache(Backend& backend, const Stream& stream);
  // A plain kernel.
  void enqueue(const Stream& stream) const;

 private:
  MemoryPool pool_;
  Memory memory_;
};

// Fills with values that are neither zero nor all alike, in (-2, 2). Does not block.
void fill_random(float* to, std::int64_t count, std::uint32_t seed, const Stream& stream);

// Writes every value again as it is: behind it, they are as if the kernel in front had made them.
void touch(float* at, std::int64_t count, const Stream& stream);

// Kernels that do nothing: launched plainly, with the attribute and a wait, or that and a trigger.
enum class Empty { kPlain, kWait, kWaitTrigger };
void enqueue_empty(Empty kind, const Stream& stream);

// Measured in the run that reports them.
struct Ceilings {
  // Bytes a second; a copy counts both directions. (It is not captured: a memcpy node is slower.)
  double copy = 0, read = 0, write = 0;
  Distribution empty_plain, empty_wait, empty_trigger;  // a node of a chain
};
Ceilings measure_ceilings(Backend& backend, const Stream& stream);

}  // namespace quire::bench
