// Ragged steps of more entries than blocks fit on any GPU at once, so that each block has several,
// of batch rows that begin inside pooling windows, short ones among them, in shapes with room to
// spare. The bytes must be those of one chunk on the host.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <quire/planner/plan_rule.h>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::uint32_t kSeed = 20270203;
constexpr std::int64_t kContents = 3;
constexpr std::int64_t kPaddedRows = 3;
constexpr std::int32_t kRefused =
    8;  // drafts that were not kept still count when tokens are reserved

struct Case {
  LayerKind kind;
  std::int32_t requests;
  std::int32_t tokens;  // of each request
  ElementType type;
  std::int64_t draft_max;
  std::int32_t entries_min;  // of the long step: what the case is about
};

TestEngineOptions engine_of(const Case& c) {
  TestEngineOptions options = small_engine(c.requests, c.tokens + kRefused);
  options.spec.layers = {c.kind};
  options.limits.rows_max = c.requests + kPaddedRows;
  options.limits.tokens_max = std::int64_t{c.requests} * c.tokens + 777;
  options.limits.draft_max = c.draft_max;
  options.contents = kContents;
  options.style = RowStyle::kRare;
  options.compressor_rows = c.type;
  options.window_rows = c.type;
  return options;
}

constexpr std::size_t kWindowEntryBytes = kMainDataBytes + kMainScaleBytes;

// The window scratch, entry after entry.
std::vector<std::byte> window_scratch(TestEngine& engine) {
  EntryPool pool = engine.cache().device().window_scratch(PlanBufferId(0));
  const std::int64_t entries = engine.options().limits.scratch_tokens();
  std::vector<std::byte> memory(
      static_cast<std::size_t>(entries / pool.entries_per_page * pool.page_stride_bytes));
  engine.backend().copy(memory.data(), pool.base, static_cast<std::int64_t>(memory.size()),
                        engine.stream());
  engine.stream().wait();
  pool.base = memory.data();
  std::vector<std::byte> copy;
  for (std::int64_t i = 0; i < entries; ++i) {
    copy.insert(copy.end(), pool.main_data(i), pool.main_data(i) + kMainDataBytes);
    copy.insert(copy.end(), pool.main_scales(i), pool.main_scales(i) + kMainScaleBytes);
  }
  return copy;
}

// Of one content, prefilled alone in one chunk on the host.
struct Expected {
  std::vector<std::byte> live;
  std::vector<std::byte> window;  // [tokens] entries
};

std::vector<Expected> one_shots_on_host(TestEngineOptions options, std::int32_t tokens) {
  const std::unique_ptr<Backend> host = make_host_backend();
  options.limits.seats_max = options.limits.rows_max = 1;
  options.limits.pages = options.limits.cells_max();
  options.limits.tokens_max = options.limits.context_max;
  TestEngine alone(*host, options);
  alone.poison();
  std::vector<Expected> expected;
  for (std::int64_t content = 0; content < kContents; ++content) {
    expected.push_back({one_shot(alone, content, tokens), window_scratch(alone)});
    auto& window = expected.back().window;
    window.erase(
        window.begin(),
        window.begin() + static_cast<std::ptrdiff_t>(scratch_location(0, 0, 0) *
                                                     static_cast<std::int64_t>(kWindowEntryBytes)));
  }
  return expected;
}

// In a shape with room for some more of either; short rows come first.
void padded_step(TestEngine& engine, std::vector<StepRow>& rows) {
  const auto draft_max = engine.options().limits.draft_max;
  std::stable_partition(rows.begin(), rows.end(),
                        [&](const StepRow& row) { return row.tokens <= draft_max + 1; });
  std::int32_t tokens = 0;
  for (const StepRow& row : rows) tokens += row.tokens;
  engine.step(
      rows, StepShape::ragged(static_cast<std::int32_t>(rows.size()) + kPaddedRows, tokens + 333));
}

// Behind such a step: what the attention of its long rows reads.
void check_scratch(TestEngine& engine, const std::vector<StepRow>& rows,
                   const std::vector<RequestId>& requests, const std::vector<Expected>& expected) {
  const auto content_of = [&](RequestId request) {
    const auto at = std::find(requests.begin(), requests.end(), request) - requests.begin();
    return static_cast<std::size_t>(at % kContents);
  };
  const std::vector<std::byte> scratch = window_scratch(engine);
  std::int32_t first_token = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const StepRow& row = rows[r];
    const auto start = static_cast<std::int32_t>(engine.length(row.request)) - row.tokens;
    if (row.tokens > engine.options().limits.draft_max + 1) {
      const std::int32_t older = std::min(start, 127);
      const auto from = static_cast<std::size_t>(
          scratch_location(first_token, static_cast<std::int32_t>(r), -older));
      const auto& window = expected[content_of(row.request)].window;
      CAPTURE(r);
      CAPTURE(start);
      const bool same =
          std::memcmp(scratch.data() + from * kWindowEntryBytes,
                      window.data() + static_cast<std::size_t>(start - older) * kWindowEntryBytes,
                      static_cast<std::size_t>(older + row.tokens) * kWindowEntryBytes) == 0;
      REQUIRE(same);
    }
    first_token += row.tokens;
  }
}

// To its end, from wherever it stands.
StepRow rest_of(const TestEngine& engine, RequestId request, std::int32_t tokens) {
  return {request, tokens - static_cast<std::int32_t>(engine.length(request))};
}

void run(const Case& c) {
  const TestEngineOptions options = engine_of(c);
  const std::vector<Expected> expected = one_shots_on_host(options, c.tokens);
  TestEngine engine(test_backend(), options);
  engine.poison();
  std::vector<RequestId> requests;
  for (std::int64_t i = 0; i < c.requests; ++i) {
    requests.push_back(engine.admit(i % kContents, c.tokens + kRefused));
  }
  const auto dice = [](std::uint32_t step, std::size_t i) {
    return hash32(kSeed + 1024 * step + static_cast<std::uint32_t>(i));
  };
  // Where a row begins: at 0, in the first window, in any.
  std::vector<StepRow> first;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto tokens = static_cast<std::int32_t>(i % 3 == 0 ? i % 9 : dice(0, i) % 140);
    first.push_back({requests[i], tokens});
  }
  padded_step(engine, first);
  // All but the last entries of all but a few requests, whose short rows keep a part.
  std::vector<StepRow> most;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    StepRow row = rest_of(engine, requests[i], c.tokens);
    row.tokens -= static_cast<std::int32_t>(dice(1, i) % 20);
    if (i % 7 == 6) {
      row.tokens = static_cast<std::int32_t>(c.draft_max) + 1;
      row.kept = static_cast<std::int32_t>(dice(1, i) % static_cast<std::uint32_t>(row.tokens + 1));
    }
    most.push_back(row);
  }
  std::int32_t entries = 0;
  for (const StepRow& row : most) {
    const auto start = static_cast<std::int32_t>(engine.length(row.request));
    entries += compress_count(c.kind == LayerKind::kCsa ? kCsaRule : kHcaRule, start, row.tokens);
  }
  REQUIRE(entries >= c.entries_min);
  padded_step(engine, most);
  check_scratch(engine, most, requests, expected);
  std::vector<StepRow> rest;
  for (const RequestId request : requests) rest.push_back(rest_of(engine, request, c.tokens));
  padded_step(engine, rest);
  check_scratch(engine, rest, requests, expected);

  const Snapshot snapshot = engine.snapshot();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    const bool same = engine.live_bytes(snapshot, requests[i]) == expected[i % kContents].live;
    REQUIRE(same);
  }
}

// An H200 has room for 528 blocks of CSA entries: 422 of main ones, 106 of four indexer ones.
TEST_CASE("a step of 2,400 CSA entries leaves the bytes of each request alone, on the host") {
  MESSAGE("seed " << kSeed);
  run({LayerKind::kCsa, 14, 901, ElementType::kFloat32, 2, 2400});
  run({LayerKind::kCsa, 14, 902, ElementType::kBfloat16, 0, 2400});
}

TEST_CASE("a step of 600 HCA entries leaves the bytes of each request alone, on the host") {
  MESSAGE("seed " << kSeed);
  run({LayerKind::kHca, 36, 2600, ElementType::kBfloat16, 3, 600});
}

TEST_CASE("a step of 150 HCA entries of fp32 rows leaves those bytes too") {
  MESSAGE("seed " << kSeed);
  run({LayerKind::kHca, 20, 1300, ElementType::kFloat32, 1, 150});
}

}  // namespace
