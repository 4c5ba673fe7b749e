// What a cache does when something never arrives, comes twice, or is done by half: updates on their
// way from the ledger, chunks of one update, the parts of a clear, work behind a task that failed.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <quire/runtime/base/errors.h>

#include "tests/support/faulty_backend.h"
#include "tests/support/field_stories.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);

TestEngineOptions engine_options() {
  TestEngineOptions options = small_engine(2, 100);
  options.limits.run_ahead_max = 3;
  options.contents = 2;
  return options;
}

// The text of the error of this type that `call` throws.
template <class Expected>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return "accepted";
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// A ledger whose updates travel as bytes to a device cache elsewhere.
struct Wire {
  explicit Wire(TestEngine& of) : engine(of) {}

  // One decode token of the request; its outcome is told at once.
  std::vector<std::byte> prepare(const AheadRow& row) {
    const std::vector<BatchRow> batch = batch_of(engine, {row});
    const StepUpdate& update = engine.cache().ledger().prepare(batch, shape, kBuffer);
    const Outcome kept{row.row.tokens, false};
    engine.cache().ledger().settle(update.id(), {&kept, 1});
    return {update.bytes().begin(), update.bytes().end()};
  }
  void apply(const std::vector<std::byte>& bytes) {
    engine.cache().device().apply(StepUpdate::from_bytes(bytes), engine.stream());
  }
  // What the engine enqueues behind it, whether or not the update came; token `at` of the request.
  void run(const AheadRow& row, std::int64_t at) {
    copy_rows(engine, {row}, shape, at);
    engine.enqueue_body(shape, engine.stream());
    engine.cache().device().enqueue_commit(kBuffer, nullptr, nullptr, engine.stream());
  }

  TestEngine& engine;
  StepShape shape = StepShape::decode(2);
};

TEST_CASE("updates that come twice, late, early or damaged are refused and change nothing") {
  TestEngine engine(test_backend(), engine_options());
  Wire wire(engine);
  const AheadRow row{{engine.admit(0, 100)}, 0};
  std::vector<std::vector<std::byte>> sent;
  for (int i = 0; i < 4; ++i) sent.push_back(wire.prepare(row));

  const auto refused = [&](const std::vector<std::byte>& bytes, const std::string& words) {
    const std::uint64_t before = engine.memory_hash();
    const std::string text = error_of<UsageError>([&] { wire.apply(bytes); });
    CAPTURE(text);
    CHECK(has(text, words));
    CHECK(engine.memory_hash() == before);
  };
  for (std::size_t due = 0; due < sent.size(); ++due) {
    const std::string next = "step " + std::to_string(due) + " comes next";
    for (std::size_t other = 0; other < sent.size(); ++other) {
      if (other != due) refused(sent[other], next);
    }
    for (std::size_t at = 0; at < sent[due].size(); at += 11) {
      std::vector<std::byte> damaged = sent[due];
      damaged[at] ^= std::byte{0x10};
      refused(damaged, "update");
    }
    wire.apply(sent[due]);
    wire.run(row, static_cast<std::int64_t>(due));
  }
  refused(sent.back(), "step 4 comes next");
  engine.stream().wait();
  const DeviceCache& device = engine.cache().device();
  std::int32_t length = 0;
  engine.backend().copy(&length, device.step_table().length, 4, engine.stream());
  engine.stream().wait();
  CHECK(length == 4);
}

TEST_CASE("a step whose update was lost runs inert, eager and replayed, and is reported") {
  TestEngine engine(test_backend(), engine_options());
  Wire wire(engine);
  const AheadRow a{{engine.admit(0, 100)}, 0};
  const AheadRow b{{engine.admit(1, 100)}, 1};
  wire.apply(wire.prepare(a));
  wire.run(a, 0);
  // The engine captures what it will replay.
  engine.cache().begin_padding_step(wire.shape, kBuffer, engine.stream());
  engine.stream().wait();
  Capture capture(engine.backend(), engine.stream());
  engine.enqueue_body(wire.shape, engine.stream());
  engine.cache().device().enqueue_commit(kBuffer, nullptr, nullptr, engine.stream());
  const GraphExec graph = capture.finish();
  wire.apply(wire.prepare(a));
  copy_rows(engine, {a}, wire.shape, 1);
  graph.launch(engine.stream());

  const std::vector<std::byte> lost = wire.prepare(b);  // a new owner, on its way
  const std::uint64_t before = engine.memory_hash();
  CHECK(report_of(engine).rows_out_of_steps == 0);
  copy_rows(engine, {b}, wire.shape);
  graph.launch(engine.stream());
  CHECK(report_of(engine).rows_out_of_steps == 1);
  wire.run(b, 0);
  CHECK(report_of(engine).rows_out_of_steps == 2);
  CHECK(engine.memory_hash() == before);

  const std::vector<std::byte> next = wire.prepare(b);
  CHECK(has(error_of<UsageError>([&] { wire.apply(next); }), "step 2 comes next"));
  wire.apply(lost);  // sent again
  copy_rows(engine, {b}, wire.shape);
  graph.launch(engine.stream());
  wire.apply(next);
  wire.run(b, 1);
  for (const AheadRow& row : {a, b}) {
    const Ledger& ledger = engine.cache().ledger();
    const RequestId request = row.row.request;
    const bool same =
        engine.live_bytes(engine.snapshot(), ledger.info(request).seat, ledger.pages_of(request),
                          2) == alone(engine_options(), row.content, 2);
    CHECK(same);
  }
}

// --- Done by half ---

// Every call that a broken cache must refuse, with its reason.
void check_latched(TestEngine& engine, const std::string& reason) {
  CacheManager& cache = engine.cache();
  DeviceCache& device = cache.device();
  const StreamView stream = engine.stream();
  const std::uint64_t before = cache.ledger().digest();
  DeviceReport report{};
  const std::function<void()> calls[] = {
      [&] { cache.begin_step({}, StepShape::decode(1), kBuffer, stream); },
      [&] { cache.begin_padding_step(StepShape::decode(1), kBuffer, stream); },
      [&] { cache.reset(stream); },
      [&] { device.check_can_apply(stream); },
      [&] { device.enqueue_plan(kBuffer, stream); },
      [&] { engine.enqueue_append(LayerId(0), StepShape::decode(1), stream); },
      [&] { device.enqueue_commit(kBuffer, nullptr, nullptr, stream); },
      [&] { device.clear(stream); },
      [&] { device.use_sink(PageId(0)); },
      [&] { device.bind_layer(LayerId(0), {}); },
      [&] { device.bind_rope(RopeGroup::kSliding, {}); },
      [&] { device.bind_read_lists(kBuffer, {}); },
      [&] { device.report(kBuffer, &report, stream); },
  };
  for (const auto& call : calls) {
    const std::string text = error_of<BrokenInvariant>(call);
    CAPTURE(text);
    CHECK(has(text, reason));
  }
  CHECK(cache.ledger().digest() == before);
  CHECK_NOTHROW(cache.ledger().check_invariants());
}

TEST_CASE("an update of several launches: the first may fail, a later one breaks the cache aloud") {
  TestEngineOptions options = small_engine(2400, 4);
  options.spec.layers = {LayerKind::kSliding};
  options.limits.tokens_max = 2400;
  options.limits.draft_max = 0;
  const std::vector<std::byte> expected = alone(options, 0, 1);
  for (std::int64_t n = 0; n < 4; ++n) {  // an update of three launches: none fails at n = 3
    CAPTURE(n);
    FaultyBackend backend(test_backend());
    {
      TestEngine engine(backend, options);
      std::vector<StepRow> rows;
      for (int i = 0; i < 2400; ++i) rows.push_back({engine.admit(0, 4)});
      const StepShape shape = StepShape::decode(2400);
      backend.fail_at(n, static_cast<std::uint32_t>(Verb::kUpdate));
      if (n < 3) CHECK_THROWS_AS(engine.begin(rows, shape), Fault);
      if (n == 0 || n == 3) {
        const StepId id = engine.begin(rows, shape);
        CHECK(id == 0);
        engine.enqueue_body(shape, engine.stream());
        engine.enqueue_commit(engine.stream());
        engine.finish(id, rows);
        const Snapshot snapshot = engine.snapshot();
        const bool same = std::all_of(rows.begin(), rows.end(), [&](const StepRow& row) {
          return engine.live_bytes(snapshot, row.request) == expected;
        });
        CHECK(same);
      } else {
        check_latched(engine, "half of the update of step 0 was enqueued: an injected fault");
      }
    }
    CHECK(backend.fired() == (n < 3));
    CHECK(backend.living() == FaultyBackend::Living{});
  }
}

TEST_CASE("a clear whose first part fails changes nothing, a later one breaks the cache aloud") {
  for (std::int64_t n = 0; n < 4; ++n) {
    CAPTURE(n);
    FaultyBackend backend(test_backend());
    {
      TestEngine engine(backend, engine_options());
      const RequestId request = engine.admit(0, 100);
      engine.ragged_step({{request, 40}});
      const std::uint64_t before = engine.memory_hash();
      backend.fail_at(n, static_cast<std::uint32_t>(Verb::kMemory));
      if (n < 3) {
        CHECK_THROWS_AS(engine.cache().reset(engine.stream()), Fault);
      } else {
        CHECK_NOTHROW(engine.cache().reset(engine.stream()));  // pages, seats, table with headers
      }
      backend.fail_never();
      if (n == 0) {
        CHECK(engine.memory_hash() == before);
        engine.ragged_step({{request, 30}});
        const bool same = engine.live_bytes(request) == alone(engine_options(), 0, 70);
        CHECK(same);
      } else if (n < 3) {
        check_latched(engine, "half of the clear was enqueued: an injected fault");
      }
    }
    CHECK(backend.living() == FaultyBackend::Living{});
  }
}

// --- Work behind a failure ---

TEST_CASE("work behind an engine's host task that threw is dropped, and a reset makes all good") {
  if (test_backend().kind() != BackendKind::kHost) {
    MESSAGE("SKIPPED on CUDA: a context that failed stays failed");
    return;
  }
  const TestEngineOptions options = engine_options();
  TestEngine engine(test_backend(), options);
  const StepShape shape = StepShape::decode(2);
  const RequestId a = engine.admit(0, 100);
  engine.ragged_step({{a, 21}});
  {
    const Held held(engine.stream());
    run_ahead(engine, {{{a}, 0}}, shape);
    engine.stream().view().host()->enqueue([] { throw std::runtime_error("the engine failed"); });
    engine.release(a);
    run_ahead(engine, {{{engine.admit(1, 100)}, 1}}, shape);
  }
  CHECK_THROWS_WITH(engine.stream().wait(), "the engine failed");
  CHECK_NOTHROW(engine.stream().wait());
  engine.cache().reset(engine.stream());
  for (const std::int64_t content : {1, 0}) {
    const RequestId request = engine.admit(content, 100);
    engine.ragged_step({{request, 5}});
    for (int i = 0; i < 9; ++i) {
      engine.replay_step(std::vector<StepRow>{{request, 1}}, shape);
    }
    const bool same = engine.live_bytes(request) == alone(options, content, 14);
    CHECK(same);
  }
}

}  // namespace
