// Calls into the machine that fail, at every place where they can: after each the cache is usable,
// or says by its latched reason why not, and nothing leaks. A backend that fails on demand stands
// between the cache and the real one; updates are lost, repeated and damaged on their way.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/decode_graphs.h>
#include <quire/runtime/host/host_stream.h>

#include "tests/support/device_array.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr std::uint32_t kSteps = Verb::kUpdate | Verb::kLaunch;

TestEngineOptions engine_options() {
  TestEngineOptions options = small_engine(3, 300);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.draft_max = 2;
  options.limits.pages = 6;
  options.contents = 3;
  return options;
}

// --- Opening ---

// Runs `open` with the n-th call failing, for every n; returns how many calls can fail.
std::int64_t fail_everywhere(FaultyBackend& backend, const std::function<void()>& open) {
  const FaultyBackend::Living before = backend.living();
  for (std::int64_t n = 0;; ++n) {
    CAPTURE(n);
    backend.fail_at(n, kEveryVerb);
    bool failed = false;
    try {
      open();
    } catch (const Fault&) {
      failed = true;
    }
    REQUIRE(failed == backend.fired());
    backend.fail_never();
    REQUIRE(backend.living() == before);
    if (!failed) return n;
  }
}

TEST_CASE("opening a cache may fail at every call: nothing leaks, and the next opening works") {
  FaultyBackend backend(test_backend());
  const TestEngineOptions options = engine_options();
  const auto open = [&](const DeviceCacheOptions& how) {
    CacheManager(backend, options.spec, options.limits, how);
  };
  // Stream, kernels, known answers, pool, memory, its wait, the zeroes, their wait.
  CHECK(fail_everywhere(backend, [&] { open({}); }) == 8);

  Stream stream(backend);
  const std::int64_t needed = DeviceCache::bytes_needed(options.spec, options.limits).total();
  MemoryPool pool(backend, needed);
  const Memory memory(pool, needed, stream);
  DeviceCacheOptions given;
  given.memory = std::span(memory.data(), static_cast<std::size_t>(needed));
  CHECK(fail_everywhere(backend, [&] { open(given); }) == 5);
}

TEST_CASE("owners of streams, events, graphs and memory leak nothing where making one fails") {
  FaultyBackend backend(test_backend());
  const std::int64_t calls = fail_everywhere(backend, [&] {
    Stream stream(backend);
    Stream side(backend);
    Event event(backend);
    MemoryPool pool(backend, 4096);
    Memory memory(pool, 1024, stream);
    Capture capture(backend, stream);
    backend.fill(memory.data(), 1, 1024, stream);
    event.record(stream);
    event.join_into(side);
    backend.fill(memory.data(), 2, 512, side);
    event.record(side);
    event.join_into(stream);
    const GraphExec graph = capture.finish();
    graph.launch(stream);
    stream.wait();
  });
  CHECK(calls == 12);
}

// --- Capturing ---

// An engine with one request of nine tokens, and graphs captured around it.
struct GraphRun {
  explicit GraphRun(Backend& backend) : engine(backend, engine_options()) {
    request = engine.admit(0, 200);
    engine.ragged_step({{request, 9}});
  }
  DecodeGraphs capture(const DecodeGraphs::Step& step) {
    return DecodeGraphs(engine.cache(), kBuffer, shapes, step, engine.stream());
  }
  void enqueue(StepShape shape, StreamView stream) {
    engine.enqueue_body(shape, stream);
    engine.enqueue_commit(stream);
  }
  // Twenty tokens through graphs; the live bytes.
  std::vector<std::byte> generate(const DecodeGraphs& graphs) {
    for (int i = 0; i < 20; ++i) {
      const std::vector<StepRow> rows{{request, 1}};
      const StepId id = engine.begin(rows, shapes[static_cast<std::size_t>(i % 2)]);
      graphs.launch(shapes[static_cast<std::size_t>(i % 2)], engine.stream());
      engine.finish(id, rows);
    }
    return engine.live_bytes(request);
  }

  TestEngine engine;
  RequestId request;
  std::vector<StepShape> shapes{StepShape::decode(3), StepShape::decode(2)};
};

std::vector<std::byte> alone(std::int64_t content, std::int32_t tokens) {
  TestEngine engine(test_backend(), engine_options());
  return one_shot(engine, content, tokens);
}

TEST_CASE("capturing may fail at every call: no graph, no trace, and the next capture works") {
  FaultyBackend backend(test_backend());
  GraphRun run(backend);
  const std::uint64_t before = run.engine.memory_hash();
  const auto capture = [&] {
    return run.capture(
        [&](StepShape shape, PlanBufferId, StreamView on) { run.enqueue(shape, on); });
  };
  // For each of two shapes: update, plan, three appends and commit, wait, the same captured.
  CHECK(fail_everywhere(backend, [&] { (void)capture(); }) == 28);
  CHECK_FALSE(backend.is_capturing(run.engine.stream()));
  CHECK(run.engine.memory_hash() == before);
  const DecodeGraphs graphs = capture();
  const bool same = run.generate(graphs) == alone(0, 29);
  CHECK(same);
}

// G4
TEST_CASE("a step that throws anywhere in warm-up or capture passes through and leaves no trace") {
  FaultyBackend backend(test_backend());
  GraphRun run(backend);
  const std::uint64_t before = run.engine.memory_hash();
  const FaultyBackend::Living living = backend.living();
  const auto throw_at = [&](int place) {
    int at = 0;
    const auto here = [&] {
      if (at++ == place) throw std::domain_error("the engine failed");
    };
    (void)run.capture([&](StepShape shape, PlanBufferId buffer, StreamView on) {
      here();
      run.engine.cache().device().enqueue_plan(buffer, on);
      for (std::int32_t layer = 0; layer < 3; ++layer) {
        here();
        run.engine.enqueue_append(LayerId(layer), shape, on);
      }
      here();
      run.engine.enqueue_commit(on);
      here();
    });
  };
  constexpr int kPlaces = 4 * 6;  // two shapes, warm-up and capture
  for (int place = 0; place < kPlaces; ++place) {
    CAPTURE(place);
    CHECK_THROWS_AS(throw_at(place), std::domain_error);
    CHECK_FALSE(backend.is_capturing(run.engine.stream()));
    CHECK(backend.living() == living);
    CHECK_NOTHROW(run.engine.stream().wait());
  }
  CHECK(run.engine.memory_hash() == before);
  CHECK_NOTHROW(throw_at(kPlaces));
  const bool same = run.generate(run.capture([&](StepShape shape, PlanBufferId, StreamView on) {
    run.enqueue(shape, on);
  })) == alone(0, 29);
  CHECK(same);
}

// --- Steps ---

// What an engine does where a call of a step fails.
enum class After {
  kThatCall,   // makes the failed call again
  kWholeBody,  // plans and appends the step again; only rows of at most draft_max + 1 tokens may
  kNextStep,   // settles the step with nothing kept: rows decode again, a long one starts over
};

// Runs steps on a backend that fails, in one of these ways.
class FaultyRun {
 public:
  FaultyRun(Backend& backend, const TestEngineOptions& options) : engine_(backend, options) {}
  TestEngine& engine() { return engine_; }
  int faults() const { return faults_; }

  // False: a call failed and the step was settled with nothing kept.
  bool step(std::vector<StepRow> rows, StepShape shape, After after) {
    StepId id = -1;
    again([&] { id = engine_.begin(rows, shape); });
    const auto plainly = [&] { enqueue(shape, [](const auto& call) { call(); }); };
    if (after == After::kThatCall) {
      enqueue(shape, [&](const auto& call) { again(call); });
    } else if (after == After::kWholeBody) {
      again(plainly);
    } else if (!try_once(plainly)) {
      const bool is_long = rows.back().tokens > engine_.options().limits.draft_max + 1;
      if (!is_long) leave_junk(shape);
      for (StepRow& row : rows) row.kept = 0;
      engine_.finish(id, rows);
      return false;
    }
    engine_.finish(id, rows);
    return true;
  }

 private:
  template <class Guard>
  void enqueue(StepShape shape, const Guard& guard) {
    guard([&] { engine_.cache().device().enqueue_plan(kBuffer, engine_.stream()); });
    for (std::size_t i = 0; i < engine_.options().spec.layers.size(); ++i) {
      guard([&] {
        engine_.enqueue_append(LayerId(static_cast<std::int32_t>(i)), shape, engine_.stream());
      });
    }
    guard([&] { engine_.enqueue_commit(engine_.stream()); });
  }
  // Runs the step, of which nothing will be kept, again with rows of NaN: what it leaves is right
  // nowhere, unless the tokens that come next rewrite it.
  void leave_junk(StepShape shape) {
    engine_.poison_inputs();
    again([&] { engine_.enqueue_body(shape, engine_.stream()); });
  }
  template <class Call>
  bool try_once(const Call& call) {
    try {
      call();
      return true;
    } catch (const Fault&) {
      ++faults_;
      return false;
    }
  }
  template <class Call>
  void again(const Call& call) {
    while (!try_once(call)) continue;
  }

  TestEngine engine_;
  int faults_ = 0;
};

// Chunks, short rows beside a chunk, decode rows with refused drafts: the same steps for every n.
// Returns the live bytes of both requests.
std::vector<std::vector<std::byte>> run_steps(FaultyRun& run, After after) {
  TestEngine& engine = run.engine();
  RequestId a = engine.admit(0, 300);
  const RequestId b = engine.admit(1, 300);
  const auto step = [&](const std::vector<StepRow>& rows, StepShape shape) {
    const bool is_long = rows.back().tokens > 3;
    const After here = is_long && after == After::kWholeBody ? After::kThatCall : after;
    if (run.step(rows, shape, here)) return;
    // What the long row has overwritten is lost; the short row has lost nothing.
    if (is_long) {
      const std::int64_t tokens = engine.length(a) + rows.back().tokens;
      engine.release(a);
      a = engine.admit(0, 300);
      run.step({{a, static_cast<std::int32_t>(tokens)}}, StepShape::ragged(3, 300), here);
      if (rows.size() > 1) run.step({rows[0]}, shape, here);
    } else {
      run.step(rows, shape, here);
    }
  };
  step({{a, 130}}, StepShape::ragged(1, 130));
  step({{b, 2}, {a, 7}}, StepShape::ragged(3, 12));
  for (int i = 0; i < 3; ++i) {
    step({{b, 3, 1 + i}, {a, 3, 3 - i}}, StepShape::decode(3, 3));
    step({{a, 1}, {b, 1}}, StepShape::decode(2));
  }
  const Snapshot snapshot = engine.snapshot();
  std::vector<std::vector<std::byte>> bytes{engine.live_bytes(snapshot, a),
                                            engine.live_bytes(snapshot, b)};
  engine.release(a);
  engine.release(b);
  return bytes;
}

TEST_CASE("any update or launch of a step may fail: the engine goes on and the bytes are right") {
  const std::vector<std::vector<std::byte>> expected{alone(0, 130 + 7 + 6 + 3),
                                                     alone(1, 2 + 6 + 3)};
  FaultyBackend backend(test_backend());
  FaultyRun run(backend, engine_options());
  for (const After after : {After::kThatCall, After::kWholeBody, After::kNextStep}) {
    CAPTURE(static_cast<int>(after));
    std::int64_t n = 0;
    for (;; ++n) {
      CAPTURE(n);
      // Rounds have the same requests and rows: none finds there what one before it wrote.
      backend.fail_never();
      run.engine().cache().reset(run.engine().stream());
      run.engine().poison();
      backend.fail_at(n, kSteps);
      const int before = run.faults();
      const bool same = run_steps(run, after) == expected;
      REQUIRE(same);
      REQUIRE(run.faults() - before == (backend.fired() ? 1 : 0));
      REQUIRE_NOTHROW(run.engine().cache().ledger().check_invariants());
      if (!backend.fired()) break;
    }
    CHECK(n == 8 * 6);  // eight steps of update, plan, three appends and commit
  }
}

TEST_CASE("one call in eight fails while 60 requests run: each has the bytes of one alone") {
  FaultyBackend backend(test_backend());
  FaultyRun run(backend, engine_options());
  TestEngine& engine = run.engine();
  TestEngine clean(test_backend(), engine_options());
  for (const std::uint32_t seed : {1u, 2u, 3u}) {
    MESSAGE("seed " << seed);
    const int faults_before = run.faults();
    std::uint32_t dice = seed;
    const auto roll = [&](std::uint32_t below) { return (dice = hash32(dice + 1)) / 7 % below; };
    backend.fail_when(kSteps, [&] { return roll(8) == 0; });
    struct Live {
      RequestId request;
      std::int64_t content;
      std::int32_t wanted;
    };
    std::vector<Live> live;
    int checked = 0;
    const auto check = [&](const Live& of) {
      const bool same = engine.live_bytes(of.request) == one_shot(clean, of.content, of.wanted);
      REQUIRE(same);
      ++checked;
    };
    while (checked < 20) {
      while (live.size() < 3) {
        const std::int64_t content = roll(3);
        const auto wanted = static_cast<std::int32_t>(1 + roll(290));
        live.push_back({engine.admit(content, 300), content, wanted});
      }
      std::rotate(live.begin(), live.begin() + roll(3), live.end());
      const auto left = [&](const Live& of) {
        return of.wanted - static_cast<std::int32_t>(engine.length(of.request));
      };
      // One may take a chunk, the others verify; each way of going on in turn.
      std::vector<StepRow> rows;
      for (std::size_t i = 0; i + 1 < live.size(); ++i) {
        const auto tokens = std::min(left(live[i]), static_cast<std::int32_t>(roll(4)));
        rows.push_back({live[i].request, tokens,
                        tokens - static_cast<std::int32_t>(roll(2)) * (tokens > 0 ? 1 : 0)});
      }
      rows.push_back({live.back().request,
                      std::min(left(live.back()), static_cast<std::int32_t>(roll(2) * roll(150)))});
      const bool is_long = rows.back().tokens > 3;
      const auto after = static_cast<After>(roll(3));
      const StepShape shape =
          is_long || roll(2) == 0 ? StepShape::ragged(3, 160) : StepShape::decode(3, 3);
      const bool kept =
          run.step(rows, shape, is_long && after == After::kWholeBody ? After::kThatCall : after);
      if (!kept && is_long) {
        engine.release(live.back().request);
        live.pop_back();
      }
      for (std::size_t i = live.size(); i-- > 0;) {
        if (left(live[i]) > 0) continue;
        check(live[i]);
        engine.release(live[i].request);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      }
      REQUIRE_NOTHROW(engine.cache().ledger().check_invariants());
    }
    CHECK(run.faults() - faults_before > 40);
    for (const Live& of : live) engine.release(of.request);
  }
}

}  // namespace
