// Rows that stop themselves: counts and flags of one step against a walk token by token. What they
// do in a visit of many steps is stop_rows_visit_test's.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <quire/kernels/params.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/stop_walk.h"
#include "tests/support/test_backend.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using test::check_refused;
using test::DeviceArray;
using test::Random;
using test::run_three_ways;
using test::Stopped;
using test::test_backend;
using test::walked;

constexpr std::int32_t kPoison = 0x5A5A5A5A;
constexpr std::uint8_t kPoisonByte = 0x5A;
constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();

struct StopCase {
  std::int32_t rows, tokens_per_row;
  std::int64_t stride;
  std::int32_t end_count;
  bool limited, counted;  // with length limits, with kept counts
};

struct Stop : StopCase {
  static constexpr std::int32_t kSeats = 11;
  static constexpr std::size_t kGuard = 40;  // behind the arrays that are written

  Stream stream{test_backend()};
  std::vector<BatchRowRecord> records;
  std::vector<std::int32_t> tokens, ends, limits, kept;
  DeviceArray<BatchRowRecord> on_records;
  DeviceArray<std::int32_t> on_tokens, on_ends, on_limits, on_kept;
  DeviceArray<std::uint8_t> on_stop;

  explicit Stop(const StopCase& of)
      : StopCase(of),
        on_records(test_backend(), stream, rows_size(), 0x5A),
        on_tokens(test_backend(), stream, rows_size() * static_cast<std::size_t>(stride), 0x5A),
        on_ends(test_backend(), stream, static_cast<std::size_t>(end_count), 0x5A),
        on_limits(test_backend(), stream, kSeats, 0x5A),
        on_kept(test_backend(), stream, rows_size() + kGuard, 0x5A),
        on_stop(test_backend(), stream, rows_size() + kGuard, 0x5A) {}

  std::size_t rows_size() const { return static_cast<std::size_t>(rows); }

  StopRowsParams params() {
    StopRowsParams p;
    p.rows = rows;
    p.tokens_per_row = tokens_per_row;
    p.records = on_records.data();
    p.tokens = end_count > 0 ? on_tokens.data() : nullptr;
    p.tokens_stride = stride;
    p.end_tokens = end_count > 0 ? on_ends.data() : nullptr;
    p.end_count = end_count;
    p.length_limit = limited ? on_limits.data() : nullptr;
    p.kept = counted ? on_kept.data() : nullptr;
    p.stop = on_stop.data();
    return p;
  }

  // Few different tokens, so that ends are met; 0 and -1 among them, which lanes without a token
  // might take for one. Everything that no row keeps is an end token as often as not.
  void change(std::uint32_t seed) {
    Random random(seed);
    ends.clear();
    for (std::int32_t e = 0; e < end_count; ++e) ends.push_back(e < 3 ? e - 1 : 1000 + e);
    std::rotate(ends.begin(), ends.begin() + random.below(end_count + 1), ends.end());
    limits.clear();
    for (std::int32_t s = 0; s < kSeats; ++s) {
      limits.push_back(s == 0 ? kMost : s == 1 ? kLeast : random.below(tokens_per_row * 2 + 4));
    }
    tokens.assign(rows_size() * static_cast<std::size_t>(stride), ends.empty() ? 0 : ends[0]);
    records.clear();
    kept.clear();
    const std::int32_t spread = tokens_per_row < 8 ? 12 : 150;
    for (std::int32_t r = 0; r < rows; ++r) {
      const bool padding = random.below(7) == 0;
      BatchRowRecord record{padding ? -1 : random.below(kSeats), random.below(tokens_per_row + 3),
                            random.below(tokens_per_row + 1), r * tokens_per_row};
      if (random.below(2) == 0) record.live_tokens = tokens_per_row;
      if (padding) record.live_tokens = 0;
      if (random.below(16) == 0) record.start = kMost - record.live_tokens;
      if (!padding && random.below(9) == 0) record.live_tokens = tokens_per_row + random.below(4);
      records.push_back(record);
      std::int32_t count = record.live_tokens;
      if (random.below(2) == 0) count = random.below(record.live_tokens + 1);
      if (random.below(8) == 0) count = random.below(2) == 0 ? -1 - random.below(3) : kMost;
      if (random.below(8) == 0) count = record.live_tokens + 1;
      kept.push_back(count);
      std::int32_t* of_row = tokens.data() + r * stride;
      for (std::int32_t j = 0; j < tokens_per_row; ++j) {
        const std::int32_t token = random.below(spread);
        of_row[j] = token < 2 ? token - 1 : token == 2 ? 1000 + end_count - 1 : 50 + token;
      }
    }
    upload();
  }

  void upload() {
    on_records.upload(records);
    on_tokens.upload(tokens);
    on_ends.upload(ends);
    on_limits.upload(limits);
    upload_outputs();
  }
  void upload_outputs() {
    on_kept.upload(std::vector<std::int32_t>(on_kept.size(), kPoison));
    on_kept.upload(kept);
    on_stop.upload(std::vector<std::uint8_t>(on_stop.size(), kPoisonByte));
  }

  Stopped expected(std::size_t r) const {
    const BatchRowRecord& row = records[r];
    const std::int64_t limit = limited && row.seat >= 0 ? limits[static_cast<std::size_t>(row.seat)]
                                                        : std::int64_t{kMost} + 1;
    return walked(row, counted ? kept[r] : row.live_tokens,
                  tokens.data() + static_cast<std::int64_t>(r) * stride, tokens_per_row, ends,
                  limit);
  }

  void check(const char* when) {
    CAPTURE(when);
    const auto kept_now = on_kept.download();
    const auto stop_now = on_stop.download();
    for (std::size_t r = 0; r < kept_now.size(); ++r) {
      CAPTURE(r);
      const bool is_row = r < rows_size();
      const Stopped right = is_row ? expected(r) : Stopped{kPoison, false};
      const std::int32_t untouched = is_row ? kept[r] : kPoison;
      REQUIRE(kept_now[r] == (counted ? right.kept : untouched));
      REQUIRE(stop_now[r] == (is_row ? (right.stops ? 1 : 0) : kPoisonByte));
    }
  }

  void run(Pdl pdl) { test_backend().stop_rows(params(), pdl, stream); }
};

}  // namespace

TEST_CASE("rows stop as a walk token by token would stop them") {
  for (const StopCase& of : {StopCase{600, 5, 5, 2, true, true},
                             {77, 1, 1, 3, true, false},
                             {130, 1, 4, 4, false, true},
                             {90, 33, 40, 40, true, true},
                             {60, 70, 71, kEndTokensMax, false, true},
                             {130, 3, 3, 0, true, true},
                             {33, 2, 2, 32, true, true},
                             {1, 4, 4, 1, false, true}}) {
    CAPTURE(of.rows);
    CAPTURE(of.tokens_per_row);
    Stop stop(of);
    for (const Pdl pdl : {Pdl::kPrologue, Pdl::kWaitOnly, Pdl::kOff}) {
      run_three_ways(
          stop.stream, [&](std::uint32_t seed) { stop.change(seed); }, [&] { stop.run(pdl); },
          [&](const char* when) { stop.check(when); });
    }
  }
}

TEST_CASE("an end token and a limit at every place cut what is kept behind the first of them") {
  constexpr std::int32_t kTokens = 5, kStart = 40;
  Stop stop({6 * (kTokens + 1) * Stop::kSeats, kTokens, kTokens, 2, true, true});
  stop.ends = {31, 32};
  for (std::int32_t seat = 0; seat < Stop::kSeats; ++seat) stop.limits.push_back(kStart - 2 + seat);
  for (std::int32_t kept = 0; kept <= kTokens; ++kept) {
    for (std::int32_t end = 0; end <= kTokens; ++end) {  // kTokens: nowhere
      for (std::int32_t seat = 0; seat < Stop::kSeats; ++seat) {
        const auto r = static_cast<std::int32_t>(stop.records.size());
        stop.records.push_back({seat, kStart, kTokens, r * kTokens});
        stop.kept.push_back(kept);
        for (std::int32_t j = 0; j < kTokens; ++j) {
          stop.tokens.push_back(j == end ? 31 + end % 2 : j > end ? 32 : j);
        }
      }
    }
  }
  stop.upload();
  stop.run(Pdl::kOff);
  stop.check("every place");
  const auto kept_now = stop.on_kept.download();
  const auto stop_now = stop.on_stop.download();
  const auto found = [&](std::int32_t kept, std::int32_t end, std::int32_t limit) {
    const auto r = static_cast<std::size_t>((kept * (kTokens + 1) + end) * Stop::kSeats + limit -
                                            (kStart - 2));
    return Stopped{kept_now[r], stop_now[r] != 0};
  };
  CHECK(found(5, 5, kStart + 8) == Stopped{5, false});  // neither
  CHECK(found(5, 0, kStart + 8) == Stopped{1, true});
  CHECK(found(5, 4, kStart + 8) == Stopped{5, true});
  CHECK(found(4, 4, kStart + 8) == Stopped{4, false});  // the end token was refused
  CHECK(found(5, 5, kStart + 5) == Stopped{5, true});
  CHECK(found(4, 5, kStart + 5) == Stopped{4, false});
  CHECK(found(5, 5, kStart + 2) == Stopped{2, true});
  CHECK(found(5, 1, kStart + 4) == Stopped{2, true});  // both, the end token first
  CHECK(found(5, 3, kStart + 2) == Stopped{2, true});  // both, the limit first
  CHECK(found(5, 2, kStart) == Stopped{0, true});      // reached before the step
  CHECK(found(5, 2, kStart - 2) == Stopped{0, true});
  CHECK(found(0, 0, kStart + 8) == Stopped{0, false});
}

TEST_CASE("padding, inert and longer rows, and counts that cannot be, are left to the commit") {
  Stop stop({7, 2, 2, 1, true, true});
  stop.ends = {9};
  stop.limits.assign(Stop::kSeats, 0);  // all rows that can stop do
  stop.records = {{-1, 0, 0, 0}, {3, 50, 0, 2},  {4, 50, 2, 4}, {5, 50, 2, 6},
                  {6, 50, 2, 8}, {7, 50, 3, 10}, {8, 50, 1, 12}};
  stop.kept = {2, 1, -1, 3, 2, 3, 2};
  stop.tokens.assign(14, 9);
  stop.upload();
  stop.run(Pdl::kOff);
  stop.check("all kinds");
  const auto kept_now = stop.on_kept.download();
  const auto stop_now = stop.on_stop.download();
  CHECK(std::vector<std::int32_t>(kept_now.begin(), kept_now.begin() + 7) ==
        std::vector<std::int32_t>{0, 0, -1, 3, 0, 3, 2});
  CHECK(std::vector<std::uint8_t>(stop_now.begin(), stop_now.begin() + 7) ==
        std::vector<std::uint8_t>{0, 0, 0, 0, 1, 0, 0});
}

TEST_CASE("rows that have been stopped are stopped alike a second time") {
  Stop stop({200, 4, 4, 2, true, true});
  stop.change(5);
  stop.run(Pdl::kOff);
  stop.stream.wait();
  const auto kept_once = stop.on_kept.download();
  const auto stop_once = stop.on_stop.download();
  stop.run(Pdl::kOff);
  stop.stream.wait();
  CHECK(stop.on_kept.download() == kept_once);
  CHECK(stop.on_stop.download() == stop_once);
}

TEST_CASE("no rows, no end tokens, no limits and no counts are legal") {
  test_backend().stop_rows(StopRowsParams{}, Pdl::kOff, Stop({1, 1, 1, 0, false, true}).stream);
  Stop stop({9, 1, 1, 0, false, false});
  stop.change(8);
  stop.run(Pdl::kOff);
  stop.stream.wait();
  stop.check("nothing to stop for");
  const auto stop_now = stop.on_stop.download();
  CHECK(std::count(stop_now.begin(), stop_now.end(), 0) == 9);
}

TEST_CASE("what stop_rows cannot take is refused by name, before anything is enqueued") {
  Stop stop({2, 4, 4, 1, true, true});
  stop.change(6);
  const auto refused = [&](auto change, const std::string& why) {
    StopRowsParams params = stop.params();
    change(params);
    check_refused("stop_rows: " + why,
                  [&] { test_backend().stop_rows(params, Pdl::kOff, stop.stream); });
  };
  using P = StopRowsParams;
  refused([](P& p) { p.rows = -1; }, "rows is -1; supported: 0 to");
  refused([](P& p) { p.tokens_per_row = 0; }, "tokens_per_row is 0; supported: at least 1");
  refused([](P& p) { p.tokens_stride = 3; }, "tokens_stride is 3; supported: at least");
  refused([](P& p) { p.end_count = -1; }, "end_count is -1; supported: 0 to 64");
  refused([](P& p) { p.end_count = kEndTokensMax + 1; }, "end_count is 65; supported: 0 to 64");
  refused([](P& p) { p.records = nullptr; }, "records is null");
  refused([](P& p) { p.tokens = nullptr; }, "tokens is null");
  refused([](P& p) { p.end_tokens = nullptr; }, "end_tokens is null");
  refused([](P& p) { p.stop = nullptr; }, "stop is null");
  refused([](P& p) { p.kept = nullptr; }, "kept is null, but tokens_per_row is 4");
  const auto moved = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<std::intptr_t>(pointer) + 2);
  };
  refused([&](P& p) { p.records = moved(p.records); }, "records at");
  refused([&](P& p) { p.tokens = moved(p.tokens); }, "tokens at");
  refused([&](P& p) { p.end_tokens = moved(p.end_tokens); }, "end_tokens at");
  refused([&](P& p) { p.length_limit = moved(p.length_limit); }, "length_limit at");
  refused([&](P& p) { p.kept = moved(p.kept); }, "kept at");
  stop.stream.wait();
  const auto stop_now = stop.on_stop.download();
  CHECK(std::count(stop_now.begin(), stop_now.end(), kPoisonByte) ==
        static_cast<std::int64_t>(stop_now.size()));
}
