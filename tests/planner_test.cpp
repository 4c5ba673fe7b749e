// Update, plan and commit of a backend against the reference planner: whole memory images are
// compared, with poison wherever nobody should write and huge page ids where nobody should read.
// Layer groups are planner_groups_test's, random steps planner_random_test's.
// P1, P2 and so on are failures that users of other systems met (docs/RELIABILITY.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/plan_pair.h"
#include "tests/support/test_backend.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using test::PlanImage;
using test::PlanPair;
using test::PlanPlaces;
using test::Random;
using test::sizes_for;

// A ragged step over seats of mixed lengths, one per extend, applied and pushed; every so many fill
// their page table, or nearly.
PlanPair ragged_step(const std::vector<std::int32_t>& extends, StepShape shape,
                     std::int32_t cells = 16, std::size_t full_every = SIZE_MAX) {
  PlanPair pair(sizes_for(static_cast<std::int64_t>(extends.size()) + 1, cells, shape));
  std::vector<std::int32_t> seats(extends.size());
  for (std::size_t i = 0; i < extends.size(); ++i) {
    seats[i] = static_cast<std::int32_t>(extends.size() - i);  // seat and batch row differ
    const bool full = i % full_every == full_every - 1;
    const std::int32_t length =
        (full ? cells * 256 - 500 - extends[i] : 0) + static_cast<std::int32_t>(i * 37 % 500);
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
    const PlanImage unplanned = pair.image();
    pair.reference_plan(shape);
    for (int repeat = 0; repeat < many_repeats(); ++repeat) {
      CAPTURE(repeat);
      pair.push(unplanned);  // poison again where the plan of the repeat before stands
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

TEST_CASE("long page tables arrive whole, of one batch row, of some and of all") {
  for (const std::int32_t cells : {65, 600, 4099}) {
    // 250: more than all warps take at once; 300: of another size of blocks
    for (const std::size_t rows : {1u, 11u, 250u, 300u}) {
      for (const std::size_t full_every : {rows, std::size_t{3}, std::size_t{1}}) {
        CAPTURE(cells);
        CAPTURE(rows);
        CAPTURE(full_every);
        const std::vector<std::int32_t> extends(rows, 3);
        const StepShape shape = StepShape::ragged(static_cast<std::int32_t>(rows) + 1, 1000);
        PlanPair pair = ragged_step(extends, shape, cells, full_every);
        pair.plan(shape);
        pair.check_equal("planned");
      }
    }
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
    const test::CommitRequest commit{shape, {4, 3, 2, 1, 0, 4}, {0, 0, 1, 0, 0, 0}};
    pair.commit(commit);
    for (int again = 0; again < 3; ++again) pair.enqueue_commit(commit);
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
