// Layer groups in plans and commits, case by case, against the reference planner: whose length a
// plan starts from and a commit moves, how many runs are left, what the results say. What may be
// supplied on the device is planner_supplied_test's. Runs on test_backend(), host or CUDA.
#include <doctest/doctest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/plan_groups.h"

using namespace quire;
using namespace quire::test;

TEST_CASE("each group's plan starts from its own length, and its commit moves that alone") {
  const StepShape shape = StepShape::decode(5, 4);
  PlanPair pair(sizes_of_both_groups(7, shape));
  fill_seats(pair, 7);
  apply_seats(pair, shape, 5);
  for (const LayerGroup group : {kTarget, kDraft}) {
    pair.plan({shape, group});
    pair.check_equal("planned");
    for (std::int32_t r = 0; r < 5; ++r) {
      CHECK(pair.places().plan.rows[r].start == (group == kDraft ? 97 : 100) + 10 * r);
    }
    CommitRequest commit{shape, {4, 3, 2, 1, 0}};
    commit.group = group;
    pair.commit(commit);
    pair.check_equal("committed");
  }
  for (std::int32_t s = 0; s < 7; ++s) {
    const std::int32_t kept = s < 5 ? 4 - s : 0;
    CHECK(length_at(pair.places(), kTarget, s) == 100 + 10 * s + kept);
    CHECK(length_at(pair.places(), kDraft, s) == 97 + 10 * s + kept);
  }
}

TEST_CASE("a ragged plan of the draft group starts from the draft lengths, long rows included") {
  const StepShape shape = StepShape::ragged(3, 200);
  PlanPair pair(sizes_of_both_groups(4, shape));
  fill_seats(pair, 4);
  pair.start(shape);
  const std::int32_t tokens[] = {2, 4, 150};
  for (std::int32_t s = 0; s < 3; ++s) pair.update().add(BatchRowUpdate{s, tokens[s], kLimit, 0});
  pair.apply();
  for (const LayerGroup group : {kTarget, kDraft}) {
    pair.plan({shape, group});
    pair.check_equal("planned");
    CommitRequest commit{shape};
    commit.group = group;
    pair.commit(commit);
    pair.check_equal("committed");
  }
  CHECK(length_at(pair.places(), kDraft, 2) == 97 + 20 + 150);
  CHECK(length_at(pair.places(), kTarget, 2) == 100 + 20 + 150);
}

TEST_CASE("a draft plan lives in the step of a target plan that lived, and takes no run away") {
  OneRow one(1);
  one.plan({one.shape, kDraft});
  CHECK(one.report().rows_out_of_steps == 1);  // the target's was not planned yet
  one.plan({one.shape});
  one.commit({one.shape, {2}});
  CHECK(one.steps_left() == 0);
  CommitRequest extend{one.shape};
  extend.group = kDraft;
  one.plan({one.shape, kDraft, {}, {2}});  // the last step is not over for it
  CHECK(one.row().live_tokens == 2);
  one.commit(extend);
  CHECK(one.steps_left() == 0);
  one.plan({StepShape::decode(1), kDraft, {102}});
  CHECK(one.row().live_tokens == 1);
  CHECK(one.report().rows_out_of_steps == 1);
  CHECK(one.length(kTarget) == 102);
  CHECK(one.length(kDraft) == 102);

  one.plan({one.shape});  // one replay too many
  one.commit({one.shape, {2}});
  one.plan({one.shape, kDraft});
  one.commit(extend);
  CHECK(one.report().rows_out_of_steps == 2);  // the target's plan, and nobody again
  CHECK(one.length(kTarget) == 102);
  CHECK(one.length(kDraft) == 102);
}

TEST_CASE("a commit belongs to the newest plan: of another group or shape it is only reported") {
  OneRow one;
  length_at(one.pair.places(), kDraft, 0) = 96;
  one.pair.push();
  CommitRequest draft{one.shape};
  draft.group = kDraft;
  one.plan({one.shape});
  one.commit(draft);
  CHECK(one.length(kDraft) == 96);
  CHECK(one.report().commits_unplanned == 1);
  one.plan({one.shape, kDraft});
  one.commit({one.shape});
  CHECK(one.length(kTarget) == 100);
  CHECK(one.steps_left() == 9);
  CHECK(one.report().commits_unplanned == 2);
  one.commit({StepShape::decode(1, 3)});
  CHECK(one.report().commits_unplanned == 3);
  one.commit(draft);
  CHECK(one.length(kDraft) == 100);
  CHECK(one.length(kTarget) == 100);
  CHECK(one.report().commits_unplanned == 3);
  CHECK(one.report().first_failing_seat == DeviceReport::kNoSeat);
}

TEST_CASE("a commit without a plan since the update, or of one run too many, is reported") {
  OneRow one(1);
  one.commit({one.shape});
  CHECK(one.report().commits_unplanned == 1);
  one.plan({one.shape});
  one.commit({one.shape});
  one.commit({one.shape});  // again, which is legal
  CHECK(one.report().commits_unplanned == 1);
  one.plan({one.shape});
  one.commit({one.shape});
  CHECK(one.report().commits_unplanned == 2);
  CHECK(one.length(kTarget) == 104);
  apply_seats(one.pair, one.shape, 1);
  CHECK(one.report().commits_unplanned == 0);
}

// A shape of fewer batch rows says nothing of the rest, which must not live either.
TEST_CASE("behind a target plan of the wrong shape no draft plan lives, in no batch row") {
  const StepShape shape = StepShape::decode(3, 2);
  PlanPair pair(sizes_of_both_groups(3, shape));
  fill_seats(pair, 3);
  apply_seats(pair, shape, 3);
  pair.plan({StepShape::decode(1, 2)});
  pair.check_equal("planned");
  CHECK(pair.places().plan.header->steps_at_plan == 0);
  pair.plan({shape, kDraft});
  pair.check_equal("planned");
  for (std::int32_t r = 0; r < 3; ++r) CHECK(pair.places().plan.rows[r].live_tokens == 0);
  CHECK(pair.places().plan.report->rows_wrong_shape == 1);
  CHECK(pair.places().plan.report->rows_out_of_steps == 2);
  pair.plan({shape});
  pair.plan({shape, kDraft});
  pair.check_equal("planned");
  for (std::int32_t r = 0; r < 3; ++r) CHECK(pair.places().plan.rows[r].live_tokens == 2);
}

// Pages follow what the target keeps: entries of a draft group ahead of it could lie in another's.
TEST_CASE("a draft commit that would get ahead of the target is reported and does nothing") {
  OneRow one;
  one.plan({one.shape});
  one.commit({one.shape, {2}});
  CommitRequest extend{one.shape, {3}};
  extend.group = kDraft;
  one.plan({one.shape, kDraft});
  one.commit(extend);
  CHECK(one.length(kDraft) == 100);
  CHECK(one.report().rows_kept_wrong == 1);
  extend.kept = {2};
  one.commit(extend);
  CHECK(one.length(kDraft) == 102);
  CHECK(one.report().rows_kept_wrong == 1);
}

TEST_CASE("second commits of both groups change nothing") {
  OneRow one(3);
  one.plan({one.shape});
  const CommitRequest verify{one.shape, {3}, {1}};
  one.commit(verify);
  for (int again = 0; again < 2; ++again) one.pair.enqueue_commit(verify);
  one.pair.check_equal("committed three times");
  CHECK(one.length(kTarget) == 103);
  CHECK(one.steps_left() == 2);
  one.commit({one.shape, {3}});  // without the flag, which is sticky
  CHECK(one.result().length == 103);
  CHECK(one.result().stopped == 1);
  one.pair.places().table.stopped[0] = 0;
  one.pair.push();
  one.plan({one.shape, kDraft});
  CommitRequest extend{one.shape, {2}};
  extend.group = kDraft;
  one.commit(extend);
  for (int again = 0; again < 2; ++again) one.pair.enqueue_commit(extend);
  one.pair.check_equal("committed three times");
  CHECK(one.length(kDraft) == 102);
}

TEST_CASE("kept counts and stop flags of padding rows are passed over and counted") {
  const StepShape shape = StepShape::decode(6, 2);
  PlanPair pair(sizes_of_both_groups(6, shape));
  fill_seats(pair, 6);
  apply_seats(pair, shape, 2);
  pair.plan(shape);
  pair.commit({shape, {1, 2, 0, -7, 9, 0}, {0, 0, 0, 0, 3, 200}});
  pair.check_equal("committed");
  const PlanBuffer& plan = pair.places().plan;
  CHECK(plan.report->padding_rows_kept == 3);
  CHECK(plan.report->rows_kept_wrong == 0);
  CHECK(plan.report->first_failing_seat == DeviceReport::kNoSeat);
  CHECK(length_at(pair.places(), kTarget, 1) == 112);
  pair.plan({shape, kDraft});
  CommitRequest extend{shape, {1, 1, 1, 1, 1, 1}};
  extend.group = kDraft;
  pair.commit(extend);
  pair.check_equal("committed");
  CHECK(plan.report->padding_rows_kept == 3 + 4);
}

TEST_CASE("results say length and stopped of every row, inert ones too, whatever was supplied") {
  const StepShape shape = StepShape::decode(6, 4);
  PlanPair pair(sizes_of_both_groups(7, shape));
  fill_seats(pair, 7);
  pair.places().table.stopped[1] = 1;
  pair.push();
  const auto check_results = [&](const std::vector<RowResult>& expected) {
    for (std::size_t r = 0; r < expected.size(); ++r) {
      CAPTURE(r);
      CHECK(pair.places().plan.results[r].length == expected[r].length);
      CHECK(pair.places().plan.results[r].stopped == expected[r].stopped);
    }
  };
  apply_seats(pair, shape, 5);
  check_results({{100, 0}, {110, 1}, {120, 0}, {130, 0}, {140, 0}, {0, 0}});
  // A stopped row, one without tokens and one of wrong counts, all at positions that would fit.
  PlanRequest request{shape};
  for (std::int32_t r = 0; r < 6; ++r) {
    for (const std::int32_t p : from(100 + 10 * r)) request.positions.push_back(p);
  }
  request.row_tokens = {3, 1, 0, 7, 2, 1};
  for (std::int32_t r : {1, 2, 3, 4}) {
    for (std::int32_t j = 0; j < 4; ++j) ++request.positions[static_cast<std::size_t>(4 * r + j)];
  }
  pair.plan(request);
  pair.check_equal("planned");
  pair.commit({shape, {2, 1, 1, 1, 1, 0}, {1, 0, 1, 0, 0, 0}, kTarget, true});
  pair.check_equal("committed");
  check_results({{102, 1}, {110, 1}, {120, 0}, {130, 0}, {140, 0}, {0, 0}});
  CHECK(pair.places().plan.report->rows_kept_wrong == 1);  // seat 4, beyond its length
  // A draft commit leaves them alone.
  pair.plan({shape, kDraft});
  CommitRequest extend{shape};
  extend.group = kDraft;
  pair.commit(extend);
  pair.check_equal("committed");
  check_results({{102, 1}, {110, 1}, {120, 0}, {130, 0}, {140, 0}, {0, 0}});
}

TEST_CASE("results say what a visit of another plan buffer has done between update and plan") {
  const StepShape shape = StepShape::decode(4, 4);
  PlanPair pair(sizes_of_both_groups(4, shape));
  fill_seats(pair, 4);
  apply_seats(pair, shape, 4);
  for (std::int32_t s = 0; s < 4; ++s) length_at(pair.places(), kTarget, s) += 3;
  pair.places().table.stopped[1] = 1;
  pair.push();
  pair.plan(shape);
  pair.commit({shape, {2, 2, 9, 0}});
  pair.check_equal("committed");
  const RowResult* results = pair.places().plan.results;
  for (std::int32_t r = 0; r < 4; ++r) {
    CAPTURE(r);
    CHECK(results[r].length == 103 + 10 * r + (r == 0 ? 2 : 0));
    CHECK(results[r].stopped == (r == 1 ? 1 : 0));
  }
  CHECK(pair.places().plan.report->rows_kept_wrong == 1);
}

TEST_CASE("a new owner starts both groups at 0, a resumed request neither") {
  const StepShape shape = StepShape::decode(2, 2);
  PlanPair pair(sizes_of_both_groups(3, shape));
  fill_seats(pair, 3);
  for (std::int32_t s = 0; s < 3; ++s) pair.places().table.stopped[s] = 1;
  pair.push();
  pair.start(shape);
  pair.update().add(BatchRowUpdate{1, 2, 9, BatchRowUpdate::kNewOwner});
  pair.update().add(BatchRowUpdate{2, 2, kLimit, BatchRowUpdate::kResume});
  pair.apply();
  pair.check_equal("applied");
  const PlanPlaces at = pair.places();
  for (const LayerGroup group : {kTarget, kDraft}) {
    CHECK(length_at(at, group, 0) > 0);
    CHECK(length_at(at, group, 1) == 0);
    CHECK(length_at(at, group, 2) > 0);
    pair.plan({shape, group});
    pair.check_equal("planned");
    CHECK(at.plan.rows[0].live_tokens == 2);
    CHECK(at.plan.rows[1].live_tokens == 2);
  }
}

TEST_CASE("a captured step of both groups follows what is supplied through every replay") {
  const StepShape shape = StepShape::decode(5, 4);
  const StepShape pass = StepShape::decode(5);
  PlanPair pair(sizes_of_both_groups(7, shape));
  fill_seats(pair, 7);
  for (std::int32_t s = 0; s < 7; ++s) length_at(pair.places(), kDraft, s) += 3;
  pair.push();
  apply_seats(pair, shape, 0);  // warm-up and capture see padding
  CommitRequest verify{shape, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}};
  PlanRequest extend{shape, kDraft, {}, {0, 0, 0, 0, 0}};
  CommitRequest extended{shape};
  extended.group = kDraft;
  PlanRequest drafting{pass, kDraft, {0, 0, 0, 0, 0}};
  Capture capture(pair.backend(), pair.stream());
  pair.enqueue_plan(shape);
  pair.enqueue_commit(verify);
  pair.enqueue_plan(extend);
  pair.enqueue_commit(extended);
  pair.enqueue_plan(drafting);
  const GraphExec graph = capture.finish();
  apply_seats(pair, shape, 5, 3);
  for (std::int32_t run = 0; run < 5; ++run) {
    CAPTURE(run);
    for (std::int32_t r = 0; r < 5; ++r) {
      const auto i = static_cast<std::size_t>(r);
      verify.kept[i] = extend.row_tokens[i] = (r + run) % 5;
      verify.stop[i] = run == 1 && r == 3;
      drafting.positions[i] = length_at(pair.places(), kTarget, r) + verify.kept[i];
    }
    pair.supply(verify);
    pair.supply({shape, kDraft, drafting.positions, extend.row_tokens});
    graph.launch(pair.stream());
    pair.reference_plan(shape);
    pair.reference_commit(verify);
    pair.reference_plan(extend);
    pair.reference_commit(extended);
    pair.reference_plan(drafting);
    pair.check_equal("replayed");
  }
  const PlanBuffer& plan = pair.places().plan;
  CHECK(plan.results[0].length == 100 + 0 + 1 + 2);
  CHECK(plan.results[3].length == 130 + 3 + 4);  // stopped behind the second run
  CHECK(plan.results[3].stopped == 1);
  CHECK(length_at(pair.places(), kDraft, 0) == 103);
  CHECK(length_at(pair.places(), kDraft, 3) == 137);  // it follows in the step of the stop, too
  CHECK(plan.report->rows_out_of_steps > 0);
  CHECK(plan.report->rows_wrong_positions == 0);
}

TEST_CASE("a row whose seat has gone to another request is inert, whatever was applied before") {
  const StepShape shape = StepShape::decode(2, 3);
  PlanPair pair(sizes_for(4, 4, shape));
  for (std::int32_t s = 0; s < 2; ++s) pair.seat(s, 100, 120);
  pair.push();
  pair.start(shape, 4);
  for (std::int32_t s = 0; s < 2; ++s) pair.update().add(BatchRowUpdate{s, 3, 120, 0});
  pair.apply();
  // As an update of another plan buffer does that names a new owner of seat 0.
  const auto give_away = [&](std::int32_t seat) {
    pair.places().table.owner[seat] += 1;
    pair.places().table.length[seat] = 0;
    pair.push();
  };

  SUBCASE("between update and plan") {
    give_away(0);
    pair.plan(shape);
    pair.check_equal("planned");
    CHECK(pair.places().plan.rows[0].live_tokens == 0);
    CHECK(pair.places().plan.rows[0].start == 0);
    CHECK(pair.places().plan.rows[1].live_tokens == 3);
    CHECK(pair.places().plan.report->rows_of_former_owners == 1);
    pair.commit(shape);
    pair.check_equal("committed");
    CHECK(pair.places().table.length[0] == 0);
  }
  SUBCASE("between plan and commit") {
    pair.plan(shape);
    give_away(1);
    pair.commit(shape);
    pair.check_equal("committed");
    CHECK(pair.places().table.length[0] == 103);
    CHECK(pair.places().table.length[1] == 0);
    CHECK(pair.places().plan.results[1].stopped == 1);
    CHECK(pair.places().plan.report->rows_of_former_owners == 1);
  }
}
