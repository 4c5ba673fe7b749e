// Appends and commits that do not find their plan, in ways that only the device can see: the update
// was never planned, a clear came between, pieces of graphs are replayed out of order. They change
// nothing and are counted in the report.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include "tests/support/field_stories.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr LayerGroup kTarget = LayerGroup::kTarget;
constexpr LayerGroup kDraft = LayerGroup::kDraft;

TestEngineOptions small_options() {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.seats_max = 4;
  options.limits.pages = 8;
  options.limits.rows_max = 4;
  options.limits.tokens_max = 512;
  options.limits.context_max = 512;
  options.limits.run_ahead_max = 0;
  return options;
}

std::int32_t unplanned_of(TestEngine& engine) { return report_of(engine).appends_unplanned; }

// Nothing but appends and commits without a plan.
void check_report(TestEngine& engine, std::int32_t appends, std::int32_t commits,
                  PlanBufferId buffer = kBuffer) {
  const DeviceReport report = report_of(engine, buffer);
  CHECK(report.appends_unplanned == appends);
  CHECK(report.commits_unplanned == commits);
  CHECK(report.first_failing_seat == DeviceReport::kNoSeat);
}

// A step of one layer group, cut into graphs that can be replayed in any order.
struct Pieces {
  GraphExec plan, appends, commit;

  void launch_all(StreamView stream) const {
    for (const GraphExec* piece : {&plan, &appends, &commit}) piece->launch(stream);
  }
};

Pieces capture_pieces(TestEngine& engine, StepShape shape, LayerGroup group = kTarget,
                      PlanBufferId buffer = kBuffer) {
  DeviceCache& device = engine.cache().device();
  const StreamView stream = engine.stream();
  engine.cache().begin_padding_step(shape, buffer, stream);
  engine.stream().wait();
  const auto captured = [&](const auto& body) {
    Capture capture(engine.backend(), stream);
    body();
    return capture.finish();
  };
  GraphExec plan = captured([&] { device.enqueue_plan(buffer, stream, {.group = group}); });
  GraphExec appends = captured([&] {
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(device.spec().layers.size()); ++i) {
      const LayerId layer(i);
      if (device.spec().group_of(layer) != group) continue;
      const auto at = engine.rows_of(layer);
      device.append(layer, buffer, {{at.window}, {at.csa}, {at.indexer}, {at.hca}}, stream);
    }
  });
  GraphExec commit = captured([&] { device.enqueue_commit(buffer, nullptr, nullptr, stream); });
  return {std::move(plan), std::move(appends), std::move(commit)};
}

TEST_CASE("an append that forgot its plan touches nobody's bytes, though its shape was captured") {
  TestEngine engine(test_backend(), small_options());
  const StepShape shape = StepShape::decode(1);
  const RequestId a = engine.admit(0, 256);
  for (int i = 0; i < 135; ++i) engine.replay_step(std::vector<StepRow>{{a, 1}}, shape);
  const RequestId z = engine.admit(0, 256);
  const std::vector<StepRow> rows{{z, 1}};
  const auto before = engine.live_bytes(a);
  static_cast<void>(engine.begin(rows, shape));
  const std::uint64_t hash = engine.memory_hash();
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    engine.enqueue_append(LayerId(layer), shape, engine.stream());
  }
  CHECK(unplanned_of(engine) == 3);
  CHECK(engine.memory_hash() == hash);
  const bool same = engine.live_bytes(a) == before;
  CHECK(same);
}

TEST_CASE("a capture that was dropped after its plan has planned nothing") {
  TestEngine engine(test_backend(), small_options());
  const RequestId a = engine.admit(0, 256);
  engine.ragged_step({{a, 40}});
  const StepShape shape = StepShape::ragged(1, 30);
  const std::vector<StepRow> rows{{a, 30}};
  static_cast<void>(engine.begin(rows, shape));
  {
    Capture dropped(engine.backend(), engine.stream());
    engine.cache().device().enqueue_plan(kBuffer, engine.stream());
  }
  const std::uint64_t hash = engine.memory_hash();
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    engine.enqueue_append(LayerId(layer), shape, engine.stream());
  }
  CHECK(unplanned_of(engine) == 3);
  CHECK(engine.memory_hash() == hash);
}

TEST_CASE("behind a clear the pieces of an old step do nothing, until the next update") {
  for (const StepShape shape : {StepShape::decode(1), StepShape::ragged(1, 20)}) {
    CAPTURE(shape.tokens);
    TestEngine engine(test_backend(), small_options());
    const std::uint64_t zeroes = engine.memory_hash();
    const Pieces step = capture_pieces(engine, shape);
    const std::vector<StepRow> old{{engine.admit(0, 256), shape.tokens}};
    static_cast<void>(engine.begin(old, shape));
    step.plan.launch(engine.stream());
    step.appends.launch(engine.stream());
    CHECK(engine.memory_hash() != zeroes);

    engine.cache().reset(engine.stream());
    CHECK(engine.memory_hash() == zeroes);
    check_report(engine, 0, 0);
    step.appends.launch(engine.stream());
    step.commit.launch(engine.stream());
    check_report(engine, 3, 1);
    step.launch_all(engine.stream());
    check_report(engine, 6, 2);
    CHECK(engine.memory_hash() == zeroes);

    const std::vector<StepRow> rows{{engine.admit(0, 256), shape.tokens}};
    const StepId id = engine.begin(rows, shape);
    step.launch_all(engine.stream());
    engine.finish(id, rows);
    check_report(engine, 0, 0);
    const bool same = engine.live_bytes(rows[0].request) == alone(small_options(), 0, shape.tokens);
    CHECK(same);
  }
}

// Owners are counted anew behind a clear, and the counts of an old step fit a new owner's.
TEST_CASE("a step that was applied before a clear does not write for who owns its seat behind it") {
  TestEngineOptions options = small_options();
  options.limits.plan_buffers = 2;
  TestEngine engine(test_backend(), options);
  const PlanBufferId other(1);
  const StepShape shape = StepShape::decode(1);
  const Pieces step = capture_pieces(engine, shape, kTarget, other);
  const RequestId old = engine.admit(0, 256);
  engine.cache().ledger().reserve(old, 1).value();
  const std::vector<BatchRow> batch{{old, 1}};
  engine.cache().begin_step(batch, shape, other, engine.stream());
  const SeatId seat = engine.cache().ledger().info(old).seat;

  engine.cache().reset(engine.stream());
  const RequestId owner = engine.admit(0, 256);
  REQUIRE(engine.cache().ledger().info(owner).seat == seat);
  engine.ragged_step({{owner, 40}});
  static_cast<void>(engine.begin(std::vector<StepRow>{{owner, 1}}, shape));  // has room for it
  const std::uint64_t before = engine.memory_hash();
  step.launch_all(engine.stream());
  check_report(engine, 3, 1, other);
  CHECK(engine.memory_hash() == before);
}

// Pieces of both groups of a step have one shape: nothing but the group tells them apart.
TEST_CASE("pieces behind a plan of the other layer group do nothing, and are reported") {
  TestEngineOptions options = small_options();
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca,
                         LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.spec.draft_layers = 3;
  options.limits.draft_max = 3;
  for (const StepShape shape : {StepShape::decode(2, 4), StepShape::ragged(2, 300)}) {
    CAPTURE(shape.tokens);
    TestEngine engine(test_backend(), options), straight(test_backend(), options);
    const Pieces target = capture_pieces(engine, shape, kTarget);
    const Pieces draft = capture_pieces(engine, shape, kDraft);
    const Pieces same_target = capture_pieces(straight, shape, kTarget);
    const Pieces same_draft = capture_pieces(straight, shape, kDraft);
    const std::int32_t tokens = shape.tokens / 2;
    for (TestEngine* each : {&engine, &straight}) {
      const std::vector<StepRow> rows{{each->admit(0, 256), tokens}, {each->admit(0, 256), tokens}};
      static_cast<void>(each->begin(rows, shape));
    }
    const std::uint64_t before = engine.memory_hash();
    target.plan.launch(engine.stream());
    draft.appends.launch(engine.stream());
    check_report(engine, 3, 0);
    draft.commit.launch(engine.stream());
    check_report(engine, 3, 1);
    draft.plan.launch(engine.stream());
    target.appends.launch(engine.stream());
    check_report(engine, 6, 1);
    target.commit.launch(engine.stream());
    check_report(engine, 6, 2);
    CHECK(engine.memory_hash() == before);

    // In order all is well, and what was reported says so no more often.
    target.launch_all(engine.stream());
    draft.launch_all(engine.stream());
    check_report(engine, 6, 2);
    same_target.launch_all(straight.stream());
    same_draft.launch_all(straight.stream());
    check_report(straight, 0, 0);
    CHECK(engine.memory_hash() != before);
    CHECK(engine.memory_hash() == straight.memory_hash());
  }
}

}  // namespace
