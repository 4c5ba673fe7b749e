// Ragged steps of more entries than blocks fit on any GPU at once, so that each block has several, of
// batch rows that begin inside pooling windows, short ones among them, in shapes with room to spare.
// The bytes must be those of one chunk on the host.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::uint32_t kSeed = 20270203;
constexpr std::int64_t kContents = 3;
constexpr std::int64_t kPaddedRows = 3;

struct Case {
  LayerKind kind;
  std::int32_t requests;
  std::int32_t context;
  ElementType type;
  std::int64_t draft_max;
};

TestEngineOptions engine_of(const Case& c) {
  TestEngineOptions options = small_engine(c.requests, c.context);
  options.spec.layers = {c.kind};
  options.limits.rows_max = c.requests + kPaddedRows;
  options.limits.tokens_max = std::int64_t{c.requests} * c.context + 777;
  options.limits.draft_max = c.draft_max;
  options.contents = kContents;
  options.style = RowStyle::kRare;
  options.compressor_rows = c.type;
  options.window_rows = c.type;
  return options;
}

std::vector<std::vector<std::byte>> one_shots_on_host(TestEngineOptions options) {
  const std::unique_ptr<Backend> host = make_host_backend();
  options.limits.seats_max = options.limits.rows_max = 1;
  options.limits.pages = options.limits.cells_max();
  options.limits.tokens_max = options.limits.context_max;
  TestEngine alone(*host, options);
  alone.poison();
  std::vector<std::vector<std::byte>> bytes;
  for (std::int64_t content = 0; content < kContents; ++content) {
    bytes.push_back(
        one_shot(alone, content, static_cast<std::int32_t>(options.limits.context_max)));
  }
  return bytes;
}

// Rows in their order, short ones first, and room for some more of either.
void padded_step(TestEngine& engine, std::vector<StepRow> rows) {
  const auto draft_max = engine.options().limits.draft_max;
  std::stable_partition(rows.begin(), rows.end(),
                        [&](const StepRow& row) { return row.tokens <= draft_max + 1; });
  std::int32_t tokens = 0;
  for (const StepRow& row : rows) tokens += row.tokens;
  engine.step(rows, StepShape::ragged(static_cast<std::int32_t>(rows.size()) + kPaddedRows,
                                      tokens + 333));
}

// To its end, from wherever it stands.
StepRow rest_of(const TestEngine& engine, RequestId request, std::int32_t context) {
  return {request, context - static_cast<std::int32_t>(engine.length(request))};
}

void run(const Case& c) {
  const TestEngineOptions options = engine_of(c);
  const std::vector<std::vector<std::byte>> expected = one_shots_on_host(options);
  TestEngine engine(test_backend(), options);
  engine.poison();
  std::vector<RequestId> requests;
  for (std::int64_t i = 0; i < c.requests; ++i) {
    requests.push_back(engine.admit(i % kContents, c.context));
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
    StepRow row = rest_of(engine, requests[i], c.context);
    row.tokens -= static_cast<std::int32_t>(dice(1, i) % 20);
    if (i % 7 == 6) {
      row.tokens = static_cast<std::int32_t>(c.draft_max) + 1;
      row.kept = static_cast<std::int32_t>(dice(1, i) %
                                           static_cast<std::uint32_t>(row.tokens + 1));
    }
    most.push_back(row);
  }
  padded_step(engine, most);
  std::vector<StepRow> rest;
  for (const RequestId request : requests) rest.push_back(rest_of(engine, request, c.context));
  padded_step(engine, rest);

  const Snapshot snapshot = engine.snapshot();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    const bool same = engine.live_bytes(snapshot, requests[i]) == expected[i % kContents];
    REQUIRE(same);
  }
}

// An H200 has room for 528 blocks of CSA entries: 422 of main ones, 106 of four indexer ones.
TEST_CASE("a step of 2,700 CSA entries leaves the bytes of each request alone, on the host") {
  MESSAGE("seed " << kSeed);
  run({LayerKind::kCsa, 14, 901, ElementType::kFloat32, 2});
  run({LayerKind::kCsa, 14, 902, ElementType::kBfloat16, 0});
}

TEST_CASE("a step of 620 HCA entries leaves the bytes of each request alone, on the host") {
  MESSAGE("seed " << kSeed);
  run({LayerKind::kHca, 36, 2600, ElementType::kBfloat16, 3});
}

TEST_CASE("a step of 170 HCA entries of fp32 rows leaves those bytes too") {
  MESSAGE("seed " << kSeed);
  run({LayerKind::kHca, 20, 1300, ElementType::kFloat32, 1});
}

}  // namespace
