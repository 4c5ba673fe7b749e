// Where pages lie is data: tight, padded and page-major caches run the same steps with the same
// kernels and hold the same entries, and nothing is written between the entries.
#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <quire/cache/memory_layout.h>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace quire::test {
namespace {

constexpr std::int64_t kCsaPage = 37'440;
constexpr std::int64_t kIndexerPage = 8'448;
constexpr std::int64_t kHcaPage = 1'728;

struct Variant {
  const char* name;
  DeviceCacheOptions options;
};

std::vector<Variant> variants() {
  std::vector<Variant> all(5);
  all[0].name = "tight";
  all[1].name = "padded";
  all[1].options.csa_page_stride_bytes = kCsaPage + 576;
  all[1].options.indexer_page_stride_bytes = 8'640;
  all[1].options.hca_page_stride_bytes = kHcaPage + 16;
  all[2].name = "page-major";
  all[2].options.page_order = PageOrder::kPageMajor;
  all[3].name = "page-major, padded";
  all[3].options = all[1].options;
  all[3].options.page_order = PageOrder::kPageMajor;
  all[4].name = "larger rings";
  all[4].options.window_ring_tokens = 320;
  all[4].options.csa_ring_tokens = 20;
  return all;
}

TestEngineOptions engine_options(const DeviceCacheOptions& cache, RowStyle style) {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kHca, LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca,
                         LayerKind::kCsa};
  options.limits = {.seats_max = 3,
                    .pages = 9,
                    .rows_max = 3,
                    .tokens_max = 320,
                    .context_max = 700,
                    .draft_max = 2};
  options.cache = cache;
  options.style = style;
  options.contents = 3;
  return options;
}

// Fills pages with 0xFF, then prefills three requests in chunks that mix, decodes them eagerly and
// replayed, some drafts refused; pages come to the requests in turn. Request i has content i.
std::vector<RequestId> serve(TestEngine& engine, std::uint32_t seed) {
  engine.poison();
  std::vector<RequestId> requests;
  for (std::int64_t i = 0; i < 3; ++i) requests.push_back(engine.admit(i, 700));
  for (int round = 0; round < 4; ++round) {
    std::vector<StepRow> rows;
    for (const RequestId request : requests) {
      seed = hash32(seed + 1);
      rows.push_back({request, static_cast<std::int32_t>(1 + seed % 106)});
    }
    engine.ragged_step(rows);
    for (std::int32_t i = 0; i < 5; ++i) {
      std::vector<StepRow> drafted;
      for (const RequestId request : requests) {
        seed = hash32(seed + 1);
        drafted.push_back({request, 3, static_cast<std::int32_t>(1 + seed % 3)});
      }
      const StepShape shape = StepShape::decode(3, 3);
      if (i % 2 == 0) {
        engine.step(drafted, shape);
      } else {
        engine.replay_step(drafted, shape);
      }
    }
  }
  return requests;
}

// Live bytes of a request that has content `content`, prefilled alone in one chunk on the host.
std::vector<std::byte> alone(std::int64_t content, std::int64_t tokens, RowStyle style) {
  const auto host = make_host_backend();
  TestEngineOptions options = engine_options({}, style);
  options.limits.tokens_max = options.limits.context_max;
  TestEngine engine(*host, options);
  return one_shot(engine, content, static_cast<std::int32_t>(tokens));
}

// Bytes from `first` to `last` of every page of the pool that are not as `poison` left them.
std::int64_t written_between(const Snapshot& memory, std::span<std::byte> region, EntryPool pool,
                             std::int64_t pages, std::int64_t first, std::int64_t last) {
  const std::byte* base = memory.pages.data() + (pool.base - region.data());
  std::int64_t written = 0;
  for (std::int64_t page = 0; page < pages; ++page) {
    for (std::int64_t at = first; at < last; ++at) {
      written += base[page * pool.page_stride_bytes + at] == std::byte{0xFF} ? 0 : 1;
    }
  }
  return written;
}

TEST_CASE("tight, padded and page-major caches hold the same entries") {
  const std::uint32_t seed = std::random_device{}();
  CAPTURE(seed);
  for (const RowStyle style : {RowStyle::kPlain, RowStyle::kRare, RowStyle::kNasty}) {
    std::vector<std::vector<std::byte>> expected;
    for (const Variant& variant : variants()) {
      CAPTURE(std::string(variant.name));
      TestEngine engine(test_backend(), engine_options(variant.options, style));
      const std::vector<RequestId> requests = serve(engine, seed);
      if (expected.empty()) {
        for (const RequestId request : requests) {
          const auto content = static_cast<std::int64_t>(expected.size());
          expected.push_back(alone(content, engine.length(request), style));
          CHECK(expected.back().size() > 100'000);
        }
        CHECK((expected[0] != expected[1]));
      }
      const Snapshot memory = engine.snapshot();
      for (std::size_t i = 0; i < requests.size(); ++i) {
        CHECK((engine.live_bytes(memory, requests[i]) == expected[i]));
      }
    }
  }
}

TEST_CASE("nothing is written between entries, pages or layers") {
  for (const Variant& variant : variants()) {
    CAPTURE(std::string(variant.name));
    TestEngine engine(test_backend(), engine_options(variant.options, RowStyle::kPlain));
    serve(engine, 7);
    const Snapshot memory = engine.snapshot();
    const DeviceCache& device = engine.cache().device();
    const std::int64_t pages = device.limits().pages;
    const auto written = [&](EntryPool pool, std::int64_t first, std::int64_t slot) {
      return written_between(memory, device.pages_memory(), pool, pages, first, slot);
    };
    const auto slot = [](std::int64_t asked, std::int64_t page) {
      return asked == 0 ? page : asked;
    };
    for (const LayerId layer : {LayerId(2), LayerId(4)}) {
      CHECK(written(device.csa_pages(layer), 64 * 584,
                    slot(variant.options.csa_page_stride_bytes, kCsaPage)) == 0);
      CHECK(written(device.csa_pages(layer), 0, 64 * 584) > 0);
      CHECK(written(device.indexer_pages(layer), kIndexerPage,
                    slot(variant.options.indexer_page_stride_bytes, kIndexerPage)) == 0);
      CHECK(written(device.indexer_pages(layer), 0, kIndexerPage) > 0);
    }
    for (const LayerId layer : {LayerId(0), LayerId(3)}) {
      CHECK(written(device.hca_pages(layer), 2 * 584,
                    slot(variant.options.hca_page_stride_bytes, kHcaPage)) == 0);
      CHECK(written(device.hca_pages(layer), 0, 2 * 584) > 0);
    }
  }
}

TEST_CASE("pools stand where the options put them") {
  const auto open = [](const DeviceCacheOptions& options) {
    const TestEngineOptions engine = engine_options(options, RowStyle::kPlain);
    return std::make_unique<DeviceCache>(test_backend(), engine.spec, engine.limits, options);
  };
  const auto all = variants();
  const auto padded = open(all[1].options);
  CHECK(padded->csa_pages(LayerId(2)).page_stride_bytes == kCsaPage + 576);
  CHECK(padded->indexer_pages(LayerId(2)).page_stride_bytes == 8'640);
  CHECK(padded->hca_pages(LayerId(0)).page_stride_bytes == kHcaPage + 16);

  const auto major = open(all[2].options);
  // 2 x (37,440 + 8,448) + 2 x 1,728 = 95,232, to the next 576.
  const std::int64_t stride = 166 * 576;
  std::byte* const base = major->pages_memory().data();
  const auto check = [&](EntryPool pool, std::int64_t offset) {
    CHECK(pool.page_stride_bytes == stride);
    CHECK(pool.base - base == offset);
  };
  check(major->hca_pages(LayerId(0)), 0);
  check(major->csa_pages(LayerId(2)), kHcaPage);
  check(major->indexer_pages(LayerId(2)), kHcaPage + kCsaPage);
  check(major->hca_pages(LayerId(3)), kHcaPage + kCsaPage + kIndexerPage);
  check(major->csa_pages(LayerId(4)), 2 * kHcaPage + kCsaPage + kIndexerPage);
  check(major->indexer_pages(LayerId(4)), 2 * kHcaPage + 2 * kCsaPage + kIndexerPage);
  CHECK(static_cast<std::int64_t>(major->pages_memory().size()) ==
        round_up<std::int64_t>(9 * stride, 256));
}

}  // namespace
}  // namespace quire::test
