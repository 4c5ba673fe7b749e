// Failures of ownership that users of other systems met (FIELD_CASES, O1 to O14), as small stories.
// O13 has a program of its own, ledger_lockstep_test.cpp; what a device does with O6, O7, O12 and
// O14 is in field_cases_reuse_test.cpp. docs/RELIABILITY.md has the whole list.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

constexpr PlanBufferId kBuffer(0);

Limits field_limits() {
  return {.seats_max = 4,
          .pages = 8,
          .rows_max = 4,
          .tokens_max = 2048,
          .context_max = 2048,
          .draft_max = 3,
          .repeat_max = 8,
          .run_ahead_max = 1,
          .plan_buffers = 1,
          .holds_max = 4};
}

RequestId admit_with(Ledger& ledger, std::int64_t tokens) {
  const RequestId request = ledger.admit(2048, 0).value();
  if (tokens > 0) REQUIRE(ledger.reserve(request, tokens));
  return request;
}

const StepUpdate& prepare(Ledger& ledger, std::vector<BatchRow> rows, std::int32_t repeat = 1) {
  return ledger.prepare(rows, StepShape::ragged(4, 2048), kBuffer, repeat);
}

void settle(Ledger& ledger, StepId id, const std::vector<Outcome>& outcomes) {
  ledger.settle(id, outcomes);
}

// The new limit of a seat in an update; -1 where the update does not name the seat.
std::int64_t limit_in(const StepUpdate& update, std::int32_t seat) {
  for (const BatchRowUpdate& row : update.batch_rows()) {
    if (row.seat == seat) return row.limit;
  }
  for (const LimitUpdate& limit : update.lowered_limits()) {
    if (limit.seat == seat) return limit.limit;
  }
  return -1;
}

// O1
TEST_CASE("pages that a successor owns are not freed by the predecessor's stale mapping") {
  Ledger ledger(field_limits());
  const RequestId a = admit_with(ledger, 512);
  prepare(ledger, {{a, 512}});
  const std::set<PageId> pages_of_a(ledger.pages_of(a).begin(), ledger.pages_of(a).end());
  ledger.release(a);
  CHECK_THROWS_AS((void)ledger.pages_of(a), UsageError);
  const RequestId b = admit_with(ledger, 300);
  for (const PageId page : ledger.pages_of(b)) CHECK(pages_of_a.count(page) == 1);
  CHECK_THROWS_AS(ledger.release(a), UsageError);
  CHECK(ledger.info(b).pages_owned == 2);
  CHECK(ledger.usage().pages_free == 6);
  // The seat reaches nothing of the former owner's until the new one is named.
  CHECK(limit_in(prepare(ledger, {}), b.index) == 0);
  ledger.check_invariants();
}

// O2
TEST_CASE("the sink never reaches the free list, and no more is free than there is") {
  Ledger ledger(field_limits());
  const PageId sink = ledger.reserve_sink().value();
  for (int round = 0; round < 5; ++round) {
    const RequestId a = ledger.admit(7 * 256, 0).value();
    REQUIRE(ledger.reserve(a, 7 * 256));
    CHECK(ledger.usage().pages_free == 0);
    CHECK(std::ranges::count(ledger.pages_of(a), sink) == 0);
    ledger.release(a);
    CHECK(ledger.usage().pages_free == 7);
    CHECK(ledger.usage().pages_sink == 1);
    ledger.check_invariants();
  }
}

// O3
TEST_CASE("five pages needed and three free: nothing is taken, nothing leaks") {
  Ledger ledger(field_limits());
  const RequestId a = admit_with(ledger, 5 * 256);
  const RequestId b = ledger.admit(2048, 0).value();
  const std::uint64_t before = ledger.digest();
  const auto answer = ledger.reserve(b, 5 * 256);
  REQUIRE_FALSE(answer);
  CHECK(answer.shortfall().needed == 5);
  CHECK(answer.shortfall().free == 3);
  CHECK(ledger.digest() == before);
  CHECK(ledger.info(b).pages_owned == 0);
  CHECK(ledger.usage().pages_free == 3);
  ledger.release(a);
  CHECK(ledger.reserve(b, 5 * 256).value() == 5);
}

// O5
TEST_CASE("use falls back to nothing and never passes what there is") {
  Ledger ledger(field_limits());
  for (int round = 0; round < 20; ++round) {
    std::vector<RequestId> requests;
    for (int i = 0; i < 4; ++i) requests.push_back(admit_with(ledger, 256 + round));
    const Usage full = ledger.usage();
    CHECK(full.pages_owned == (round == 0 ? 4 : 8));
    CHECK(full.pages_owned + full.pages_free + full.pages_held == full.pages_total);
    for (const RequestId request : requests) ledger.release(request);
    CHECK(ledger.usage().pages_owned == 0);
    CHECK(ledger.usage().seats_owned == 0);
    CHECK(ledger.usage().pages_free == 8);
  }
}

// O6, the ledger's part
TEST_CASE("what a reader outside the stream holds is given to nobody") {
  Ledger ledger(field_limits());
  const RequestId a = admit_with(ledger, 8 * 256);
  const HoldId hold = ledger.hold(a).value();
  ledger.release(a);
  const RequestId b = ledger.admit(2048, 0).value();
  CHECK(b.index != a.index);
  const auto answer = ledger.reserve(b, 1);
  REQUIRE_FALSE(answer);
  CHECK(answer.shortfall().held == 8);
  ledger.drop(hold);
  CHECK(ledger.reserve(b, 1));
}

// O8
TEST_CASE("pages are given back on the settled count, never on an optimistic one") {
  Limits limits = field_limits();
  limits.draft_max = 511;
  Ledger ledger(limits);
  const RequestId a = admit_with(ledger, 600);
  prepare(ledger, {{a, 158}});
  prepare(ledger, {{a, 442}});
  settle(ledger, 0, {{158, false}});
  settle(ledger, 1, {{1, false}});  // heard, and not yet due
  prepare(ledger, {});
  CHECK(ledger.info(a).settled_tokens == 158);
  CHECK(ledger.info(a).upper_tokens == 600);
  CHECK(ledger.info(a).pages_owned == 3);
  settle(ledger, 2, {});
  prepare(ledger, {});
  CHECK(ledger.info(a).settled_tokens == 159);
  CHECK(ledger.info(a).pages_owned == 1);
}

// O9
TEST_CASE("batch rows are not durable: a seat's next owner gets none of what its row brought") {
  Ledger ledger(field_limits());
  const RequestId a = admit_with(ledger, 300);
  const RequestId b = admit_with(ledger, 10);
  prepare(ledger, {{b, 3}, {a, 300}});
  ledger.release(a);  // suspended
  const RequestId c = admit_with(ledger, 20);
  REQUIRE(c.index == a.index);
  settle(ledger, 0, {{2, false}, {300, true}});
  prepare(ledger, {});
  settle(ledger, 1, {});
  const StepUpdate& update = prepare(ledger, {{c, 4}, {b, 1}});  // rows have changed places
  CHECK(ledger.info(b).settled_tokens == 2);
  CHECK(ledger.info(c).settled_tokens == 0);
  CHECK_FALSE(ledger.info(c).stopped);
  CHECK(update.batch_rows()[0].flags == BatchRowUpdate::kNewOwner);
  CHECK(update.batch_rows()[0].limit == 4);
  REQUIRE(update.cells().size() == 1);
  CHECK(PageId(update.cells()[0].page) == ledger.pages_of(c)[0]);
}

// O10
TEST_CASE("what can never fit is an error at once that names the numbers") {
  Limits limits = field_limits();
  limits.context_max = 8 * 256;
  Ledger ledger(limits);
  REQUIRE(ledger.reserve_sink());
  std::string text;
  try {
    (void)ledger.admit(2048, 0);
  } catch (const UsageError& error) {
    text = error.what();
  }
  CAPTURE(text);
  for (const char* part : {"2048 tokens", "8 pages", "never", "7 usable pages"}) {
    CHECK(text.find(part) != std::string::npos);
  }
  CHECK_THROWS_AS((void)ledger.admit(2049, 0), UsageError);
  CHECK(ledger.admit(7 * 256, 7 * 256));
}

// O11
TEST_CASE("with a step in flight that holds every page, releasing one request makes the next fit") {
  Ledger ledger(field_limits());  // run_ahead_max 1
  const RequestId a = admit_with(ledger, 4 * 256);
  const RequestId b = admit_with(ledger, 4 * 256);
  prepare(ledger, {{a, 4 * 256}, {b, 4 * 256}});  // in flight, nothing settled
  const auto answer = ledger.reserve(a, 1);
  REQUIRE_FALSE(answer);
  CHECK(answer.shortfall().needed == 1);
  CHECK(answer.shortfall().free == 0);
  const PageId last_of_b = ledger.pages_of(b)[0];
  ledger.release(b);
  CHECK(ledger.reserve(a, 1).value() == 1);
  CHECK(ledger.pages_of(a)[4] == last_of_b);
  const StepUpdate& update = prepare(ledger, {{a, 1}});
  CHECK(update.id() == 1);
  CHECK(limit_in(update, b.index) == 0);  // b's step in flight is ordered before by the stream
  CHECK(update.cells().size() == 1);
  ledger.check_invariants();
}

// O12
TEST_CASE("released between prepare and launch, and the seat reused while the visit still runs") {
  Ledger ledger(field_limits());
  const RequestId a = admit_with(ledger, 10);
  CHECK(prepare(ledger, {{a, 10}}).batch_rows()[0].flags == BatchRowUpdate::kNewOwner);
  ledger.release(a);
  const RequestId b = admit_with(ledger, 20);
  REQUIRE(b.index == a.index);

  SUBCASE("the visit runs: the new owner starts over behind it") {
    const StepUpdate& update = prepare(ledger, {{b, 20}});
    CHECK(update.id() == 1);
    CHECK(update.batch_rows()[0].flags == BatchRowUpdate::kNewOwner);
    CHECK(update.cells().size() == 1);
    settle(ledger, 0, {{10, true}});
    prepare(ledger, {});
    CHECK(ledger.info(b).settled_tokens == 0);
    CHECK(ledger.info(b).upper_tokens == 20);
    CHECK_FALSE(ledger.info(b).stopped);
  }
  SUBCASE("the visit is abandoned: the new owner is untouched by it") {
    ledger.abandon(0);
    CHECK(ledger.info(b).upper_tokens == 0);
    CHECK(ledger.info(b).secured_tokens == 20);
    const StepUpdate& update = prepare(ledger, {{b, 20}});
    CHECK(update.id() == 0);
    CHECK(update.batch_rows()[0].flags == BatchRowUpdate::kNewOwner);
    CHECK(update.batch_rows()[0].limit == 20);
    CHECK(update.cells().size() == 1);
  }
  ledger.check_invariants();
}

TEST_CASE("the limit of a seat is what five prepared runs may reach, and lies within its pages") {
  Ledger ledger(field_limits());
  const RequestId a = admit_with(ledger, 255);
  CHECK(prepare(ledger, {{a, 250}}).batch_rows()[0].limit == 250);
  const std::int64_t limit = prepare(ledger, {{a, 1}}, 5).batch_rows()[0].limit;
  CHECK(limit == 255);
  CHECK(limit <= 256 * ledger.info(a).pages_owned);
}

}  // namespace
}  // namespace quire
