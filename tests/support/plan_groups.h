// A step table of both layer groups with a few seats in it, for tests of plans and commits case by
// case.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/support/plan_pair.h"

namespace quire::test {

inline constexpr LayerGroup kTarget = LayerGroup::kTarget;
inline constexpr LayerGroup kDraft = LayerGroup::kDraft;
inline constexpr std::int32_t kLimit = 400;

inline PlanSizes sizes_of_both_groups(std::int64_t seats, StepShape shape) {
  PlanSizes sizes = sizes_for(seats, 4, shape);
  sizes.groups = 2;
  return sizes;
}

// Seat s has 100 + 10 s tokens in the target group and 3 less in the draft group.
inline void fill_seats(PlanPair& pair, std::int32_t seats) {
  for (std::int32_t s = 0; s < seats; ++s) {
    pair.seat(s, 100 + 10 * s, kLimit);
    length_at(pair.places(), kDraft, s) = 97 + 10 * s;
  }
  pair.push();
}

// Batch row r is seat r, with as many tokens as the shape has room for.
inline void apply_seats(PlanPair& pair, StepShape shape, std::int32_t seats,
                        std::int32_t repeat = 1) {
  pair.start(shape, repeat);
  for (std::int32_t s = 0; s < seats; ++s) {
    pair.update().add(BatchRowUpdate{s, shape.tokens_per_row, kLimit, 0});
  }
  pair.apply();
}

// One batch row of 4 tokens, whose seat has 100 tokens, planned and checked.
struct OneRow {
  static constexpr std::int32_t kLength = 100;
  StepShape shape = StepShape::decode(1, 4);
  PlanPair pair{sizes_of_both_groups(1, shape)};

  explicit OneRow(std::int32_t repeat = 9) {
    fill_seats(pair, 1);
    length_at(pair.places(), kDraft, 0) = kLength;
    pair.push();
    apply_seats(pair, shape, 1, repeat);
  }
  void plan(const PlanRequest& request) {
    pair.plan(request);
    pair.check_equal("planned");
  }
  void commit(const CommitRequest& request) {
    pair.commit(request);
    pair.check_equal("committed");
  }
  BatchRowRecord row() { return pair.places().plan.rows[0]; }
  DeviceReport report() { return *pair.places().plan.report; }
  RowResult result() { return pair.places().plan.results[0]; }
  std::int32_t length(LayerGroup group) { return length_at(pair.places(), group, 0); }
  std::int32_t steps_left() { return pair.places().plan.header->steps_left; }
};

// Positions of a row of 4.
inline std::vector<std::int32_t> from(std::int32_t start) {
  return {start, start + 1, start + 2, start + 3};
}

}  // namespace quire::test
