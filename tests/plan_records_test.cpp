// Plan records of explicit prefixes and extends, on a backend, against what other programs planned
// and against counting over tokens. P1, P3 and P10: docs/RELIABILITY.md.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;

// What one call gives.
struct RecordLists {
  std::vector<PlanRecord> compress, write;
  std::vector<std::int32_t> cu_extend, cu_compress, cu_write;
  bool operator==(const RecordLists&) const = default;
};

class RecordPlanner {
 public:
  RecordPlanner(CompressionRule rule, const std::vector<std::int32_t>& prefix,
                const std::vector<std::int32_t>& extend, std::size_t capacity)
      : backend_(test::test_backend()),
        stream_(backend_),
        prefix_(backend_, stream_, std::span<const std::int32_t>(prefix)),
        extend_(backend_, stream_, std::span<const std::int32_t>(extend)),
        compress_(backend_, stream_, capacity, kPoison),
        write_(backend_, stream_, capacity, kPoison),
        cu_extend_(backend_, stream_, prefix.size() + 1, kPoison),
        cu_compress_(backend_, stream_, prefix.size() + 1, kPoison),
        cu_write_(backend_, stream_, prefix.size() + 1, kPoison) {
    params_ = {rule,
               static_cast<std::int32_t>(prefix.size()),
               prefix_.data(),
               extend_.data(),
               compress_.data(),
               write_.data(),
               static_cast<std::int64_t>(capacity),
               static_cast<std::int64_t>(capacity),
               cu_extend_.data(),
               cu_compress_.data(),
               cu_write_.data()};
  }

  // Over poison, whatever an earlier run has left.
  RecordLists run() {
    const auto poison = [&](auto& list) {
      const auto bytes = static_cast<std::int64_t>(list.size() * sizeof(*list.data()));
      backend_.fill(list.data(), kPoison, bytes, stream_);
    };
    poison(compress_);
    poison(write_);
    for (auto* prefixes : {&cu_extend_, &cu_compress_, &cu_write_}) poison(*prefixes);
    backend_.plan_records(params_, stream_);
    return {compress_.download(), write_.download(), cu_extend_.download(), cu_compress_.download(),
            cu_write_.download()};
  }
  RecordPlanParams& params() { return params_; }

 private:
  static constexpr std::uint8_t kPoison = 0xA5;

  Backend& backend_;
  Stream stream_;
  test::DeviceArray<std::int32_t> prefix_, extend_;
  test::DeviceArray<PlanRecord> compress_, write_;
  test::DeviceArray<std::int32_t> cu_extend_, cu_compress_, cu_write_;
  RecordPlanParams params_;
};

// SPEC 1.8 in words, over tokens.
RecordLists counted_records(CompressionRule rule, const std::vector<std::int32_t>& prefix,
                            const std::vector<std::int32_t>& extend, std::size_t capacity) {
  RecordLists lists;
  std::int32_t ragged_id = 0;
  const auto mark = [&] {
    lists.cu_extend.push_back(ragged_id);
    lists.cu_compress.push_back(static_cast<std::int32_t>(lists.compress.size()));
    lists.cu_write.push_back(static_cast<std::int32_t>(lists.write.size()));
  };
  mark();
  const std::int32_t pooled = rule.overlap ? 2 * rule.ratio : rule.ratio;
  for (std::size_t b = 0; b < prefix.size(); ++b) {
    const std::int32_t length = prefix[b] + extend[b];
    const std::int32_t kept = length % rule.ratio + (rule.overlap ? rule.ratio : 0);
    for (std::int32_t j = 0; j < extend[b]; ++j, ++ragged_id) {
      const std::int32_t p = prefix[b] + j;
      const PlanRecord record{static_cast<std::uint32_t>(ragged_id), static_cast<std::uint32_t>(b),
                              static_cast<std::uint32_t>(p),
                              static_cast<std::uint32_t>(std::max(0, pooled - 1 - j))};
      if (p % rule.ratio == rule.ratio - 1) lists.compress.push_back(record);
      if (length - p <= kept) lists.write.push_back(record);
    }
    mark();
  }
  lists.compress.resize(capacity, kPaddingRecord);
  lists.write.resize(capacity, kPaddingRecord);
  return lists;
}

void check_records(const std::vector<std::int32_t>& prefix, const std::vector<std::int32_t>& extend,
                   std::size_t spare) {
  const auto tokens =
      static_cast<std::size_t>(std::accumulate(extend.begin(), extend.end(), std::int64_t{0}));
  for (const CompressionRule rule : {kCsaRule, kHcaRule}) {
    RecordPlanner planner(rule, prefix, extend, tokens + spare);
    REQUIRE(planner.run() == counted_records(rule, prefix, extend, tokens + spare));
  }
}

std::vector<PlanRecord> records_of(const nlohmann::json& list) {
  std::vector<PlanRecord> records;
  for (const nlohmann::json& r : list) {
    const auto field = [&](std::size_t i, const char* name) {
      return (r.is_array() ? r[i] : r[name]).get<std::uint32_t>();
    };
    records.push_back({field(0, "ragged_id"), field(1, "batch_id"), field(2, "position"),
                       field(3, "window_len")});
  }
  return records;
}

// The lists hold the golden records, then padding to their end.
void check_golden(CompressionRule rule, const std::vector<std::int32_t>& prefix,
                  const std::vector<std::int32_t>& extend, const nlohmann::json& golden) {
  std::vector<PlanRecord> compress = records_of(golden["compress"]);
  std::vector<PlanRecord> write = records_of(golden["write"]);
  const std::size_t capacity = std::max(compress.size(), write.size()) + 3;
  RecordPlanner planner(rule, prefix, extend, capacity);
  const RecordLists lists = planner.run();
  CHECK(lists.cu_compress.back() == static_cast<std::int32_t>(compress.size()));
  CHECK(lists.cu_write.back() == static_cast<std::int32_t>(write.size()));
  compress.resize(capacity, kPaddingRecord);
  write.resize(capacity, kPaddingRecord);
  CHECK(lists.compress == compress);
  CHECK(lists.write == write);
}

}  // namespace

TEST_CASE("48 ragged batches of both ratios give the records of the golden plans") {
  const nlohmann::json plans = test::read_json(test::goldens() / "plans.json");
  REQUIRE(plans.size() == 48);
  int records = 0;
  int of_ratio_128 = 0;
  for (const nlohmann::json& plan : plans) {
    CAPTURE(plan["prefix"].dump());
    CAPTURE(plan["extend"].dump());
    const CompressionRule rule{plan["ratio"].get<std::int32_t>(), plan["overlap"].get<bool>()};
    check_golden(rule, plan["prefix"].get<std::vector<std::int32_t>>(),
                 plan["extend"].get<std::vector<std::int32_t>>(), plan);
    records += static_cast<int>(plan["compress"].size() + plan["write"].size());
    of_ratio_128 += rule.ratio == 128 ? 1 : 0;
  }
  CHECK(records > 48);
  CHECK(of_ratio_128 > 0);
}

TEST_CASE("the 90 cases of SPEC's Appendix A give its records") {
  const nlohmann::json cases = test::read_json(test::goldens() / "c4_plan_cases.json")["cases"];
  REQUIRE(cases.size() == 90);
  for (const nlohmann::json& c : cases) {
    const auto P0 = c["prefix"].get<std::int32_t>();
    const auto E = c["extend"].get<std::int32_t>();
    CAPTURE(P0);
    CAPTURE(E);
    check_golden(kCsaRule, {P0}, {E}, c);
  }
}

// P1
TEST_CASE("records of nearly equal extends name only tokens that exist, and never vary") {
  const std::vector<std::vector<std::int32_t>> cases = [] {
    std::vector<std::int32_t> first(96, 4), second(128, 3);
    std::fill(first.begin() + 72, first.end(), 3);
    std::fill(second.begin() + 104, second.end(), 2);
    return std::vector{first, second};
  }();
  const int repeats = test::test_backend().kind() == BackendKind::kCuda ? 2000 : 20;
  for (const std::vector<std::int32_t>& extends : cases) {
    const auto tokens =
        static_cast<std::uint32_t>(std::accumulate(extends.begin(), extends.end(), 0));
    REQUIRE(tokens == 360);
    std::vector<std::int32_t> prefix(extends.size());
    for (std::size_t i = 0; i < prefix.size(); ++i)
      prefix[i] = static_cast<std::int32_t>(i * 5 % 9);
    RecordPlanner planner(kCsaRule, prefix, extends, 4096);
    const RecordLists expected = counted_records(kCsaRule, prefix, extends, 4096);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      CAPTURE(repeat);
      const RecordLists lists = planner.run();
      for (const auto* list : {&lists.compress, &lists.write}) {
        for (const PlanRecord& r : *list) REQUIRE((r == kPaddingRecord || r.ragged_id < tokens));
      }
      REQUIRE(lists == expected);
    }
  }
}

// P3
TEST_CASE("zero-length rows are legal and emit nothing") {
  check_records({5, 3, 2, 7}, {3, 0, 2, 0}, 4);
}

// P10
TEST_CASE("no rows, no tokens, many rows and many tokens are all legal") {
  check_records({}, {}, 0);
  check_records({}, {}, 3);
  check_records({0, 4, 128}, {0, 0, 0}, 2);
  std::vector<std::int32_t> prefix, extends;
  std::mt19937 random(10);
  for (int i = 0; i < 2500; ++i) {
    prefix.push_back(static_cast<std::int32_t>(random() % 400));
    extends.push_back(static_cast<std::int32_t>(random() % (i < 1000 ? 5 : 100)));
  }
  REQUIRE(std::accumulate(extends.begin(), extends.end(), 0) > 65'535);
  check_records(prefix, extends, 100);
}

TEST_CASE("a list that nobody asked for is left alone") {
  RecordPlanner planner(kCsaRule, {1, 2}, {9, 8}, 20);
  planner.params().write = nullptr;
  const RecordLists expected = counted_records(kCsaRule, {1, 2}, {9, 8}, 20);
  const RecordLists lists = planner.run();
  CHECK(lists.compress == expected.compress);
  CHECK(lists.cu_write == expected.cu_write);
  CHECK(lists.write[0].ragged_id == 0xA5A5A5A5u);
}

TEST_CASE("lists shorter than the records are filled, not overrun") {
  RecordPlanner planner(kCsaRule, {0, 3}, {40, 40}, 30);
  planner.params().compress_capacity = 7;
  planner.params().write_capacity = 3;
  const RecordLists expected = counted_records(kCsaRule, {0, 3}, {40, 40}, 30);
  const RecordLists lists = planner.run();
  CHECK(std::equal(lists.compress.begin(), lists.compress.begin() + 7, expected.compress.begin()));
  CHECK(std::equal(lists.write.begin(), lists.write.begin() + 3, expected.write.begin()));
  CHECK(lists.compress[7].ragged_id == 0xA5A5A5A5u);
  CHECK(lists.write[3].ragged_id == 0xA5A5A5A5u);
}
