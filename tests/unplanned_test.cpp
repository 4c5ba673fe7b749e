// An append whose update was never planned, in ways that only the device can see: it writes nothing
// and is counted in the report.
#include <doctest/doctest.h>

#include <vector>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);

TestEngineOptions small_engine() {
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

std::int32_t unplanned_of(TestEngine& engine) {
  DeviceReport report{};
  engine.cache().device().report(kBuffer, &report, engine.stream());
  engine.stream().wait();
  return report.appends_unplanned;
}

TEST_CASE("an append that forgot its plan touches nobody's bytes, though its shape was captured") {
  TestEngine engine(test_backend(), small_engine());
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
  TestEngine engine(test_backend(), small_engine());
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

}  // namespace
