// The planning rule against what other programs planned, and against brute force over tokens that
// counts where the rule has a closed form.
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <quire/kernels/host/operations.h>
#include <quire/planner/divisors.h>
#include <quire/planner/plan_rule.h>

namespace {

using quire::CompressionRule;
using quire::PlanRecord;
using Json = nlohmann::json;

constexpr CompressionRule kRules[] = {quire::kCsaRule, quire::kHcaRule};

Json load_golden(const std::string& name) {
  std::ifstream file(std::string(QUIRE_GOLDENS_DIR) + "/" + name);
  REQUIRE_MESSAGE(file.good(), "missing golden file " << name);
  return Json::parse(file);
}

struct Lists {
  std::vector<PlanRecord> compress, write;
  bool operator==(const Lists&) const = default;
};

// What SPEC 1.8 says in words, token by token: no closed form of the rule is used.
Lists brute_force(CompressionRule rule, const std::vector<std::int32_t>& prefix,
                  const std::vector<std::int32_t>& extend) {
  Lists lists;
  std::uint32_t ragged_id = 0;
  const std::int32_t pooled = rule.overlap ? 2 * rule.ratio : rule.ratio;
  for (std::size_t b = 0; b < prefix.size(); ++b) {
    const std::int32_t length = prefix[b] + extend[b];
    // The tokens behind the last complete window, and that window where the next one overlaps it.
    std::int32_t first_kept = 0;
    while (first_kept + rule.ratio <= length) first_kept += rule.ratio;
    if (rule.overlap) first_kept = std::max(0, first_kept - rule.ratio);
    for (std::int32_t p = prefix[b]; p < length; ++p, ++ragged_id) {
      std::uint32_t from_state = 0;
      for (std::int32_t t = p - pooled + 1; t <= p; ++t) from_state += t < prefix[b] ? 1u : 0u;
      const PlanRecord record{ragged_id, static_cast<std::uint32_t>(b),
                              static_cast<std::uint32_t>(p), from_state};
      if ((p + 1) % rule.ratio == 0) lists.compress.push_back(record);
      if (p >= first_kept) lists.write.push_back(record);
    }
  }
  return lists;
}

// The lists of host::plan_records, whose tails must be padding up to the capacity and a bit more.
Lists planned(CompressionRule rule, const std::vector<std::int32_t>& prefix,
              const std::vector<std::int32_t>& extend, std::int64_t spare = 5) {
  const auto rows = static_cast<std::int64_t>(prefix.size());
  const std::int64_t tokens = std::accumulate(extend.begin(), extend.end(), std::int64_t{0});
  const auto ends = static_cast<std::size_t>(rows + 1);
  std::vector<std::int32_t> cu_extend(ends, -9), cu_compress(ends, -9), cu_write(ends, -9);
  const PlanRecord poison{7, 7, 7, 7};
  Lists lists;
  quire::RecordPlanParams params;
  params.rule = rule;
  params.rows = static_cast<std::int32_t>(rows);
  params.prefix = prefix.data();
  params.extend = extend.data();
  params.compress_capacity = quire::compress_capacity(rule, rows, tokens) + spare;
  params.write_capacity = quire::write_capacity(rule, rows, tokens) + spare;
  lists.compress.assign(static_cast<std::size_t>(params.compress_capacity), poison);
  lists.write.assign(static_cast<std::size_t>(params.write_capacity), poison);
  params.compress = lists.compress.data();
  params.write = lists.write.data();
  params.cu_extend = cu_extend.data();
  params.cu_compress = cu_compress.data();
  params.cu_write = cu_write.data();
  quire::host::plan_records(params);

  CHECK(cu_extend.back() == tokens);
  const auto cut = [](std::vector<PlanRecord>& list, std::int32_t live) {
    REQUIRE(live >= 0);
    REQUIRE(static_cast<std::size_t>(live) <= list.size());
    const auto tail = list.begin() + live;
    CHECK(std::all_of(tail, list.end(),
                      [](const PlanRecord& r) { return r == quire::kPaddingRecord; }));
    list.erase(tail, list.end());
  };
  cut(lists.compress, cu_compress.back());
  cut(lists.write, cu_write.back());
  return lists;
}

std::vector<PlanRecord> records_of(const Json& list) {
  std::vector<PlanRecord> records;
  for (const Json& r : list) {
    if (r.is_array()) {
      records.push_back({r[0].get<std::uint32_t>(), r[1].get<std::uint32_t>(),
                         r[2].get<std::uint32_t>(), r[3].get<std::uint32_t>()});
    } else {
      records.push_back({r["ragged_id"].get<std::uint32_t>(), r["batch_id"].get<std::uint32_t>(),
                         r["position"].get<std::uint32_t>(), r["window_len"].get<std::uint32_t>()});
    }
  }
  return records;
}

}  // namespace

TEST_CASE("the records of 48 ragged batches are those of the golden plans") {
  const Json plans = load_golden("plans.json");
  REQUIRE(plans.size() == 48);
  for (const Json& plan : plans) {
    CAPTURE(plan["prefix"].dump());
    CAPTURE(plan["extend"].dump());
    const CompressionRule rule{plan["ratio"].get<std::int32_t>(), plan["overlap"].get<bool>()};
    const Lists lists = planned(rule, plan["prefix"].get<std::vector<std::int32_t>>(),
                                plan["extend"].get<std::vector<std::int32_t>>());
    CHECK(lists.compress == records_of(plan["compress"]));
    CHECK(lists.write == records_of(plan["write"]));
  }
}

TEST_CASE("the 90 cases of SPEC's Appendix A give its records and its page bundle") {
  const Json cases = load_golden("c4_plan_cases.json")["cases"];
  REQUIRE(cases.size() == 90);
  for (const Json& c : cases) {
    const auto P0 = c["prefix"].get<std::int32_t>();
    const auto E = c["extend"].get<std::int32_t>();
    CAPTURE(P0);
    CAPTURE(E);
    const Lists lists = planned(quire::kCsaRule, {P0}, {E});
    CHECK(lists.compress == records_of(c["compress"]));
    CHECK(lists.write == records_of(c["write"]));
    const quire::C4LogicalPages pages = quire::c4_logical_pages(P0, E);
    const Json& bundle = c["bundle"];
    CHECK(pages.bundle.load_first_page == bundle["load_first_page"].get<std::int32_t>());
    CHECK(pages.bundle.load_second_page == bundle["load_second_page"].get<std::int32_t>());
    CHECK(pages.bundle.write_first_page == bundle["write_first_page"].get<std::int32_t>());
    CHECK(pages.bundle.last_position == bundle["last_position"].get<std::int32_t>());
    CHECK(pages.index_page == c["indices_page"].get<std::int32_t>());
  }
}

TEST_CASE("10,000 random batches give the records that brute force over tokens finds") {
  const std::uint32_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(n));
  };
  for (int batch = 0; batch < 10000; ++batch) {
    CAPTURE(seed);
    CAPTURE(batch);
    const CompressionRule rule = kRules[batch % 2];
    std::vector<std::int32_t> prefix, extend;
    for (std::int32_t rows = below(7); rows > 0; --rows) {
      // Edges more often than their share: boundaries of a window, and no token at all.
      prefix.push_back(below(3) == 0 ? rule.ratio * below(6) : below(700));
      const std::int32_t kind = below(4);
      extend.push_back(kind == 0 ? 0 : kind == 1 ? 1 + below(9) : below(2 * rule.ratio + 40));
    }
    const Lists expected = brute_force(rule, prefix, extend);
    const Lists lists = planned(rule, prefix, extend, below(3));
    REQUIRE(lists.compress == expected.compress);
    REQUIRE(lists.write == expected.write);
  }
}

TEST_CASE("the closed forms agree with counting for all prefixes below 300 and extends below 40") {
  for (const CompressionRule rule : kRules) {
    for (std::int32_t P0 = 0; P0 < 300; ++P0) {
      for (std::int32_t E = 0; E < 40; ++E) {
        CAPTURE(rule.ratio);
        CAPTURE(P0);
        CAPTURE(E);
        const Lists counted = brute_force(rule, {P0}, {E});
        const auto compress = static_cast<std::int32_t>(counted.compress.size());
        const auto write = static_cast<std::int32_t>(counted.write.size());
        REQUIRE(quire::compress_count(rule, P0, E) == compress);
        REQUIRE(quire::write_count(rule, P0, E) == write);
        REQUIRE(quire::compress_capacity(rule, 1, E) >= compress);
        REQUIRE(quire::write_capacity(rule, 1, E) >= write);
        for (std::int32_t k = 0; k < compress; ++k) {
          const auto p = static_cast<std::int32_t>(counted.compress[std::size_t(k)].position);
          REQUIRE(quire::closes_entry(rule, p));
          REQUIRE(quire::compress_index(rule, P0, p) == k);
          REQUIRE(quire::compress_position(rule, P0, k) == p);
        }
        for (std::int32_t k = 0; k < write; ++k) {
          const auto p = static_cast<std::int32_t>(counted.write[std::size_t(k)].position);
          REQUIRE(quire::write_index(rule, P0, E, p) == k);
          REQUIRE(quire::write_position(rule, P0, E, k) == p);
        }
      }
    }
  }
}

TEST_CASE(
    "the k-th event of a chunk stands where SPEC 1.5 says, with 4 + r, r, then 0 from state") {
  for (std::int32_t P0 = 0; P0 < 300; ++P0) {
    for (std::int32_t E = 0; E < 40; ++E) {
      const std::int32_t r = P0 % 4;
      std::int32_t k = 0;
      for (std::int32_t p = P0; p < P0 + E; ++p) {
        if (!quire::closes_entry(quire::kCsaRule, p)) continue;
        REQUIRE(p == P0 + 3 - r + 4 * k);
        const std::int32_t from_state = quire::window_len(quire::kCsaRule, p - P0);
        REQUIRE(from_state == (k == 0 ? 4 + r : k == 1 ? r : 0));
        ++k;
      }
    }
  }
}

TEST_CASE("the page bundle leads every row of every event to the page of its token") {
  // SPEC 1.9: which page an event reads follows from its window_len alone.
  for (std::int32_t P0 = 0; P0 < 60; ++P0) {
    for (std::int32_t E = 1; E < 30; ++E) {
      CAPTURE(P0);
      CAPTURE(E);
      const quire::C4LogicalPages pages = quire::c4_logical_pages(P0, E);
      for (const PlanRecord& event : brute_force(quire::kCsaRule, {P0}, {E}).compress) {
        const auto window_len = static_cast<std::int32_t>(event.window_len);
        for (std::int32_t i = 0; i < window_len; ++i) {
          const std::int32_t token = static_cast<std::int32_t>(event.position) - 7 + i;
          if (token < 0) continue;  // of the first window: read by nobody
          const bool first = i < 4 && window_len > 4;
          REQUIRE((first ? pages.bundle.load_first_page : pages.bundle.load_second_page) ==
                  token / 4);
        }
      }
      for (const PlanRecord& record : brute_force(quire::kCsaRule, {P0}, {E}).write) {
        const auto p = static_cast<std::int32_t>(record.position);
        const bool first = p < pages.bundle.last_position;
        REQUIRE((first ? pages.bundle.write_first_page : pages.index_page) == p / 4);
      }
    }
  }
}

TEST_CASE("a prepared divisor divides as the processor does, over its whole range") {
  const auto equal = [](std::int32_t divisor, std::int64_t number) {
    if (number < 0 || number > INT32_MAX) return true;
    const auto n = static_cast<std::int32_t>(number);
    const quire::Division plain = quire::PlainDivisor{divisor}.divide(n);
    const quire::Division prepared = quire::prepared_divisor(divisor).divide(n);
    return prepared.quotient == plain.quotient && prepared.remainder == plain.remainder;
  };
  const std::uint32_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<std::int32_t> divisors;
  for (std::int32_t d = 1; d <= 4096; ++d) divisors.push_back(d);
  for (int bit = 12; bit < 31; ++bit) {
    for (const std::int32_t near : {-1, 0, 1}) divisors.push_back((1 << bit) + near);
  }
  for (int i = 0; i < 2000; ++i) divisors.push_back(static_cast<std::int32_t>(random() >> 1) | 1);
  divisors.push_back(INT32_MAX);
  // A quotient goes wrong beside a multiple first: some thousand of each divisor, the last among
  // them, and for what caches have (page entries, rings) all of them.
  for (const std::int32_t divisor : divisors) {
    CAPTURE(divisor);
    const std::int64_t multiples = INT32_MAX / divisor;
    const bool all = divisor >= 64 && divisor <= 512 && divisor % 64 == 0;
    const std::int64_t step = all ? 1 : std::max<std::int64_t>(multiples / 1000, 1);
    bool right = equal(divisor, INT32_MAX) && equal(divisor, 0);
    for (std::int64_t k = multiples; k >= 0; k -= step) {
      const std::int64_t at = k * divisor;
      right = right && equal(divisor, at - 1) && equal(divisor, at) && equal(divisor, at + 1);
    }
    REQUIRE(right);
  }
}
