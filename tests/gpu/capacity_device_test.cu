// What plan_capacity says against what opening such a cache really takes from the GPU.
#include <doctest/doctest.h>

#include <cuda_runtime_api.h>

#include <quire/cache/cache_manager.h>
#include <quire/cache/capacity.h>
#include <quire/runtime/cuda/check.h>

#include "tests/support/test_backend.h"

namespace {

using namespace quire;

std::int64_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  QUIRE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

TEST_CASE("V4-Flash and V4-Pro take what their capacity report says, of 8, 40, 100 GiB that fit") {
  Limits limits;
  limits.seats_max = 64;
  limits.rows_max = 64;
  limits.tokens_max = 8192;
  limits.context_max = 131072;
  limits.plan_buffers = 2;
  CapacityOptions options;
  options.pool_granularity_bytes = kCudaPoolGranularityBytes;
  {
    // Kernels and the first pool load what stays loaded: not part of a cache.
    ModelSpec spec;
    spec.layers = {LayerKind::kSliding};
    Limits few = limits;
    few.pages = few.cells_max();
    const CacheManager warm_up(test::test_backend(), spec, few);
  }
  const std::int64_t free_at_first = free_bytes();
  int opened = 0;
  for (const ModelSpec& spec : {ModelSpec::deepseek_v4_flash(), ModelSpec::deepseek_v4_pro()}) {
    for (const std::int64_t gib : {8, 40, 100}) {
      const std::int64_t budget = gib << 30;
      const Capacity planned = plan_capacity(spec, limits, {}, budget, options);
      CAPTURE(gib);
      CAPTURE(planned.limits.pages);
      if (free_at_first < budget + (std::int64_t{1} << 30)) {
        MESSAGE("SKIPPED at ", gib, " GiB: ", free_at_first, " bytes are free");
        continue;
      }
      const std::int64_t before = free_bytes();
      const CacheManager cache(test::test_backend(), spec, planned.limits);
      const std::int64_t taken = before - free_bytes();
      MESSAGE(gib, " GiB: ", planned.limits.pages, " pages, report ", planned.cache.total(),
              " bytes, pool adds ", planned.pool_adds_bytes, ", taken ", taken);
      CHECK(cache.device().bytes().total() == planned.cache.total());
      CHECK(taken == planned.cache.total() + planned.pool_adds_bytes);
      CHECK(taken <= budget);
      ++opened;
    }
  }
  CHECK(opened >= 2);
}

}  // namespace
