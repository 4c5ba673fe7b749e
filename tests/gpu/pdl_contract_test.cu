// Why an engine's kernels must wait: three kernels of its own, none of Quire's, in one graph. The
// first triggers, is slow and then writes; the last waits and reads. Where the one between them has
// the attribute and ends without waiting, the last overtakes the first.
#include <doctest/doctest.h>

#include <cstdint>

#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
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
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < 200'000);
  *words.written += 1;
}

__global__ void waits(const __grid_constant__ Words) { cuda::pdl_wait(); }
__global__ void ends_at_once(const __grid_constant__ Words) {}

__global__ void reader(const __grid_constant__ Words words) {
  cuda::pdl_wait();
  *words.seen = *reinterpret_cast<volatile std::int32_t*>(words.written);
}

// How many of 50 replays read what the replay before had written.
int stale_reads(void (*between)(Words)) {
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
  for (std::int32_t replay = 1; replay <= 50; ++replay) {
    graph.launch(stream);
    const auto found = memory.download();
    CHECK(found[0] == replay);
    stale += found[1] == replay ? 0 : 1;
  }
  return stale;
}

}  // namespace

// P12
TEST_CASE("a kernel with the attribute that never waits breaks a chain without any part of Quire") {
  CHECK(stale_reads(waits) == 0);
  CHECK(stale_reads(ends_at_once) > 0);
}
