// Update, plan and commit of a backend against the reference planner: whole memory images are
// compared, with poison wherever nobody should write and huge page ids where nobody should read.
// P1 to P13 are failures that users of other systems met (planning and padding).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <quire/planner/apply_chunks.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/plan_fixture.h"
#include "tests/support/plan_reference.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using test::PlanImage;
using test::PlanPlaces;
using test::PlanSizes;

constexpr std::int32_t kHugePage = 0x7F7F7F7F;
constexpr PlanGeometry kGeometry{192, 3, 64, 2, -1, -1, -1, -1};

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  std::int32_t below(std::int64_t n) {
    return static_cast<std::int32_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  bool one_in(std::int64_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

std::int32_t csa_capacity(StepShape shape) {
  return std::min(shape.tokens, shape.tokens / 4 + shape.rows);
}

// The backend's memory and the reference's image, moved by the same calls.
class Pair {
 public:
  explicit Pair(const PlanSizes& sizes)
      : sizes_(sizes),
        backend_(test::test_backend()),
        stream_(backend_),
        fixture_(backend_, stream_, sizes),
        kept_(backend_, stream_, static_cast<std::size_t>(sizes.rows), 0),
        stop_(backend_, stream_, static_cast<std::size_t>(sizes.rows), 0),
        image_(sizes),
        update_(limits_of(sizes)) {
    const PlanPlaces at = image_.places();
    std::fill_n(at.table.length, sizes.seats, 0);
    std::fill_n(at.table.limit, sizes.seats, 0);
    std::fill_n(at.table.stopped, sizes.seats, 0);
    std::fill_n(at.table.page_table, sizes.seats * sizes.cells, kHugePage);
  }

  // Of the reference; `push` sends changes made through it.
  PlanPlaces places() { return image_.places(); }
  const PlanImage& image() const { return image_; }
  void push() { fixture_.upload(image_); }
  PlanImage download() const { return fixture_.download(); }
  StepUpdate& update() { return update_; }
  StreamView stream() const { return stream_.view(); }
  Backend& backend() const { return backend_; }

  // A seat of `length` tokens that may grow to `limit`, with page ids that name seat and cell.
  void seat(std::int32_t seat, std::int32_t length, std::int32_t limit) {
    const PlanPlaces at = places();
    at.table.length[seat] = length;
    at.table.limit[seat] = limit;
    for (std::int32_t cell = 0; cell * 256 < limit; ++cell) {
      at.table.page_table[seat * at.table.cells + cell] = 100'000'000 + seat * 1000 + cell;
    }
  }

  void start(StepShape shape, std::int32_t repeat = 1) {
    update_.start(0, PlanBufferId(0), shape, repeat);
  }

  void apply() {
    update_.seal();
    for_each_apply_chunk(update_, fixture_.table(), fixture_.plan(), [&](const ApplyParams& chunk) {
      ++chunks_;
      backend_.apply(chunk, stream_);
    });
    stream_.wait();  // a host task reads the update's copy, not the update: waiting is for ASan
    test::reference_apply(image_, update_);
  }
  int chunks() const { return chunks_; }

  void enqueue_plan(StepShape shape) {
    backend_.plan({shape, geometry, fixture_.table(), fixture_.plan(), csa_capacity(shape)},
                  stream_);
  }
  void enqueue_commit(StepShape shape, bool use_kept = false, bool use_stop = false) {
    backend_.commit({shape, fixture_.table(), fixture_.plan(), use_kept ? kept_.data() : nullptr,
                     use_stop ? stop_.data() : nullptr},
                    Pdl::kOff, stream_);
  }
  void reference_plan(StepShape shape) {
    test::ReferencePlanner(image_, shape, geometry, csa_capacity(shape)).run();
  }

  void plan(StepShape shape) {
    enqueue_plan(shape);
    reference_plan(shape);
  }
  void commit(StepShape shape, const std::vector<std::int32_t>& kept = {},
              const std::vector<std::uint8_t>& stop = {}) {
    kept_.upload(kept);
    stop_.upload(stop);
    enqueue_commit(shape, !kept.empty(), !stop.empty());
    test::reference_commit(image_, shape, kept, stop);
  }

  void check_equal(const char* when) {
    stream_.wait();
    CAPTURE(when);
    REQUIRE(test::difference(image_, fixture_.download()) == "");
  }

  PlanGeometry geometry = kGeometry;

 private:
  static Limits limits_of(const PlanSizes& sizes) {
    Limits limits;
    limits.seats_max = sizes.seats;
    limits.rows_max = sizes.rows;
    limits.tokens_max = sizes.seats * sizes.cells * kPageTokens;  // room for any cell
    limits.context_max = sizes.cells * kPageTokens;
    return limits;
  }

  PlanSizes sizes_;
  Backend& backend_;
  Stream stream_;
  test::PlanFixture fixture_;
  test::DeviceArray<std::int32_t> kept_;
  test::DeviceArray<std::uint8_t> stop_;
  PlanImage image_;
  StepUpdate update_;
  int chunks_ = 0;
};

PlanSizes sizes_for(std::int64_t seats, std::int64_t cells, StepShape shape) {
  return {seats, cells, shape.rows, shape.tokens, csa_capacity(shape) + 3};
}

// A ragged step over seats of mixed lengths, one per extend, applied and pushed.
Pair ragged_step(const std::vector<std::int32_t>& extends, StepShape shape) {
  Pair pair(sizes_for(static_cast<std::int64_t>(extends.size()) + 1, 16, shape));
  std::vector<std::int32_t> seats(extends.size());
  for (std::size_t i = 0; i < extends.size(); ++i) {
    seats[i] = static_cast<std::int32_t>(extends.size() - i);  // seat and batch row differ
    const std::int32_t length = static_cast<std::int32_t>(i * 37 % 500);
    pair.seat(seats[i], length, length + extends[i]);
  }
  pair.push();
  pair.start(shape);
  const PlanPlaces at = pair.places();
  for (std::size_t i = 0; i < extends.size(); ++i) {
    pair.update().add(BatchRowUpdate{seats[i], extends[i], at.table.limit[seats[i]], 0});
  }
  pair.apply();
  return pair;
}

std::vector<std::int32_t> repeated(std::size_t n, std::int32_t a, std::size_t m, std::int32_t b) {
  std::vector<std::int32_t> values(n, a);
  values.insert(values.end(), m, b);
  return values;
}

int many_repeats() { return test::test_backend().kind() == BackendKind::kCuda ? 2000 : 20; }

// The same lists for explicit prefixes and extends, on the backend.
struct RecordLists {
  std::vector<PlanRecord> compress, write;
  std::vector<std::int32_t> cu_extend, cu_compress, cu_write;
  bool operator==(const RecordLists&) const = default;
};

class RecordPlanner {
 public:
  RecordPlanner(CompressionRule rule, const std::vector<std::int32_t>& prefix,
                const std::vector<std::int32_t>& extend, std::size_t capacity)
      : backend_(test::test_backend()),
        stream_(backend_),
        prefix_(backend_, stream_, std::span<const std::int32_t>(prefix)),
        extend_(backend_, stream_, std::span<const std::int32_t>(extend)),
        compress_(backend_, stream_, capacity, 0xA5),
        write_(backend_, stream_, capacity, 0xA5),
        cu_extend_(backend_, stream_, prefix.size() + 1, 0xA5),
        cu_compress_(backend_, stream_, prefix.size() + 1, 0xA5),
        cu_write_(backend_, stream_, prefix.size() + 1, 0xA5) {
    params_ = {rule,
               static_cast<std::int32_t>(prefix.size()),
               prefix_.data(),
               extend_.data(),
               compress_.data(),
               write_.data(),
               static_cast<std::int64_t>(capacity),
               static_cast<std::int64_t>(capacity),
               cu_extend_.data(),
               cu_compress_.data(),
               cu_write_.data()};
  }

  RecordLists run() {
    backend_.plan_records(params_, stream_);
    return {compress_.download(), write_.download(), cu_extend_.download(),
            cu_compress_.download(), cu_write_.download()};
  }
  RecordPlanParams& params() { return params_; }

 private:
  Backend& backend_;
  Stream stream_;
  test::DeviceArray<std::int32_t> prefix_, extend_;
  test::DeviceArray<PlanRecord> compress_, write_;
  test::DeviceArray<std::int32_t> cu_extend_, cu_compress_, cu_write_;
  RecordPlanParams params_;
};

// SPEC 1.8 in words, over tokens.
RecordLists counted_records(CompressionRule rule, const std::vector<std::int32_t>& prefix,
                            const std::vector<std::int32_t>& extend, std::size_t capacity) {
  RecordLists lists;
  std::int32_t ragged_id = 0;
  const auto mark = [&] {
    lists.cu_extend.push_back(ragged_id);
    lists.cu_compress.push_back(static_cast<std::int32_t>(lists.compress.size()));
    lists.cu_write.push_back(static_cast<std::int32_t>(lists.write.size()));
  };
  mark();
  const std::int32_t pooled = rule.overlap ? 2 * rule.ratio : rule.ratio;
  for (std::size_t b = 0; b < prefix.size(); ++b) {
    const std::int32_t length = prefix[b] + extend[b];
    const std::int32_t kept = length % rule.ratio + (rule.overlap ? rule.ratio : 0);
    for (std::int32_t j = 0; j < extend[b]; ++j, ++ragged_id) {
      const std::int32_t p = prefix[b] + j;
      const PlanRecord record{static_cast<std::uint32_t>(ragged_id), static_cast<std::uint32_t>(b),
                              static_cast<std::uint32_t>(p),
                              static_cast<std::uint32_t>(std::max(0, pooled - 1 - j))};
      if (p % rule.ratio == rule.ratio - 1) lists.compress.push_back(record);
      if (length - p <= kept) lists.write.push_back(record);
    }
    mark();
  }
  lists.compress.resize(capacity, kPaddingRecord);
  lists.write.resize(capacity, kPaddingRecord);
  return lists;
}

void check_records(const std::vector<std::int32_t>& prefix,
                   const std::vector<std::int32_t>& extend, std::size_t spare) {
  const auto tokens = static_cast<std::size_t>(
      std::accumulate(extend.begin(), extend.end(), std::int64_t{0}));
  for (const CompressionRule rule : {kCsaRule, kHcaRule}) {
    RecordPlanner planner(rule, prefix, extend, tokens + spare);
    REQUIRE(planner.run() == counted_records(rule, prefix, extend, tokens + spare));
  }
}

}  // namespace

TEST_CASE("P1: plans of nearly equal extends name only tokens that exist, and never vary") {
  const std::vector<std::int32_t> cases[] = {repeated(72, 4, 24, 3), repeated(104, 3, 24, 2)};
  for (const std::vector<std::int32_t>& extends : cases) {
    const auto tokens = std::accumulate(extends.begin(), extends.end(), 0);
    std::vector<std::int32_t> prefix(extends.size());
    for (std::size_t i = 0; i < prefix.size(); ++i) prefix[i] = static_cast<std::int32_t>(i * 5 % 9);
    RecordPlanner planner(kCsaRule, prefix, extends, 4096);
    Pair pair = ragged_step(extends, StepShape::ragged(128, 4096));
    pair.reference_plan(StepShape::ragged(128, 4096));
    const RecordLists expected = counted_records(kCsaRule, prefix, extends, 4096);
    for (const PlanRecord& record : expected.compress) {
      REQUIRE((record == kPaddingRecord || record.ragged_id < static_cast<std::uint32_t>(tokens)));
    }
    for (int repeat = 0; repeat < many_repeats(); ++repeat) {
      CAPTURE(repeat);
      REQUIRE(planner.run() == expected);
      pair.enqueue_plan(StepShape::ragged(128, 4096));
      pair.check_equal("planned");
    }
  }
}

TEST_CASE("P2: a small uniform extend in a large bucket follows the live count") {
  const StepShape shape = StepShape::ragged(8, 2048);
  Pair pair = ragged_step(std::vector<std::int32_t>(8, 6), shape);
  pair.plan(shape);
  pair.check_equal("planned");
  CHECK(pair.places().plan.views.cu_extend[8] == 48);
}

TEST_CASE("P3: zero-length rows are legal and emit nothing") {
  const StepShape shape = StepShape::ragged(4, 8);
  Pair pair = ragged_step({3, 0, 2, 0}, shape);
  pair.plan(shape);
  pair.check_equal("planned");
  pair.commit(shape);
  pair.check_equal("committed");
  CHECK(pair.places().plan.report->first_failing_seat == DeviceReport::kNoSeat);
  check_records({5, 3, 2, 7}, {3, 0, 2, 0}, 4);
}

TEST_CASE("P6: 64 live and 64 padded rows: padding reaches no page, no seat and no table cell") {
  const StepShape shape = StepShape::decode(128);
  Pair pair(sizes_for(65, 8, shape));
  pair.geometry.padding_csa_location = 4242;  // a sink of the engine's
  pair.geometry.padding_ring_location = 77;
  for (std::int32_t s = 0; s < 64; ++s) pair.seat(s, 3 + s * 31, 4 + s * 31);
  pair.push();
  pair.start(shape);
  for (std::int32_t s = 0; s < 64; ++s) pair.update().add(BatchRowUpdate{s, 1, 4 + s * 31, 0});
  pair.apply();
  const std::vector<std::byte> table = pair.download().table_bytes();
  pair.plan(shape);
  pair.check_equal("planned");
  CHECK(pair.download().table_bytes() == table);
  CHECK(pair.places().plan.views.csa_locations[100] == 4242);
  pair.commit(shape);
  pair.check_equal("committed");
}

TEST_CASE("P8: every array of a batch is padded to its bucket") {
  for (const StepShape shape :
       {StepShape::decode(112), StepShape::decode(112, 4), StepShape::ragged(112, 448)}) {
    Pair pair(sizes_for(101, 8, shape));
    pair.push();  // the plan buffer is poison
    pair.start(shape);
    for (std::int32_t s = 0; s < 100; ++s) {
      pair.update().add(BatchRowUpdate{s, 1, 9, BatchRowUpdate::kNewOwner});
    }
    for (std::int32_t s = 0; s < 100; ++s) pair.update().add(CellUpdate{s, 0, 5000 + s});
    pair.apply();
    pair.plan(shape);
    pair.check_equal("planned");
    const PlanViews& views = pair.places().plan.views;
    for (std::int32_t r = 100; r < 112; ++r) {
      CHECK(views.row_seat[r] == -1);
      CHECK(views.row_length[r] == 0);
    }
    CHECK(views.token_batch_row[shape.tokens - 1] == -1);
  }
}

TEST_CASE("P10: no rows, no tokens, length 0, many rows and many tokens are all legal") {
  SUBCASE("nothing at all") {
    for (const StepShape shape : {StepShape::ragged(0, 0), StepShape::ragged(0, 5),
                                  StepShape::ragged(3, 0), StepShape::decode(0)}) {
      Pair pair(sizes_for(2, 2, shape));
      pair.push();
      pair.start(shape);
      pair.apply();
      pair.plan(shape);
      pair.check_equal("planned");
      pair.commit(shape);
      pair.check_equal("committed");
    }
    check_records({}, {}, 0);
    check_records({}, {}, 3);
    check_records({0, 4, 128}, {0, 0, 0}, 2);
  }
  SUBCASE("more rows than a block has threads, more tokens than 16 bits count") {
    Random random(10);
    std::vector<std::int32_t> prefix, extends;
    for (int i = 0; i < 2500; ++i) {
      prefix.push_back(random.below(400));
      extends.push_back(i < 1000 ? random.below(5) : random.below(100));
    }
    extends.back() = 500;
    const StepShape shape = StepShape::ragged(2600, 90'000);
    REQUIRE(std::accumulate(extends.begin(), extends.end(), 0) > 65'535);
    check_records(prefix, extends, 100);
    Pair pair = ragged_step(extends, shape);
    CHECK(pair.chunks() == 2);
    pair.plan(shape);
    pair.check_equal("planned");
    pair.commit(shape);
    pair.check_equal("committed");
  }
  SUBCASE("lists that nobody asked for") {
    RecordPlanner planner(kCsaRule, {1, 2}, {9, 8}, 20);
    planner.params().write = nullptr;
    RecordLists expected = counted_records(kCsaRule, {1, 2}, {9, 8}, 20);
    const RecordLists lists = planner.run();
    CHECK(lists.compress == expected.compress);
    CHECK(lists.cu_write == expected.cu_write);
    CHECK(lists.write[0].ragged_id == 0xA5A5A5A5u);
  }
}

TEST_CASE("P13: a plan or a commit that runs twice changes nothing more") {
  for (const StepShape shape : {StepShape::decode(6, 4), StepShape::ragged(6, 64)}) {
    Pair pair(sizes_for(8, 4, shape));
    for (std::int32_t s = 0; s < 6; ++s) pair.seat(s, s * 50, s * 50 + 16);
    pair.push();
    pair.start(shape, 4);
    for (std::int32_t s = 0; s < 6; ++s) pair.update().add(BatchRowUpdate{s, 4, s * 50 + 16, 0});
    pair.apply();
    const std::vector<std::byte> table = pair.download().table_bytes();
    pair.plan(shape);
    for (int again = 0; again < 3; ++again) pair.enqueue_plan(shape);
    pair.check_equal("planned four times");
    CHECK(pair.download().table_bytes() == table);
    pair.commit(shape, {4, 3, 2, 1, 0, 4}, {0, 0, 1, 0, 0, 0});
    for (int again = 0; again < 3; ++again) pair.enqueue_commit(shape, true, true);
    pair.check_equal("committed four times");
    CHECK(pair.places().plan.header->steps_left == 3);
  }
}

TEST_CASE("a captured plan and commit follow the table through every replay, then run out") {
  for (const StepShape shape : {StepShape::decode(5, 2), StepShape::ragged(5, 40)}) {
    Pair pair(sizes_for(7, 4, shape));
    for (std::int32_t s = 0; s < 5; ++s) pair.seat(s, s * 61, s * 61 + 6);
    pair.push();
    pair.start(shape);
    pair.apply();  // warm-up and capture see padding
    Capture capture(pair.backend(), pair.stream());
    pair.enqueue_plan(shape);
    pair.enqueue_commit(shape);
    const GraphExec graph = capture.finish();
    pair.check_equal("captured");
    pair.start(shape, 3);
    for (std::int32_t s = 0; s < 5; ++s) pair.update().add(BatchRowUpdate{s, 2, s * 61 + 6, 0});
    pair.apply();
    for (int run = 0; run < 5; ++run) {
      CAPTURE(run);
      graph.launch(pair.stream());
      pair.reference_plan(shape);
      test::reference_commit(const_cast<PlanImage&>(pair.image()), shape, {}, {});
      pair.check_equal("replayed");
    }
    CHECK(pair.places().table.length[4] == 4 * 61 + 6);
    CHECK(pair.places().plan.report->rows_out_of_steps == 10);
  }
}

TEST_CASE("an update above what one launch holds arrives whole, in several") {
  const StepShape shape = StepShape::decode(1500);
  Pair pair(sizes_for(1600, 4, shape));
  pair.push();
  pair.start(shape);
  for (std::int32_t s = 0; s < 1400; ++s) {
    pair.update().add(BatchRowUpdate{s, 1, 100 + s % 7, static_cast<std::uint32_t>(s % 4)});
  }
  for (std::int32_t s = 0; s < 1400; ++s) {
    for (std::int32_t cell = 0; cell < 2; ++cell) pair.update().add(CellUpdate{s, cell, 7 * s + cell});
  }
  for (std::int32_t s = 1400; s < 1600; ++s) pair.update().add(LimitUpdate{s, s - 1390});
  pair.apply();
  CHECK(pair.chunks() == 3);
  pair.check_equal("applied");
  pair.plan(shape);
  pair.check_equal("planned");
}

TEST_CASE("an update whose plan never ran commits nothing of the plan before") {
  const StepShape shape = StepShape::decode(2);
  Pair pair(sizes_for(4, 2, shape));
  for (std::int32_t s = 0; s < 4; ++s) pair.seat(s, 10, 20);
  pair.push();
  for (const std::int32_t first : {0, 2}) {
    pair.start(shape);
    for (std::int32_t s = first; s < first + 2; ++s) pair.update().add(BatchRowUpdate{s, 1, 20, 0});
    pair.apply();
    if (first == 0) pair.plan(shape);
    pair.commit(shape);
  }
  pair.check_equal("committed");
  CHECK(pair.places().table.length[0] == 11);
  CHECK(pair.places().plan.header->steps_left == 1);
}

TEST_CASE("random tables, updates, shapes and outcomes give the reference's bytes") {
  const std::uint32_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  Random random(seed);
  constexpr std::int32_t kSeats = 40, kCells = 12;
  const PlanSizes sizes{kSeats, kCells, 24, 1500, 420};
  Pair pair(sizes);
  pair.geometry.padding_hca_location = 999;
  const auto random_shape = [&] {
    const std::int32_t rows = random.below(25);
    return random.one_in(2) ? StepShape::decode(rows, 1 + random.below(4))
                            : StepShape::ragged(rows, random.below(1501));
  };
  for (int round = 0; round < 400; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    const PlanPlaces at = pair.places();
    std::fill_n(at.table.page_table, kSeats * kCells, kHugePage);
    for (std::int32_t s = 0; s < kSeats; ++s) {
      const std::int32_t length = random.one_in(3) ? 128 * random.below(12) : random.below(1500);
      pair.seat(s, length, length + random.below(1200));
      at.table.stopped[s] = random.one_in(8) ? 1 : 0;
    }
    pair.push();

    const StepShape shape = random_shape();
    pair.start(shape, random.below(4));
    std::vector<std::int32_t> seats(kSeats);
    std::iota(seats.begin(), seats.end(), 0);
    for (std::size_t i = seats.size(); i > 1; --i) {
      std::swap(seats[i - 1], seats[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
    }
    const std::int32_t used = shape.rows == 0 ? 0 : random.below(shape.rows + 1);
    std::int32_t room = shape.tokens;
    for (std::int32_t r = 0; r < used; ++r) {
      const std::int32_t seat = seats[static_cast<std::size_t>(r)];
      const std::int32_t most =
          shape.is_decode() ? shape.tokens_per_row : std::min(room, r < used / 2 ? 4 : 700);
      const std::int32_t tokens = random.below(most + 1);
      room -= tokens;
      const std::int32_t limit =
          random.one_in(4) ? at.table.limit[seat] / 2 : at.table.limit[seat];
      const auto flags = static_cast<std::uint32_t>(random.one_in(4) ? random.below(4) : 0);
      pair.update().add(BatchRowUpdate{seat, tokens, limit, flags});
    }
    for (std::int32_t i = random.below(5); i > 0; --i) {
      pair.update().add(CellUpdate{i, random.below(kCells), random.below(200'000'000)});
    }
    for (std::size_t i = seats.size() - 3; i < seats.size(); ++i) {
      pair.update().add(LimitUpdate{seats[i], random.below(900)});
    }
    pair.apply();
    pair.check_equal("applied");

    for (int run = 0; run < 4; ++run) {
      const StepShape planned = random.one_in(6) ? random_shape() : shape;
      pair.plan(planned);
      pair.check_equal("planned");
      std::vector<std::int32_t> kept;
      std::vector<std::uint8_t> stop;
      for (std::int32_t r = 0; r < sizes.rows; ++r) {
        const std::int32_t live = r < planned.rows ? at.plan.rows[r].live_tokens : 0;
        kept.push_back(random.one_in(9) ? (random.one_in(2) ? -1 : live + 1) : random.below(live + 1));
        stop.push_back(random.one_in(6) ? static_cast<std::uint8_t>(1 + random.below(255)) : 0);
      }
      if (random.one_in(3)) kept.clear();
      if (random.one_in(3)) stop.clear();
      pair.commit(random.one_in(8) ? random_shape() : planned, kept, stop);
      pair.check_equal("committed");
    }
  }
}

TEST_CASE("applied tokens beyond the shape, which no checked update has, write nothing outside it") {
  for (const StepShape shape : {StepShape::ragged(4, 10), StepShape::decode(4, 2)}) {
    Pair pair(sizes_for(6, 4, shape));
    for (std::int32_t s = 0; s < 6; ++s) pair.seat(s, 10, 900);
    pair.push();
    pair.start(shape);
    for (std::int32_t s = 0; s < 4; ++s) pair.update().add(BatchRowUpdate{s, 4, 900, 0});
    pair.apply();
    pair.enqueue_plan(shape);
    PlanImage planned = pair.download();
    const PlanPlaces at = planned.places();
    for (std::int32_t r = 0; r < 4; ++r) {
      const BatchRowRecord& row = at.plan.rows[r];
      CHECK(row.first_token + row.live_tokens <= shape.tokens);
    }
    CHECK(at.plan.views.cu_extend[4] <= shape.tokens);
    // The guards behind all arrays are those of the image that knows of no plan.
    const auto guard_of = [](const PlanImage& image, const PlanPlaces& places, std::size_t region) {
      const PlanPlaces::Region& r = places.regions[region];
      return std::vector<std::byte>(image.bytes() + r.offset + r.bytes,
                                    image.bytes() + places.regions[region + 1].offset);
    };
    for (std::size_t region = 0; region + 1 < at.regions.size(); ++region) {
      CAPTURE(at.regions[region].name);
      CHECK(guard_of(planned, at, region) == guard_of(pair.image(), pair.places(), region));
    }
  }
}
