// What an engine supplies on the device for a plan, case by case, against the reference planner:
// positions and counts of tokens, right ones and wrong ones. Runs on test_backend(), host or CUDA.
#include <doctest/doctest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/plan_groups.h"

using namespace quire;
using namespace quire::test;

TEST_CASE("positions from the length on that ascend and stay near it are planned") {
  for (const LayerGroup group : {kTarget, kDraft}) {
    OneRow one;
    if (group == kDraft) one.plan({one.shape});  // the target's comes first
    one.plan({one.shape, group, from(100)});
    CHECK(one.row().live_tokens == 4);
    one.plan({StepShape::decode(1, 4), group, from(100), {2}});
    CHECK(one.row().live_tokens == 2);
    CHECK(one.report().first_failing_seat == DeviceReport::kNoSeat);
  }
  OneRow one;
  one.plan({one.shape});
  for (std::int32_t tokens = 1; tokens <= 3; ++tokens) {
    const StepShape pass = StepShape::decode(1, tokens);
    for (std::int32_t start = 100; start + tokens <= 104; ++start) {  // draft_max is 3
      std::vector<std::int32_t> positions = from(start);
      positions.resize(static_cast<std::size_t>(tokens));
      one.plan({pass, kDraft, positions});
      CHECK(one.row().start == start);
      CHECK(one.row().live_tokens == tokens);
    }
  }
  CHECK(one.report().first_failing_seat == DeviceReport::kNoSeat);
}

TEST_CASE("positions that are wrong in any way make their row inert, are reported, and no other") {
  struct Wrong {
    const char* what;
    std::vector<std::int32_t> positions;
  };
  const std::vector<Wrong> wrongs{{"below the length", from(99)},
                                  {"far below", from(0)},
                                  {"negative", from(-4)},
                                  {"the least there is", from(INT32_MIN)},
                                  {"one more than draft_max beyond", from(101)},
                                  {"far beyond", from(300)},
                                  {"huge", from(INT32_MAX - 3)},
                                  {"around the end", {INT32_MAX, INT32_MIN, INT32_MIN, 1}},
                                  {"a gap", {100, 101, 103, 104}},
                                  {"one twice", {100, 100, 101, 102}},
                                  {"descending", {103, 102, 101, 100}},
                                  {"the last wrong", {100, 101, 102, 102}},
                                  {"the second wrong", {100, 99, 102, 103}}};
  const StepShape shape = StepShape::decode(3, 4);
  for (const LayerGroup group : {kTarget, kDraft}) {
    for (const Wrong& wrong : wrongs) {
      CAPTURE(wrong.what);
      PlanPair pair(sizes_of_both_groups(3, shape));
      fill_seats(pair, 3);
      for (std::int32_t s = 0; s < 3; ++s) {
        length_at(pair.places(), kTarget, s) = length_at(pair.places(), kDraft, s) = 100;
      }
      pair.push();
      apply_seats(pair, shape, 3);
      if (group == kDraft) pair.plan(shape);
      PlanRequest request{shape, group, from(100)};
      request.positions.insert(request.positions.end(), wrong.positions.begin(),
                               wrong.positions.end());
      for (const std::int32_t p : from(100)) request.positions.push_back(p);
      pair.plan(request);
      pair.check_equal("planned");
      const PlanBuffer& plan = pair.places().plan;
      CHECK(plan.report->rows_wrong_positions == 1);
      CHECK(plan.report->first_failing_seat == 1);
      CHECK(plan.rows[0].live_tokens == 4);
      CHECK(plan.rows[1].live_tokens == 0);
      CHECK(plan.rows[1].start == 100);
      CHECK(plan.rows[2].live_tokens == 4);
    }
  }
}

TEST_CASE("positions beyond the seat's limit are reported as that") {
  OneRow one;
  one.pair.places().table.limit[0] = 102;
  one.pair.push();
  const StepShape pass = StepShape::decode(1);
  one.plan({one.shape, kTarget, {}, {2}});
  for (const auto& [position, live] : {std::pair{101, 1}, std::pair{102, 0}, std::pair{103, 0}}) {
    one.plan({pass, kDraft, {position}});
    CHECK(one.row().live_tokens == live);
  }
  CHECK(one.report().rows_at_limit == 2);
  CHECK(one.report().rows_wrong_positions == 0);
}

TEST_CASE("counts of tokens from none to those that were applied are planned, others reported") {
  for (const LayerGroup group : {kTarget, kDraft}) {
    OneRow one;
    if (group == kDraft) one.plan({one.shape});
    for (std::int32_t count = 0; count <= 4; ++count) {
      one.plan({one.shape, group, {}, {count}});
      CHECK(one.row().live_tokens == count);
    }
    CHECK(one.report().first_failing_seat == DeviceReport::kNoSeat);
    std::int32_t reported = 0;
    for (const std::int32_t count : {-1, 5, INT32_MAX, INT32_MIN}) {
      one.plan({one.shape, group, {}, {count}});
      CHECK(one.row().live_tokens == 0);
      CHECK(one.report().rows_wrong_tokens == ++reported);
    }
    CHECK(one.report().first_failing_seat == 0);
  }
  OneRow one;  // of those that a pass has room for
  one.plan({one.shape});
  one.plan({StepShape::decode(1, 2), kDraft, {}, {3}});
  CHECK(one.report().rows_wrong_tokens == 1);
}

TEST_CASE("plans with fewer tokens per row are the draft group's alone") {
  OneRow one;
  one.plan({StepShape::decode(1, 3)});
  CHECK(one.report().rows_wrong_shape == 1);
  one.plan({one.shape});
  one.plan({StepShape::decode(1, 3), kDraft});
  CHECK(one.row().live_tokens == 3);
  CHECK(one.report().rows_wrong_shape == 1);
  one.plan({StepShape::decode(1, 5), kDraft});
  CHECK(one.report().rows_wrong_shape == 2);
  one.plan({StepShape::decode(2, 2), kDraft});
  CHECK(one.report().rows_wrong_shape == 3);
}

TEST_CASE("a commit that would leave a gap behind the length is reported and does nothing") {
  for (const LayerGroup group : {kTarget, kDraft}) {
    OneRow one;
    if (group == kDraft) {
      one.plan({one.shape});
      length_at(one.pair.places(), kTarget, 0) = 110;
      one.pair.push();
    }
    for (const std::int32_t start : {100, 102, 101}) {
      CAPTURE(start);
      one.plan({one.shape, group, from(start), {2}});
      CommitRequest commit{one.shape, {}, {}, group, true};
      one.commit(commit);
      CHECK(one.length(group) == (start == 100 ? 102 : start == 102 ? 104 : 104));
    }
  }
  for (const LayerGroup group : {kTarget, kDraft}) {
    OneRow one;
    if (group == kDraft) one.plan({one.shape});
    one.plan({one.shape, group, from(101), {2}});
    one.commit({one.shape, {}, {}, group, true});
    CHECK(one.length(group) == 100);
    CHECK(one.report().rows_kept_wrong == 1);
    CHECK(one.report().first_failing_seat == 0);
    CHECK(one.result().length == 100);
  }
}
