// The read side's single operations, each eager, captured, and replayed after its data changed:
// picks to locations against a plain walk, dequantised entries against double, keys for non-paged
// logits against the pages they come from.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <quire/kernels/params.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using test::DeviceArray;
using test::test_backend;

constexpr std::int32_t kPoison = 0x5A5A5A5A;

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  std::int32_t below(std::int64_t n) {
    return static_cast<std::int32_t>(engine_() % static_cast<std::uint64_t>(n));
  }

 private:
  std::mt19937_64 engine_;
};

template <class T>
std::vector<T> random_values(Random& random, std::size_t count, std::int64_t below) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(random.below(below));
  return values;
}

// `change(seed)` gives new data, `enqueue` runs the operation on it, `check` looks at the results.
template <class Change, class Enqueue, class Check>
void run_three_ways(Stream& stream, const Change& change, const Enqueue& enqueue,
                    const Check& check) {
  change(1);
  enqueue();
  stream.wait();
  check("eager");
  Capture capture(test_backend(), stream);
  enqueue();
  const GraphExec graph = capture.finish();
  for (const std::uint32_t seed : {2u, 3u}) {
    change(seed);
    graph.launch(stream);
    stream.wait();
    check("replayed");
  }
}

// --- Picks ---

struct PicksCase {
  std::int32_t tokens, k;
  std::int64_t stride;
  bool in_place;
  std::int32_t padding, floor;
};

struct Picks : PicksCase {
  static constexpr std::int32_t kRows = 7, kCells = 40;

  Stream stream{test_backend()};
  std::vector<std::int32_t> picks, rows, entries, table;
  DeviceArray<std::int32_t> on_picks, on_rows, on_entries, on_table, on_locations, on_lengths;

  explicit Picks(const PicksCase& of)
      : PicksCase(of),
        on_picks(test_backend(), stream, static_cast<std::size_t>(tokens * stride), 0x5A),
        on_rows(test_backend(), stream, static_cast<std::size_t>(tokens), 0),
        on_entries(test_backend(), stream, static_cast<std::size_t>(tokens), 0),
        on_table(test_backend(), stream, kRows * kCells, 0x7F),
        on_locations(test_backend(), stream, static_cast<std::size_t>(tokens * stride), 0x5A),
        on_lengths(test_backend(), stream, static_cast<std::size_t>(tokens) + 1, 0x5A) {}

  TranslatePicksParams params() {
    TranslatePicksParams p;
    p.tokens = tokens;
    p.k = k;
    p.picks = on_picks.data();
    p.picks_stride = p.locations_stride = stride;
    p.token_batch_row = on_rows.data();
    p.token_csa_length = on_entries.data();
    p.page_table = on_table.data();
    p.page_table_stride = kCells;
    p.locations = in_place ? on_picks.data() : on_locations.data();
    p.lengths = on_lengths.data();
    p.padding_location = padding;
    p.length_floor = floor;
    return p;
  }

  // A top-k without order: distinct entries in front, -1 behind; in every third token -1 and
  // entries that are not complete yet stand among them, and valid picks at the end.
  void change(std::uint32_t seed) {
    Random random(seed);
    table = random_values<std::int32_t>(random, kRows * kCells, 33'000'000);
    rows = random_values<std::int32_t>(random, static_cast<std::size_t>(tokens), kRows + 1);
    picks.assign(static_cast<std::size_t>(tokens * stride), kPoison);
    entries.clear();
    for (std::int32_t t = 0; t < tokens; ++t) {
      if (rows[static_cast<std::size_t>(t)] == kRows) rows[static_cast<std::size_t>(t)] = -1;
      const std::int32_t n = t % 4 == 0 ? random.below(k + 3) : random.below(kCells * 64 + 1);
      entries.push_back(n);
      const std::int32_t chosen = std::min(n, k);
      std::int32_t* of_token = picks.data() + t * stride;
      for (std::int32_t i = 0; i < k; ++i) of_token[i] = i < chosen ? (i * 7919 + t) % n : -1;
      if (t % 3 != 0) continue;
      for (std::int32_t i = 0; i < k; ++i) {
        if (random.below(5) == 0) of_token[i] = random.below(2) == 0 ? -1 : n + random.below(9);
      }
      if (n > 0 && random.below(2) == 0) of_token[k - 1] = n - 1;
    }
    on_table.upload(table);
    on_rows.upload(rows);
    on_entries.upload(entries);
    on_picks.upload(picks);
  }

  void check(const char* when) {
    CAPTURE(when);
    const auto locations = (in_place ? on_picks : on_locations).download();
    const auto lengths = on_lengths.download();
    for (std::int32_t t = 0; t < tokens; ++t) {
      CAPTURE(t);
      const auto at = static_cast<std::size_t>(t);
      const std::int32_t n = rows[at] < 0 ? 0 : entries[at];
      std::int32_t length = std::max(floor, std::min(n, k));
      for (std::int64_t i = 0; i < stride; ++i) {
        const auto place = static_cast<std::size_t>(t * stride + i);
        std::int32_t expected = i < k ? padding : kPoison;  // between the rows: untouched
        if (i < k && picks[place] >= 0 && picks[place] < n) {
          const std::int32_t page =
              table[static_cast<std::size_t>(rows[at] * kCells + picks[place] / 64)];
          expected = page * 64 + picks[place] % 64;
          length = std::max(length, static_cast<std::int32_t>(i) + 1);
        }
        REQUIRE(locations[place] == expected);
      }
      REQUIRE(lengths[at] == length);
    }
    CHECK(lengths.back() == kPoison);
  }
};

}  // namespace

TEST_CASE("picks become locations place by place, whatever is no entry becomes padding") {
  for (const PicksCase& of : {PicksCase{40, 512, 512, false, -1, 0}, {9, 70, 77, true, 5, 1},
                              {3, 1024, 1030, false, -1, 1}, {5, 1, 1, true, -1, 0}}) {
    Picks picks(of);
    run_three_ways(
        picks.stream, [&](std::uint32_t seed) { picks.change(seed); },
        [&] { test_backend().translate_picks(picks.params(), Pdl::kPrologue, picks.stream); },
        [&](const char* when) { picks.check(when); });
  }
}

TEST_CASE("picks without a place for lengths, and no tokens at all, are legal") {
  Picks picks({6, 64, 64, false, -1, 0});
  picks.change(4);
  TranslatePicksParams params = picks.params();
  params.lengths = nullptr;
  test_backend().translate_picks(params, Pdl::kOff, picks.stream);
  params.tokens = 0;
  test_backend().translate_picks(params, Pdl::kOff, picks.stream);
  picks.stream.wait();
  CHECK(picks.on_lengths.download()[0] == kPoison);
  CHECK(picks.on_locations.download()[0] != kPoison);
}

// --- Entries, dequantised ---

namespace {

// From the definition of e4m3: sign, four bits of exponent, three of significand, no infinities.
double e4m3_value(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int significand = code & 7;
  if (exponent == 15 && significand == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0 ? std::ldexp(significand, -9)
                                         : std::ldexp(8 + significand, exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

struct GatherCase {
  std::int32_t entries_per_page;
  bool wide;  // locations
  ElementType type;
  std::int64_t stride;
};

struct Gather : GatherCase {
  explicit Gather(const GatherCase& of) : GatherCase(of) {}

  static constexpr std::int64_t kPages = 9, kCount = 131;

  std::int64_t page_stride = main_page_bytes(entries_per_page) + 576;
  Stream stream{test_backend()};
  std::vector<std::byte> pages;
  std::vector<std::int64_t> locations;
  DeviceArray<std::byte> on_pages{test_backend(), stream,
                                  static_cast<std::size_t>(kPages * page_stride), 0xFF};
  DeviceArray<std::int64_t> on_wide{test_backend(), stream, kCount, 0xFF};
  DeviceArray<std::int32_t> on_narrow{test_backend(), stream, kCount, 0xFF};
  DeviceArray<std::byte> output{test_backend(), stream,
                                static_cast<std::size_t>(kCount * stride * bytes_of(type)), 0x5A};

  // Random bytes everywhere: all codes, and scale bytes from all of their range.
  void change(std::uint32_t seed) {
    Random random(seed);
    pages = random_values<std::byte>(random, static_cast<std::size_t>(kPages * page_stride), 256);
    const EntryPool pool = make_entry_pool(pages.data(), page_stride, entries_per_page);
    for (std::int64_t at = 0; at < kPages * entries_per_page; ++at) {
      constexpr std::uint8_t kEdges[] = {0, 1, 2, 3, 92, 105, 127, 247, 254, 255};
      pool.main_scales(at)[at % 7] = static_cast<std::byte>(kEdges[at % 10]);
    }
    locations.clear();
    for (std::int64_t i = 0; i < kCount; ++i) {
      locations.push_back(random.below(6) == 0 ? -1 - random.below(3)
                                               : random.below(kPages * entries_per_page));
    }
    on_pages.upload(pages);
    on_wide.upload(locations);
    on_narrow.upload(std::vector<std::int32_t>(locations.begin(), locations.end()));
  }

  GatherMainParams params() {
    GatherMainParams p;
    p.pool = make_entry_pool(on_pages.data(), page_stride, entries_per_page);
    p.locations = wide ? static_cast<const void*>(on_wide.data()) : on_narrow.data();
    p.wide_locations = wide;
    p.count = kCount;
    p.output = output.data();
    p.output_stride = stride;
    p.output_type = type;
    return p;
  }

  // The value that a channel must have; false: it is the bf16 `tail` instead.
  bool expected_value(std::int64_t location, std::int64_t channel, double& value,
                      std::uint16_t& tail) {
    const EntryPool pool = make_entry_pool(pages.data(), page_stride, entries_per_page);
    if (channel >= 448) {
      std::memcpy(&tail, pool.main_data(location) + 448 + 2 * (channel - 448), 2);
      return false;
    }
    const auto scale = static_cast<int>(pool.main_scales(location)[channel / 64]);
    value = std::ldexp(e4m3_value(static_cast<std::uint8_t>(pool.main_data(location)[channel])),
                       scale - 127);
    if (scale == 255) value = std::numeric_limits<double>::quiet_NaN();
    if (std::abs(value) >= 0x1p128) value = std::copysign(HUGE_VAL, value);
    // bf16 has no bits below 2^-133, which only scale bytes below 3 can set.
    if (type == ElementType::kBfloat16 && std::abs(value) < 0x1p-120) {
      value = std::copysign(std::ldexp(std::nearbyint(std::ldexp(value, 133)), -133), value);
    }
    return true;
  }

  std::uint32_t bits_at(const std::vector<std::byte>& found, std::int64_t place) const {
    const std::int64_t size = bytes_of(type);
    std::uint32_t bits = 0;
    std::memcpy(&bits, found.data() + place * size, static_cast<std::size_t>(size));
    return size == 4 ? bits : bits << 16;
  }

  void check(const char* when) {
    CAPTURE(when);
    const std::vector<std::byte> found = output.download();
    for (std::int64_t i = 0; i < kCount; ++i) {
      const std::int64_t location = locations[static_cast<std::size_t>(i)];
      for (std::int64_t c = 0; c < stride; ++c) {
        CAPTURE(i);
        CAPTURE(c);
        const std::uint32_t bits = bits_at(found, i * stride + c);
        double value = 0;
        std::uint16_t tail = 0;
        if (c >= 512) {
          REQUIRE((bits >> 16) == 0x5A5A);
        } else if (location < 0) {
          REQUIRE(bits == 0);
        } else if (!expected_value(location, c, value, tail)) {
          REQUIRE(bits == static_cast<std::uint32_t>(tail) << 16);
        } else if (std::isnan(value)) {
          REQUIRE(bits == (type == ElementType::kFloat32 ? 0x7FFFFFFFu : 0x7FFF0000u));
        } else {
          REQUIRE(double{std::bit_cast<float>(bits)} == value);
          REQUIRE((bits >> 31 != 0) == std::signbit(value));
        }
      }
    }
  }
};

}  // namespace

TEST_CASE("gathered entries are their exact values, in bf16 and fp32, from pages of any size") {
  for (const std::int32_t entries : {64, 2}) {
    for (const bool wide : {false, true}) {
      for (const ElementType type : {ElementType::kBfloat16, ElementType::kFloat32}) {
        Gather gather({entries, wide, type, wide ? 520 : 512});
        run_three_ways(
            gather.stream, [&](std::uint32_t seed) { gather.change(seed); },
            [&] { test_backend().gather_main(gather.params(), Pdl::kPrologue, gather.stream); },
            [&](const char* when) { gather.check(when); });
      }
    }
  }
}

// --- Keys for non-paged logits ---

namespace {

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
                                  static_cast<std::size_t>(kPages * page_stride), 0xFF};
  DeviceArray<std::int32_t> on_entries{test_backend(), stream, size(rows), 0};
  DeviceArray<std::int32_t> on_table{test_backend(), stream, size(rows * kCells), 0x7F};
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
  for (const KeyCase& of : {KeyCase{9, 50, 8000, 700}, {1500, 40, 40'000, 20},
                            {1, 3, 1280, 1280}, {6, 2000, 901, 400}}) {  // the last: no room
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
  CHECK(gather.cu.download()[3] == std::accumulate(gather.entries.begin(), gather.entries.end(), 0));
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

TEST_CASE("parameters out of range are refused by name, before anything is enqueued") {
  Picks picks({2, 64, 64, true, -1, 0});
  Gather gather({64, false, ElementType::kBfloat16, 512});
  KeyGather keys({2, 2, 10, 5});
  Stream& stream = picks.stream;
  const auto refused = [&](auto params, auto change, const std::string& why) {
    change(params);
    std::string message;
    try {
      if constexpr (std::is_same_v<decltype(params), TranslatePicksParams>) {
        test_backend().translate_picks(params, Pdl::kOff, stream);
      } else if constexpr (std::is_same_v<decltype(params), GatherMainParams>) {
        test_backend().gather_main(params, Pdl::kOff, stream);
      } else {
        test_backend().gather_indexer(params, Pdl::kOff, stream);
      }
    } catch (const UsageError& error) {
      message = error.what();
    }
    CAPTURE(message);
    CHECK(message.find(why) != std::string::npos);
  };
  using T = TranslatePicksParams;
  refused(picks.params(), [](T& p) { p.k = 65; }, "at least k, 65");
  refused(picks.params(), [](T& p) { p.locations_stride = 70; }, "in place");
  refused(picks.params(), [](T& p) { p.length_floor = 2; }, "length_floor is 2");
  refused(picks.params(), [](T& p) { p.entries_per_page = 0; }, "entries_per_page is 0");
  refused(picks.params(), [](T& p) { p.page_table = nullptr; }, "page_table is null");
  using G = GatherMainParams;
  refused(gather.params(), [](G& p) { p.output_stride = 511; }, "output_stride is 511");
  refused(gather.params(), [](G& p) { p.output_stride = 516; }, "output_stride is 516");
  refused(gather.params(), [](G& p) { p.output = static_cast<std::byte*>(p.output) + 2; },
          "not 16-byte aligned");
  refused(gather.params(), [](G& p) { p.count = -1; }, "count is -1");
  refused(gather.params(), [](G& p) { p.pool.entries_per_page = 63; }, "a power of two");
  using K = GatherIndexerParams;
  refused(keys.params(), [](K& p) { p.capacity = std::int64_t{1} << 31; }, "capacity is");
  refused(keys.params(), [](K& p) { p.k_end = nullptr; }, "k_start and k_end");
  refused(keys.params(), [](K& p) { p.keys += 1; }, "not 16-byte aligned");
  refused(keys.params(), [](K& p) { p.pool.base += 4; }, "multiples of 16");
}
