// DeviceCacheOptions::clear_on_reuse: what goes to a new owner is zero before any step of that
// owner runs, and no other byte is touched. Whole images of the memory are compared, beside ranges
// that come from the pools a consumer sees.
#include <doctest/doctest.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include <quire/runtime/base/errors.h>

#include "tests/support/device_array.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/field_stories.h"
#include "tests/support/owned_ranges.h"
#include "tests/support/watched_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr std::int64_t kContext = 600;  // three pages
constexpr std::int64_t kContents = 3;

TestEngineOptions engine_options() {
  TestEngineOptions options = small_engine(3, kContext);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.pages = 7;  // fewer than three contexts take: they go round
  options.limits.draft_max = 4;
  options.contents = kContents;
  options.cache.clear_on_reuse = true;
  return options;
}

struct Layout {
  std::string name;
  void (*choose)(DeviceCacheOptions&);
};
const Layout kLayouts[] = {
    {"layer-major", [](DeviceCacheOptions&) {}},
    {"layer-major, strides",
     [](DeviceCacheOptions& cache) {
       cache.csa_page_stride_bytes = 38016;
       cache.indexer_page_stride_bytes = 8704;
       cache.hca_page_stride_bytes = 2048;
       cache.window_ring_tokens = 320;
       cache.csa_ring_tokens = 20;
     }},
    {"page-major", [](DeviceCacheOptions& cache) { cache.page_order = PageOrder::kPageMajor; }},
    {"page-major, strides",
     [](DeviceCacheOptions& cache) {
       cache.page_order = PageOrder::kPageMajor;
       cache.csa_page_stride_bytes = 37456;
       cache.indexer_page_stride_bytes = 8640;
       cache.hca_page_stride_bytes = 4096;
     }},
};

// Lengths around the edges of pages and windows.
std::int32_t any_length(std::uint32_t dice) {
  constexpr std::int32_t kEdges[] = {1, 4, 127, 128, 255, 256, 257, 300, 511, 512, 513, 590};
  return kEdges[dice % std::size(kEdges)];
}

struct Told {
  std::int64_t compared = 0;
  std::int64_t refused = 0;
};

// A random engine: admissions, chunks, drafts, releases; what is released is compared with a
// prefill in one chunk.
Told tell_random_story(WatchedEngine& watched, TestEngine& reference, std::uint32_t seed) {
  TestEngine& engine = watched.engine;
  struct Live {
    RequestId request;
    std::int64_t content;
    std::int32_t target;
  };
  std::vector<Live> live;
  Told told;
  std::uint32_t dice = seed;
  const auto next = [&](std::int64_t below) {
    dice = hash32(dice + 0x9E3779B9u);
    return static_cast<std::int32_t>(dice % static_cast<std::uint32_t>(below));
  };
  for (int turn = 0; turn < 70; ++turn) {
    if (live.size() < 3 && next(3) != 0) {
      const std::int64_t content = next(kContents);
      const std::int32_t target = any_length(static_cast<std::uint32_t>(next(1 << 20)));
      const std::int64_t room = target + 10;  // what drafts reach beyond
      if (auto request = engine.cache().ledger().admit(room, room)) {
        engine.release(request.value());  // admitted again below, so that the engine knows it
        live.push_back({engine.admit(content, room), content, target});
      }
    }
    const bool ragged = next(3) == 0;
    std::vector<AheadRow> rows;
    for (const Live& each : live) {
      const auto left = static_cast<std::int32_t>(each.target - engine.length(each.request));
      if (left <= 0 || next(5) == 0) continue;
      const std::int32_t tokens = std::min(left, 1 + next(ragged ? 200 : 5));
      const bool is_short = tokens <= 5;
      const std::int32_t kept = is_short && next(3) == 0 ? next(tokens + 1) : tokens;
      told.refused += tokens - kept;
      rows.push_back({{each.request, tokens, kept}, each.content});
    }
    std::stable_partition(rows.begin(), rows.end(),
                          [](const AheadRow& row) { return row.row.tokens <= 5; });
    const auto count = static_cast<std::int32_t>(rows.size());
    if (ragged) {
      std::int32_t tokens = 1;
      for (const AheadRow& row : rows) tokens += row.row.tokens;
      watched.step(rows, StepShape::ragged(std::max(count, 1), tokens));
    } else {
      watched.step(rows, StepShape::decode(std::max(count, 1), 5));
    }
    for (std::size_t i = 0; i < live.size(); ++i) {
      const auto length = static_cast<std::int32_t>(engine.length(live[i].request));
      if (length < live[i].target && next(25) != 0) continue;
      if (length > 0) {
        const bool same =
            engine.live_bytes(live[i].request) == one_shot(reference, live[i].content, length);
        CHECK(same);
        ++told.compared;
      }
      engine.release(live[i].request);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i--));
    }
  }
  return told;
}

TEST_CASE("pages and seats are zero right behind the update that gives them to a new owner") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(layout.name);
    const std::uint32_t seed = 20260801 + static_cast<std::uint32_t>(&layout - kLayouts);
    MESSAGE("seed " << seed);
    TestEngineOptions options = engine_options();
    layout.choose(options.cache);
    WatchedEngine watched(options);
    TestEngine reference(test_backend(), options);
    const Told told = tell_random_story(watched, reference, seed);
    CHECK(watched.seats_zeroed >= 10);
    CHECK(watched.pages_zeroed >= 15);
    CHECK(told.compared >= 8);
    CHECK(told.refused >= 10);
  }
}

TEST_CASE("an abandoned update clears nothing, and the next one clears it all, once") {
  WatchedEngine watched(engine_options());
  TestEngine& engine = watched.engine;
  Ledger& ledger = engine.cache().ledger();
  const RequestId a = engine.admit(0, kContext);
  watched.step({{{a, 250}, 0}}, StepShape::ragged(1, 250));
  const RequestId b = engine.admit(1, kContext);
  for (int i = 0; i < 3; ++i) {
    const std::vector<BatchRow> batch = batch_of(engine, {{{b, 20}, 1}, {{a, 20}, 0}});
    const Snapshot before = engine.snapshot();
    const StepUpdate& lost = ledger.prepare(batch, StepShape::ragged(2, 40), kBuffer);
    CHECK(lost.cells().size() == 2);  // the second page of a, the first of b
    ledger.abandon(lost.id());
    const Snapshot after = engine.snapshot();
    const bool untouched = before.pages == after.pages && before.seats == after.seats;
    CHECK(untouched);
  }
  const std::int64_t pages = watched.pages_zeroed;
  watched.step({{{a, 3}, 0}}, StepShape::decode(1, 5));  // to 253: nothing new
  CHECK(watched.pages_zeroed == pages);
  watched.step({{{a, 5, 2}, 0}, {{b, 4}, 1}}, StepShape::decode(2, 5));
  CHECK(watched.pages_zeroed == pages + 2);
  watched.step({{{a, 5}, 0}, {{b, 4}, 1}}, StepShape::decode(2, 5));
  const bool a_same = engine.live_bytes(a) == alone(engine.options(), 0, 260);
  const bool b_same = engine.live_bytes(b) == alone(engine.options(), 1, 8);
  CHECK(a_same);
  CHECK(b_same);
}

TEST_CASE("an update of which any call fails may be made again, and clears all the same") {
  for (std::int64_t n = 0; n < 3; ++n) {  // seats, pages, the update itself
    CAPTURE(n);
    FaultyBackend backend(test_backend());
    TestEngine engine(backend, engine_options());
    engine.poison();
    const RequestId a = engine.admit(0, kContext);
    engine.ragged_step({{a, 255}});
    const RequestId b = engine.admit(1, kContext);
    const std::vector<StepRow> rows{{b, 4}, {a, 4}};
    backend.fail_at(n, static_cast<std::uint32_t>(Verb::kUpdate));
    CHECK_THROWS_AS(engine.begin(rows, StepShape::decode(2, 5)), Fault);
    CHECK(backend.fired());
    const StepId id = engine.begin(rows, StepShape::decode(2, 5));
    const Snapshot memory = engine.snapshot();
    const DeviceCache& device = engine.cache().device();
    const Ledger& ledger = engine.cache().ledger();
    CHECK(all_zero(cut(memory.seats, seat_ranges(device, ledger.info(b).seat))));
    CHECK(all_zero(cut(memory.pages, page_ranges(device, ledger.pages_of(b)[0]))));
    CHECK(all_zero(cut(memory.pages, page_ranges(device, ledger.pages_of(a)[1]))));
    engine.enqueue_body(StepShape::decode(2, 5), engine.stream());
    engine.enqueue_commit(engine.stream());
    engine.finish(id, rows);
    const bool a_same = engine.live_bytes(a) == alone(engine.options(), 0, 259);
    const bool b_same = engine.live_bytes(b) == alone(engine.options(), 1, 4);
    CHECK(a_same);
    CHECK(b_same);
  }
}

// Plan, appends and a commit that keeps all, as a graph.
GraphExec capture_step(TestEngine& engine, StepShape shape) {
  engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
  engine.stream().wait();
  Capture capture(test_backend(), engine.stream());
  engine.enqueue_body(shape, engine.stream());
  engine.cache().device().enqueue_commit(kBuffer, nullptr, nullptr, engine.stream());
  return capture.finish();
}

// A copy of all memory, made in stream order; it stays on the device, so that making it waits for
// nothing.
class SnapshotAhead {
 public:
  explicit SnapshotAhead(TestEngine& engine)
      : engine_(&engine),
        pages_(test_backend(), engine.stream(), engine.cache().device().pages_memory().size(),
               0xFF),
        seats_(test_backend(), engine.stream(), engine.cache().device().seats_memory().size(),
               0xFF) {}

  void enqueue() {
    copy(pages_, engine_->cache().device().pages_memory());
    copy(seats_, engine_->cache().device().seats_memory());
  }
  Snapshot fetch() const { return {pages_.download(), seats_.download()}; }

 private:
  void copy(DeviceArray<std::byte>& to, std::span<const std::byte> from) {
    test_backend().copy(to.data(), from.data(), static_cast<std::int64_t>(from.size()),
                        engine_->stream());
  }

  TestEngine* engine_;
  DeviceArray<std::byte> pages_, seats_;
};

// Seat and first page of a request, all their bytes.
std::vector<std::byte> seat_and_page(const Snapshot& memory, TestEngine& engine,
                                     RequestId request) {
  const DeviceCache& device = engine.cache().device();
  const Ledger& ledger = engine.cache().ledger();
  auto bytes = cut(memory.seats, seat_ranges(device, ledger.info(request).seat));
  const auto page = cut(memory.pages, page_ranges(device, ledger.pages_of(request)[0]));
  bytes.insert(bytes.end(), page.begin(), page.end());
  return bytes;
}

// G3
TEST_CASE("a former owner's steps in flight come before the zeroes, a successor's replays behind") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(layout.name);
    TestEngineOptions options = engine_options();
    layout.choose(options.cache);
    options.limits.run_ahead_max = 60;
    TestEngine engine(test_backend(), options);
    engine.poison();
    const StepShape shape = StepShape::decode(2);
    const GraphExec graph = capture_step(engine, shape);
    graph.launch(engine.stream());  // of padding only: a first launch may wait
    const RequestId a = engine.admit(0, kContext);
    const RequestId mate = engine.admit(1, kContext);
    engine.ragged_step({{a, 250}, {mate, 112}});
    RequestId next;
    SnapshotAhead behind(engine);  // the update that names the successor
    {
      Held held(engine.stream());
      for (int i = 0; i < 8; ++i) run_ahead(engine, {{{a}, 0}, {{mate}, 1}}, shape);
      engine.release(a);
      next = engine.admit(2, kContext);
      REQUIRE(next.index == a.index);
      for (int i = 0; i < 12; ++i) {
        const std::vector<AheadRow> rows{{{next}, 2}, {{mate}, 1}};
        const std::vector<BatchRow> batch = batch_of(engine, rows);
        const StepId id = engine.cache().begin_step(batch, shape, kBuffer, engine.stream());
        if (i == 0) behind.enqueue();
        copy_rows(engine, rows, shape);
        graph.launch(engine.stream());
        engine.finish(id, step_rows_of(rows));
      }
      REQUIRE(held.resume() == "");
    }
    CHECK(all_zero(seat_and_page(behind.fetch(), engine, next)));
    const bool mate_same = engine.live_bytes(mate) == alone(options, 1, 132);
    CHECK(mate_same);

    // They hold what their owner has written, and zeroes.
    TestEngine fresh(test_backend(), options);
    const RequestId same_as = fresh.admit(2, kContext);
    for (int i = 0; i < 12; ++i) run_ahead(fresh, {{{same_as}, 2}}, shape);
    const bool same = seat_and_page(engine.snapshot(), engine, next) ==
                      seat_and_page(fresh.snapshot(), fresh, same_as);
    CHECK(same);
  }
}

TEST_CASE("a page that came back with refused drafts is zeroed again, one that stayed is not") {
  WatchedEngine watched(engine_options());
  TestEngine& engine = watched.engine;
  Ledger& ledger = engine.cache().ledger();
  const RequestId a = engine.admit(0, kContext);
  const RequestId b = engine.admit(1, kContext);
  watched.step({{{a, 254}, 0}, {{b, 254}, 1}}, StepShape::ragged(2, 508));
  ledger.reserve(b, 60).value();  // its second page stays, whatever is refused
  for (int i = 0; i < 3; ++i) {
    const std::int64_t before = watched.pages_zeroed;
    watched.step({{{a, 5, 0}, 0}, {{b, 5, 0}, 1}}, StepShape::decode(2, 5));
    CHECK(watched.pages_zeroed - before == (i == 0 ? 2 : 1));
    watched.step({}, StepShape::decode(1, 5));  // counts what was refused
    CHECK(ledger.pages_of(a).size() == 1);
    CHECK(ledger.pages_of(b).size() == 2);
  }
  watched.step({{{a, 5}, 0}, {{b, 5}, 1}}, StepShape::decode(2, 5));
  watched.step({{{a, 5}, 0}, {{b, 5}, 1}}, StepShape::decode(2, 5));
  const bool a_same = engine.live_bytes(a) == alone(engine.options(), 0, 264);
  const bool b_same = engine.live_bytes(b) == alone(engine.options(), 1, 264);
  CHECK(a_same);
  CHECK(b_same);
}

// Applies one update that gives a seat and a page to each of `owners` and counts calls; whether all
// of the memory was 0xFF and is zero where it should be.
std::int64_t clear_for(std::int32_t owners, std::vector<LayerKind> layers, bool clear_on_reuse) {
  FaultyBackend backend(test_backend());
  std::int64_t calls = 0;
  TestEngineOptions options = small_engine(owners + 1, 256);
  options.spec.layers = std::move(layers);
  DeviceCacheOptions cache;
  cache.clear_on_reuse = clear_on_reuse;
  DeviceCache device(backend, options.spec, options.limits, cache);
  Stream stream(backend);
  for (const auto region : {device.pages_memory(), device.seats_memory()}) {
    backend.fill(region.data(), 0xFF, static_cast<std::int64_t>(region.size()), stream);
  }
  StepUpdate update(options.limits);
  update.start(0, kBuffer, StepShape::decode(owners), 1);
  for (std::int32_t i = 0; i < owners; ++i) {
    update.add(BatchRowUpdate{i, 1, 1, BatchRowUpdate::kNewOwner});
  }
  for (std::int32_t i = 0; i < owners; ++i) update.add(CellUpdate{i, 0, owners - i});
  update.seal();
  backend.fail_when(static_cast<std::uint32_t>(Verb::kUpdate), [&] {
    ++calls;
    return false;
  });
  device.apply(update, stream);
  Snapshot expected{std::vector<std::byte>(device.pages_memory().size(), std::byte{0xFF}),
                    std::vector<std::byte>(device.seats_memory().size(), std::byte{0xFF})};
  Snapshot now = expected;
  backend.copy(now.pages.data(), device.pages_memory().data(),
               static_cast<std::int64_t>(now.pages.size()), stream);
  backend.copy(now.seats.data(), device.seats_memory().data(),
               static_cast<std::int64_t>(now.seats.size()), stream);
  stream.wait();
  for (std::int32_t i = 0; clear_on_reuse && i < owners; ++i) {
    zero(expected.seats, seat_ranges(device, SeatId(i)));
    zero(expected.pages, page_ranges(device, PageId(i + 1)));
  }
  const bool right = now.pages == expected.pages && now.seats == expected.seats;
  CHECK(right);
  return calls;
}

TEST_CASE("more owners, and more layers, than one launch holds are cleared by several") {
  const std::vector<LayerKind> few{LayerKind::kCsa};
  CHECK(clear_for(2, few, true) == 1 + 1 + 1);
  CHECK(clear_for(256, few, true) == 1 + 1 + 1);
  CHECK(clear_for(257, few, true) == 2 + 2 + 1);
  std::vector<LayerKind> many(110, LayerKind::kSliding);  // 2 pieces a seat, 5 of CSA layers
  many.resize(130, LayerKind::kCsa);
  CHECK(clear_for(2, many, true) == 2 + 1 + 1);
}

TEST_CASE("updates without a new owner clear nothing, nor do any where the option is off") {
  CHECK(clear_for(3, {LayerKind::kCsa, LayerKind::kHca}, false) == 1);
  FaultyBackend backend(test_backend());
  TestEngine engine(backend, engine_options());
  std::int64_t calls = 0;
  const RequestId a = engine.admit(0, kContext);
  engine.ragged_step({{a, 100}});
  backend.fail_when(static_cast<std::uint32_t>(Verb::kUpdate), [&] {
    ++calls;
    return false;
  });
  for (std::int64_t i = 1; i <= 156; ++i) {
    engine.step(std::vector<StepRow>{{a}}, StepShape::decode(1));
    REQUIRE(calls == i);
  }
  engine.step(std::vector<StepRow>{{a}}, StepShape::decode(1));  // token 257
  CHECK(calls == 156 + 2);
}

}  // namespace
