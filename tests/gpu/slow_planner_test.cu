// Steps behind a planner that lets its successors go at once and sleeps 100 us before its first
// store: this program links its own build of the planner (tests/CMakeLists.txt). An append that
// does not stand behind the full edge reads the records of the plan before; bytes are compared with
// the host backend's (docs/PDL.md).
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int32_t kTokens = 150;  // more than an HCA entry
constexpr PlanBufferId kBuffer(0);
constexpr Pdl kModes[] = {Pdl::kOff, Pdl::kWaitOnly, Pdl::kPrologue};

TestEngineOptions engine_options(Pdl pdl) {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kCsa, LayerKind::kHca, LayerKind::kSliding, LayerKind::kCsa};
  options.limits.seats_max = 4;
  options.limits.pages = 16;
  options.limits.rows_max = 4;
  options.limits.tokens_max = 256;
  options.limits.context_max = 520;
  options.limits.run_ahead_max = 0;
  options.contents = 2;
  options.pdl = pdl;
  return options;
}

std::vector<std::byte> host_bytes(std::int64_t content) {
  const auto backend = make_host_backend();
  TestEngine engine(*backend, engine_options(Pdl::kOff));
  return one_shot(engine, content, kTokens);
}

// What a kernel behind a plan sees of it before and after its wait.
struct ProbeParams {
  const std::int32_t* position;
  std::int32_t* seen;  // [2]
};

__global__ void probe_kernel(const __grid_constant__ ProbeParams params) {
  const std::int32_t before = __ldcg(params.position);
  cuda::pdl_wait();
  cuda::pdl_trigger();
  params.seen[0] = before;
  params.seen[1] = __ldcg(params.position);
}

// Plan and appends of a step, in one of several ways. Of three plans the first two find every seat
// stopped: all that they write is inert, and only the third has the step's records.
enum class Way { kPlain, kThreePlans, kForkFirst, kForkLast };

class SlowEngine {
 public:
  explicit SlowEngine(Pdl pdl)
      : engine_(test_backend(), engine_options(pdl)),
        side_(engine_.backend()),
        forked_(engine_.backend()),
        joined_(engine_.backend()) {
    engine_.poison();
  }

  TestEngine& engine() { return engine_; }

  GraphExec capture(StepShape shape, Way way) {
    engine_.cache().begin_padding_step(shape, kBuffer, engine_.stream());
    engine_.stream().wait();
    Capture capture(engine_.backend(), engine_.stream());
    if (way == Way::kForkFirst || way == Way::kForkLast) {
      enqueue_forked(shape, way == Way::kForkFirst);
    } else {
      if (way == Way::kThreePlans) {
        stop_seats(true);
        for (int i = 0; i < 2; ++i) plan();
        stop_seats(false);
      }
      engine_.enqueue_body(shape, engine_.stream());
    }
    engine_.enqueue_commit(engine_.stream());
    return capture.finish();
  }

 private:
  void plan() { engine_.cache().device().enqueue_plan(kBuffer, engine_.stream()); }

  // No seat of these tests stops otherwise.
  void stop_seats(bool stopped) {
    const StepTable& table = engine_.cache().device().step_table();
    engine_.backend().fill(table.stopped, stopped ? 1 : 0,
                           table.seats * std::int64_t{sizeof(std::int32_t)}, engine_.stream());
  }

  // Layer 0 on the side while layer 1 runs here, both right behind the plan, enqueued in either
  // order.
  void enqueue_forked(StepShape shape, bool side_first) {
    plan();
    forked_.record(engine_.stream());
    forked_.join_into(side_);
    if (side_first) engine_.enqueue_append(LayerId(0), shape, side_);
    engine_.enqueue_append(LayerId(1), shape, engine_.stream());
    if (!side_first) engine_.enqueue_append(LayerId(0), shape, side_);
    joined_.record(side_);
    joined_.join_into(engine_.stream());
    engine_.enqueue_append(LayerId(2), shape, engine_.stream());
    engine_.enqueue_append(LayerId(3), shape, engine_.stream());
  }

  TestEngine engine_;
  Stream side_;
  Event forked_, joined_;
};

}  // namespace

TEST_CASE("a kernel behind this program's planner that does not wait sees the plan before") {
  if (!kernels_may_overlap()) {
    MESSAGE("SKIPPED: nothing overlaps");
    return;
  }
  SlowEngine slow(Pdl::kOff);
  TestEngine& engine = slow.engine();
  DeviceArray<std::int32_t> seen(engine.backend(), engine.stream(), 2, 0);
  for (const StepShape shape : {StepShape::decode(2), StepShape::ragged(2, 9)}) {
    CAPTURE(shape.is_decode());
    engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
    engine.stream().wait();
    Capture capture(engine.backend(), engine.stream());
    engine.cache().device().enqueue_plan(kBuffer, engine.stream());
    const std::int32_t* position = engine.cache().device().views(kBuffer).positions;
    cuda::launch(probe_kernel, dim3(1), dim3(1), 0, engine.stream().view().cuda(), true,
                 ProbeParams{position, seen.data()});
    engine.enqueue_commit(engine.stream());
    const GraphExec graph = capture.finish();
    const RequestId request = engine.admit(0, kTokens);
    const std::vector<StepRow> rows{{request, 1}};
    for (std::int32_t i = 0; i < 10; ++i) {
      engine.launch_step(graph, rows, shape);
      const std::vector<std::int32_t> found = seen.download();
      CAPTURE(i);
      if (i > 0) CHECK(found[0] == i - 1);
      CHECK(found[1] == i);
    }
    engine.release(request);
  }
}

// P12
TEST_CASE("decode steps behind a slow planner give the host's bytes, in all PDL modes") {
  const auto expected = host_bytes(0);
  const StepShape shape = StepShape::decode(2);
  for (const Pdl pdl : kModes) {
    for (const Way way : {Way::kPlain, Way::kThreePlans, Way::kForkFirst, Way::kForkLast}) {
      CAPTURE(static_cast<int>(pdl));
      CAPTURE(static_cast<int>(way));
      SlowEngine slow(pdl);
      TestEngine& engine = slow.engine();
      const GraphExec graph = slow.capture(shape, way);
      const RequestId request = engine.admit(0, kTokens);
      const std::vector<StepRow> rows{{request, 1}};
      for (std::int32_t i = 0; i < kTokens; ++i) {
        engine.launch_step(graph, rows, shape);
      }
      const bool same = engine.live_bytes(request) == expected;
      CHECK(same);
    }
  }
}

// P12
TEST_CASE("ragged steps behind a slow planner give the host's bytes, in all PDL modes") {
  const auto expected_long = host_bytes(0);
  const auto expected_short = host_bytes(1);
  const StepShape shape = StepShape::ragged(3, 40);
  // No fork: the layers of a ragged step share the window scratch, so they come one after another.
  for (const Pdl pdl : kModes) {
    for (const Way way : {Way::kPlain, Way::kThreePlans}) {
      CAPTURE(static_cast<int>(pdl));
      CAPTURE(static_cast<int>(way));
      SlowEngine slow(pdl);
      TestEngine& engine = slow.engine();
      const GraphExec graph = slow.capture(shape, way);
      std::vector<std::vector<std::byte>> found;
      // Content 0 in chunks of up to 39 tokens; content 1 in chunks of 1 to 5.
      for (std::int64_t content = 0; content < 2; ++content) {
        const RequestId request = engine.admit(content, kTokens);
        const std::int32_t chunk_max = content == 0 ? 39 : 5;
        for (const std::int32_t tokens : random_chunks(7, kTokens, chunk_max)) {
          const std::vector<StepRow> rows{{request, tokens}};
          engine.launch_step(graph, rows, shape);
        }
        found.push_back(engine.live_bytes(request));
      }
      const bool same = found[0] == expected_long && found[1] == expected_short;
      CHECK(same);
    }
  }
}
