// What the rules of docs/PDL.md rest on: three kernels, none of Quire's, in one graph. The first
// triggers, is slow and then writes; the last reads, before its wait or behind it. What may be read
// before it depends on the one between them.
#include <doctest/doctest.h>

#include <cstdint>

#include <quire/runtime/owners.h>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

#include "tests/support/device_array.h"
#include "tests/support/sleep.cuh"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using namespace quire::test;

struct Words {
  std::int32_t* written;
  std::int32_t* seen;
};

__global__ void slow_writer(const __grid_constant__ Words words) {
  cuda::pdl_trigger();
  sleep_us(200);
  *words.written += 1;
}

__global__ void waits_then_triggers(const __grid_constant__ Words) {
  cuda::pdl_wait();
  cuda::pdl_trigger();
}
__global__ void triggers_then_waits(const __grid_constant__ Words) {
  cuda::pdl_trigger();
  cuda::pdl_wait();
}
__global__ void ends_at_once(const __grid_constant__ Words) {}
__global__ void only_triggers(const __grid_constant__ Words) { cuda::pdl_trigger(); }
__global__ void may_wait(const __grid_constant__ Words words) {
  if (words.written == nullptr) cuda::pdl_wait();
}

__device__ void read(const Words& words) {
  *words.seen = *reinterpret_cast<volatile std::int32_t*>(words.written);
}
__global__ void reads_behind_its_wait(const __grid_constant__ Words words) {
  cuda::pdl_wait();
  read(words);
}
// What it sees is stored behind the wait, so that replays do not overtake each other's answers.
__global__ void reads_before_its_wait(const __grid_constant__ Words words) {
  const std::int32_t seen = *reinterpret_cast<volatile std::int32_t*>(words.written);
  cuda::pdl_wait();
  *words.seen = seen;
}

constexpr int kReplays = 50;

// How many of the replays read what the replay before had written.
int stale_reads(void (*between)(Words), void (*reader)(Words)) {
  Stream stream(test_backend());
  const cudaStream_t handle = stream.view().cuda();
  DeviceArray<std::int32_t> memory(test_backend(), stream, 2, 0);
  const Words words{memory.data(), memory.data() + 1};
  Capture capture(test_backend(), stream);
  cuda::launch(slow_writer, dim3(1), dim3(1), 0, handle, false, words);
  cuda::launch(between, dim3(1), dim3(1), 0, handle, true, words);
  cuda::launch(reader, dim3(1), dim3(1), 0, handle, true, words);
  const GraphExec graph = capture.finish();
  int stale = 0;
  for (std::int32_t replay = 1; replay <= kReplays; ++replay) {
    graph.launch(stream);
    const auto found = memory.download();
    CHECK(found[0] == replay);
    stale += found[1] == replay ? 0 : 1;
  }
  return stale;
}

}  // namespace

TEST_CASE("what stands behind a kernel that waits first may read before its own wait, else not") {
  CHECK(stale_reads(waits_then_triggers, reads_before_its_wait) == 0);
  CHECK(stale_reads(triggers_then_waits, reads_before_its_wait) == kReplays);
  CHECK(stale_reads(ends_at_once, reads_before_its_wait) == kReplays);
}

// P12. Nobody promises the second half: it is what one machine does, and no rule of ours rests on
// it.
TEST_CASE("behind its wait a kernel reads what is new, when all before it waited; else by luck") {
  CHECK(stale_reads(waits_then_triggers, reads_behind_its_wait) == 0);
  CHECK(stale_reads(triggers_then_waits, reads_behind_its_wait) == 0);
  MESSAGE("stale of ", kReplays, " behind a kernel with the attribute that ends at once: ",
          stale_reads(ends_at_once, reads_behind_its_wait),
          ", that only triggers: ", stale_reads(only_triggers, reads_behind_its_wait),
          ", whose wait is passed over: ", stale_reads(may_wait, reads_behind_its_wait));
}
