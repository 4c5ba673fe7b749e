// Indexer keys laid out for non-paged logits, against the pages they come from.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <quire/kernels/params.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using test::check_refused;
using test::DeviceArray;
using test::Random;
using test::random_values;
using test::run_three_ways;
using test::test_backend;

constexpr std::int32_t kPoison = 0x5A5A5A5A;

struct KeyCase {
  std::int32_t rows, tokens;
  std::int64_t capacity;
  std::int32_t entries_max;
};

struct KeyGather : KeyCase {
  explicit KeyGather(const KeyCase& of) : KeyCase(of) {}

  static constexpr std::int64_t kPages = 60, kCells = 20;
  std::int64_t page_stride = indexer_page_bytes(64) + 192;

  Stream stream{test_backend()};
  std::vector<std::byte> pages;
  std::vector<std::int32_t> entries, table, token_row, token_entries;
  DeviceArray<std::byte> on_pages{test_backend(), stream,
                                  static_cast<std::size_t>(kPages* page_stride), 0xFF};
  DeviceArray<std::int32_t> on_entries{test_backend(), stream, size(rows), 0};
  DeviceArray<std::int32_t> on_table{test_backend(), stream, size(rows* kCells), 0x7F};
  DeviceArray<std::int32_t> on_token_row{test_backend(), stream, size(tokens), 0};
  DeviceArray<std::int32_t> on_token_entries{test_backend(), stream, size(tokens), 0};
  DeviceArray<std::int32_t> cu{test_backend(), stream, size(rows + 2), 0x5A};
  DeviceArray<std::int32_t> start{test_backend(), stream, size(tokens + 1), 0x5A};
  DeviceArray<std::int32_t> end{test_backend(), stream, size(tokens + 1), 0x5A};
  DeviceArray<std::uint8_t> keys{test_backend(), stream, size((capacity + 1) * 128), 0x5A};
  DeviceArray<std::uint32_t> scales{test_backend(), stream, size(capacity + 1), 0x5A};

  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

  void change(std::uint32_t seed) {
    Random random(seed);
    pages = random_values<std::byte>(random, size(kPages * page_stride), 256);
    entries.clear();
    table.assign(size(rows * kCells), 0x7F7F7F7F);  // cells that nobody may read
    for (std::int32_t r = 0; r < rows; ++r) {
      entries.push_back(random.below(4) == 0 ? 0 : random.below(entries_max + 1));
      for (std::int64_t cell = 0; cell * 64 < entries.back(); ++cell) {
        table[size(r * kCells + cell)] = random.below(kPages);
      }
    }
    token_row.clear();
    token_entries.clear();
    for (std::int32_t t = 0; t < tokens; ++t) {
      token_row.push_back(random.below(rows + 1) - 1);
      const std::int32_t r = token_row.back();
      token_entries.push_back(r < 0 ? 0 : random.below(entries[size(r)] + 1));
    }
    on_pages.upload(pages);
    on_entries.upload(entries);
    on_table.upload(table);
    on_token_row.upload(token_row);
    on_token_entries.upload(token_entries);
    keys.upload(std::vector<std::uint8_t>(keys.size(), 0x5A));
    scales.upload(std::vector<std::uint32_t>(scales.size(), 0x5A5A5A5A));
  }

  GatherIndexerParams params() {
    GatherIndexerParams p;
    p.pool = make_entry_pool(on_pages.data(), page_stride, 64);
    p.rows = rows;
    p.row_entries = on_entries.data();
    p.page_table = on_table.data();
    p.page_table_stride = kCells;
    p.cu_entries = cu.data();
    p.capacity = capacity;
    p.keys = keys.data();
    p.scales = reinterpret_cast<float*>(scales.data());
    p.tokens = tokens;
    p.token_batch_row = on_token_row.data();
    p.token_entries = on_token_entries.data();
    p.k_start = start.data();
    p.k_end = end.data();
    return p;
  }

  void check(const char* when) {
    CAPTURE(when);
    std::vector<std::uint8_t> expected_keys(keys.size(), 0x5A);
    std::vector<std::uint32_t> expected_scales(scales.size(), 0x5A5A5A5A);
    std::vector<std::int32_t> begin{0};
    const EntryPool pool = make_entry_pool(pages.data(), page_stride, 64);
    for (std::int32_t r = 0; r < rows; ++r) {
      for (std::int32_t e = 0; e < entries[size(r)]; ++e) {
        const std::int64_t at = begin.back() + e;
        if (at >= capacity) break;
        const std::int64_t location = table[size(r * kCells + e / 64)] * 64 + e % 64;
        std::memcpy(&expected_keys[size(at * 128)], pool.indexer_values(location), 128);
        std::memcpy(&expected_scales[size(at)], pool.indexer_scale(location), 4);
      }
      begin.push_back(begin.back() + entries[size(r)]);
    }
    begin.push_back(kPoison);
    CHECK(cu.download() == begin);
    CHECK(keys.download() == expected_keys);
    CHECK(scales.download() == expected_scales);
    const auto starts = start.download();
    const auto ends = end.download();
    for (std::int32_t t = 0; t < tokens; ++t) {
      const std::int32_t r = token_row[size(t)];
      const std::int64_t from = r < 0 ? 0 : std::min<std::int64_t>(begin[size(r)], capacity);
      const std::int64_t to =
          r < 0 ? 0 : std::min<std::int64_t>(begin[size(r)] + token_entries[size(t)], capacity);
      REQUIRE(starts[size(t)] == from);
      REQUIRE(ends[size(t)] == to);
    }
    CHECK(starts.back() == kPoison);
    CHECK(ends.back() == kPoison);
  }
};

}  // namespace

TEST_CASE("gathered keys stand request after request, with the range of every query token") {
  for (const KeyCase& of : {KeyCase{9, 50, 8000, 700},
                            {1500, 40, 40'000, 20},
                            {1, 3, 1280, 1280},
                            {6, 2000, 901, 400}}) {  // the last: no room
    KeyGather gather(of);
    run_three_ways(
        gather.stream, [&](std::uint32_t seed) { gather.change(seed); },
        [&] { test_backend().gather_indexer(gather.params(), Pdl::kPrologue, gather.stream); },
        [&](const char* when) { gather.check(when); });
  }
}

TEST_CASE("keys of no requests, without ranges or without room are legal") {
  KeyGather gather({3, 4, 200, 100});
  gather.change(5);
  GatherIndexerParams params = gather.params();
  params.k_start = params.k_end = nullptr;
  test_backend().gather_indexer(params, Pdl::kOff, gather.stream);
  gather.stream.wait();
  CHECK(gather.start.download()[0] == kPoison);
  CHECK(gather.cu.download()[3] ==
        std::accumulate(gather.entries.begin(), gather.entries.end(), 0));
  params = gather.params();
  params.rows = 0;
  params.tokens = 0;
  test_backend().gather_indexer(params, Pdl::kOff, gather.stream);
  params.capacity = 0;
  params.keys = nullptr;
  params.scales = nullptr;
  test_backend().gather_indexer(params, Pdl::kOff, gather.stream);
  gather.stream.wait();
  CHECK(gather.cu.download()[0] == 0);
}

TEST_CASE("keys out of range are refused by name, before anything is enqueued") {
  KeyGather gather({2, 2, 10, 5});
  const auto refused = [&](auto change, const std::string& why) {
    GatherIndexerParams params = gather.params();
    change(params);
    check_refused(why, [&] { test_backend().gather_indexer(params, Pdl::kOff, gather.stream); });
  };
  using P = GatherIndexerParams;
  refused([](P& p) { p.capacity = std::int64_t{1} << 31; }, "capacity is");
  refused([](P& p) { p.k_end = nullptr; }, "k_start and k_end");
  refused([](P& p) { p.cu_entries = nullptr; }, "cu_entries is null");
  refused([](P& p) { p.keys += 1; }, "keys at");
  refused([](P& p) { p.pool.base += 4; }, "pool.base at");
}
