// Entries beyond 2^31 bytes of their pool (A1, A2, A3 of the failures that users of other systems
// met): offsets are 64-bit before any multiplication, those of the scales too, and what cannot be
// addressed is refused. Tight strides never get there: pages lie apart, as in a coalesced pool. The
// state of seats is in addresses_seats_test.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <quire/runtime/base/errors.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int64_t kStride = 1'039'680;  // a page of all layers of a model, in other systems
constexpr std::int64_t kLowPages = 2066;     // the first page that begins beyond 2^31 bytes
constexpr std::int64_t kFillerPages = 240;   // of each request that takes pages, nothing more
static_assert(kLowPages * kStride > std::int64_t{1} << 31);

std::vector<std::byte> fetch(TestEngine& engine, const std::byte* from, std::int64_t bytes) {
  std::vector<std::byte> to(static_cast<std::size_t>(bytes));
  engine.backend().copy(to.data(), from, bytes, engine.stream());
  engine.stream().wait();
  return to;
}

// Requests that take this many pages and do nothing else.
void take_pages(Ledger& ledger, std::int64_t pages) {
  for (; pages > 0; pages -= kFillerPages) {
    const std::int64_t tokens = std::min(pages, kFillerPages) * kPageTokens;
    ledger.reserve(ledger.admit(tokens, tokens).value(), tokens).value();
  }
}

// Entries and scales of a request's pages, page after page, fetched one by one: a copy of the whole
// pool would take longer than all the rest.
std::vector<std::byte> entries_of(TestEngine& engine, LayerId layer, RequestId request) {
  const DeviceCache& device = engine.cache().device();
  const std::int64_t entries = engine.length(request) / 4;
  std::vector<std::byte> all;
  const auto add = [&](const std::byte* from, std::int64_t bytes) {
    const std::vector<std::byte> more = fetch(engine, from, bytes);
    all.insert(all.end(), more.begin(), more.end());
  };
  const auto pages = engine.cache().ledger().pages_of(request);
  for (std::int64_t first = 0; first < entries; first += 64) {
    const std::int64_t count = std::min<std::int64_t>(64, entries - first);
    const std::int64_t at = std::int64_t{pages[static_cast<std::size_t>(first / 64)].value} * 64;
    const EntryPool main = device.csa_pages(layer);
    const EntryPool keys = device.indexer_pages(layer);
    // Where LAYOUT says that they are, not where EntryPool says.
    const std::byte* main_page = main.base + at / 64 * main.page_stride_bytes;
    const std::byte* keys_page = keys.base + at / 64 * keys.page_stride_bytes;
    add(main_page, count * kMainDataBytes);
    add(main_page + 64 * kMainDataBytes, count * kMainScaleBytes);
    add(keys_page, count * kIndexerDim);
    add(keys_page + 64 * kIndexerDim, count * kIndexerScaleBytes);
  }
  return all;
}

// A1, A2
TEST_CASE("a request on pages beyond 2^31 bytes has the bytes of one on page 0") {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kCsa};
  // Pages of the main and the indexer pool in turn, so that both have the one stride.
  options.cache.page_order = PageOrder::kPageMajor;
  options.cache.csa_page_stride_bytes = kStride - indexer_page_bytes(64);
  options.limits.seats_max = 12;
  options.limits.pages = 2070;
  options.limits.rows_max = 3;
  options.limits.tokens_max = 700;
  options.limits.context_max = kFillerPages * kPageTokens;
  options.limits.run_ahead_max = 0;
  options.bank_tokens = 700;
  TestEngine engine(test_backend(), options);
  const DeviceCache& device = engine.cache().device();
  REQUIRE(device.csa_pages(LayerId(0)).page_stride_bytes == kStride);
  REQUIRE(device.indexer_pages(LayerId(0)).page_stride_bytes == kStride);

  const RequestId low = engine.admit(0, 700);
  const auto run = [&](RequestId request) {
    engine.ragged_step({{request, 1}});
    engine.ragged_step({{request, 600}});
    for (int i = 0; i < 10; ++i) {
      engine.replay_step(std::vector<StepRow>{{request, 1}}, StepShape::decode(1));
    }
  };
  run(low);
  Ledger& ledger = engine.cache().ledger();
  take_pages(ledger, kLowPages - 3);  // what lies between
  const RequestId high = engine.admit(0, 700);
  run(high);

  for (const PageId page : ledger.pages_of(low)) CHECK(page.value < 3);
  for (const PageId page : ledger.pages_of(high)) CHECK(page.value >= kLowPages);
  REQUIRE(ledger.pages_of(high).size() == 3);
  const auto expected = entries_of(engine, LayerId(0), low);
  REQUIRE(expected.size() == 152 * (584 + 132));
  REQUIRE(expected != std::vector<std::byte>(expected.size()));
  const bool same = entries_of(engine, LayerId(0), high) == expected;
  CHECK(same);
}

// A1, A2
TEST_CASE("HCA entries on pages beyond 2^31 bytes have the bytes of those on page 0") {
  TestEngineOptions options = small_engine(12, kFillerPages * kPageTokens);
  options.spec.layers = {LayerKind::kHca};
  options.cache.hca_page_stride_bytes = kStride;
  options.limits.pages = kLowPages + 3;
  options.limits.rows_max = 1;
  options.limits.tokens_max = 600;
  options.bank_tokens = 600;
  TestEngine engine(test_backend(), options);
  Ledger& ledger = engine.cache().ledger();
  const RequestId low = engine.admit(0, 600);
  engine.ragged_step({{low, 600}});
  take_pages(ledger, kLowPages - 3);
  const RequestId high = engine.admit(0, 600);
  engine.ragged_step({{high, 507}});
  for (int i = 0; i < 10; ++i) {  // position 511, which closes an entry, is decoded
    engine.replay_step(std::vector<StepRow>{{high, 1}}, StepShape::decode(1));
  }
  const EntryPool pool = engine.cache().device().hca_pages(LayerId(0));
  REQUIRE(pool.page_stride_bytes == kStride);
  // Of the two full pages; up to 600 tokens close no entry on the third.
  const auto entries = [&](RequestId request) {
    std::vector<std::byte> all;
    for (const PageId page : ledger.pages_of(request).first(2)) {
      const auto bytes = fetch(engine, pool.base + page.value * kStride,
                               2 * (kMainDataBytes + kMainScaleBytes));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  };
  for (const PageId page : ledger.pages_of(high)) CHECK(page.value >= kLowPages);
  const auto expected = entries(low);
  REQUIRE(expected.size() == 4 * 584);
  REQUIRE(expected != std::vector<std::byte>(expected.size()));
  const bool same = entries(high) == expected;
  CHECK(same);
}

// The bytes of one entry, found by the layout of a page. Only the places that are looked at are
// touched: the memory between them costs nothing on the host.
struct StoredEntry {
  std::vector<std::byte> data, scales;
  bool operator==(const StoredEntry&) const = default;
};

void check_store(std::int64_t entries_per_page, std::int64_t location) {
  CAPTURE(entries_per_page);
  Backend& backend = test_backend();
  Stream stream(backend);
  const std::int64_t page_bytes = main_page_bytes(entries_per_page);
  const std::int64_t bytes = (location / entries_per_page + 1) * page_bytes;
  REQUIRE(bytes > std::int64_t{1} << 31);
  MemoryPool pool(backend, bytes);
  const Memory memory(pool, bytes, stream);
  std::vector<std::uint16_t> rows(2 * 512);
  for (std::size_t c = 0; c < rows.size(); ++c) {
    rows[c] = static_cast<std::uint16_t>(0x3C00 + c % 512 * 3);  // two equal rows
  }
  const DeviceArray<std::uint16_t> input(backend, stream, rows);

  const auto data_at = [&](std::int64_t at) {
    return memory.data() + at / entries_per_page * page_bytes + at % entries_per_page * 576;
  };
  const auto scales_at = [&](std::int64_t at) {
    return memory.data() + at / entries_per_page * page_bytes + entries_per_page * 576 +
           at % entries_per_page * 8;
  };
  for (const bool wide : {false, true}) {
    CAPTURE(wide);
    for (const std::int64_t at : {std::int64_t{0}, location}) {
      backend.fill(data_at(at), 0xEE, 576, stream);
      backend.fill(scales_at(at), 0xEE, 8, stream);
    }
    const DeviceArray<std::int32_t> narrow_locations(
        backend, stream, std::vector<std::int32_t>{0, static_cast<std::int32_t>(location)});
    const DeviceArray<std::int64_t> wide_locations(backend, stream,
                                                   std::vector<std::int64_t>{0, location});
    StoreParams params;
    params.input = input.data();
    params.rows = 2;
    params.wide_locations = wide;
    params.locations = wide ? static_cast<const void*>(wide_locations.data())
                            : static_cast<const void*>(narrow_locations.data());
    params.pool =
        make_entry_pool(memory.data(), page_bytes, static_cast<std::int32_t>(entries_per_page));
    backend.store_flashmla(params, Pdl::kOff, stream);
    const auto stored = [&](std::int64_t at) {
      StoredEntry entry{std::vector<std::byte>(576), std::vector<std::byte>(8)};
      backend.copy(entry.data.data(), data_at(at), 576, stream);
      backend.copy(entry.scales.data(), scales_at(at), 8, stream);
      stream.wait();
      return entry;
    };
    const StoredEntry near = stored(0);
    const bool same = near == stored(location);
    CHECK(same);
    CHECK(near.data != std::vector<std::byte>(576, std::byte{0xEE}));
    CHECK(near.scales[7] == std::byte{0});
  }
}

// A1, A2
TEST_CASE("a store beyond 2^31 or 2^32 bytes of its pool writes what one to location 0 does") {
  check_store(64, 3'728'271);       // page 58,254
  check_store(1 << 22, 3'728'271);  // one page: 2^31 is passed inside it
  check_store(64, 7'728'271);
  check_store(1 << 23, 7'728'271);  // one page: 2^32 is passed inside it
}

// A3
TEST_CASE("what cannot be addressed is refused at construction with the limit named") {
  const auto refusal = [](std::int64_t pages, std::int64_t stride, PageOrder order, int layers) {
    ModelSpec spec;
    spec.layers.assign(static_cast<std::size_t>(layers), LayerKind::kCsa);
    Limits limits;
    limits.seats_max = limits.rows_max = 1;
    limits.pages = pages;
    limits.tokens_max = limits.context_max = 64;
    DeviceCacheOptions options;
    options.csa_page_stride_bytes = options.indexer_page_stride_bytes = stride;
    options.page_order = order;
    try {
      const DeviceCache cache(test_backend(), spec, limits, options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto has = [](const std::string& text, const std::string& words) {
    CAPTURE(text);
    CHECK(text.find(words) != std::string::npos);
  };
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  has(refusal(kMost + 1, kStride, PageOrder::kLayerMajor, 1), "Limits::pages is 1073741825");
  has(refusal(4, kMost + 16, PageOrder::kLayerMajor, 1), "csa_page_stride_bytes is 1073741840");
  // 2^30 pages of 2^30 bytes are 2^60 bytes a pool: eight pools are too many for 63 bits.
  for (const PageOrder order : {PageOrder::kLayerMajor, PageOrder::kPageMajor}) {
    has(refusal(kMost, kMost, order, 8), "cannot be addressed");
  }
}

}  // namespace
