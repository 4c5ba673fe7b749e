// The device cache and the decode graphs: what they refuse and how they say so, memory that neither
// grows nor moves, the order of updates, and captures that leave no trace.
#include <doctest/doctest.h>
#include <quire/cache/cache_manager.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/decode_graphs.h>
#include <quire/runtime/device_cache.h>
#include <quire/runtime/host/host_stream.h>
#include <quire/runtime/owners.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using quire::test::DeviceArray;
using quire::test::test_backend;

constexpr PlanBufferId kBuffer(0);
constexpr LayerId kSlidingLayer(0);
constexpr LayerId kCsaLayer(1);
constexpr LayerId kHcaLayer(2);

ModelSpec small_spec() {
  return ModelSpec{{LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca}};
}

Limits small_limits() {
  Limits limits;
  limits.seats_max = 4;
  limits.pages = 8;
  limits.rows_max = 4;
  limits.tokens_max = 64;
  limits.context_max = 512;
  limits.draft_max = 1;
  limits.repeat_max = 4;
  return limits;
}

// The text of the UsageError that `call` throws.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

#define CHECK_REFUSED(call, words) \
  CHECK_MESSAGE(refusal([&] { call; }).find(words) != std::string::npos, refusal([&] { call; }))

StepUpdate make_update(StepId id, StepShape shape, std::vector<BatchRowUpdate> rows = {},
                       std::vector<CellUpdate> cells = {}, std::vector<LimitUpdate> lowered = {}) {
  StepUpdate update(small_limits());
  update.start(id, kBuffer, shape, 1);
  for (const auto& row : rows) update.add(row);
  for (const auto& cell : cells) update.add(cell);
  for (const auto& limit : lowered) update.add(limit);
  update.seal();
  return update;
}

BatchRowUpdate new_row(std::int32_t seat, std::int32_t tokens, std::int32_t limit) {
  return {seat, tokens, limit, BatchRowUpdate::kNewOwner};
}

// A small cache with everything bound, and input rows of zeros.
struct Fixture {
  explicit Fixture(DeviceCacheOptions options = {}, bool bind = true)
      : cache(test_backend(), small_spec(), small_limits(), options) {
    if (bind) bind_all();
  }
  ~Fixture() { stream.wait(); }  // before the cache's memory goes

  void bind_all() {
    cache.bind_rope(RopeGroup::kSliding, {rope.data(), 512, RopeLayout::kInterleaved});
    cache.bind_rope(RopeGroup::kCompressing, {rope.data(), 512, RopeLayout::kInterleaved});
    cache.bind_layer(kSlidingLayer, binding());
    cache.bind_layer(kCsaLayer, binding());
    cache.bind_layer(kHcaLayer, binding());
  }
  LayerBinding binding() {
    LayerBinding bound;
    bound.window_norm = bound.csa_norm = bound.indexer_norm = weights.data();
    bound.csa_bias = bound.indexer_bias = weights.data();
    bound.hca_bias = weights.data();
    bound.hca_norm = weights.data();
    return bound;
  }
  AppendInputs inputs(bool compressing) {
    AppendInputs in;
    in.window.data = rows.data();
    if (compressing) in.csa.data = in.indexer.data = rows.data();
    return in;
  }
  void start(StepShape shape) {
    cache.apply(make_update(kPaddingStep, shape), stream);
    cache.enqueue_plan(kBuffer, stream);
  }
  std::vector<std::byte> read(std::span<const std::byte> memory) {
    std::vector<std::byte> bytes(memory.size());
    test_backend().copy(bytes.data(), memory.data(), static_cast<std::int64_t>(bytes.size()),
                        stream);
    stream.wait();
    return bytes;
  }
  std::vector<std::byte> lasting_bytes() {
    std::vector<std::byte> all = read(cache.pages_memory());
    for (const auto region : {cache.seats_memory(), cache.step_table_memory()}) {
      const std::vector<std::byte> more = read(region);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  std::vector<std::int32_t> lengths() {
    std::vector<std::int32_t> values(4);
    test_backend().copy(values.data(), cache.step_table().length, 16, stream);
    stream.wait();
    return values;
  }

  Stream stream{test_backend()};
  DeviceArray<float> rope{test_backend(), stream, 512 * 64, 0};
  DeviceArray<float> weights{test_backend(), stream, 8 * 512, 0};
  DeviceArray<float> rows{test_backend(), stream, 64 * 2048, 0};
  DeviceCache cache;
};

// --- Opening ---

TEST_CASE("bytes_needed is what the cache takes, and a span of exactly that is enough") {
  const CacheBytes needed = DeviceCache::bytes_needed(small_spec(), small_limits());
  CHECK(Fixture().cache.bytes().total() == needed.total());
  Backend& backend = test_backend();
  const Stream stream(backend);
  MemoryPool pool(backend, needed.total() + 4096);
  const Memory memory(pool, needed.total() + 1024, stream);
  const auto bytes = static_cast<std::size_t>(needed.total());
  DeviceCacheOptions options;
  options.memory = std::span(memory.data(), bytes);
  const Fixture fixture(options);
  CHECK(fixture.cache.pages_memory().data() == memory.data());

  const auto open = [&](std::span<std::byte> span) {
    options.memory = span;
    DeviceCache(backend, small_spec(), small_limits(), options);
  };
  CHECK_REFUSED(open(std::span(memory.data(), bytes - 1)), std::to_string(bytes));
  CHECK_REFUSED(open(std::span(memory.data() + 16, bytes)), "multiple of 256");
}

TEST_CASE("a cache on a pool with exactly its bytes opens on the host") {
  if (test_backend().kind() != BackendKind::kHost) {
    MESSAGE("SKIPPED on CUDA: its pools take whole granules, as capacity_device_test measures");
    return;
  }
  // The pool is the cache's own, with a budget of its total: opening proves that nothing more is
  // asked of it, and the regions adjoin without a gap.
  const Fixture fixture;
  const CacheBytes bytes = fixture.cache.bytes();
  CHECK(fixture.cache.pages_memory().data() + bytes.pages == fixture.cache.seats_memory().data());
  CHECK(fixture.cache.seats_memory().data() + bytes.seats + bytes.scratch ==
        fixture.cache.step_table_memory().data());
}

// G2
TEST_CASE("everything is zero after opening and after clear, at the same addresses") {
  Fixture fixture;
  const auto zeros = std::vector<std::byte>(fixture.lasting_bytes().size());
  CHECK(fixture.lasting_bytes() == zeros);
  const std::byte* pages = fixture.cache.pages_memory().data();
  for (const auto region : {fixture.cache.pages_memory(), fixture.cache.seats_memory(),
                            fixture.cache.step_table_memory()}) {
    test_backend().fill(region.data(), 0xFF, static_cast<std::int64_t>(region.size()),
                        fixture.stream);
  }
  PlanHeader* header = fixture.cache.plan_buffer(kBuffer).header;
  test_backend().fill(header, 0xFF, sizeof(PlanHeader), fixture.stream);
  fixture.cache.clear(fixture.stream);
  CHECK(fixture.lasting_bytes() == zeros);
  const std::span<const PlanHeader> headers(header, 1);
  CHECK(fixture.read(std::as_bytes(headers)) == std::vector<std::byte>(sizeof(PlanHeader)));
  CHECK(fixture.cache.pages_memory().data() == pages);
}

// P9
TEST_CASE("rings that are too small and a model without layers are refused") {
  const auto open = [](ModelSpec spec, DeviceCacheOptions options) {
    DeviceCache(test_backend(), spec, small_limits(), options);
  };
  DeviceCacheOptions window;
  window.window_ring_tokens = 128;
  CHECK_REFUSED(open(small_spec(), window), "at least 192");
  DeviceCacheOptions csa;
  csa.csa_ring_tokens = 8;
  CHECK_REFUSED(open(small_spec(), csa), "at least 12");
  CHECK_REFUSED(open(ModelSpec{}, {}), "layers");
}

TEST_CASE("a scale floor or a norm epsilon that no arithmetic can take is refused by name") {
  const auto open = [](auto change) {
    DeviceCacheOptions options;
    change(options);
    DeviceCache(test_backend(), small_spec(), small_limits(), options);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0f, -1e-4f, 1e-37f, nan, infinity}) {
    CHECK_REFUSED(open([&](DeviceCacheOptions& o) { o.scale_floor = bad; }),
                  "DeviceCacheOptions::scale_floor is");
  }
  for (const float bad : {-1e-6f, nan, infinity, -infinity}) {
    CHECK_REFUSED(open([&](DeviceCacheOptions& o) { o.norm_eps = bad; }),
                  "DeviceCacheOptions::norm_eps is");
  }
  CHECK_NOTHROW(open([](DeviceCacheOptions& o) { o.norm_eps = 0.0f; }));
  CHECK_NOTHROW(open([](DeviceCacheOptions& o) { o.scale_floor = 1e-8f; }));
}

// --- Binding ---

TEST_CASE("null, misaligned and short bindings are refused by name") {
  Fixture fixture;
  const auto bind_to = [&](LayerId layer, auto change) {
    LayerBinding binding = fixture.binding();
    change(binding);
    fixture.cache.bind_layer(layer, binding);
  };
  const auto bind = [&](auto change) { bind_to(kCsaLayer, change); };
  CHECK_REFUSED(bind_to(kHcaLayer, [](LayerBinding& b) { b.hca_bias = nullptr; }), "hca_bias");
  CHECK_REFUSED(bind_to(kHcaLayer, [](LayerBinding& b) { b.hca_norm = nullptr; }), "hca_norm");
  CHECK_REFUSED(bind_to(kHcaLayer, [](LayerBinding& b) { ++b.hca_bias; }), "hca_bias");
  CHECK(refusal([&] { bind_to(kHcaLayer, [](LayerBinding& b) { b.csa_bias = nullptr; }); }) ==
        "accepted");
  CHECK_REFUSED(bind([](LayerBinding& b) { b.csa_bias = nullptr; }), "csa_bias");
  CHECK_REFUSED(bind([](LayerBinding& b) { b.csa_norm = nullptr; }), "csa_norm");
  CHECK_REFUSED(bind([](LayerBinding& b) { b.indexer_bias = nullptr; }), "indexer_bias");
  CHECK_REFUSED(bind([](LayerBinding& b) { b.indexer_norm = nullptr; }), "indexer_norm");
  CHECK_REFUSED(bind([](LayerBinding& b) { ++b.csa_norm; }), "csa_norm");
  CHECK_REFUSED(bind([](LayerBinding& b) { ++b.window_norm; }), "window_norm");
  CHECK(refusal([&] { bind([](LayerBinding& b) { b.window_norm = nullptr; }); }) == "accepted");
  LayerBinding window_only;
  CHECK_NOTHROW(fixture.cache.bind_layer(kSlidingLayer, window_only));
  CHECK_REFUSED(fixture.cache.bind_layer(LayerId(3), window_only), "layer 3");
  CHECK_REFUSED(fixture.cache.bind_layer(LayerId(), window_only), "layer -1");

  const auto rope = [&](const float* values, std::int64_t positions) {
    fixture.cache.bind_rope(RopeGroup::kSliding, {values, positions, RopeLayout::kHalves});
  };
  CHECK_REFUSED(rope(nullptr, 512), "null");
  CHECK_REFUSED(rope(fixture.rope.data() + 1, 512), "aligned");
  CHECK_REFUSED(rope(fixture.rope.data(), 511), "512");
}

TEST_CASE("an append to a layer or a group that is not bound says which") {
  Fixture fixture({}, false);
  fixture.start(StepShape::decode(4));
  const auto append = [&] {
    fixture.cache.append(kSlidingLayer, kBuffer, fixture.inputs(false), fixture.stream);
  };
  CHECK_REFUSED(append(), "layer 0 is not bound");
  fixture.cache.bind_layer(kSlidingLayer, fixture.binding());
  CHECK_REFUSED(append(), "group sliding");
  fixture.cache.bind_rope(RopeGroup::kSliding,
                          {fixture.rope.data(), 512, RopeLayout::kInterleaved});
  CHECK_NOTHROW(append());
}

// --- Appending ---

TEST_CASE("input rows that are misaligned or overlap, and parts a kind lacks, are refused") {
  Fixture fixture;
  fixture.start(StepShape::decode(4));
  const auto append = [&](LayerId layer, auto change) {
    AppendInputs inputs = fixture.inputs(layer == kCsaLayer);
    change(inputs);
    fixture.cache.append(layer, kBuffer, inputs, fixture.stream);
  };
  float* rows = fixture.rows.data();
  CHECK_REFUSED(append(kCsaLayer, [&](AppendInputs& in) { in.csa.data = rows + 1; }), "csa");
  CHECK_REFUSED(append(kCsaLayer, [](AppendInputs& in) { in.csa.stride = 2047; }), "stride");
  CHECK_REFUSED(append(kCsaLayer, [](AppendInputs& in) { in.csa.stride = 2050; }), "stride");
  CHECK_REFUSED(append(kCsaLayer, [](AppendInputs& in) { in.window.stride = 516; }), "stride");
  CHECK_REFUSED(append(kCsaLayer, [](AppendInputs& in) { in.indexer.stride = -512; }), "stride");
  for (const std::int64_t far : {std::int64_t{1} << 40, std::int64_t{1} << 61,
                                 std::numeric_limits<std::int64_t>::max() - 511}) {
    CHECK_REFUSED(append(kCsaLayer, [&](AppendInputs& in) { in.csa.stride = far; }), "at most");
  }
  CHECK_REFUSED(append(kCsaLayer, [&](AppendInputs& in) { in.hca.data = rows; }), "kind csa");
  CHECK_REFUSED(append(kHcaLayer, [&](AppendInputs& in) { in.csa.data = rows; }), "kind hca");
  CHECK_REFUSED(append(kHcaLayer, [&](AppendInputs& in) { in.hca.data = rows + 1; }), "hca");
  CHECK_REFUSED(append(kHcaLayer, [&](AppendInputs& in) { in.hca = {rows, 1023}; }), "hca.stride");
  CHECK_REFUSED(append(kSlidingLayer, [&](AppendInputs& in) { in.csa.data = rows; }), "sliding");
  CHECK_REFUSED(append(kSlidingLayer, [&](AppendInputs& in) { in.indexer.data = rows; }),
                "sliding");
  CHECK_REFUSED(append(kSlidingLayer, [](AppendInputs& in) { in = {}; }), "no part");
  CHECK_REFUSED(append(LayerId(9), [](AppendInputs&) {}), "layer 9");
  CHECK(refusal([&] { append(kCsaLayer, [](AppendInputs& in) { in.csa.stride = 2052; }); }) ==
        "accepted");
  fixture.stream.wait();
}

// G6
TEST_CASE("plan, append and commit without what must come before are refused") {
  Fixture fixture;
  const auto append = [&] {
    fixture.cache.append(kSlidingLayer, kBuffer, fixture.inputs(false), fixture.stream);
  };
  const auto commit = [&] {
    fixture.cache.enqueue_commit(kBuffer, nullptr, nullptr, fixture.stream);
  };
  CHECK_REFUSED(fixture.cache.enqueue_plan(kBuffer, fixture.stream), "no update was applied");
  CHECK_REFUSED(append(), "no update was applied");
  CHECK_REFUSED(commit(), "no update was applied");
  fixture.cache.apply(make_update(kPaddingStep, StepShape::decode(2)), fixture.stream);
  CHECK_REFUSED(append(), "enqueue_plan first");
  CHECK_REFUSED(commit(), "enqueue_plan first");
  fixture.cache.enqueue_plan(kBuffer, fixture.stream);
  CHECK_NOTHROW(append());
  CHECK_NOTHROW(commit());
  fixture.cache.clear(fixture.stream);
  CHECK_REFUSED(fixture.cache.enqueue_plan(kBuffer, fixture.stream), "no update was applied");
  CHECK_REFUSED(fixture.cache.enqueue_plan(PlanBufferId(1), fixture.stream), "plan buffer 1");
}

TEST_CASE("a captured plan counts as planned after later updates of its shape only") {
  Fixture fixture;
  fixture.cache.apply(make_update(kPaddingStep, StepShape::decode(2)), fixture.stream);
  Capture capture(test_backend(), fixture.stream);
  fixture.cache.enqueue_plan(kBuffer, fixture.stream);
  const GraphExec plan = capture.finish();
  const auto append = [&] {
    fixture.cache.append(kSlidingLayer, kBuffer, fixture.inputs(false), fixture.stream);
  };
  fixture.cache.apply(make_update(kPaddingStep, StepShape::decode(2)), fixture.stream);
  plan.launch(fixture.stream);
  CHECK_NOTHROW(append());
  fixture.cache.apply(make_update(kPaddingStep, StepShape::decode(3)), fixture.stream);
  CHECK_REFUSED(append(), "enqueue_plan first");
  fixture.stream.wait();
}

TEST_CASE("a checked cache refuses a second append of a part to a step with long rows") {
  DeviceCacheOptions options;
  options.checked = true;
  Fixture fixture(options);
  fixture.cache.apply(make_update(0, StepShape::ragged(1, 8), {new_row(0, 8, 8)}, {{0, 0, 3}}),
                      fixture.stream);
  fixture.cache.enqueue_plan(kBuffer, fixture.stream);
  AppendInputs window = fixture.inputs(false);
  AppendInputs csa;
  csa.csa.data = fixture.rows.data();
  fixture.cache.append(kCsaLayer, kBuffer, window, fixture.stream);
  fixture.cache.append(kCsaLayer, kBuffer, csa, fixture.stream);
  CHECK_REFUSED(fixture.cache.append(kCsaLayer, kBuffer, csa, fixture.stream), "runs once");
  fixture.cache.enqueue_commit(kBuffer, nullptr, nullptr, fixture.stream);
  CHECK(fixture.lengths()[0] == 8);
}

// --- Updates ---

TEST_CASE("updates are carried out in the order of their ids and padding at any time") {
  Fixture fixture;
  const StepShape shape = StepShape::decode(1);
  const auto apply = [&](StepId id) {
    fixture.cache.apply(make_update(id, shape, {new_row(0, 1, 4)}, {{0, 0, 0}}), fixture.stream);
  };
  CHECK_REFUSED(apply(1), "step 0 comes next");
  apply(0);
  CHECK_REFUSED(apply(0), "step 1 comes next");
  CHECK_REFUSED(apply(2), "step 1 comes next");
  CHECK_NOTHROW(fixture.cache.apply(make_update(kPaddingStep, shape), fixture.stream));
  apply(1);
  CHECK_REFUSED(apply(-2), "out of order");
  fixture.cache.clear(fixture.stream);
  apply(0);
  fixture.stream.wait();
}

TEST_CASE("an update on a capturing stream is refused and the capture goes on") {
  Fixture fixture;
  fixture.cache.apply(make_update(kPaddingStep, StepShape::decode(1)), fixture.stream);
  Capture capture(test_backend(), fixture.stream);
  CHECK_REFUSED(fixture.cache.apply(make_update(0, StepShape::decode(1)), fixture.stream),
                "capturing");
  fixture.cache.enqueue_plan(kBuffer, fixture.stream);
  CHECK_NOTHROW(capture.finish());
}

TEST_CASE("updates with indices beyond the limits are refused and change nothing") {
  Fixture fixture;
  const auto before = fixture.lasting_bytes();
  const auto apply = [&](StepShape shape, std::vector<BatchRowUpdate> rows,
                         std::vector<CellUpdate> cells = {},
                         std::vector<LimitUpdate> lowered = {}) {
    fixture.cache.apply(make_update(0, shape, rows, cells, lowered), fixture.stream);
  };
  const StepShape one = StepShape::decode(1);
  CHECK_REFUSED(apply(StepShape::decode(5), {}), "rows_max");
  CHECK_REFUSED(apply(StepShape::decode(4, 3), {}), "draft_max");
  CHECK_REFUSED(apply(StepShape::ragged(4, 65), {}), "tokens_max");
  CHECK_REFUSED(apply(StepShape::ragged(0, 1), {}), "batch rows");
  CHECK_REFUSED(apply(StepShape{2, 1, 3}, {}), "decode shape");
  CHECK_REFUSED(apply(one, {new_row(4, 1, 4)}), "seat 4");
  CHECK_REFUSED(apply(one, {new_row(-1, 1, 4)}), "seat -1");
  CHECK_REFUSED(apply(one, {new_row(0, 2, 4)}), "2 tokens");
  CHECK_REFUSED(apply(one, {new_row(0, 1, 513)}), "context_max");
  CHECK_REFUSED(apply(one, {new_row(0, 1, 4), new_row(1, 1, 4)}), "batch rows");
  CHECK_REFUSED(apply(one, {}, {{0, 2, 0}}), "cell 2");
  CHECK_REFUSED(apply(one, {}, {{0, 0, 8}}), "page 8");
  CHECK_REFUSED(apply(one, {}, {{5, 0, 0}}), "seat 5");
  CHECK_REFUSED(apply(one, {}, {}, {{9, 0}}), "seat 9");
  CHECK_REFUSED(apply(one, {}, {}, {{0, -1}}), "limit of seat 0");
  CHECK_REFUSED(apply(StepShape::ragged(3, 8), {new_row(0, 5, 9), new_row(1, 4, 9)}), "9 tokens");
  CHECK_REFUSED(apply(StepShape::ragged(3, 8), {new_row(0, 5, 9), new_row(1, 1, 9)}), "come first");
  StepUpdate foreign(small_limits());
  foreign.start(0, PlanBufferId(1), one, 1);
  foreign.seal();
  CHECK_REFUSED(fixture.cache.apply(foreign, fixture.stream), "plan buffer 1");
  foreign.start(0, kBuffer, one, 5);
  foreign.seal();
  CHECK_REFUSED(fixture.cache.apply(foreign, fixture.stream), "repeat_max");
  foreign.start(kPaddingStep, kBuffer, one, 1);
  foreign.add(new_row(0, 1, 1));
  foreign.seal();
  CHECK_REFUSED(fixture.cache.apply(foreign, fixture.stream), "padding step");
  CHECK(fixture.lasting_bytes() == before);
  CHECK_NOTHROW(apply(one, {new_row(0, 1, 4)}, {{0, 0, 0}}));  // the id was not used up
}

TEST_CASE("an update that names a seat twice is refused and changes nothing") {
  Fixture fixture;
  const auto before = fixture.lasting_bytes();
  const auto apply = [&](std::vector<BatchRowUpdate> rows, std::vector<LimitUpdate> lowered = {}) {
    fixture.cache.apply(make_update(0, StepShape::ragged(3, 8), rows, {}, lowered),
                        fixture.stream);
  };
  CHECK_REFUSED(apply({new_row(2, 1, 4), new_row(0, 1, 4), new_row(2, 1, 9)}),
                "a batch row names seat 2, which the update names already");
  CHECK_REFUSED(apply({new_row(1, 1, 4)}, {{1, 0}}), "a lowered limit names seat 1");
  CHECK_REFUSED(apply({}, {{3, 0}, {0, 0}, {3, 1}}), "a lowered limit names seat 3");
  CHECK(fixture.lasting_bytes() == before);
  // Cells of a named seat are its own, and the next update may name the same seats again.
  CHECK_NOTHROW(apply({new_row(2, 1, 4), new_row(0, 1, 4)}, {{1, 0}, {3, 0}}));
  CHECK_NOTHROW(fixture.cache.apply(make_update(1, StepShape::ragged(3, 8), {new_row(2, 1, 4)},
                                                {{2, 0, 1}, {2, 1, 2}}, {{1, 0}}),
                                    fixture.stream));
  fixture.stream.wait();
}

TEST_CASE("a row longer than draft_max + 1 tokens in a repeated step is refused") {
  Fixture fixture;
  StepUpdate update(small_limits());
  const auto apply = [&](std::int32_t tokens, std::int32_t repeat) {
    update.start(0, kBuffer, StepShape::ragged(2, 8), repeat);
    update.add(new_row(0, tokens, 12));
    update.seal();
    fixture.cache.apply(update, fixture.stream);
  };
  CHECK_REFUSED(apply(3, 2), "3 tokens and repeat is 2");
  CHECK(refusal([&] { apply(2, 2); }) == "accepted");
  fixture.cache.clear(fixture.stream);
  CHECK(refusal([&] { apply(3, 1); }) == "accepted");
  fixture.stream.wait();
}

TEST_CASE("streams of another backend are refused everywhere") {
  Fixture fixture;
  fixture.start(StepShape::decode(1));
  HostStream host;
  int nothing = 0;
  const StreamView foreign = test_backend().kind() == BackendKind::kHost
                                 ? StreamView(reinterpret_cast<CUstream_st*>(&nothing))
                                 : StreamView(host);
  DeviceCache& cache = fixture.cache;
  CHECK_THROWS_AS(cache.apply(make_update(0, StepShape::decode(1)), foreign), UsageError);
  CHECK_THROWS_AS(cache.enqueue_plan(kBuffer, foreign), UsageError);
  CHECK_THROWS_AS(cache.append(kSlidingLayer, kBuffer, fixture.inputs(false), foreign), UsageError);
  CHECK_THROWS_AS(cache.enqueue_commit(kBuffer, nullptr, nullptr, foreign), UsageError);
  CHECK_THROWS_AS(cache.clear(foreign), UsageError);
}

TEST_CASE("an update larger than one launch arrives whole") {
  Limits limits = small_limits();
  limits.seats_max = limits.rows_max = limits.tokens_max = 3000;
  limits.pages = 4000;
  DeviceCache cache(test_backend(), ModelSpec{{LayerKind::kSliding}}, limits);
  const Stream stream(test_backend());
  StepUpdate update(limits);
  update.start(0, kBuffer, StepShape::decode(3000), 1);
  for (std::int32_t i = 0; i < 3000; ++i) update.add(new_row(2999 - i, 1, 1 + i % 500));
  for (std::int32_t i = 0; i < 3000; ++i) update.add(CellUpdate{i, i % 2, i});
  update.seal();
  CHECK(update.bytes().size() > 2 * kUpdateChunkBytes);
  cache.apply(update, stream);
  std::vector<std::int32_t> seats(3000), limit(3000), table(6000);
  Backend& backend = test_backend();
  backend.copy(seats.data(), cache.plan_buffer(kBuffer).row_seats, 12000, stream);
  backend.copy(limit.data(), cache.step_table().limit, 12000, stream);
  backend.copy(table.data(), cache.step_table().page_table, 24000, stream);
  stream.wait();
  bool equal = true;
  for (std::int32_t i = 0; i < 3000; ++i) {
    const auto at = static_cast<std::size_t>(i);
    equal = equal && seats[at] == 2999 - i && limit[2999 - at] == 1 + i % 500 &&
            table[2 * at + at % 2] == i;
  }
  CHECK(equal);
}

// --- Many steps, and graphs ---

// G1
TEST_CASE("steps move lengths to the limit and no address ever changes") {
  Fixture fixture;
  const PlanBuffer plan = fixture.cache.plan_buffer(kBuffer);
  const StepTable table = fixture.cache.step_table();
  const std::byte* pages = fixture.cache.csa_pages(kCsaLayer).base;
  for (StepId id = 0; id < 60; ++id) {
    BatchRowUpdate row = new_row(2, 1, static_cast<std::int32_t>(id) + 1);
    if (id > 0) row.flags = 0;
    fixture.cache.apply(make_update(id, StepShape::decode(2), {row}, {{2, 0, 5}}), fixture.stream);
    fixture.cache.enqueue_plan(kBuffer, fixture.stream);
    for (const LayerId layer : {kSlidingLayer, kCsaLayer}) {
      fixture.cache.append(layer, kBuffer, fixture.inputs(layer == kCsaLayer), fixture.stream);
    }
    fixture.cache.enqueue_commit(kBuffer, nullptr, nullptr, fixture.stream);
  }
  CHECK(fixture.lengths() == std::vector<std::int32_t>{0, 0, 60, 0});
  CHECK(fixture.cache.plan_buffer(kBuffer).tokens == plan.tokens);
  CHECK(fixture.cache.views(kBuffer).page_table == plan.views.page_table);
  CHECK(fixture.cache.step_table().length == table.length);
  CHECK(fixture.cache.csa_pages(kCsaLayer).base == pages);
  DeviceReport report{};
  fixture.cache.report(kBuffer, &report, fixture.stream);
  fixture.stream.wait();
  CHECK(report.first_failing_seat == DeviceReport::kNoSeat);
}

struct GraphFixture {
  GraphFixture() : manager(test_backend(), small_spec(), small_limits()) {
    DeviceCache& cache = manager.device();
    cache.bind_rope(RopeGroup::kSliding, {rope.data(), 512, RopeLayout::kInterleaved});
    cache.bind_rope(RopeGroup::kCompressing, {rope.data(), 512, RopeLayout::kInterleaved});
    LayerBinding bound;
    bound.csa_norm = bound.indexer_norm = rope.data();
    bound.csa_bias = bound.indexer_bias = rope.data();
    cache.bind_layer(kSlidingLayer, bound);
    cache.bind_layer(kCsaLayer, bound);
  }
  ~GraphFixture() { stream.wait(); }
  void step(StepShape, PlanBufferId buffer, StreamView on) {
    DeviceCache& cache = manager.device();
    cache.enqueue_plan(buffer, on);
    AppendInputs inputs;
    inputs.window.data = rows.data();
    cache.append(kSlidingLayer, buffer, inputs, on);
    inputs.csa.data = inputs.indexer.data = rows.data();
    cache.append(kCsaLayer, buffer, inputs, on);
    cache.enqueue_commit(buffer, nullptr, nullptr, on);
  }
  DecodeGraphs capture(std::vector<StepShape> shapes) {
    return DecodeGraphs(
        manager, kBuffer, shapes,
        [this](StepShape shape, PlanBufferId buffer, StreamView on) { step(shape, buffer, on); },
        stream);
  }

  Stream stream{test_backend()};
  DeviceArray<float> rope{test_backend(), stream, 512 * 64, 0};
  DeviceArray<float> rows{test_backend(), stream, 64 * 2048, 0};
  CacheManager manager;
};

// G5
TEST_CASE("decode graphs find the smallest shape with room and refuse a batch above the largest") {
  GraphFixture fixture;
  const DecodeGraphs graphs = fixture.capture(
      {StepShape::decode(1), StepShape::decode(4), StepShape::decode(2), StepShape::decode(2, 2)});
  CHECK(graphs.shape_for(1) == StepShape::decode(1));
  CHECK(graphs.shape_for(2) == StepShape::decode(2));
  CHECK(graphs.shape_for(3) == StepShape::decode(4));
  CHECK(graphs.shape_for(1, 2) == StepShape::decode(2, 2));
  CHECK_REFUSED(graphs.shape_for(5), "4 x 1");
  CHECK_REFUSED(graphs.shape_for(4, 2), "2 x 2");
  CHECK_REFUSED(graphs.shape_for(0), "positive");
  CHECK_REFUSED(fixture.capture({}), "no shape");
  CHECK_REFUSED(fixture.capture({StepShape::ragged(2, 8)}), "ragged");
}

TEST_CASE("a graph replays the applied step and refuses another shape") {
  GraphFixture fixture;
  const DecodeGraphs graphs = fixture.capture({StepShape::decode(1), StepShape::decode(2)});
  Ledger& ledger = fixture.manager.ledger();
  const RequestId request = ledger.admit(100, 100).value();
  for (int i = 0; i < 10; ++i) {
    REQUIRE(ledger.reserve(request, 1));
    const BatchRow row{request, 1};
    const StepId id =
        fixture.manager.begin_step({&row, 1}, StepShape::decode(1), kBuffer, fixture.stream);
    CHECK_REFUSED(graphs.launch(StepShape::decode(2), fixture.stream), "1 x 1");
    CHECK_REFUSED(graphs.launch(StepShape::decode(3), fixture.stream), "not captured");
    graphs.launch(StepShape::decode(1), fixture.stream);
    const Outcome outcome{1, false};
    ledger.settle(id, {&outcome, 1});
  }
  std::vector<std::int32_t> lengths(4);
  test_backend().copy(lengths.data(), fixture.manager.device().step_table().length, 16,
                      fixture.stream);
  fixture.stream.wait();
  CHECK(lengths[static_cast<std::size_t>(ledger.info(request).seat.value)] == 10);
  fixture.manager.reset(fixture.stream);
  CHECK_REFUSED(graphs.launch(StepShape::decode(1), fixture.stream), "no update");
  fixture.stream.wait();
}

// G4
TEST_CASE("a step that throws while it is captured passes through and leaves the stream usable") {
  GraphFixture fixture;
  const std::vector<StepShape> shapes{StepShape::decode(2)};
  int calls = 0;
  const auto failing = [&](StepShape shape, PlanBufferId buffer, StreamView on) {
    fixture.step(shape, buffer, on);
    if (++calls == 2) throw std::runtime_error("the engine failed");  // the first is the warm-up
  };
  CHECK_THROWS_WITH(DecodeGraphs(fixture.manager, kBuffer, shapes, failing, fixture.stream),
                    "the engine failed");
  CHECK_FALSE(test_backend().is_capturing(fixture.stream));
  CHECK_NOTHROW(fixture.capture(shapes));
}

TEST_CASE("warm-up and capture leave pages, seats and step table as they were") {
  GraphFixture fixture;
  DeviceCache& cache = fixture.manager.device();
  const auto fill = [&](std::span<std::byte> memory, std::uint8_t value) {
    test_backend().fill(memory.data(), value, static_cast<std::int64_t>(memory.size()),
                        fixture.stream);
  };
  const auto holds = [&](std::span<std::byte> memory, std::byte value) {
    std::vector<std::byte> seen(memory.size());
    test_backend().copy(seen.data(), memory.data(), static_cast<std::int64_t>(seen.size()),
                        fixture.stream);
    fixture.stream.wait();
    return seen == std::vector<std::byte>(memory.size(), value);
  };
  fill(cache.pages_memory(), 0xA5);
  fill(cache.seats_memory(), 0xA6);
  fill(cache.step_table_memory(), 0x01);
  const DecodeGraphs graphs = fixture.capture({StepShape::decode(4), StepShape::decode(2, 2)});
  CHECK(holds(cache.pages_memory(), std::byte{0xA5}));
  CHECK(holds(cache.seats_memory(), std::byte{0xA6}));
  CHECK(holds(cache.step_table_memory(), std::byte{0x01}));
}

}  // namespace
