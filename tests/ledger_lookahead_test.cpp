// The lookahead of a batch row, room for draft passes beyond the upper length: secured, within the
// device's limit, in nobody's length. And the bound on the page table cells of one update, which it
// counts in.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/support/ledger_fixture.h"
#include "tests/support/three_ways.h"

namespace quire {
namespace {

using namespace test;  // NOLINT: the fixture's words

Limits draft_limits() {
  Limits limits = small_limits();
  limits.draft_max = 9;
  return limits;
}

TEST_CASE("a lookahead raises the limit and sends cells, and is no part of any length") {
  Ledger ledger(draft_limits());
  const RequestId a = admit_with(ledger, 260);
  const StepUpdate& update = prepare(ledger, {{a, 252, 8}});
  CHECK(update.batch_rows()[0].tokens == 252);
  CHECK(update.batch_rows()[0].limit == 260);
  CHECK(update.cells().size() == 2);  // the second page is the lookahead's alone
  CHECK(ledger.info(a).upper_tokens == 252);
  CHECK(ledger.info(a).secured_tokens == 260);
  CHECK(ledger.info(a).settled_tokens == 0);
  ledger.check_invariants();
}

TEST_CASE("what one step looked ahead the next may use; its own lookahead replaces the former") {
  Ledger ledger(draft_limits());
  const RequestId a = admit_with(ledger, 20);
  const RequestId b = admit_with(ledger, 20);
  prepare(ledger, {{a, 10, 8}, {b, 4, 3}});
  const StepUpdate& second = prepare(ledger, {{a, 8}});
  CHECK(second.batch_rows()[0].limit == 18);
  CHECK(second.lowered_limits().empty());  // of b nothing has changed
  settle(ledger, 0, {{2, false}, {4, false}});
  const StepUpdate& third = prepare(ledger, {{b, 0}});
  CHECK(third.batch_rows()[0].limit == 4);  // its lookahead is over
  REQUIRE(third.lowered_limits().size() == 1);
  CHECK(third.lowered_limits()[0].limit == 10);  // a: 2 + 8, of which no outcome counts yet
  CHECK(ledger.info(a).secured_tokens == 12);
  ledger.check_invariants();
}

TEST_CASE("refused tokens come back, the lookahead stays secured beyond what is left") {
  Limits limits = draft_limits();
  limits.run_ahead_max = 0;
  Ledger ledger(limits);
  const RequestId a = admit_with(ledger, 50);
  prepare(ledger, {{a, 4, 7}}, 4);
  settle(ledger, 0, {{5, false}});
  const StepUpdate& next = prepare(ledger, {});
  REQUIRE(next.lowered_limits().size() == 1);
  CHECK(next.lowered_limits()[0].limit == 5 + 7);
  CHECK(ledger.info(a).upper_tokens == 5);
  CHECK(ledger.info(a).secured_tokens == 50 - 11);
}

TEST_CASE("a lookahead out of range or not secured is refused by batch row and number") {
  Ledger ledger(draft_limits());
  const RequestId a = admit_with(ledger, 20);
  const RequestId b = admit_with(ledger, 20);
  check_refused(ledger, "batch row 1 looks -1 tokens ahead; supported: 0 to draft_max + 1 = 10",
                [&] {
                  prepare(ledger, {{a, 1}, {b, 1, -1}});
                });
  check_refused(ledger, "batch row 0 looks 11 tokens ahead; supported: 0 to draft_max + 1 = 10",
                [&] {
                  prepare(ledger, {{a, 1, 11}, {b, 1}});
                });
  check_refused(ledger, "batch row 1 (seat 1): 21 tokens asked, 20 secured", [&] {
    prepare(ledger, {{a, 10, 10}, {b, 12, 9}});
  });
  check_refused(ledger, "batch row 0 (seat 0): 22 tokens asked, 20 secured", [&] {
    prepare(ledger, {{a, 4, 6}}, 4);
  });
  CHECK(prepare(ledger, {{a, 10, 10}, {b, 4, 4}}).batch_rows()[1].limit == 8);
}

TEST_CASE("abandon brings the former lookahead back, with the cells that the device lacks") {
  Ledger ledger(draft_limits());
  const RequestId a = admit_with(ledger, 600);
  prepare(ledger, {{a, 250, 6}});
  prepare(ledger, {{a, 1, 10}});
  ledger.abandon(1);
  ledger.check_invariants();
  const StepUpdate& padding = prepare(ledger, {});
  REQUIRE(padding.lowered_limits().size() == 1);
  CHECK(padding.lowered_limits()[0].limit == 256);
  settle(ledger, 0, {{250, false}});
  const StepUpdate& again = prepare(ledger, {{a, 2, 5}});
  CHECK(again.batch_rows()[0].limit == 257);
  CHECK(again.cells().size() == 1);
}

TEST_CASE("a new owner of the seat has no lookahead") {
  Ledger ledger(draft_limits());
  const RequestId a = admit_with(ledger, 20);
  prepare(ledger, {{a, 10, 10}});
  ledger.release(a);
  const RequestId b = admit_with(ledger, 5);
  REQUIRE(b.index == a.index);
  const StepUpdate& update = prepare(ledger, {{b, 5}});
  CHECK(update.batch_rows()[0].limit == 5);
  ledger.check_invariants();
}

// Ledger and update throw where a step has more cells than the limits let them have room for.
TEST_CASE("the cells of one update have room, whatever lengths and lookaheads do at page edges") {
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Limits limits{.seats_max = 1 + random.below(4), .pages = 64, .context_max = 4096};
    limits.rows_max = 1 + random.below(limits.seats_max);
    limits.draft_max = random.below(2) == 0 ? random.below(8) : random.below(700);
    limits.tokens_max = limits.rows_max * (limits.draft_max + 1) + random.below(600);
    limits.repeat_max = 1 + random.below(3);
    limits.run_ahead_max = random.below(2);
    Ledger ledger(limits);
    std::int64_t most = 0;
    std::vector<RequestId> requests;
    for (std::int64_t s = 0; s < limits.seats_max; ++s) {
      requests.push_back(ledger.admit(4096, 0).value());
    }
    for (StepId step = 0; step < 150; ++step) {
      const auto repeat = static_cast<std::int32_t>(1 + random.below(limits.repeat_max));
      const auto per_row = static_cast<std::int32_t>(limits.draft_max + 1);
      const auto rows_now = static_cast<std::int32_t>(limits.rows_max);
      std::vector<BatchRow> rows;
      for (RequestId& request : requests) {
        if (std::ssize(rows) == limits.rows_max) break;
        std::int64_t upper = ledger.info(request).upper_tokens;
        const std::int64_t needed = std::int64_t{per_row} * (repeat + 1);
        if (upper + needed > 4096 || random.below(12) == 0) {
          ledger.release(request);
          request = ledger.admit(4096, 0).value();
          upper = 0;
        }
        // Up to just below, at, or just above the end of a page, where that is in reach.
        BatchRow row{request, 1 + random.below(per_row), random.below(per_row + 1)};
        const std::int64_t to_edge = 255 + random.below(3) - upper % 256;
        if (to_edge > 0 && to_edge <= per_row) row.tokens = static_cast<std::int32_t>(to_edge);
        if (random.below(3) == 0) row.tokens = per_row;
        if (random.below(2) == 0) row.lookahead_tokens = per_row;
        if (!ledger.reserve(request, std::int64_t{row.tokens} * repeat + row.lookahead_tokens)) {
          continue;
        }
        rows.push_back(row);
      }
      const StepShape shape = StepShape::decode(rows_now, per_row);
      const StepUpdate* update = &ledger.prepare(rows, shape, PlanBufferId(0), repeat);
      if (random.below(5) == 0) {
        ledger.abandon(step);
        update = &ledger.prepare(rows, shape, PlanBufferId(0), repeat);
      }
      most = std::max(most, std::ssize(update->cells()));
      std::vector<Outcome> outcomes;
      for (const BatchRow& row : rows) {
        outcomes.push_back({random.below(std::int64_t{row.tokens} * repeat + 1), false});
      }
      ledger.settle(step, outcomes);
      std::rotate(requests.begin(), requests.begin() + 1, requests.end());
    }
    ledger.check_invariants();
    CAPTURE(limits.update_cells_max());
    CHECK(most <= limits.update_cells_max());
    CHECK(most > 0);
  }
}

}  // namespace
}  // namespace quire
