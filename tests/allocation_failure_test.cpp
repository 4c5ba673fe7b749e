// The host runs out of memory at every allocation in turn, from opening a backend to replaying
// graphs: what cannot be done is an exception, nothing terminates, nothing leaks, and what had been
// opened goes on. This program replaces the global operators new and delete.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/decode_graphs.h>
#include <quire/runtime/host/host_stream.h>
#include <quire/runtime/owners.h>

#include "tests/support/counted_new.h"

namespace quire {
namespace {

using test::calls_until_failure;
using test::living_allocations;

constexpr PlanBufferId kBuffer(0);
constexpr StepShape kShape = StepShape::decode(2);

Limits small_limits() {
  Limits limits;
  limits.seats_max = limits.rows_max = 2;
  limits.pages = 4;
  limits.tokens_max = limits.context_max = 64;
  limits.run_ahead_max = 0;
  return limits;
}

// Runs `call` with the n-th allocation of this thread failing, for every n, until it goes through.
// `after` is told how many allocations each run has left behind. Returns how many could fail.
std::int64_t fail_everywhere(const std::function<void()>& call,
                             const std::function<void(std::int64_t)>& after) {
  for (std::int64_t n = 0;; ++n) {
    bool thrown = false;
    const std::int64_t before = living_allocations;
    calls_until_failure = n;
    try {
      call();
    } catch (const std::exception&) {
      thrown = true;
    }
    const bool met = calls_until_failure < 0;
    calls_until_failure = -1;
    const std::int64_t left = living_allocations - before;
    CAPTURE(n);
    REQUIRE((met || !thrown));
    after(left);
    if (!met) return n;
  }
}

// Rows, tables and weights of zeros, on ordinary memory as the host backend has it.
struct Zeros {
  std::vector<float> memory = std::vector<float>(128 * 512 + 4, 0.0f);
  const float* data() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (16 - address % 16) % 16 / sizeof(float);
  }
};

void bind(DeviceCache& device, const Zeros& zeros) {
  const float* data = zeros.data();
  LayerBinding binding;
  binding.window_norm = binding.csa_norm = binding.indexer_norm = binding.hca_norm = data;
  binding.csa_bias = binding.indexer_bias = binding.hca_bias = data;
  for (std::int32_t layer = 0; layer < 3; ++layer) device.bind_layer(LayerId(layer), binding);
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    device.bind_rope(group, {data, 64, RopeLayout::kInterleaved});
  }
}

void enqueue(DeviceCache& device, const Zeros& zeros, StreamView stream) {
  device.enqueue_plan(kBuffer, stream);
  AppendInputs inputs;
  inputs.window.data = zeros.data();
  device.append(LayerId(0), kBuffer, inputs, stream);
  AppendInputs csa = inputs;
  csa.csa.data = csa.indexer.data = zeros.data();
  device.append(LayerId(1), kBuffer, csa, stream);
  AppendInputs hca = inputs;
  hca.hca.data = zeros.data();
  device.append(LayerId(2), kBuffer, hca, stream);
  device.enqueue_commit(kBuffer, nullptr, nullptr, stream);
}

const ModelSpec& three_layers() {
  static const ModelSpec spec{{LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca}};
  return spec;
}

TEST_CASE("opening, capturing and stepping fail at any allocation without a leak") {
  const Zeros zeros;
  const Limits limits = small_limits();
  const ModelSpec& spec = three_layers();
  const auto call = [&] {
    const std::unique_ptr<Backend> backend = make_host_backend();
    Stream stream(*backend);
    Stream side(*backend);
    Event event(*backend);
    CacheManager cache(*backend, spec, limits);
    bind(cache.device(), zeros);
    const DecodeGraphs graphs(
        cache, kBuffer, std::span(&kShape, 1),
        [&](StepShape, PlanBufferId, StreamView on) { enqueue(cache.device(), zeros, on); },
        stream);
    const BatchRow row{cache.ledger().admit(64, 64).value(), 1};
    for (int i = 0; i < 3; ++i) {
      (void)cache.ledger().reserve(row.request, 1).value();
      const StepId id = cache.begin_step({&row, 1}, kShape, kBuffer, stream);
      graphs.launch(kShape, stream);
      event.record(stream);
      event.join_into(side);
      event.wait();
      const Outcome outcome{1, false};
      cache.ledger().settle(id, {&outcome, 1});
    }
    cache.reset(stream);
    stream.wait();
    side.wait();
  };
  const std::int64_t calls = fail_everywhere(call, [](std::int64_t left) { REQUIRE(left == 0); });
  MESSAGE(calls << " allocations failed in turn");
  CHECK(calls > 60);
}

TEST_CASE("a graph that cannot be queued whole is not queued at all, and what was recorded ends") {
  const std::unique_ptr<Backend> backend = make_host_backend();
  Stream stream(*backend);
  Event event(*backend);
  int runs = 0;
  Capture capture(*backend, stream);
  for (int i = 0; i < 40; ++i) stream.view().host()->enqueue([&runs] { ++runs; });
  const GraphExec graph = capture.finish();
  const auto all_or_none = [&](std::int64_t) {
    stream.wait();
    REQUIRE((runs == 0 || runs == 40));
  };
  const std::int64_t failed = fail_everywhere([&] { graph.launch(stream); }, all_or_none);
  CHECK(runs == 40);
  CHECK(failed >= 40);
  CHECK(fail_everywhere([&] { event.record(stream); }, [&](std::int64_t) { event.wait(); }) >= 2);
}

TEST_CASE("a step that meets the end of the host's memory is made again, and lengths are right") {
  const Zeros zeros;
  const std::unique_ptr<Backend> backend = make_host_backend();
  Stream stream(*backend);
  CacheManager cache(*backend, three_layers(), small_limits());
  bind(cache.device(), zeros);
  cache.begin_padding_step(kShape, kBuffer, stream);
  Capture capture(*backend, stream);
  enqueue(cache.device(), zeros, stream);
  const GraphExec graph = capture.finish();
  const BatchRow row{cache.ledger().admit(64, 64).value(), 1};
  int steps = 0;
  // Each of update, eager step, replay and wait, as often as it takes.
  const auto again = [&](const auto& call) { return fail_everywhere(call, [](std::int64_t) {}); };
  std::int64_t failed = 0;
  for (; steps < 40; ++steps) {
    (void)cache.ledger().reserve(row.request, 1).value();
    StepId id = -1;
    failed += again([&] {
      if (id < 0) id = cache.begin_step({&row, 1}, kShape, kBuffer, stream);
    });
    if (steps % 2 == 0) {
      failed += again([&] { graph.launch(stream); });
    } else {
      failed += again([&] { enqueue(cache.device(), zeros, stream); });
    }
    const Outcome outcome{1, false};
    cache.ledger().settle(id, {&outcome, 1});
    std::int32_t length = 0;
    backend->copy(&length, cache.device().step_table().length, 4, stream);
    stream.wait();
    REQUIRE(length == steps + 1);
    REQUIRE_NOTHROW(cache.ledger().check_invariants());
  }
  CHECK(failed > 40);
}

}  // namespace
}  // namespace quire
