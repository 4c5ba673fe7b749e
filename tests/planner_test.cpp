// Update, plan and commit of a backend against the reference planner: whole memory images are
// compared, with poison wherever nobody should write and huge page ids where nobody should read.
// P1, P2 and so on are failures that users of other systems met (docs/RELIABILITY.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/plan_pair.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using test::kHugePage;
using test::PlanImage;
using test::PlanPair;
using test::PlanPlaces;
using test::PlanSizes;
using test::sizes_for;

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

// A ragged step over seats of mixed lengths, one per extend, applied and pushed.
PlanPair ragged_step(const std::vector<std::int32_t>& extends, StepShape shape) {
  PlanPair pair(sizes_for(static_cast<std::int64_t>(extends.size()) + 1, 16, shape));
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

}  // namespace

// P1
TEST_CASE("plans of nearly equal extends never vary and never pass the last token") {
  const std::vector<std::int32_t> cases[] = {repeated(72, 4, 24, 3), repeated(104, 3, 24, 2)};
  const StepShape shape = StepShape::ragged(128, 4096);
  for (const std::vector<std::int32_t>& extends : cases) {
    PlanPair pair = ragged_step(extends, shape);
    pair.reference_plan(shape);
    for (int repeat = 0; repeat < many_repeats(); ++repeat) {
      CAPTURE(repeat);
      pair.enqueue_plan(shape);
      pair.check_equal("planned");
    }
  }
}

// P2
TEST_CASE("a small uniform extend in a large bucket follows the live count") {
  const StepShape shape = StepShape::ragged(8, 2048);
  PlanPair pair = ragged_step(std::vector<std::int32_t>(8, 6), shape);
  pair.plan(shape);
  pair.check_equal("planned");
  CHECK(pair.places().plan.views.cu_extend[8] == 48);
}

// P3
TEST_CASE("zero-length rows are legal and emit nothing") {
  const StepShape shape = StepShape::ragged(4, 8);
  PlanPair pair = ragged_step({3, 0, 2, 0}, shape);
  pair.plan(shape);
  pair.check_equal("planned");
  pair.commit(shape);
  pair.check_equal("committed");
  CHECK(pair.places().plan.report->first_failing_seat == DeviceReport::kNoSeat);
}

// P6
TEST_CASE("64 live and 64 padded rows: padding reaches no page, no seat and no table cell") {
  const StepShape shape = StepShape::decode(128);
  PlanPair pair(sizes_for(65, 8, shape));
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

// P8
TEST_CASE("every array of a batch is padded to its bucket") {
  for (const StepShape shape :
       {StepShape::decode(112), StepShape::decode(112, 4), StepShape::ragged(112, 448)}) {
    PlanPair pair(sizes_for(101, 8, shape));
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

// P10
TEST_CASE("no rows, no tokens, length 0, many rows and many tokens are all legal") {
  SUBCASE("nothing at all") {
    for (const StepShape shape : {StepShape::ragged(0, 0), StepShape::ragged(0, 5),
                                  StepShape::ragged(3, 0), StepShape::decode(0)}) {
      PlanPair pair(sizes_for(2, 2, shape));
      pair.push();
      pair.start(shape);
      pair.apply();
      pair.plan(shape);
      pair.check_equal("planned");
      pair.commit(shape);
      pair.check_equal("committed");
    }
  }
  SUBCASE("more rows than a block has threads, more tokens than 16 bits count") {
    Random random(10);
    std::vector<std::int32_t> extends;
    for (int i = 0; i < 2500; ++i) {
      extends.push_back(i < 1000 ? random.below(5) : random.below(100));
    }
    extends.back() = 500;
    const StepShape shape = StepShape::ragged(2600, 90'000);
    REQUIRE(std::accumulate(extends.begin(), extends.end(), 0) > 65'535);
    PlanPair pair = ragged_step(extends, shape);
    CHECK(pair.chunks() == 2);
    pair.plan(shape);
    pair.check_equal("planned");
    pair.commit(shape);
    pair.check_equal("committed");
  }
}

// P13
TEST_CASE("a plan or a commit that runs twice changes nothing more") {
  for (const StepShape shape : {StepShape::decode(6, 4), StepShape::ragged(6, 64)}) {
    PlanPair pair(sizes_for(8, 4, shape));
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

// P4
TEST_CASE("a captured plan and commit follow the table through every replay, then run out") {
  for (const StepShape shape : {StepShape::decode(5, 2), StepShape::ragged(5, 40)}) {
    PlanPair pair(sizes_for(7, 4, shape));
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
      pair.reference_commit(shape);
      pair.check_equal("replayed");
    }
    CHECK(pair.places().table.length[4] == 4 * 61 + 6);
    CHECK(pair.places().plan.report->rows_out_of_steps == 10);
  }
}

TEST_CASE("an update above what one launch holds arrives whole, in several") {
  const StepShape shape = StepShape::decode(1500);
  PlanPair pair(sizes_for(1600, 4, shape));
  pair.push();
  pair.start(shape);
  for (std::int32_t s = 0; s < 1400; ++s) {
    pair.update().add(BatchRowUpdate{s, 1, 100 + s % 7, static_cast<std::uint32_t>(s % 4)});
  }
  for (std::int32_t s = 0; s < 1400; ++s) {
    for (std::int32_t cell = 0; cell < 2; ++cell)
      pair.update().add(CellUpdate{s, cell, 7 * s + cell});
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
  PlanPair pair(sizes_for(4, 2, shape));
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
  const PlanSizes sizes{kSeats, kCells, 24, 1500, 420, 40};
  PlanPair pair(sizes);
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
      std::swap(seats[i - 1],
                seats[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
    }
    const std::int32_t used = shape.rows == 0 ? 0 : random.below(shape.rows + 1);
    std::int32_t room = shape.tokens;
    for (std::int32_t r = 0; r < used; ++r) {
      const std::int32_t seat = seats[static_cast<std::size_t>(r)];
      const std::int32_t most =
          shape.is_decode() ? shape.tokens_per_row : std::min(room, r < used / 2 ? 4 : 700);
      const std::int32_t tokens = random.below(most + 1);
      room -= tokens;
      const std::int32_t limit = random.one_in(4) ? at.table.limit[seat] / 2 : at.table.limit[seat];
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
        kept.push_back(random.one_in(9) ? (random.one_in(2) ? -1 : live + 1)
                                        : random.below(live + 1));
        stop.push_back(random.one_in(6) ? static_cast<std::uint8_t>(1 + random.below(255)) : 0);
      }
      if (random.one_in(3)) kept.clear();
      if (random.one_in(3)) stop.clear();
      pair.commit(random.one_in(8) ? random_shape() : planned, kept, stop);
      pair.check_equal("committed");
    }
  }
}

TEST_CASE(
    "applied tokens beyond the shape, which no checked update has, write nothing outside it") {
  for (const StepShape shape : {StepShape::ragged(4, 10), StepShape::decode(4, 2)}) {
    PlanPair pair(sizes_for(6, 4, shape));
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

TEST_CASE("applied tokens whose sum passes 32 bits leave every row behind them inert") {
  const StepShape shape = StepShape::ragged(5, 64);
  PlanPair pair(sizes_for(6, 4, shape));
  for (std::int32_t s = 0; s < 6; ++s) pair.seat(s, 10, 900);
  pair.push();
  pair.start(shape);
  // 3, then 2^32 + 2 in front of the last row.
  const std::int32_t tokens[] = {3, INT32_MAX, INT32_MAX, 1, 4};
  for (std::int32_t s = 0; s < 5; ++s) pair.update().add(BatchRowUpdate{s, tokens[s], 900, 0});
  pair.apply();
  pair.enqueue_plan(shape);
  PlanImage planned = pair.download();
  const PlanPlaces at = planned.places();
  CHECK(at.plan.rows[0].live_tokens == 3);
  for (std::int32_t r = 1; r < 5; ++r) {
    CAPTURE(r);
    CHECK(at.plan.rows[r].live_tokens == 0);
  }
  CHECK(at.plan.views.cu_extend[5] == 64);
  CHECK(at.plan.views.token_batch_row[3] == -1);
}
