// The rules and refusals of the ledger, one by one: requests, holds, the latch, no allocation.
// Steps are in ledger_steps_test.cpp, random sequences of calls in ledger_model_test.cpp, failures
// that other systems had in ledger_field_cases_test.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/cache/ledger_state.h>
#include <quire/runtime/base/errors.h>

#include "tests/support/ledger_fixture.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}  // namespace

// Out of line, for g++ takes an inlined free() of what operator new gave for a mistake.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace quire {

struct LedgerTestAccess {
  static auto& state(Ledger& ledger) { return *ledger.state_; }
};

namespace {

using namespace test;  // NOLINT: the fixture's words

TEST_CASE("admit takes a seat and sets pages aside by count") {
  Ledger ledger(small_limits());
  const RequestId a = ledger.admit(1024, 700).value();
  CHECK(ledger.info(a).seat == SeatId(0));
  CHECK(ledger.info(a).pages_promised == 3);
  CHECK(ledger.info(a).pages_owned == 0);
  CHECK(ledger.headroom().pages == 9);
  CHECK(ledger.headroom().seats == 3);
  CHECK(ledger.usage().pages_free == 12);
  CHECK(ledger.usage().pages_promised == 3);
  CHECK(ledger.tokens_that_fit(a) == 1024);
}

TEST_CASE("admit refuses what is out of range") {
  Ledger ledger(small_limits());
  for (const std::int64_t context : {std::int64_t{0}, std::int64_t{-5}, std::int64_t{1025}}) {
    check_refused(ledger, "context_max_tokens is", [&] { (void)ledger.admit(context, 0); });
  }
  check_refused(ledger, "promised_tokens is -1", [&] { (void)ledger.admit(10, -1); });
  check_refused(ledger, "promised_tokens is 11", [&] { (void)ledger.admit(10, 11); });
}

TEST_CASE("admit answers with a shortfall of seats or of pages") {
  Ledger ledger(small_limits());
  for (int i = 0; i < 3; ++i) REQUIRE(ledger.admit(1024, i == 0 ? 300 : 1024));
  const std::uint64_t before = ledger.digest();
  const auto refused = ledger.admit(1024, 600);
  REQUIRE_FALSE(refused);
  CHECK(refused.shortfall().what == Resource::kPages);
  CHECK(refused.shortfall().needed == 3);
  CHECK(refused.shortfall().free == 2);
  CHECK(ledger.digest() == before);
  REQUIRE(ledger.admit(1024, 512));
  const auto no_seat = ledger.admit(1, 0);
  REQUIRE_FALSE(no_seat);
  CHECK(no_seat.shortfall().what == Resource::kSeats);
  CHECK(no_seat.shortfall().needed == 1);
  CHECK(no_seat.shortfall().free == 0);
}

TEST_CASE("reserve is idempotent and draws on the own promise first") {
  Ledger ledger(small_limits());
  const RequestId a = ledger.admit(1024, 512).value();
  const RequestId b = ledger.admit(1024, 1024).value();
  const RequestId c = ledger.admit(1024, 1024).value();
  CHECK(ledger.headroom().pages == 2);
  CHECK(ledger.reserve(a, 256).value() == 1);
  CHECK(ledger.reserve(a, 256).value() == 0);
  CHECK(ledger.reserve(a, 1).value() == 0);
  CHECK(ledger.headroom().pages == 2);
  CHECK(ledger.reserve(a, 257).value() == 1);
  CHECK(ledger.headroom().pages == 2);
  CHECK(ledger.reserve(a, 769).value() == 2);
  CHECK(ledger.headroom().pages == 0);
  CHECK(ledger.info(a).secured_tokens == 769);
  CHECK(ledger.reserve(b, 1024).value() == 4);  // all of it was promised
  CHECK(ledger.tokens_that_fit(c) == 1024);
  ledger.check_invariants();
}

TEST_CASE("reserve refuses what can never be") {
  Ledger ledger(small_limits());
  const RequestId a = ledger.admit(500, 0).value();
  for (const std::int64_t tokens : {std::int64_t{0}, std::int64_t{-1}, INT64_MIN}) {
    check_refused(ledger, "at least 1", [&] { (void)ledger.reserve(a, tokens); });
  }
  for (const std::int64_t tokens : {std::int64_t{501}, INT64_MAX}) {
    check_refused(ledger, "can never fit", [&] { (void)ledger.reserve(a, tokens); });
  }
}

TEST_CASE("a stale handle is refused by every call that takes one") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 10);
  ledger.release(a);
  const RequestId b = ledger.admit(1024, 0).value();
  REQUIRE(b.index == a.index);  // the same seat, another generation
  for (const RequestId stale : {a, RequestId{}, RequestId{4, 1}, RequestId{b.index, 0}}) {
    const std::string part = stale.index == a.index ? "is stale" : "no request has index";
    check_refused(ledger, part, [&] { ledger.release(stale); });
    check_refused(ledger, part, [&] { ledger.resume(stale); });
    check_refused(ledger, part, [&] { (void)ledger.reserve(stale, 1); });
    check_refused(ledger, part, [&] { (void)ledger.tokens_that_fit(stale); });
    check_refused(ledger, part, [&] { (void)ledger.info(stale); });
    check_refused(ledger, part, [&] { (void)ledger.pages_of(stale); });
    check_refused(ledger, part, [&] { (void)ledger.hold(stale); });
    check_refused(ledger, part, [&] { prepare(ledger, {{b, 0}, {stale, 1}}); });
  }
}

TEST_CASE("holds keep seat and pages from other owners until the last is dropped") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 512);
  const std::vector<PageId> pages(ledger.pages_of(a).begin(), ledger.pages_of(a).end());
  const HoldId whole = ledger.hold(a).value();
  const HoldId one = ledger.hold(std::span(pages).first(1)).value();
  const auto none_left = ledger.hold(a);
  REQUIRE_FALSE(none_left);
  CHECK(none_left.shortfall().what == Resource::kHolds);
  ledger.release(a);
  CHECK(ledger.usage().pages_held == 2);
  CHECK(ledger.usage().seats_held == 1);
  CHECK(ledger.usage().pages_free == 10);
  const RequestId b = admit_with(ledger, 1);
  CHECK(b.index != a.index);
  const RequestId c = ledger.admit(1024, 1024).value();
  const RequestId d = ledger.admit(1024, 1024).value();
  REQUIRE(ledger.reserve(c, 1024));
  REQUIRE(ledger.reserve(d, 1024));
  const auto seats_short = ledger.admit(1, 0);
  REQUIRE_FALSE(seats_short);
  CHECK(seats_short.shortfall().held == 1);
  const auto pages_short = ledger.reserve(b, 1024);
  REQUIRE_FALSE(pages_short);
  CHECK(pages_short.shortfall().needed == 3);
  CHECK(pages_short.shortfall().free == 1);
  CHECK(pages_short.shortfall().held == 2);
  ledger.drop(whole);
  CHECK(ledger.usage().pages_held == 1);
  CHECK(ledger.usage().seats_held == 0);
  check_refused(ledger, "is stale", [&] { ledger.drop(whole); });
  ledger.drop(one);
  CHECK(ledger.usage().pages_held == 0);
  CHECK(ledger.reserve(b, 1024).value() == 3);
  ledger.check_invariants();
}

TEST_CASE("a held page stays with its owner and stops the giving back before it") {
  Limits limits = long_draft_limits();
  limits.run_ahead_max = 0;
  Ledger ledger(limits);
  const RequestId a = admit_with(ledger, 1024);
  const PageId third = ledger.pages_of(a)[2];
  const HoldId hold = ledger.hold(std::span(&third, 1)).value();
  prepare(ledger, {{a, 1000}});
  settle(ledger, 0, {{1, false}});
  prepare(ledger, {{a, 0}});
  CHECK(ledger.info(a).pages_owned == 3);
  CHECK(ledger.info(a).secured_tokens == 25);
  ledger.drop(hold);
  CHECK(ledger.usage().pages_held == 0);
  settle(ledger, 1, {{0, false}});
  prepare(ledger, {});
  CHECK(ledger.info(a).pages_owned == 1);
}

TEST_CASE("hold and drop refuse what they cannot name") {
  Ledger ledger(small_limits());
  const PageId sink = ledger.reserve_sink().value();
  const RequestId a = admit_with(ledger, 1024);
  const PageId own = ledger.pages_of(a)[0];
  const auto hold = [&](std::vector<PageId> pages) { (void)ledger.hold(pages); };
  check_refused(ledger, "does not exist", [&] { hold({own, PageId(12)}); });
  check_refused(ledger, "does not exist", [&] { hold({PageId()}); });
  check_refused(ledger, "is free", [&] { hold({PageId(11)}); });
  check_refused(ledger, "is the sink", [&] { hold({sink}); });
  check_refused(ledger, "is named twice", [&] { hold({own, own}); });
  check_refused(ledger, "at most 4", [&] { hold(std::vector<PageId>(5, own)); });
  check_refused(ledger, "is stale", [&] { ledger.drop(HoldId{0, 0}); });
  check_refused(ledger, "no hold has index", [&] { ledger.drop(HoldId{}); });
  check_refused(ledger, "no hold has index", [&] { ledger.drop(HoldId{2, 1}); });
}

TEST_CASE("the sink is taken once and shrinks what can ever fit") {
  Limits limits = small_limits();
  limits.pages = 4;
  Ledger ledger(limits);
  const RequestId a = ledger.admit(1024, 1000).value();
  const auto short_of_pages = ledger.reserve_sink();
  REQUIRE_FALSE(short_of_pages);
  CHECK(short_of_pages.shortfall().needed == 1);
  CHECK(short_of_pages.shortfall().free == 0);
  ledger.release(a);
  const RequestId b = ledger.admit(1024, 0).value();
  REQUIRE(ledger.reserve_sink());
  CHECK(ledger.usage().pages_sink == 1);
  check_refused(ledger, "taken before", [&] { (void)ledger.reserve_sink(); });
  check_refused(ledger, "3 usable pages", [&] { (void)ledger.admit(1024, 0); });
  check_refused(ledger, "3 usable pages", [&] { (void)ledger.reserve(b, 769); });
  CHECK(ledger.tokens_that_fit(b) == 768);
  ledger.reset();
  CHECK(ledger.usage().pages_sink == 1);  // captured graphs know its address
  CHECK(ledger.usage().pages_free == 3);
  ledger.check_invariants();
}

TEST_CASE("reset goes back to the beginning and makes all handles stale") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 600);
  const HoldId hold = ledger.hold(a).value();
  const std::vector<PageId> pages(ledger.pages_of(a).begin(), ledger.pages_of(a).end());
  prepare(ledger, {{a, 600}});
  ledger.release(a);
  ledger.reset();
  ledger.check_invariants();
  CHECK(ledger.usage().pages_free == 12);
  CHECK(ledger.usage().seats_free == 4);
  CHECK_THROWS_AS(ledger.drop(hold), UsageError);
  CHECK_THROWS_AS(ledger.settle(0, {}), UsageError);
  const RequestId b = admit_with(ledger, 600);
  CHECK(b.index == a.index);
  CHECK(b != a);
  CHECK(std::ranges::equal(ledger.pages_of(b), pages));
  const StepUpdate& update = prepare(ledger, {{b, 600}});
  CHECK(update.id() == 0);
  CHECK(update.cells().size() == 3);
  CHECK(update.lowered_limits().empty());
}

TEST_CASE("a broken invariant is latched: every later call says why, destruction works") {
  const std::vector<std::pair<const char*, std::function<void(Ledger&)>>> damages{
      {"a page is not in one place",
       [](Ledger& l) { LedgerTestAccess::state(l).free_pages.pop_back(); }},
      {"a free page is owned",
       [](Ledger& l) { LedgerTestAccess::state(l).free_pages.push_back(0); }},
      {"a page is owned by another",
       [](Ledger& l) { LedgerTestAccess::state(l).pages[0].owner = 1; }},
      {"a page is held more", [](Ledger& l) { LedgerTestAccess::state(l).pages[0].holds = 1; }},
      {"a seat is held more", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].holds = 1; }},
      {"settled <= upper", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].secured = 400; }},
      {"upper + lookahead", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].lookahead = 1; }},
      {"settled <= upper", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].lookahead = -1; }},
      {"upper - settled", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].settled = 1; }},
      {"lack cells", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].cells_sent = 0; }},
      {"a limit differs", [](Ledger& l) { LedgerTestAccess::state(l).seats[0].limit_sent = 9; }},
      {"sum of promises", [](Ledger& l) { LedgerTestAccess::state(l).outstanding_sum = 1; }},
      {"a seat is not in one place",
       [](Ledger& l) { LedgerTestAccess::state(l).free_seats.pop_back(); }},
      {"holds are lost", [](Ledger& l) { LedgerTestAccess::state(l).free_holds.clear(); }}};
  for (const auto& [what, damage] : damages) {
    CAPTURE(what);
    Ledger ledger(small_limits());
    const RequestId a = admit_with(ledger, 200);
    prepare(ledger, {{a, 200}});
    ledger.check_invariants();
    damage(ledger);
    std::string reason;
    try {
      ledger.check_invariants();
    } catch (const BrokenInvariant& error) {
      reason = error.what();
    }
    CAPTURE(reason);
    CHECK(reason.find(what) != std::string::npos);
    const char* text = reason.c_str();
    CHECK_THROWS_WITH_AS((void)ledger.admit(1, 0), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.reserve(a, 1), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.tokens_that_fit(a), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(prepare(ledger, {}), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.padding_update(StepShape::decode(1), kBuffer), text,
                         BrokenInvariant);
    CHECK_THROWS_WITH_AS(settle(ledger, 0, {}), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.abandon(0), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.release(a), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.resume(a), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.hold(a), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.drop(HoldId{}), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.reserve_sink(), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.headroom(), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.usage(), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.describe(), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS((void)ledger.digest(), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.check_invariants(), text, BrokenInvariant);
    CHECK_THROWS_WITH_AS(ledger.reset(), text, BrokenInvariant);
  }
}

TEST_CASE("describe names pages, seats, steps and requests") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 300);
  prepare(ledger, {{a, 300}});
  const std::string text = ledger.describe();
  CAPTURE(text);
  for (const char* part : {"10 free of 12", "3 free of 4", "next 1", "seat 0", "upper 300"}) {
    CHECK(text.find(part) != std::string::npos);
  }
}

TEST_CASE("a ledger moves") {
  Ledger first(small_limits());
  const RequestId a = admit_with(first, 300);
  Ledger second(std::move(first));
  CHECK(second.info(a).pages_owned == 2);
  CHECK(second.limits().pages == 12);
}

TEST_CASE("nothing is allocated in the steady state: 1,000 steps of 256 rows") {
  const Limits limits{.seats_max = 300,
                      .pages = 4000,
                      .rows_max = 256,
                      .tokens_max = 1024,
                      .context_max = 4096,
                      .draft_max = 3,
                      .run_ahead_max = 1,
                      .holds_max = 4};
  Ledger ledger(limits);
  std::vector<BatchRow> rows;
  for (int i = 0; i < 256; ++i) rows.push_back({ledger.admit(4096, 1024).value(), 4});
  std::vector<Outcome> outcomes(256);
  const std::int64_t before = allocations.load();
  for (int step = 0; step < 1000; ++step) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      outcomes[i].kept_tokens = static_cast<std::int32_t>((i + static_cast<std::size_t>(step)) % 5);
      if (!ledger.reserve(rows[i].request, 4)) throw std::logic_error("a reserve was refused");
    }
    if (step % 10 == 0) {
      BatchRow& row = rows[static_cast<std::size_t>(step / 10)];
      const HoldId hold = ledger.hold(row.request).value();
      ledger.release(row.request);
      row.request = ledger.admit(4096, 1024).value();
      if (!ledger.reserve(row.request, 4)) throw std::logic_error("a reserve was refused");
      ledger.drop(hold);
    }
    const StepId id = ledger.prepare(rows, StepShape::decode(256, 4), kBuffer).id();
    if (step % 7 == 0) {
      ledger.abandon(id);
      ledger.prepare(rows, StepShape::decode(256, 4), kBuffer);
    }
    ledger.settle(id, outcomes);
    if (step % 100 == 0) ledger.check_invariants();
  }
  const std::int64_t made = allocations.load() - before;
  CHECK(made == 0);
  const std::string long_text(1000, 'x');
  CHECK(allocations.load() > before + made);  // the counter does count
}

}  // namespace
}  // namespace quire
