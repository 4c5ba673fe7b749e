// How the device cache asks its backend for launches: plain or programmatic, who copies the older
// window, and how many bytes a pool is asked for. A spy stands between it and the host backend.
#include <doctest/doctest.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache.h>
#include <quire/runtime/owners.h>

#include <memory>
#include <new>
#include <vector>

#include "tests/support/idle_backend.h"

namespace {

using namespace quire;

// Notes what is of interest here; no operation runs.
class SpyBackend final : public test::IdleBackend {
 public:
  struct Append {
    Pdl pdl;
    AppendParams params;
  };
  std::vector<Append> appends;
  std::vector<Pdl> commits;
  std::vector<PlanParams> plans;
  std::vector<std::int64_t> budgets;
  std::vector<std::int64_t> allocations;
  int updates = 0;

  void* make_pool(std::int64_t bytes) override {
    budgets.push_back(bytes);
    return IdleBackend::make_pool(bytes);
  }
  std::byte* allocate(void* p, std::int64_t bytes, StreamView s) override {
    allocations.push_back(bytes);
    return IdleBackend::allocate(p, bytes, s);
  }
  std::vector<std::uint32_t> wait_for_known_answers() override {
    auto answers = IdleBackend::wait_for_known_answers();
    answers[wrong_answer >= 0 ? static_cast<std::size_t>(wrong_answer) : 0] ^=
        wrong_answer >= 0 ? 1u : 0u;
    return answers;
  }
  void apply(const ApplyParams&, StreamView) override {
    if (++updates == failing_update) throw std::bad_alloc();
  }
  void plan(const PlanParams& params, StreamView) override { plans.push_back(params); }
  void append(const AppendParams& params, Pdl pdl, StreamView) override {
    appends.push_back({pdl, params});
  }
  void commit(const CommitParams&, Pdl pdl, StreamView) override { commits.push_back(pdl); }

  int wrong_answer = -1;
  int failing_update = -1;
};

constexpr PlanBufferId kBuffer(0);

Limits small_limits() {
  Limits limits;
  limits.seats_max = 2;
  limits.pages = 4;
  limits.rows_max = 4;
  limits.tokens_max = 32;
  limits.context_max = 256;
  return limits;
}

struct Fixture {
  SpyBackend backend;
  Stream stream{backend};
  ModelSpec spec{{LayerKind::kCsa, LayerKind::kCsa}};
  DeviceCache cache{backend, spec, small_limits()};
  alignas(16) float values[4096] = {};

  Fixture() {
    cache.bind_rope(RopeGroup::kCompressing, {values, 256, RopeLayout::kInterleaved});
    LayerBinding binding;
    binding.csa_bias = binding.csa_norm = binding.indexer_bias = binding.indexer_norm = values;
    cache.bind_layer(LayerId(0), binding);
    cache.bind_layer(LayerId(1), binding);
  }
  void apply(StepShape shape) {
    StepUpdate update(small_limits());
    update.start(kPaddingStep, kBuffer, shape, 1);
    update.seal();
    cache.apply(update, stream);
  }
  void plan(StepShape shape) {
    apply(shape);
    cache.enqueue_plan(kBuffer, stream);
  }
  const SpyBackend::Append& append(int layer, bool window, StreamView on,
                                   Pdl pdl = Pdl::kPrologue) {
    AppendInputs inputs;
    (window ? inputs.window : inputs.csa).data = values;
    cache.append(LayerId(layer), kBuffer, inputs, on, {pdl});
    return backend.appends.back();
  }
};

// G1
TEST_CASE("one allocation of exactly bytes_needed is asked of a pool with exactly that budget") {
  Fixture fixture;
  const std::int64_t needed = DeviceCache::bytes_needed(fixture.spec, small_limits()).total();
  CHECK(fixture.backend.budgets == std::vector<std::int64_t>{needed});
  CHECK(fixture.backend.allocations == std::vector<std::int64_t>{needed});
  for (int i = 0; i < 10; ++i) {
    fixture.plan(StepShape::decode(2));
    fixture.append(0, true, fixture.stream);
  }
  fixture.cache.clear(fixture.stream);
  CHECK(fixture.backend.allocations.size() == 1);
}

TEST_CASE("a machine whose arithmetic differs opens nothing and the first difference is named") {
  SpyBackend backend;
  backend.wrong_answer = 17;
  CHECK_THROWS_WITH_AS(DeviceCache(backend, ModelSpec{{LayerKind::kSliding}}, small_limits()),
                       doctest::Contains("known answer 17"), BrokenInvariant);
}

TEST_CASE("the first append after each plan is plain, later ones are chained as asked") {
  Fixture fixture;
  for (int round = 0; round < 2; ++round) {
    fixture.plan(StepShape::decode(2));
    CHECK(fixture.append(0, true, fixture.stream).pdl == Pdl::kOff);
    CHECK(fixture.append(1, true, fixture.stream).pdl == Pdl::kPrologue);
    CHECK_FALSE(fixture.backend.appends.back().params.load_after_wait);
    CHECK(fixture.append(1, false, fixture.stream, Pdl::kWaitOnly).pdl == Pdl::kWaitOnly);
    CHECK(fixture.backend.appends.back().params.load_after_wait);
    CHECK(fixture.append(1, false, fixture.stream, Pdl::kOff).pdl == Pdl::kOff);
  }
}

TEST_CASE("an append on another stream is plain and does not stand for the first on the plan's") {
  Fixture fixture;
  const Stream other(fixture.backend);
  fixture.plan(StepShape::decode(2));
  CHECK(fixture.append(0, true, other).pdl == Pdl::kOff);
  CHECK(fixture.append(1, true, fixture.stream).pdl == Pdl::kOff);
  CHECK(fixture.append(0, true, other).pdl == Pdl::kOff);
  CHECK(fixture.append(1, true, fixture.stream).pdl == Pdl::kPrologue);
}

TEST_CASE("ragged steps load nothing mutable before the wait") {
  Fixture fixture;
  fixture.plan(StepShape::ragged(2, 20));
  fixture.append(0, true, fixture.stream);
  CHECK(fixture.append(1, true, fixture.stream).pdl == Pdl::kWaitOnly);
  CHECK(fixture.backend.appends.back().params.load_after_wait);
}

TEST_CASE("a commit straight behind the plan is plain and behind appends chained") {
  Fixture fixture;
  fixture.plan(StepShape::decode(2));
  fixture.cache.enqueue_commit(kBuffer, nullptr, nullptr, fixture.stream);
  fixture.append(0, true, fixture.stream);
  fixture.cache.enqueue_commit(kBuffer, nullptr, nullptr, fixture.stream);
  CHECK(fixture.backend.commits == std::vector<Pdl>{Pdl::kOff, Pdl::kPrologue});
}

TEST_CASE("an append behind a replayed plan is plain, for nobody saw which stream planned") {
  Fixture fixture;
  fixture.apply(StepShape::decode(2));
  Capture capture(fixture.backend, fixture.stream);
  fixture.cache.enqueue_plan(kBuffer, fixture.stream);
  const GraphExec graph = capture.finish();
  fixture.apply(StepShape::decode(2));
  CHECK(fixture.append(0, true, fixture.stream).pdl == Pdl::kOff);
  CHECK(fixture.append(1, true, fixture.stream).pdl == Pdl::kOff);
}

TEST_CASE("the older window is copied once per layer and plan, with the window or without it") {
  Fixture fixture;
  const auto copies = [&](int layer, bool window) {
    return fixture.append(layer, window, fixture.stream).params.window.copy_older_window;
  };
  for (int round = 0; round < 2; ++round) {
    fixture.plan(StepShape::ragged(2, 20));
    CHECK(copies(0, true));
    CHECK_FALSE(copies(0, false));
    CHECK(copies(1, false));
    CHECK_FALSE(copies(1, true));
  }
  fixture.plan(StepShape::decode(2));
  CHECK_FALSE(copies(0, true));
}

TEST_CASE("plans and appends have the room of their shape, not of the limits") {
  Fixture fixture;
  fixture.plan(StepShape::ragged(2, 20));
  CHECK(fixture.backend.plans.back().csa_entry_capacity == 7);
  fixture.append(0, true, fixture.stream);
  CHECK(fixture.backend.appends.back().params.csa_entry_capacity == 7);
  CHECK(fixture.backend.appends.back().params.shape == StepShape::ragged(2, 20));
  fixture.plan(StepShape::decode(3));
  CHECK(fixture.backend.plans.back().csa_entry_capacity == 0);
}

TEST_CASE("an update that fails halfway, however it fails, breaks the cache for good") {
  Limits limits = small_limits();
  limits.seats_max = limits.rows_max = limits.tokens_max = 3000;
  limits.pages = 3000;
  StepUpdate update(limits);
  update.start(0, kBuffer, StepShape::decode(3000), 1);
  for (std::int32_t seat = 0; seat < 3000; ++seat) {
    update.add(BatchRowUpdate{seat, 1, 1, BatchRowUpdate::kNewOwner});
  }
  update.seal();
  REQUIRE(update.bytes().size() > kUpdateChunkBytes);
  SpyBackend backend;
  const Stream stream(backend);
  {
    DeviceCache cache(backend, ModelSpec{{LayerKind::kSliding}}, limits);
    backend.failing_update = backend.updates + 1;
    CHECK_THROWS_AS(cache.apply(update, stream), std::bad_alloc);
    CHECK_NOTHROW(cache.apply(update, stream));  // nothing had changed
  }
  DeviceCache cache(backend, ModelSpec{{LayerKind::kSliding}}, limits);
  backend.failing_update = backend.updates + 2;
  CHECK_THROWS_AS(cache.apply(update, stream), std::bad_alloc);
  CHECK_THROWS_WITH_AS(cache.apply(update, stream),
                       doctest::Contains("half of the update of step 0"), BrokenInvariant);
  CHECK_THROWS_AS(cache.enqueue_plan(kBuffer, stream), BrokenInvariant);
}

}  // namespace
