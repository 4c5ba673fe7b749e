// The lists that plans write for attention kernels, against a walk over tokens and positions, at
// the planner alone and over the bytes that append wrote; and what binding refuses.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/plan_pair.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using test::DeviceArray;
using test::PlanPair;
using test::PlanPlaces;
using test::sizes_for;

constexpr std::int32_t kPoison = 0x5A5A5A5A;
constexpr std::size_t kGuard = 64;  // int32 behind each list that nobody may touch

// The four lists on the backend, and what should be in them.
class Lists {
 public:
  Lists(std::int64_t tokens, std::int64_t rows, std::int64_t hca_width)
      : stream_(test::test_backend()), width_(hca_width) {
    const std::int64_t hca_lists = std::max(tokens, rows);
    for (const std::int64_t count : {tokens * 128, tokens, hca_lists * hca_width, tokens}) {
      const auto size = static_cast<std::size_t>(count) + kGuard;
      arrays_.emplace_back(test::test_backend(), stream_, size, std::uint8_t{0x5A});
      expected_.emplace_back(size, kPoison);
    }
  }

  ReadLists bound(std::int32_t padding = -1, std::int32_t floor = 0) {
    return {arrays_[0].data(), arrays_[1].data(), arrays_[2].data(), arrays_[3].data(),
            width_,            padding,           floor};
  }

  // Moves the expectation by what a plan of the shape writes into the bound lists.
  void expect(PlanPair& pair, StepShape shape) {
    const PlanPlaces at = pair.places();
    const ReadLists& read = pair.read;
    for (std::int32_t t = 0; t < shape.tokens; ++t) expect_token(pair, shape, t);
    if (shape.is_decode() || read.hca_locations == nullptr) return;
    for (std::int32_t r = 0; r < shape.rows; ++r) {
      const std::int32_t entries = at.plan.rows[r].live_tokens > 0
                                       ? (at.plan.rows[r].start + at.plan.rows[r].live_tokens) / 128
                                       : 0;
      expect_hca(at, read, r, at.plan.rows[r].seat, entries);
    }
  }

  // Empty: all lists and what lies behind them are as expected.
  std::string difference() const {
    constexpr const char* kNames[] = {"window_locations", "window_lengths", "hca_locations",
                                      "hca_lengths"};
    for (std::size_t list = 0; list < 4; ++list) {
      const std::vector<std::int32_t> found = arrays_[list].download();
      const auto [a, b] = std::mismatch(found.begin(), found.end(), expected_[list].begin());
      if (a == found.end()) continue;
      return concat(kNames[list], "[", a - found.begin(), "] is ", *a, ", expected ", *b);
    }
    return {};
  }

  std::vector<std::int32_t> window() const { return arrays_[0].download(); }
  const std::vector<std::int32_t>& expected(std::size_t list) const { return expected_[list]; }

 private:
  void expect_token(PlanPair& pair, StepShape shape, std::int32_t t) {
    const PlanPlaces at = pair.places();
    const ReadLists& read = pair.read;
    const TokenRecord& token = at.plan.tokens[t];
    const bool live = token.seat >= 0;
    std::int32_t visible = 0;
    for (std::int32_t i = 0; i < 128; ++i) {
      std::int32_t location = read.padding_location;
      const std::int32_t position = token.position - i;
      if (live && position >= 0) {
        const BatchRowRecord& row = at.plan.rows[token.batch_row];
        const bool in_ring = row.live_tokens <= pair.geometry.draft_max + 1;
        const std::int64_t ring = pair.geometry.window_ring_tokens;
        const std::int64_t before_rows = 127 * (std::int64_t{token.batch_row} + 1);
        location = static_cast<std::int32_t>(
            in_ring ? token.seat * ring + position % ring : t + before_rows - i);
        ++visible;
      }
      if (read.window_locations != nullptr) at_place(0, t * 128 + i) = location;
    }
    const std::int32_t entries = live ? (token.position + 1) / 128 : 0;
    if (read.window_lengths != nullptr) at_place(1, t) = std::max(visible, read.length_floor);
    if (read.hca_lengths != nullptr) at_place(3, t) = std::max(entries, read.length_floor);
    if (shape.is_decode() && read.hca_locations != nullptr) {
      expect_hca(at, read, t, token.seat, entries);
    }
  }

  void expect_hca(const PlanPlaces& at, const ReadLists& read, std::int64_t list, std::int32_t seat,
                  std::int32_t entries) {
    for (std::int64_t e = 0; e < width_; ++e) {
      at_place(2, list * width_ + e) =
          e < entries ? at.table.page_table[seat * at.table.cells + e / 2] * 2 +
                            static_cast<std::int32_t>(e % 2)
                      : read.padding_location;
    }
  }

  std::int32_t& at_place(std::size_t list, std::int64_t place) {
    return expected_[list][static_cast<std::size_t>(place)];
  }

  Stream stream_;
  std::int64_t width_;
  std::vector<DeviceArray<std::int32_t>> arrays_;
  std::vector<std::vector<std::int32_t>> expected_;
};

struct Row {
  std::int32_t length, tokens;
  bool stopped = false;
};

// Seats of these lengths, one batch row each in another order of seats, applied but not planned.
void apply_rows(PlanPair& pair, StepShape shape, const std::vector<Row>& rows) {
  const PlanPlaces at = pair.places();
  const auto seat_of = [&](std::size_t r) { return static_cast<std::int32_t>(rows.size() - 1 - r); };
  for (std::size_t r = 0; r < rows.size(); ++r) {
    pair.seat(seat_of(r), rows[r].length, rows[r].length + rows[r].tokens);
    at.table.stopped[seat_of(r)] = rows[r].stopped ? 1 : 0;
  }
  pair.push();
  pair.start(shape);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::int32_t seat = seat_of(r);
    pair.update().add(BatchRowUpdate{seat, rows[r].tokens, at.table.limit[seat], 0});
  }
  pair.apply();
}

void plan_and_check(PlanPair& pair, Lists& lists, StepShape shape) {
  pair.plan(shape);
  pair.check_equal("planned");
  lists.expect(pair, shape);
  REQUIRE(lists.difference() == "");
}

}  // namespace

TEST_CASE("decode lists show the window newest first and every complete HCA entry, then padding") {
  for (const std::int32_t drafts : {0, 1, 3}) {
    std::vector<Row> rows;
    for (const std::int32_t length :
         {0, 1, 2, 63, 64, 126, 127, 128, 129, 191, 192, 254, 255, 256, 257, 383, 511, 3000}) {
      rows.push_back({length, drafts + 1, length == 64});
    }
    const StepShape shape = StepShape::decode(20, drafts + 1);  // two padding rows
    PlanPair pair(sizes_for(20, 16, shape));
    Lists lists(shape.tokens, shape.rows, 40);
    for (const std::int32_t floor : {0, 1}) {
      for (const std::int32_t padding : {-1, 77}) {
        pair.read = lists.bound(padding, floor);
        apply_rows(pair, shape, rows);
        plan_and_check(pair, lists, shape);
      }
    }
  }
}

TEST_CASE("ragged lists: short rows read the ring, long rows the scratch, HCA lists go by batch row") {
  const std::vector<Row> rows{{0, 1},    {500, 4},  {130, 0}, {127, 2}, {255, 1, true}, {0, 5},
                              {3, 200},  {127, 129}, {0, 0},  {90, 38}, {1000, 7},      {2047, 128}};
  const StepShape shape = StepShape::ragged(14, 700);  // tokens and rows beyond the live ones
  PlanPair pair(sizes_for(14, 16, shape));
  Lists lists(shape.tokens, shape.rows, 33);
  for (const std::int32_t floor : {0, 1}) {
    pair.read = lists.bound(-1, floor);
    apply_rows(pair, shape, rows);
    plan_and_check(pair, lists, shape);
  }
}

TEST_CASE("a list that shrinks between plans is padded again") {
  for (const bool decode : {true, false}) {
    const StepShape shape = decode ? StepShape::decode(3, 2) : StepShape::ragged(3, 40);
    PlanPair pair(sizes_for(4, 16, shape));
    Lists lists(shape.tokens, shape.rows, 32);
    pair.read = lists.bound();
    for (const std::int32_t length : {4000, 1000, 130, 2, 0, 3000}) {
      CAPTURE(length);
      apply_rows(pair, shape, {{length, 2}, {length / 2, 2}, {length, decode ? 1 : 30}});
      plan_and_check(pair, lists, shape);
    }
    apply_rows(pair, shape, {});
    plan_and_check(pair, lists, shape);
  }
}

TEST_CASE("HCA lists of more entries than one block writes, at an odd width") {
  for (const StepShape shape : {StepShape::decode(2, 2), StepShape::ragged(2, 12)}) {
    PlanPair pair(sizes_for(3, 1100, shape));
    Lists lists(shape.tokens, shape.rows, 4501);
    pair.read = lists.bound();
    apply_rows(pair, shape, {{270'000, 2}, {128 * 2048 - 1, shape.is_decode() ? 2 : 9}});
    plan_and_check(pair, lists, shape);
    CHECK(std::count_if(lists.expected(2).begin(), lists.expected(2).end(),
                        [](std::int32_t x) { return x >= 0 && x != kPoison; }) > 4000);
  }
}

TEST_CASE("each list may be absent, and is then left alone") {
  for (const StepShape shape : {StepShape::decode(4, 2), StepShape::ragged(4, 30)}) {
    for (int absent = 0; absent < 16; ++absent) {
      CAPTURE(absent);
      PlanPair pair(sizes_for(4, 4, shape));
      Lists lists(shape.tokens, shape.rows, 8);
      pair.read = lists.bound();
      if ((absent & 1) != 0) pair.read.window_locations = nullptr;
      if ((absent & 2) != 0) pair.read.window_lengths = nullptr;
      if ((absent & 4) != 0) pair.read.hca_locations = nullptr;
      if ((absent & 8) != 0) pair.read.hca_lengths = nullptr;
      apply_rows(pair, shape, {{200, 1}, {127, 2}, {300, shape.is_decode() ? 2 : 20}});
      plan_and_check(pair, lists, shape);
    }
  }
}

TEST_CASE("no tokens and no rows write no list") {
  for (const StepShape shape : {StepShape::decode(0), StepShape::ragged(0, 0),
                                StepShape::ragged(0, 9), StepShape::ragged(3, 0)}) {
    PlanPair pair(sizes_for(2, 2, shape));
    Lists lists(9, 3, 4);
    pair.read = lists.bound();
    apply_rows(pair, shape, {});
    plan_and_check(pair, lists, shape);
  }
}

TEST_CASE("a captured plan writes the lists of every replay") {
  for (const StepShape shape : {StepShape::decode(3, 2), StepShape::ragged(3, 20)}) {
    PlanPair pair(sizes_for(4, 8, shape));
    Lists lists(shape.tokens, shape.rows, 16);
    pair.read = lists.bound();
    apply_rows(pair, shape, {});
    Capture capture(pair.backend(), pair.stream());
    pair.enqueue_plan(shape);
    const GraphExec graph = capture.finish();
    for (const std::int32_t length : {1500, 126, 300}) {
      apply_rows(pair, shape, {{length, 2}, {length + 1, shape.is_decode() ? 1 : 11}});
      graph.launch(pair.stream());
      pair.reference_plan(shape);
      pair.check_equal("replayed");
      lists.expect(pair, shape);
      REQUIRE(lists.difference() == "");
    }
  }
}

TEST_CASE("lists of random steps follow the records") {
  const std::uint32_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(n));
  };
  PlanPair pair(sizes_for(12, 16, StepShape::ragged(12, 600)));
  Lists lists(600, 12, 32);
  for (int round = 0; round < 40; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    const bool decode = below(2) == 0;
    const StepShape shape =
        decode ? StepShape::decode(12, 1 + below(4)) : StepShape::ragged(12, 600);
    std::vector<Row> rows;
    for (std::int32_t r = below(12); r > 0; --r) {
      const std::int32_t most = decode ? shape.tokens_per_row : r > 6 ? 4 : 90;
      const std::int32_t length = below(3) == 0 ? 128 * below(20) + below(3) : below(3000);
      rows.push_back({length, below(most + 1), below(6) == 0});
    }
    pair.read = lists.bound(below(2) == 0 ? -1 : 7, below(2));
    apply_rows(pair, shape, rows);
    plan_and_check(pair, lists, shape);
  }
}

namespace {

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
  test::TestEngine engine(test::test_backend(), engine_options());
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
  test::TestEngine engine{test::test_backend(), engine_options()};
  Lists lists{480, 4, 8};
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
      : cache(test::test_backend(), spec, limits) {}

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
  Lists lists(480, 4, 8);
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
  if (test::test_backend().kind() == BackendKind::kCuda) {
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
  Lists lists(480, 4, 8);
  CHECK(contains(bound.refusal(lists.bound()), "Limits::pages"));
  ReadLists window_only = lists.bound();
  window_only.hca_locations = nullptr;
  CHECK(bound.refusal(window_only) == "");
}
