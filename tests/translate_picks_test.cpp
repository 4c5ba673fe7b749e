// Picks of a top-k to CSA locations, against a plain walk.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
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
  for (const PicksCase& of : {PicksCase{40, 512, 512, false, -1, 0},
                              {9, 70, 77, true, 5, 1},
                              {3, 1024, 1030, false, -1, 1},
                              {5, 1, 1, true, -1, 0}}) {
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

TEST_CASE("picks out of range are refused by name, before anything is enqueued") {
  Picks picks({2, 64, 64, true, -1, 0});
  const auto refused = [&](auto change, const std::string& why) {
    TranslatePicksParams params = picks.params();
    change(params);
    check_refused(why, [&] { test_backend().translate_picks(params, Pdl::kOff, picks.stream); });
  };
  using P = TranslatePicksParams;
  refused([](P& p) { p.tokens = -1; }, "tokens is -1");
  refused([](P& p) { p.k = 65; }, "at least k, 65");
  refused([](P& p) { p.locations_stride = 70; }, "in place");
  refused([](P& p) { p.length_floor = 2; }, "length_floor is 2");
  refused([](P& p) { p.entries_per_page = 0; }, "entries_per_page is 0");
  refused([](P& p) { p.page_table = nullptr; }, "page_table is null");
}
