// What a cache refuses about layer groups and visits of many steps, by text, before anything is
// enqueued: the newest plan stays what it was. Runs on test_backend().
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/group_engine.h"
#include "tests/support/test_backend.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr LayerGroup kTarget = LayerGroup::kTarget;
constexpr LayerGroup kDraft = LayerGroup::kDraft;

TestEngineOptions options_of(std::int64_t draft_layers) {
  TestEngineOptions options = small_engine(2, 300);
  options.spec.layers = {LayerKind::kCsa, LayerKind::kSliding};
  options.spec.draft_layers = draft_layers;
  options.limits.draft_max = 3;
  options.limits.repeat_max = 4;
  options.contents = 2;
  return options;
}

// A cache with a step of two batch rows of four tokens applied, and numbers on the device.
struct Applied {
  GroupEngine world{options_of(1)};
  DeviceCache& device = world.device();
  StreamView stream = world.stream();
  DeviceArray<std::int32_t> numbers{test_backend(), world.stream(), 16, 0};
  DeviceArray<std::uint8_t> stop{test_backend(), world.stream(), 2, 0};

  explicit Applied(StepShape shape = StepShape::decode(2, 4)) {
    std::vector<BatchRow> rows;
    for (std::int64_t content = 0; content < 2; ++content) {
      const RequestId request = world.admit(content, 20);
      world.ledger().reserve(request, 8).value();
      rows.push_back({request, 4, 4});
    }
    world.engine().cache().begin_step(rows, shape, kBuffer, stream);
  }

  void plan(const PlanInputs& inputs) { device.enqueue_plan(kBuffer, stream, inputs); }
  void append(std::int32_t layer) {
    AppendInputs inputs;
    inputs.window.data = world.engine().rows_of(LayerId(layer)).window;
    device.append(LayerId(layer), kBuffer, inputs, stream);
  }
  const std::int32_t* misaligned() {
    return reinterpret_cast<const std::int32_t*>(reinterpret_cast<std::uintptr_t>(numbers.data()) +
                                                 2);
  }
};

}  // namespace

TEST_CASE("a group that the model has no layers of is refused") {
  GroupEngine world(options_of(0));
  world.engine().cache().begin_padding_step(StepShape::decode(2, 4), kBuffer, world.stream());
  check_refused("the model has no layers of group draft; ModelSpec::draft_layers is 0",
                [&] { world.device().enqueue_plan(kBuffer, world.stream(), {.group = kDraft}); });
  for (const int unknown : {2, -1}) {
    check_refused("the model has no layers of group unknown layer group", [&] {
      world.device().enqueue_plan(kBuffer, world.stream(),
                                  {.group = static_cast<LayerGroup>(unknown)});
    });
  }
  CHECK_NOTHROW(world.device().enqueue_plan(kBuffer, world.stream(), {.group = kTarget}));
}

TEST_CASE("tokens per row are the draft group's, of a decode step, up to what was applied") {
  Applied applied;
  for (const std::int32_t bad : {-1, 5, INT32_MIN, INT32_MAX}) {
    check_refused("PlanInputs::tokens_per_row is " + std::to_string(bad) + "; supported: 0, or",
                  [&] { applied.plan({.group = kDraft, .tokens_per_row = bad}); });
  }
  for (const std::int32_t target_has_none : {1, 4}) {
    check_refused("in a decode step of the draft group 1 to what was applied, here 0",
                  [&] { applied.plan({.tokens_per_row = target_has_none}); });
  }
  CHECK_NOTHROW(applied.plan({}));
  for (std::int32_t fewer = 0; fewer <= 4; ++fewer) {
    CHECK_NOTHROW(applied.plan({.group = kDraft, .tokens_per_row = fewer}));
  }
  Applied ragged(StepShape::ragged(2, 8));
  check_refused("PlanInputs::tokens_per_row is 1",
                [&] { ragged.plan({.group = kDraft, .tokens_per_row = 1}); });
}

TEST_CASE("positions and counts are refused for ragged steps, and where they are misaligned") {
  Applied applied;
  check_refused("PlanInputs::positions at",
                [&] { applied.plan({.positions = applied.misaligned()}); });
  check_refused("PlanInputs::row_tokens at",
                [&] { applied.plan({.group = kDraft, .row_tokens = applied.misaligned()}); });
  Applied ragged(StepShape::ragged(2, 8));
  for (const LayerGroup group : {kTarget, kDraft}) {
    check_refused("PlanInputs::positions belongs to decode steps; the applied step is ragged",
                  [&] { ragged.plan({.group = group, .positions = ragged.numbers.data()}); });
    check_refused("PlanInputs::row_tokens belongs to decode steps; the applied step is ragged",
                  [&] { ragged.plan({.group = group, .row_tokens = ragged.numbers.data()}); });
  }
  CHECK_NOTHROW(ragged.plan({}));
  CHECK_NOTHROW(ragged.plan({.group = kDraft}));
}

TEST_CASE("a layer is appended under a plan of its own group") {
  Applied applied;
  applied.plan({});
  check_refused(
      "append: layer 1 is of the draft group, but plan buffer 0 was planned for the "
      "target group; enqueue_plan with PlanInputs::group first",
      [&] { applied.append(1); });
  CHECK_NOTHROW(applied.append(0));
  applied.plan({.group = kDraft});
  check_refused(
      "append: layer 0 is of the target group, but plan buffer 0 was planned for the "
      "draft group",
      [&] { applied.append(0); });
  CHECK_NOTHROW(applied.append(1));
}

TEST_CASE("a refused plan leaves the newest one as it was") {
  Applied applied;
  applied.plan({});
  check_refused("PlanInputs::tokens_per_row",
                [&] { applied.plan({.group = kDraft, .tokens_per_row = 9}); });
  CHECK_NOTHROW(applied.append(0));
  CHECK_NOTHROW(
      applied.device.enqueue_commit(kBuffer, nullptr, applied.stop.data(), applied.stream));
}

TEST_CASE("stop flags belong to the target group's commit") {
  Applied applied;
  applied.plan({});
  CHECK_NOTHROW(
      applied.device.enqueue_commit(kBuffer, nullptr, applied.stop.data(), applied.stream));
  applied.plan({.group = kDraft});
  check_refused("enqueue_commit: stop flags belong to the commit of the target group", [&] {
    applied.device.enqueue_commit(kBuffer, nullptr, applied.stop.data(), applied.stream);
  });
  CHECK_NOTHROW(applied.device.enqueue_commit(kBuffer, nullptr, nullptr, applied.stream));
}

TEST_CASE("results have room for one batch row at least and rows_max at most") {
  Applied applied;
  std::vector<RowResult> room(3);
  for (const std::size_t count : {std::size_t{0}, std::size_t{3}}) {
    check_refused("DeviceCache::results was given room for " + std::to_string(count), [&] {
      applied.device.results(kBuffer, std::span(room).first(count), applied.stream);
    });
  }
  applied.device.results(kBuffer, std::span(room).first(2), applied.stream);
  applied.world.stream().wait();
  CHECK(room[1].length == 20);
}

TEST_CASE(
    "runs out of range, and rows and lookaheads that are not secured, are refused by number") {
  GroupEngine world(options_of(1));
  const RequestId request = world.admit(0, 20);
  world.ledger().reserve(request, 18).value();
  const auto begin = [&](std::int32_t tokens, std::int32_t lookahead, std::int32_t repeat) {
    const std::vector<BatchRow> rows{{request, tokens, lookahead}};
    world.engine().cache().begin_step(rows, StepShape::decode(2, 4), kBuffer, world.stream(),
                                      repeat);
  };
  const std::uint64_t before = world.ledger().digest();
  const std::uint64_t memory = world.engine().memory_hash();
  for (const std::int32_t repeat : {0, 5, -1, INT32_MAX}) {
    check_refused("a repeat count of " + std::to_string(repeat) + "; supported: 1 to repeat_max 4",
                  [&] { begin(4, 0, repeat); });
  }
  check_refused("batch row 0 looks 5 tokens ahead; supported: 0 to draft_max + 1 = 4",
                [&] { begin(4, 5, 1); });
  check_refused("batch row 0 looks -1 tokens ahead", [&] { begin(4, -1, 1); });
  check_refused("batch row 0 (seat 0): 19 tokens asked, 18 secured beyond the upper length",
                [&] { begin(4, 3, 4); });
  CHECK(world.ledger().digest() == before);
  CHECK(world.engine().memory_hash() == memory);
  CHECK_NOTHROW(begin(4, 2, 4));
}

TEST_CASE("a step is settled once, after it was prepared, within what its runs can keep") {
  GroupEngine world(options_of(1));
  const std::vector<VisitRow> rows{{world.admit(0, 20), {4}}};
  const StepId id = world.begin(rows, {3, 4});
  const auto settle = [&](StepId step, std::int32_t kept) {
    world.ledger().settle(step, std::vector<Outcome>{{kept, false}});
  };
  check_refused("step " + std::to_string(id + 1) + " is unknown", [&] { settle(id + 1, 4); });
  check_refused("kept 17 tokens; supported: 0 to 16", [&] { settle(id, 17); });
  check_refused("kept -1 tokens", [&] { settle(id, -1); });
  settle(id, 16);
  check_refused("step " + std::to_string(id) + " was settled before", [&] { settle(id, 16); });
}
