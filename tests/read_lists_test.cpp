// The lists that plans write for attention kernels, against a walk over tokens and positions; at
// the planner alone. tests/read_bytes_test.cpp follows them to the bytes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/plan_pair.h"
#include "tests/support/read_lists.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using test::Lists;
using test::PlanPair;
using test::PlanPlaces;
using test::sizes_for;
using test::test_backend;

struct Row {
  std::int32_t length, tokens;
  bool stopped = false;
};

// Seats of these lengths, one batch row each in another order of seats, applied but not planned.
void apply_rows(PlanPair& pair, StepShape shape, const std::vector<Row>& rows) {
  const PlanPlaces at = pair.places();
  const auto seat_of = [&](std::size_t r) {
    return static_cast<std::int32_t>(rows.size() - 1 - r);
  };
  for (std::size_t r = 0; r < rows.size(); ++r) {
    pair.seat(seat_of(r), rows[r].length, rows[r].length + rows[r].tokens);
    at.table.stopped[seat_of(r)] = rows[r].stopped ? 1 : 0;
  }
  pair.push();
  pair.start(shape);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::int32_t seat = seat_of(r);
    pair.update().add(BatchRowUpdate{seat, rows[r].tokens, at.table.limit[seat], 0});
  }
  pair.apply();
}

void plan_and_check(PlanPair& pair, Lists& lists, StepShape shape) {
  pair.plan(shape);
  pair.check_equal("planned");
  lists.expect(pair, shape);
  REQUIRE(lists.difference() == "");
}

}  // namespace

TEST_CASE("decode lists show the window newest first and every complete HCA entry, then padding") {
  for (const std::int32_t drafts : {0, 1, 3}) {
    std::vector<Row> rows;
    for (const std::int32_t length :
         {0, 1, 2, 63, 64, 126, 127, 128, 129, 191, 192, 254, 255, 256, 257, 383, 511, 3000}) {
      rows.push_back({length, drafts + 1, length == 64});
    }
    const StepShape shape = StepShape::decode(20, drafts + 1);  // two padding rows
    PlanPair pair(sizes_for(20, 16, shape));
    Lists lists(test_backend(), shape.tokens, shape.rows, 40);
    for (const std::int32_t floor : {0, 1}) {
      for (const std::int32_t padding : {-1, 77}) {
        pair.read = lists.bound(padding, floor);
        apply_rows(pair, shape, rows);
        plan_and_check(pair, lists, shape);
      }
    }
  }
}

TEST_CASE(
    "ragged lists: short rows read the ring, long rows the scratch, HCA lists go by batch row") {
  const std::vector<Row> rows{{0, 1},         {500, 4}, {130, 0},  {127, 2},
                              {255, 1, true}, {0, 5},   {3, 200},  {127, 129},
                              {0, 0},         {90, 38}, {1000, 7}, {2047, 128}};
  const StepShape shape = StepShape::ragged(14, 700);  // tokens and rows beyond the live ones
  PlanPair pair(sizes_for(14, 16, shape));
  Lists lists(test_backend(), shape.tokens, shape.rows, 33);
  for (const std::int32_t floor : {0, 1}) {
    pair.read = lists.bound(-1, floor);
    apply_rows(pair, shape, rows);
    plan_and_check(pair, lists, shape);
  }
}

TEST_CASE("a list that shrinks between plans is padded again") {
  for (const bool decode : {true, false}) {
    const StepShape shape = decode ? StepShape::decode(3, 2) : StepShape::ragged(3, 40);
    PlanPair pair(sizes_for(4, 16, shape));
    Lists lists(test_backend(), shape.tokens, shape.rows, 32);
    pair.read = lists.bound();
    for (const std::int32_t length : {4000, 1000, 130, 2, 0, 3000}) {
      CAPTURE(length);
      apply_rows(pair, shape, {{length, 2}, {length / 2, 2}, {length, decode ? 1 : 30}});
      plan_and_check(pair, lists, shape);
    }
    apply_rows(pair, shape, {});
    plan_and_check(pair, lists, shape);
  }
}

TEST_CASE("HCA lists of more entries than one block writes, at an odd width") {
  for (const StepShape shape : {StepShape::decode(2, 2), StepShape::ragged(2, 12)}) {
    PlanPair pair(sizes_for(3, 1100, shape));
    Lists lists(test_backend(), shape.tokens, shape.rows, 4501);
    pair.read = lists.bound();
    apply_rows(pair, shape, {{270'000, 2}, {128 * 2048 - 1, shape.is_decode() ? 2 : 9}});
    plan_and_check(pair, lists, shape);
    CHECK(std::count_if(lists.expected(2).begin(), lists.expected(2).end(),
                        [](std::int32_t x) { return x >= 0 && x != test::kListPoison; }) > 4000);
  }
}

TEST_CASE("each list may be absent, and is then left alone") {
  for (const StepShape shape : {StepShape::decode(4, 2), StepShape::ragged(4, 30)}) {
    for (int absent = 0; absent < 16; ++absent) {
      CAPTURE(absent);
      PlanPair pair(sizes_for(4, 4, shape));
      Lists lists(test_backend(), shape.tokens, shape.rows, 8);
      pair.read = lists.bound();
      if ((absent & 1) != 0) pair.read.window_locations = nullptr;
      if ((absent & 2) != 0) pair.read.window_lengths = nullptr;
      if ((absent & 4) != 0) pair.read.hca_locations = nullptr;
      if ((absent & 8) != 0) pair.read.hca_lengths = nullptr;
      apply_rows(pair, shape, {{200, 1}, {127, 2}, {300, shape.is_decode() ? 2 : 20}});
      plan_and_check(pair, lists, shape);
    }
  }
}

TEST_CASE("no tokens and no rows write no list") {
  for (const StepShape shape : {StepShape::decode(0), StepShape::ragged(0, 0),
                                StepShape::ragged(0, 9), StepShape::ragged(3, 0)}) {
    PlanPair pair(sizes_for(2, 2, shape));
    Lists lists(test_backend(), 9, 3, 4);
    pair.read = lists.bound();
    apply_rows(pair, shape, {});
    plan_and_check(pair, lists, shape);
  }
}

TEST_CASE("a captured plan writes the lists of every replay") {
  for (const StepShape shape : {StepShape::decode(3, 2), StepShape::ragged(3, 20)}) {
    PlanPair pair(sizes_for(4, 8, shape));
    Lists lists(test_backend(), shape.tokens, shape.rows, 16);
    pair.read = lists.bound();
    apply_rows(pair, shape, {});
    Capture capture(pair.backend(), pair.stream());
    pair.enqueue_plan(shape);
    const GraphExec graph = capture.finish();
    for (const std::int32_t length : {1500, 126, 300}) {
      apply_rows(pair, shape, {{length, 2}, {length + 1, shape.is_decode() ? 1 : 11}});
      graph.launch(pair.stream());
      pair.reference_plan(shape);
      pair.check_equal("replayed");
      lists.expect(pair, shape);
      REQUIRE(lists.difference() == "");
    }
  }
}

TEST_CASE("lists of draft plans follow the draft group, in passes at the supplied positions") {
  const StepShape shape = StepShape::decode(4, 4);
  test::PlanSizes sizes = sizes_for(4, 8, shape);
  sizes.groups = 2;
  PlanPair pair(sizes);
  Lists lists(test_backend(), shape.tokens, shape.rows, 8);
  pair.read = lists.bound();
  apply_rows(pair, shape, {{500, 4}, {140, 4, true}, {130, 4}});
  for (std::int32_t seat = 0; seat < 3; ++seat) {
    test::length_at(pair.places(), LayerGroup::kDraft, seat) = 126 + seat;
    pair.places().table.limit[seat] = 600;
  }
  pair.push();
  plan_and_check(pair, lists, shape);
  const StepShape pass = StepShape::decode(4);
  // Seats are in the other order: the second row has stopped, the third's position is wrong.
  const std::vector<test::PlanRequest> requests{{shape, LayerGroup::kDraft, {}, {2, 4, 0, 0}},
                                                {pass, LayerGroup::kDraft, {129, 128, 125, 0}},
                                                {pass, LayerGroup::kDraft, {128, 127, 127, 9}}};
  for (const test::PlanRequest& request : requests) {
    pair.plan(request);
    pair.check_equal("planned");
    lists.expect(pair, request.shape);
    REQUIRE(lists.difference() == "");
  }
  CHECK(pair.places().plan.rows[0].start == 128);
  CHECK(pair.places().plan.report->rows_wrong_positions == 1);
}

TEST_CASE("lists of random steps follow the records") {
  const std::uint32_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(n));
  };
  PlanPair pair(sizes_for(12, 16, StepShape::ragged(12, 600)));
  Lists lists(test_backend(), 600, 12, 32);
  for (int round = 0; round < 40; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    const bool decode = below(2) == 0;
    const StepShape shape =
        decode ? StepShape::decode(12, 1 + below(4)) : StepShape::ragged(12, 600);
    std::vector<Row> rows;
    for (std::int32_t r = below(12); r > 0; --r) {
      const std::int32_t most = decode ? shape.tokens_per_row : r > 6 ? 4 : 90;
      const std::int32_t length = below(3) == 0 ? 128 * below(20) + below(3) : below(3000);
      rows.push_back({length, below(most + 1), below(6) == 0});
    }
    pair.read = lists.bound(below(2) == 0 ? -1 : 7, below(2));
    apply_rows(pair, shape, rows);
    plan_and_check(pair, lists, shape);
  }
}
