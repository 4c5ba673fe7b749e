// Read lists bound to a device cache: every location is followed to the bytes that append wrote,
// and bad bindings are refused.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

#include "tests/support/read_lists.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using test::Lists;
using test::test_backend;

using Entry = std::array<std::byte, kMainDataBytes + kMainScaleBytes>;

Entry entry_at(const EntryPool& pool, std::int64_t location) {
  Entry entry;
  std::memcpy(entry.data(), pool.main_data(location), kMainDataBytes);
  std::memcpy(entry.data() + kMainDataBytes, pool.main_scales(location), kMainScaleBytes);
  return entry;
}

// The pool, in a copy of its memory on the host.
EntryPool in_copy(EntryPool pool, const std::byte* region, std::vector<std::byte>& copy) {
  pool.base = copy.data() + (pool.base - region);
  return pool;
}

test::TestEngineOptions engine_options() {
  test::TestEngineOptions options;
  options.limits.seats_max = 3;
  options.limits.pages = 12;
  options.limits.rows_max = 4;
  options.limits.tokens_max = 480;
  options.limits.context_max = 1024;
  options.limits.draft_max = 3;
  options.contents = 3;
  return options;
}

// The window entries of one content by position, per layer, as an engine that decodes token by
// token stores them in its ring.
std::vector<std::vector<Entry>> decoded_entries(std::int64_t content, std::int32_t tokens) {
  test::TestEngine engine(test_backend(), engine_options());
  const RequestId request = engine.admit(content, tokens);
  const DeviceCache& device = engine.cache().device();
  const std::int64_t seat = engine.cache().ledger().info(request).seat.value;
  std::vector<std::vector<Entry>> entries(2);
  for (std::int32_t length = 1; length <= tokens; ++length) {
    const test::StepRow row{request, 1};
    engine.step({&row, 1}, StepShape::decode(1));
    if (length % 128 != 0 && length != tokens) continue;
    test::Snapshot copy = engine.snapshot();
    for (std::size_t layer = 0; layer < 2; ++layer) {
      const EntryPool ring = in_copy(device.window_ring(LayerId(static_cast<std::int32_t>(layer))),
                                     device.seats_memory().data(), copy.seats);
      const std::int64_t tokens_in_ring = device.window_ring_tokens();
      for (auto p = static_cast<std::int64_t>(entries[layer].size()); p < length; ++p) {
        entries[layer].push_back(entry_at(ring, seat * tokens_in_ring + p % tokens_in_ring));
      }
    }
  }
  return entries;
}

struct Follower {
  test::TestEngine engine{test_backend(), engine_options()};
  Lists lists{test_backend(), 480, 4, 8};
  std::vector<std::vector<std::vector<Entry>>> expected;  // by content, layer, position
  std::vector<RequestId> requests;
  std::int64_t in_scratch = 0;

  // One step; after each layer's append, every location of every token holds the bytes of its
  // position. `rows`: content and tokens.
  void step(const std::vector<std::pair<std::size_t, std::int32_t>>& rows, StepShape shape) {
    std::vector<test::StepRow> batch;
    for (const auto& [content, tokens] : rows) batch.push_back({requests[content], tokens});
    const StepId id = engine.begin(batch, shape);
    DeviceCache& device = engine.cache().device();
    device.enqueue_plan(PlanBufferId(0), engine.stream());
    for (std::size_t layer = 0; layer < 2; ++layer) {
      engine.enqueue_append(LayerId(static_cast<std::int32_t>(layer)), shape, engine.stream());
      check_layer(rows, shape, layer);
    }
    engine.enqueue_commit(engine.stream());
    engine.finish(id, batch);
  }

  void check_layer(const std::vector<std::pair<std::size_t, std::int32_t>>& rows, StepShape shape,
                   std::size_t layer) {
    DeviceCache& device = engine.cache().device();
    test::Snapshot copy = engine.snapshot();
    const EntryPool ring = in_copy(device.window_ring(LayerId(static_cast<std::int32_t>(layer))),
                                   device.seats_memory().data(), copy.seats);
    EntryPool scratch = device.window_scratch(PlanBufferId(0));
    const std::int64_t bytes =
        engine.options().limits.scratch_tokens() / 64 * scratch.page_stride_bytes;
    std::vector<std::byte> scratch_copy(static_cast<std::size_t>(bytes));
    engine.backend().copy(scratch_copy.data(), scratch.base, bytes, engine.stream());
    engine.stream().wait();
    scratch = in_copy(scratch, scratch.base, scratch_copy);
    const std::vector<std::int32_t> window = lists.window();
    std::int32_t first = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto& [content, tokens] = rows[r];
      if (shape.is_decode()) first = static_cast<std::int32_t>(r) * shape.tokens_per_row;
      const bool is_long = tokens > engine.options().limits.draft_max + 1;
      const std::int64_t start = engine.length(requests[content]);
      for (std::int32_t j = 0; j < tokens; ++j, ++first) {
        for (std::int64_t i = 0; i < 128; ++i) {
          const std::int64_t p = start + j - i;
          const std::int32_t location = window[static_cast<std::size_t>(first * 128 + i)];
          CAPTURE(layer);
          CAPTURE(p);
          CAPTURE(i);
          REQUIRE((location < 0) == (p < 0));
          if (p < 0) continue;
          REQUIRE(location < (is_long ? engine.options().limits.scratch_tokens()
                                      : 3 * device.window_ring_tokens()));
          in_scratch += is_long ? 1 : 0;
          const Entry& wanted = expected[content][layer][static_cast<std::size_t>(p)];
          const bool same = entry_at(is_long ? scratch : ring, location) == wanted;
          REQUIRE(same);
        }
      }
    }
  }
};

}  // namespace

TEST_CASE("every window location holds the bytes that decoding stores for its position") {
  Follower follower;
  for (std::int64_t content = 0; content < 3; ++content) {
    follower.expected.push_back(decoded_entries(content, 560));
    follower.requests.push_back(follower.engine.admit(content, 1024));
  }
  follower.engine.poison();
  follower.engine.cache().device().bind_read_lists(PlanBufferId(0), follower.lists.bound());
  // Chunks that end on, before and behind multiples of 128 and of the ring; short rows in front.
  const StepShape ragged = StepShape::ragged(4, 440);
  follower.step({{0, 1}, {1, 5}, {2, 127}}, ragged);
  follower.step({{0, 4}, {1, 123}, {2, 130}}, ragged);
  follower.step({{2, 2}, {0, 251}, {1, 1 + 5}}, ragged);
  follower.step({{0, 2}, {1, 2}, {2, 3}}, StepShape::decode(4, 3));
  follower.step({{1, 3}, {0, 40}, {2, 200}}, ragged);
  follower.step({{0, 3}, {2, 3}, {1, 300}}, ragged);
  follower.step({{0, 1}, {1, 1}, {2, 1}}, StepShape::decode(3));
  CHECK(follower.in_scratch > 200'000);
}

namespace {

struct BoundCache {
  BoundCache() : BoundCache(engine_options().limits) {}
  explicit BoundCache(const Limits& limits, ModelSpec spec = {{LayerKind::kSliding}})
      : cache(test_backend(), spec, limits) {}

  // The message of the refusal; empty: bound.
  std::string refusal(const ReadLists& lists, std::int32_t buffer = 0) {
    try {
      cache.bind_read_lists(PlanBufferId(buffer), lists);
    } catch (const UsageError& error) {
      return error.what();
    }
    return {};
  }

  DeviceCache cache;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a bad binding is refused by name, and the one before it stays") {
  BoundCache bound;
  Lists lists(test_backend(), 480, 4, 8);
  const ReadLists good = lists.bound(5, 1);
  CHECK(bound.refusal(good) == "");
  const auto refused = [&](auto change, const std::string& why) {
    ReadLists bad = lists.bound();
    change(bad);
    const std::string message = bound.refusal(bad);
    CAPTURE(message);
    CHECK(contains(message, why));
    CHECK(bound.cache.plan_buffer(PlanBufferId(0)).read.window_locations == good.window_locations);
    CHECK(bound.cache.plan_buffer(PlanBufferId(0)).read.padding_location == 5);
  };
  refused([](ReadLists& l) { l.window_locations += 1; }, "window_locations at");
  refused([](ReadLists& l) { l.window_lengths += 2; }, "window_lengths at");
  refused([](ReadLists& l) { l.hca_locations += 3; }, "hca_locations at");
  refused([](ReadLists& l) { l.hca_lengths += 1; }, "hca_lengths at");
  refused([](ReadLists& l) { l.hca_width = 7; }, "hca_width is 7; Limits::context_max of 1024");
  refused([](ReadLists& l) { l.hca_width = 0; }, "needs at least 8");
  refused([](ReadLists& l) { l.hca_width = std::int64_t{1} << 31; }, "hca_width is");
  refused([](ReadLists& l) { l.length_floor = 2; }, "length_floor is 2; supported: 0, 1");
  refused([](ReadLists& l) { l.length_floor = -1; }, "length_floor is -1");
  refused([](ReadLists& l) { l.padding_location = -2; }, "padding_location is -2");
  refused([](ReadLists& l) { l.padding_location = 24; }, "0 to 23");  // 12 pages of 2
  refused(
      [](ReadLists& l) {
        l.hca_locations = nullptr;
        l.padding_location = 3 * 192;
      },
      "0 to 575");  // 3 seats of 192
  if (test_backend().kind() == BackendKind::kCuda) {
    alignas(16) static std::int32_t on_the_host[512];
    refused([](ReadLists& l) { l.window_lengths = on_the_host; }, "ordinary host memory");
  }
  CHECK(contains(bound.refusal(good, 1), "plan buffer 1 does not exist"));
  CHECK(bound.refusal(ReadLists{}) == "");
  CHECK(bound.cache.plan_buffer(PlanBufferId(0)).read.window_locations == nullptr);
}

TEST_CASE("pages beyond the locations that int32 holds are refused, naming the limit") {
  Limits limits = engine_options().limits;
  limits.pages = std::int64_t{1} << 30;  // a model without compressing layers has none of them
  BoundCache bound(limits);
  Lists lists(test_backend(), 480, 4, 8);
  CHECK(contains(bound.refusal(lists.bound()), "Limits::pages"));
  ReadLists window_only = lists.bound();
  window_only.hca_locations = nullptr;
  CHECK(bound.refusal(window_only) == "");
}
