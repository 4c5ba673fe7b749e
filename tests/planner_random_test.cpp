// Random steps against the reference planner: tables, updates, shapes, plans of both layer groups
// with what an engine may supply on the device, right or wrong in every way, and commits in any
// order. Whole memory images are compared after each call, results and reports among them. Runs on
// test_backend(), host or CUDA.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/plan_pair.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using test::CommitRequest;
using test::kHugePage;
using test::PlanPair;
using test::PlanPlaces;
using test::PlanRequest;
using test::PlanSizes;

constexpr std::int32_t kSeats = 40, kCells = 12, kRows = 24, kTokens = 1500;
constexpr LayerGroup kDraft = LayerGroup::kDraft;

class RandomSteps {
 public:
  explicit RandomSteps(std::uint32_t seed) : random_(seed) {
    pair_.geometry.padding_hca_location = 999;
  }

  // A table, an update, and a few plans and commits of it.
  void round() {
    new_table();
    const StepShape shape = random_shape();
    apply(shape);
    for (int call = 0; call < 9; ++call) {
      if (one_in(30)) move_seats();
      if (one_in(30)) give_seats_away();
      if (planned_.shape.rows < 0 || one_in(2)) {
        plan(shape);
      } else {
        commit();
      }
    }
    count_reports();
    planned_.shape.rows = -1;
  }

  std::map<std::string, std::int64_t> counts;  // of what happened, to see that a test reaches it

 private:
  std::int32_t below(std::int64_t n) { return random_.below(n); }
  bool one_in(std::int64_t n) { return below(n) == 0; }

  StepShape random_shape() {
    const std::int32_t rows = below(kRows + 1);
    return one_in(3) ? StepShape::ragged(rows, below(kTokens + 1))
                     : StepShape::decode(rows, 1 + below(4));
  }

  void new_table() {
    const PlanPlaces at = pair_.places();
    std::fill_n(at.table.page_table, kSeats * kCells, kHugePage);
    for (std::int32_t s = 0; s < kSeats; ++s) {
      const std::int32_t length = one_in(3) ? 128 * below(12) : below(1500);
      const std::int32_t limit = length + (one_in(3) ? below(5) : below(1200));
      pair_.seat(s, length, limit);
      // The draft group is a little behind, or somewhere else, or ahead, which no commit makes.
      const std::int32_t near = std::clamp(length + below(9) - 4, 0, limit);
      test::length_at(at, kDraft, s) = one_in(3) ? below(length + 1) : near;
      at.table.stopped[s] = one_in(8) ? 1 : 0;
    }
    pair_.push();
  }

  // As visits of another plan buffer do, in front of a plan of this one.
  void move_seats() {
    const PlanPlaces at = pair_.places();
    for (std::int32_t s = 0; s < kSeats; ++s) {
      if (one_in(2)) continue;
      for (const LayerGroup group : {LayerGroup::kTarget, kDraft}) {
        std::int32_t& length = test::length_at(at, group, s);
        length = std::clamp(length + below(4), 0, std::max(length, at.table.limit[s]));
      }
      if (at.table.stopped[s] == 0) at.table.stopped[s] = one_in(8) ? 1 : 0;
    }
    pair_.push();
    planned_.shape.rows = -1;
  }

  // As an update of another plan buffer does, at any time.
  void give_seats_away() {
    const PlanPlaces at = pair_.places();
    for (std::int32_t s = 0; s < kSeats; ++s) {
      if (!one_in(8)) continue;
      at.table.owner[s] += 1;
      at.table.stopped[s] = 0;
      for (const LayerGroup group : {LayerGroup::kTarget, kDraft}) {
        test::length_at(at, group, s) = 0;
      }
    }
    pair_.push();
  }

  void apply(StepShape shape) {
    const PlanPlaces at = pair_.places();
    pair_.start(shape, one_in(6) ? 0 : 1 + below(3));
    std::vector<std::int32_t> seats(kSeats);
    std::iota(seats.begin(), seats.end(), 0);
    for (std::int32_t i = kSeats; i > 1; --i) {
      std::swap(seats[static_cast<std::size_t>(i - 1)], seats[static_cast<std::size_t>(below(i))]);
    }
    const std::int32_t used = shape.rows == 0 ? 0 : below(shape.rows + 1);
    std::int32_t room = shape.tokens;
    for (std::int32_t r = 0; r < used; ++r) {
      const std::int32_t seat = seats[static_cast<std::size_t>(r)];
      const std::int32_t most =
          shape.is_decode() ? shape.tokens_per_row : std::min(room, r < used / 2 ? 4 : 700);
      const std::int32_t tokens = shape.is_decode() && !one_in(3) ? most : below(most + 1);
      room -= tokens;
      const std::int32_t limit = one_in(4) ? at.table.limit[seat] / 2 : at.table.limit[seat];
      const auto flags = static_cast<std::uint32_t>(one_in(4) ? below(4) : 0);
      pair_.update().add(BatchRowUpdate{seat, tokens, limit, flags});
    }
    for (std::int32_t i = below(5); i > 0; --i) {
      pair_.update().add(CellUpdate{i, below(kCells), below(200'000'000)});
    }
    for (std::size_t i = seats.size() - 3; i < seats.size(); ++i) {
      pair_.update().add(LimitUpdate{seats[i], below(900)});
    }
    pair_.apply();
    pair_.check_equal("applied");
  }

  void plan(StepShape applied) {
    PlanRequest request{one_in(8) ? random_shape() : applied};
    if (one_in(2)) request.group = kDraft;
    if (request.group == kDraft && request.shape.is_decode() && one_in(2)) {
      const std::int32_t fewer = 1 + below(request.shape.tokens_per_row);
      request.shape = StepShape::decode(request.shape.rows, fewer);
    }
    if (request.shape.is_decode() && one_in(2)) request.row_tokens = random_counts(request.shape);
    if (request.shape.is_decode() && one_in(2)) request.positions = random_positions(request);
    ++counts[request.group == kDraft ? "draft plans" : "target plans"];
    pair_.plan(request);
    pair_.check_equal("planned");
    planned_ = request;
    const BatchRowRecord* rows = pair_.places().plan.rows;
    for (std::int32_t r = 0; r < request.shape.rows; ++r) {
      if (rows[r].live_tokens == 0) continue;
      ++counts[request.group == kDraft ? "draft rows" : "target rows"];
      if (!request.positions.empty()) ++counts["rows at supplied positions"];
      if (!request.row_tokens.empty()) ++counts["rows of supplied counts"];
    }
  }

  std::int32_t applied_seat(std::int32_t r) {
    const PlanPlaces at = pair_.places();
    return r < at.plan.header->rows ? at.plan.row_seats[r] : -1;
  }

  std::vector<std::int32_t> random_counts(StepShape shape) {
    std::vector<std::int32_t> row_tokens;
    for (std::int32_t r = 0; r < shape.rows; ++r) {
      const std::int32_t wrong[] = {-1, shape.tokens_per_row + 1, INT32_MAX, INT32_MIN};
      row_tokens.push_back(one_in(8) ? wrong[below(4)] : below(shape.tokens_per_row + 1));
    }
    return row_tokens;
  }

  std::vector<std::int32_t> random_positions(const PlanRequest& request) {
    std::vector<std::int32_t> positions;
    const std::int32_t tokens = request.shape.tokens_per_row;
    for (std::int32_t r = 0; r < request.shape.rows; ++r) {
      const std::int32_t seat = applied_seat(r);
      const std::int32_t length =
          seat < 0 ? below(9) : test::length_at(pair_.places(), request.group, seat);
      const std::int32_t start = one_in(6) ? length - 1 - below(3) : length + below(6);
      const auto first = static_cast<std::ptrdiff_t>(positions.size());
      for (std::int32_t j = 0; j < tokens; ++j) positions.push_back(start + j);
      if (one_in(6)) {  // one of them is another
        const std::int32_t other[] = {start - 1, start + tokens,
                                      INT32_MAX, INT32_MIN,
                                      0,         positions[static_cast<std::size_t>(first)]};
        positions[static_cast<std::size_t>(first + below(tokens))] = other[below(6)];
      }
      if (one_in(12)) {  // all of them are huge, and ascend around the end of what 32 bits hold
        for (std::int32_t j = 0; j < tokens; ++j) {
          const auto huge =
              static_cast<std::uint32_t>(INT32_MAX - 2) + static_cast<std::uint32_t>(j);
          positions[static_cast<std::size_t>(first + j)] = static_cast<std::int32_t>(huge);
        }
      }
    }
    return positions;
  }

  // Of the newest plan, most often; padding rows get garbage like all others.
  void commit() {
    CommitRequest request{planned_.shape};
    request.group = planned_.group;
    request.positions_supplied = !planned_.positions.empty();
    if (one_in(8)) request.shape = random_shape();
    if (one_in(8)) request.group = one_in(2) ? kDraft : LayerGroup::kTarget;
    const PlanPlaces at = pair_.places();
    for (std::int32_t r = 0; r < kRows; ++r) {
      const std::int32_t live = r < planned_.shape.rows ? at.plan.rows[r].live_tokens : 0;
      request.kept.push_back(one_in(9) ? (one_in(2) ? -1 : live + 1) : below(live + 1));
      request.stop.push_back(one_in(6) ? static_cast<std::uint8_t>(1 + below(255)) : 0);
    }
    if (one_in(3)) request.kept.clear();
    if (one_in(3) || request.group == kDraft) request.stop.clear();  // else refused by the host
    const std::int32_t steps_left = at.plan.header->steps_left;
    pair_.commit(request);
    pair_.check_equal("committed");
    if (request.group == kDraft) {
      REQUIRE(at.plan.header->steps_left == steps_left);
      ++counts["draft commits"];
    }
  }

  void count_reports() {
    const DeviceReport& report = *pair_.places().plan.report;
    counts["at limit"] += report.rows_at_limit;
    counts["stopped"] += report.rows_stopped;
    counts["out of steps"] += report.rows_out_of_steps;
    counts["wrong shape"] += report.rows_wrong_shape;
    counts["kept wrong"] += report.rows_kept_wrong;
    counts["wrong positions"] += report.rows_wrong_positions;
    counts["wrong tokens"] += report.rows_wrong_tokens;
    counts["padding kept"] += report.padding_rows_kept;
    counts["former owners"] += report.rows_of_former_owners;
    counts["commits unplanned"] += report.commits_unplanned;
  }

  test::Random random_;
  PlanPair pair_{PlanSizes{kSeats, kCells, kRows, kTokens, 420, 40, 2}};
  PlanRequest planned_{StepShape{-1, 0, 0}};  // the newest plan; -1 rows: none yet
};

}  // namespace

TEST_CASE("random tables, updates, plans and commits of both groups give the reference's bytes") {
  const std::uint32_t seed = std::random_device{}();
  MESSAGE("seed " << seed);
  CAPTURE(seed);
  RandomSteps steps(seed);
  for (int round = 0; round < 1000; ++round) {
    CAPTURE(round);
    steps.round();
  }
  std::string text;
  for (const auto& [name, count] : steps.counts) text += name + " " + std::to_string(count) + "; ";
  MESSAGE("counts: ", text);
  for (const char* name : {"target plans", "draft plans", "target rows", "draft rows",
                           "draft commits", "rows at supplied positions", "rows of supplied counts",
                           "at limit", "stopped", "out of steps", "wrong shape", "kept wrong",
                           "wrong positions", "wrong tokens", "padding kept", "former owners",
                           "commits unplanned"}) {
    CAPTURE(name);
    CHECK(steps.counts[name] >= 100);  // the test reaches what it is for
  }
}
