// Steps: what an update carries, when outcomes count, what abandoning restores, and what is
// refused.
#include <doctest/doctest.h>

#include <vector>

#include <quire/cache/ledger.h>

#include "tests/support/ledger_fixture.h"

namespace quire {
namespace {

using namespace test;  // NOLINT: the fixture's words

TEST_CASE("prepare refuses a wrong batch and names the row") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 100);
  const RequestId b = admit_with(ledger, 3);
  check_refused(ledger, "batch row 1: the request of seat 0 is in the batch twice", [&] {
    prepare(ledger, {{a, 1}, {a, 1}});
  });
  check_refused(ledger, "batch row 0 has -1 tokens", [&] { prepare(ledger, {{a, -1}}); });
  check_refused(ledger, "4 tokens asked, 3 secured", [&] { prepare(ledger, {{a, 1}, {b, 4}}); });
  check_refused(ledger, "4 tokens asked, 3 secured", [&] { prepare(ledger, {{b, 1}}, 4); });
  check_refused(ledger, "runs once", [&] { prepare(ledger, {{a, 4}}, 2); });
  check_refused(ledger, "short rows come first", [&] { prepare(ledger, {{a, 4}, {b, 1}}); });
  CHECK_NOTHROW(prepare(ledger, {{b, 0}, {a, 4}}));
  CHECK_NOTHROW(prepare(ledger, {{a, 4}, {b, 0}}));
}

TEST_CASE("prepare and padding_update refuse a shape beyond the limits") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 100);
  const RequestId b = admit_with(ledger, 100);
  struct Case {
    StepShape shape;
    const char* part;
  };
  for (const Case& c : {Case{StepShape::decode(5, 1), "a shape of 5 batch rows"},
                        Case{StepShape::decode(0, 1), "a shape of 0 batch rows"},
                        Case{StepShape::decode(1, 4), "a shape of 4 tokens per batch row"},
                        Case{{1, -1, 1}, "a shape of -1 tokens per batch row"},
                        Case{{2, 2, 5}, "has 4 tokens, not 5"},
                        Case{StepShape::ragged(1, 1201), "a shape of 1201 tokens"},
                        Case{StepShape::ragged(1, 0), "a shape of 0 tokens"}}) {
    check_refused(ledger, c.part, [&] { ledger.prepare({}, c.shape, kBuffer); });
    check_refused(ledger, c.part, [&] { ledger.padding_update(c.shape, kBuffer); });
  }
  const std::vector<BatchRow> rows{{a, 2}, {b, 2}};
  check_refused(ledger, "2 batch rows in a shape of 1",
                [&] { ledger.prepare(rows, StepShape::decode(1, 2), kBuffer); });
  check_refused(ledger, "the shape has room for 1",
                [&] { ledger.prepare(rows, StepShape::decode(2), kBuffer); });
  check_refused(ledger, "4 tokens in a shape of 3",
                [&] { ledger.prepare(rows, StepShape::ragged(2, 3), kBuffer); });
  for (const std::int32_t buffer : {-1, 2}) {
    const PlanBufferId wrong(buffer);
    check_refused(ledger, "plan buffer", [&] { ledger.prepare({}, StepShape::decode(1), wrong); });
    check_refused(ledger, "plan buffer",
                  [&] { ledger.padding_update(StepShape::decode(1), wrong); });
  }
  for (const std::int32_t repeat : {0, -1, 5}) {
    check_refused(ledger, "a repeat count",
                  [&] { ledger.prepare({}, StepShape::decode(1), kBuffer, repeat); });
  }
}

TEST_CASE("an update carries new owners, cells once, and limits") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 300);
  const StepUpdate& first =
      ledger.prepare(std::vector<BatchRow>{{a, 257}}, StepShape::ragged(3, 600), PlanBufferId(1));
  CHECK(first.id() == 0);
  CHECK(first.plan_buffer() == PlanBufferId(1));
  CHECK(first.shape() == StepShape::ragged(3, 600));
  REQUIRE(first.batch_rows().size() == 1);
  CHECK(first.batch_rows()[0].seat == 0);
  CHECK(first.batch_rows()[0].tokens == 257);
  CHECK(first.batch_rows()[0].limit == 257);
  CHECK(first.batch_rows()[0].flags == BatchRowUpdate::kNewOwner);
  REQUIRE(first.cells().size() == 2);
  for (std::int32_t cell = 0; cell < 2; ++cell) {
    CHECK(first.cells()[static_cast<std::size_t>(cell)].cell == cell);
    CHECK(PageId(first.cells()[static_cast<std::size_t>(cell)].page) ==
          ledger.pages_of(a)[static_cast<std::size_t>(cell)]);
  }
  ledger.resume(a);
  const StepUpdate& second = prepare(ledger, {{a, 2}}, 3);
  CHECK(second.id() == 1);
  CHECK(second.header().repeat == 3);
  CHECK(second.batch_rows()[0].tokens == 2);
  CHECK(second.batch_rows()[0].limit == 263);
  CHECK(second.batch_rows()[0].flags == BatchRowUpdate::kResume);
  CHECK(second.cells().empty());  // both are there already
  CHECK(second.lowered_limits().empty());
  CHECK_NOTHROW(StepUpdate::from_bytes(second.bytes()));
  CHECK(ledger.info(a).upper_tokens == 263);
  CHECK(ledger.info(a).settled_tokens == 0);
}

TEST_CASE("outcomes count at the prepare that they are due at, never earlier") {
  Ledger ledger(long_draft_limits());  // run_ahead_max 1
  const RequestId a = admit_with(ledger, 300);
  prepare(ledger, {{a, 300}});
  const std::uint64_t unheard = ledger.digest();
  settle(ledger, 0, {{10, true}});
  CHECK(ledger.digest() == unheard);
  CHECK(ledger.info(a).pages_owned == 2);
  prepare(ledger, {});
  CHECK(ledger.info(a).settled_tokens == 0);
  CHECK(ledger.info(a).pages_owned == 2);
  CHECK_FALSE(ledger.info(a).stopped);
  settle(ledger, 1, {});
  const StepUpdate& update = prepare(ledger, {});
  CHECK(ledger.info(a).settled_tokens == 10);
  CHECK(ledger.info(a).upper_tokens == 10);
  CHECK(ledger.info(a).secured_tokens == 10);
  CHECK(ledger.info(a).pages_owned == 1);
  CHECK(ledger.info(a).stopped);
  REQUIRE(update.lowered_limits().size() == 1);  // no step may reach the page given back
  CHECK(update.lowered_limits()[0].limit == 10);
  ledger.check_invariants();
}

TEST_CASE("prepare needs the outcome that is due, and a refused prepare counts nothing") {
  Ledger ledger(long_draft_limits());
  const RequestId a = admit_with(ledger, 300);
  prepare(ledger, {{a, 300}});
  prepare(ledger, {});
  check_refused(ledger, "step 0 is not settled", [&] { prepare(ledger, {}); });
  settle(ledger, 0, {{1, false}});
  check_refused(ledger, "secured", [&] { prepare(ledger, {{a, 1}}); });
  CHECK(ledger.info(a).settled_tokens == 0);
  CHECK(prepare(ledger, {}).id() == 2);
  CHECK(ledger.info(a).settled_tokens == 1);
}

TEST_CASE("settle refuses unknown steps, a second time, and counts out of range") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 100);
  check_refused(ledger, "step 0 is unknown", [&] { settle(ledger, 0, {}); });
  prepare(ledger, {{a, 3}}, 2);
  check_refused(ledger, "step -1 is unknown", [&] { settle(ledger, kPaddingStep, {}); });
  check_refused(ledger, "step 1 is unknown", [&] { settle(ledger, 1, {{1, false}}); });
  check_refused(ledger, "0 outcomes for the 1 batch rows", [&] { settle(ledger, 0, {}); });
  check_refused(ledger, "kept 7 tokens", [&] { settle(ledger, 0, {{7, false}}); });
  check_refused(ledger, "kept -1 tokens", [&] { settle(ledger, 0, {{-1, false}}); });
  settle(ledger, 0, {{6, false}});
  check_refused(ledger, "settled before", [&] { settle(ledger, 0, {{6, false}}); });
  prepare(ledger, {});
  settle(ledger, 1, {});
  prepare(ledger, {});  // step 0 is counted now
  check_refused(ledger, "settled before", [&] { settle(ledger, 0, {{6, false}}); });
}

TEST_CASE("steps settle in any order") {
  Limits limits = long_draft_limits();
  limits.run_ahead_max = 2;
  Ledger ledger(limits);
  const RequestId a = admit_with(ledger, 100);
  for (int i = 0; i < 3; ++i) prepare(ledger, {{a, 10}});
  settle(ledger, 2, {{1, false}});
  settle(ledger, 0, {{3, false}});
  prepare(ledger, {});
  CHECK(ledger.info(a).settled_tokens == 3);
  CHECK(ledger.info(a).upper_tokens == 23);
}

TEST_CASE("abandon refuses all but the newest unsettled step") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 100);
  check_refused(ledger, "not the newest", [&] { ledger.abandon(kPaddingStep); });
  check_refused(ledger, "not the newest", [&] { ledger.abandon(0); });
  prepare(ledger, {{a, 1}});
  prepare(ledger, {{a, 1}});
  check_refused(ledger, "not the newest", [&] { ledger.abandon(0); });
  check_refused(ledger, "not the newest", [&] { ledger.abandon(2); });
  settle(ledger, 1, {{1, false}});
  check_refused(ledger, "was settled", [&] { ledger.abandon(1); });
}

TEST_CASE("what an abandoned update would have changed travels in the next one") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 600);
  const RequestId b = admit_with(ledger, 10);
  prepare(ledger, {{b, 10}});
  settle(ledger, 0, {{10, false}});
  ledger.release(b);
  ledger.resume(a);
  CHECK(prepare(ledger, {{a, 513}}).lowered_limits().size() == 1);
  ledger.abandon(1);
  ledger.check_invariants();
  CHECK(ledger.info(a).upper_tokens == 0);
  CHECK(ledger.info(a).secured_tokens == 600);

  SUBCASE("in a step of the same request") {
    const StepUpdate& update = prepare(ledger, {{a, 257}});
    CHECK(update.id() == 1);
    CHECK(update.batch_rows()[0].flags == (BatchRowUpdate::kNewOwner | BatchRowUpdate::kResume));
    CHECK(update.batch_rows()[0].limit == 257);
    CHECK(update.cells().size() == 2);
    REQUIRE(update.lowered_limits().size() == 1);
    CHECK(update.lowered_limits()[0].seat == 1);
    CHECK(update.lowered_limits()[0].limit == 0);
  }
  SUBCASE("in a step of nobody") {
    const StepUpdate& update = prepare(ledger, {});
    CHECK(update.cells().empty());
    CHECK(update.lowered_limits().size() == 2);
  }
  SUBCASE("with a release meanwhile, which stays") {
    ledger.release(a);
    CHECK(ledger.usage().pages_owned == 0);
    CHECK(prepare(ledger, {}).lowered_limits().size() == 2);
    CHECK_THROWS_AS(ledger.release(a), UsageError);
  }
  ledger.check_invariants();
  CHECK(prepare(ledger, {}).lowered_limits().empty());
}

TEST_CASE("a released seat's limit is 0 in the next update, and only there") {
  Ledger ledger(long_draft_limits());
  const RequestId a = admit_with(ledger, 10);
  const RequestId never_sent = admit_with(ledger, 10);
  prepare(ledger, {{a, 10}});
  ledger.release(a);
  ledger.release(never_sent);
  const StepUpdate& update = prepare(ledger, {});
  REQUIRE(update.lowered_limits().size() == 1);
  CHECK(update.lowered_limits()[0].seat == a.index);
  CHECK(update.lowered_limits()[0].limit == 0);
  settle(ledger, 0, {{3, false}});
  CHECK(prepare(ledger, {}).lowered_limits().empty());
}

TEST_CASE("pages given back fall under the promise again") {
  Limits limits = long_draft_limits();
  limits.run_ahead_max = 0;
  Ledger ledger(limits);
  const RequestId a = ledger.admit(1024, 512).value();
  REQUIRE(ledger.reserve(a, 768));
  prepare(ledger, {{a, 768}});
  CHECK(ledger.headroom().pages == 9);
  settle(ledger, 0, {{5, false}});
  prepare(ledger, {});
  CHECK(ledger.info(a).pages_owned == 1);
  CHECK(ledger.info(a).pages_promised == 1);
  CHECK(ledger.headroom().pages == 10);
}

TEST_CASE("a padding update has no id and changes nothing") {
  Ledger ledger(small_limits());
  const RequestId a = admit_with(ledger, 10);
  prepare(ledger, {{a, 10}});
  ledger.release(a);
  const std::uint64_t before = ledger.digest();
  const StepUpdate& update = ledger.padding_update(StepShape::decode(3, 2), PlanBufferId(1));
  CHECK(update.id() == kPaddingStep);
  CHECK(update.shape() == StepShape::decode(3, 2));
  CHECK(update.bytes().size() == sizeof(StepUpdateHeader));
  CHECK(update.plan_buffer() == PlanBufferId(1));
  CHECK(update.header().repeat == 1);
  CHECK(ledger.digest() == before);
  CHECK(prepare(ledger, {}).lowered_limits().size() == 1);
}

}  // namespace
}  // namespace quire
