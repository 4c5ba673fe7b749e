// A second planner, written from SPEC.md and DESIGN.md alone and slowly: it walks over tokens and
// positions and uses nothing of plan_rule.h but the structs. It works on images of host memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <quire/cache/step_update.h>
#include <quire/planner/plan_rule.h>  // PlanGeometry; no function of it

#include "tests/support/plan_fixture.h"

namespace quire::test {

inline void reference_apply(PlanImage& image, const StepUpdate& update) {
  const PlanPlaces at = image.places();
  const StepShape shape = update.shape();
  *at.plan.header = PlanHeader{
      shape.rows, shape.tokens_per_row, shape.tokens, update.header().repeat, 0, 0, 0, 0, 0, 0, {}};
  *at.plan.report = DeviceReport{0, 0, 0, 0, 0, 0, INT32_MAX, 0, {}};
  std::fill_n(at.plan.row_seats, shape.rows, -1);
  std::fill_n(at.plan.row_tokens, shape.rows, 0);
  std::size_t r = 0;
  for (const BatchRowUpdate& row : update.batch_rows()) {
    at.plan.row_seats[r] = row.seat;
    at.plan.row_tokens[r++] = row.tokens;
    at.table.limit[row.seat] = row.limit;
    if ((row.flags & 1) != 0) at.table.length[row.seat] = 0;
    if (row.flags != 0) at.table.stopped[row.seat] = 0;
  }
  for (const CellUpdate& cell : update.cells()) {
    at.table.page_table[cell.seat * at.table.cells + cell.cell] = cell.page;
  }
  for (const LimitUpdate& limit : update.lowered_limits()) {
    at.table.limit[limit.seat] = limit.limit;
  }
}

class ReferencePlanner {
 public:
  ReferencePlanner(PlanImage& image, StepShape shape, const PlanGeometry& geometry,
                   std::int32_t csa_entry_capacity, std::int32_t hca_entry_capacity)
      : at_(image.places()),
        shape_(shape),
        geometry_(geometry),
        csa_capacity_(csa_entry_capacity),
        hca_capacity_(hca_entry_capacity) {}

  void run() {
    PlanHeader& header = *at_.plan.header;
    same_shape_ = StepShape{header.rows, header.tokens_per_row, header.tokens} == shape_;
    for (std::int32_t t = 0; t < shape_.tokens; ++t) inert_token(t);
    std::int32_t next_token = 0;
    header.short_rows = shape_.rows;
    for (std::int32_t r = shape_.rows - 1; r >= 0; --r) {
      if (!decode() && applied_tokens(r) > geometry_.draft_max + 1) header.short_rows = r;
    }
    header.used_rows = shape_.rows;
    while (!decode() && header.used_rows > 0 && applied_seat(header.used_rows - 1) < 0) {
      --header.used_rows;
    }
    for (std::int32_t r = 0; r < shape_.rows; ++r) {
      if (decode()) next_token = r * shape_.tokens_per_row;
      batch_row(r, next_token);
      next_token += decode() ? shape_.tokens_per_row : applied_tokens(r);
    }
    at_.plan.views.cu_extend[shape_.rows] = next_token;
    header.used_tokens = next_token;
    header.csa_entries = decode() ? 0 : static_cast<std::int32_t>(csa_entries_.size());
    header.hca_entries = decode() ? 0 : static_cast<std::int32_t>(hca_entries_.size());
    header.steps_at_plan = header.steps_left;
    if (decode()) return;
    const PlanRecord padding{~0u, ~0u, ~0u, ~0u};
    csa_entries_.resize(static_cast<std::size_t>(csa_capacity_), padding);
    hca_entries_.resize(static_cast<std::size_t>(hca_capacity_), padding);
    std::copy(csa_entries_.begin(), csa_entries_.end(), at_.plan.csa_entries);
    std::copy(hca_entries_.begin(), hca_entries_.end(), at_.plan.hca_entries);
  }

 private:
  bool decode() const { return shape_.tokens_per_row > 0; }

  std::int32_t applied_seat(std::int32_t r) const {
    return r < at_.plan.header->rows ? at_.plan.row_seats[r] : -1;
  }
  std::int32_t applied_tokens(std::int32_t r) const {
    return r < at_.plan.header->rows && same_shape_ ? at_.plan.row_tokens[r] : 0;
  }

  // Counts the reason in the report; true: the row lives.
  bool lives(std::int32_t r) {
    const std::int32_t seat = applied_seat(r);
    if (seat < 0) return false;
    DeviceReport& report = *at_.plan.report;
    const auto fail = [&](std::int32_t& counter) {
      ++counter;
      report.first_failing_seat = std::min(report.first_failing_seat, seat);
      return false;
    };
    if (!same_shape_) return fail(report.rows_wrong_shape);
    if (applied_tokens(r) == 0) return false;
    if (at_.plan.header->steps_left <= 0) return fail(report.rows_out_of_steps);
    if (at_.table.stopped[seat] != 0) return fail(report.rows_stopped);
    const std::int64_t after = std::int64_t{at_.table.length[seat]} + applied_tokens(r);
    return after > at_.table.limit[seat] ? fail(report.rows_at_limit) : true;
  }

  void batch_row(std::int32_t r, std::int32_t first_token) {
    const std::int32_t seat = applied_seat(r);
    const std::int32_t start = seat >= 0 ? at_.table.length[seat] : 0;
    const std::int32_t tokens = lives(r) ? applied_tokens(r) : 0;
    const std::int32_t length = tokens > 0 ? start + tokens : 0;
    at_.plan.rows[r] = {seat, start, tokens, first_token};
    PlanViews& views = at_.plan.views;
    views.cu_extend[r] = first_token;
    views.row_seat[r] = seat;
    views.row_length[r] = length;
    views.row_window_length[r] = std::min(length, 128);
    views.row_csa_length[r] = length >> 2;
    views.row_hca_length[r] = length >> 7;
    for (std::int64_t cell = 0; cell * 256 < length; ++cell) {
      views.page_table[r * views.page_table_stride + cell] =
          at_.table.page_table[seat * at_.table.cells + cell];
    }
    for (std::int32_t j = 0; j < tokens; ++j) live_token(r, first_token, start, tokens, j);
  }

  void inert_token(std::int32_t t) {
    at_.plan.tokens[t] = {-1, 0, -1, 0, -1, -1, -1, -1};
    set_views(t, 0, -1, 0);
    set_locations(t, geometry_.padding_ring_location, geometry_.padding_scratch_location,
                  geometry_.padding_csa_location, geometry_.padding_hca_location);
  }

  void live_token(std::int32_t r, std::int32_t first_token, std::int32_t start, std::int32_t tokens,
                  std::int32_t j) {
    const std::int32_t seat = applied_seat(r);
    const std::int32_t p = start + j;
    const std::int32_t t = first_token + j;
    const bool reads_ring = tokens <= geometry_.draft_max + 1;
    const bool one_of_the_last = p + 128 >= start + tokens;
    const std::int64_t page = at_.table.page_table[seat * at_.table.cells + p / 256];
    TokenRecord record{seat, p, r, j, -1, -1, -1, -1};
    if (reads_ring || one_of_the_last) {
      record.ring_location =
          std::int64_t{seat} * geometry_.window_ring_tokens + p % geometry_.window_ring_tokens;
    }
    if (!reads_ring) record.scratch_location = std::int64_t{first_token} + 127 * (r + 1) + j;
    if (p % 4 == 3) record.csa_location = page * 64 + p % 256 / 4;
    if (p % 128 == 127) record.hca_location = page * 2 + p % 256 / 128;
    at_.plan.tokens[t] = record;
    set_views(t, p, r, p + 1);
    set_locations(
        t, record.ring_location < 0 ? geometry_.padding_ring_location : record.ring_location,
        record.scratch_location < 0 ? geometry_.padding_scratch_location : record.scratch_location,
        record.csa_location < 0 ? geometry_.padding_csa_location : record.csa_location,
        record.hca_location < 0 ? geometry_.padding_hca_location : record.hca_location);
    if (p % 4 == 3) csa_entries_.push_back(entry(t, r, p, start, 8));
    if (p % 128 == 127) hca_entries_.push_back(entry(t, r, p, start, 128));
  }

  // An entry that pools the last `pooled` tokens.
  static PlanRecord entry(std::int32_t t, std::int32_t r, std::int32_t p, std::int32_t start,
                          std::int32_t pooled) {
    std::uint32_t before_the_step = 0;
    for (std::int32_t token = p - pooled + 1; token <= p; ++token) {
      before_the_step += token < start ? 1u : 0u;
    }
    return {static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(r),
            static_cast<std::uint32_t>(p), before_the_step};
  }

  void set_views(std::int32_t t, std::int32_t position, std::int32_t batch_row,
                 std::int32_t tokens_seen) {
    PlanViews& views = at_.plan.views;
    views.positions[t] = position;
    views.token_batch_row[t] = batch_row;
    views.token_window_length[t] = std::min(tokens_seen, 128);
    views.token_csa_length[t] = tokens_seen >> 2;
    views.token_hca_length[t] = tokens_seen >> 7;
  }

  void set_locations(std::int32_t t, std::int64_t ring, std::int64_t scratch, std::int64_t csa,
                     std::int64_t hca) {
    PlanViews& views = at_.plan.views;
    views.ring_locations[t] = ring;
    views.scratch_locations[t] = scratch;
    views.csa_locations[t] = csa;
    views.hca_locations[t] = hca;
  }

  PlanPlaces at_;
  StepShape shape_;
  PlanGeometry geometry_;
  std::int32_t csa_capacity_, hca_capacity_;
  bool same_shape_ = false;
  std::vector<PlanRecord> csa_entries_, hca_entries_;
};

// Empty `kept` keeps all, empty `stop` stops none.
inline void reference_commit(PlanImage& image, StepShape shape,
                             const std::vector<std::int32_t>& kept,
                             const std::vector<std::uint8_t>& stop, std::int32_t draft_max) {
  const PlanPlaces at = image.places();
  PlanHeader& header = *at.plan.header;
  if (!(StepShape{header.rows, header.tokens_per_row, header.tokens} == shape)) return;
  if (header.steps_at_plan == 0) return;  // not planned since the update, or planned inert
  for (std::int32_t r = 0; r < shape.rows; ++r) {
    const BatchRowRecord& row = at.plan.rows[r];
    if (row.seat < 0 || row.live_tokens == 0) continue;
    const std::int32_t keep = kept.empty() ? row.live_tokens : kept[static_cast<std::size_t>(r)];
    const bool runs_once = row.live_tokens > draft_max + 1;
    if (keep < 0 || keep > row.live_tokens || (runs_once && keep < row.live_tokens)) {
      ++at.plan.report->rows_kept_wrong;
      at.plan.report->first_failing_seat = std::min(at.plan.report->first_failing_seat, row.seat);
      continue;
    }
    at.table.length[row.seat] = row.start + keep;
    if (!stop.empty() && stop[static_cast<std::size_t>(r)] != 0) at.table.stopped[row.seat] = 1;
  }
  header.steps_left = header.steps_at_plan - 1;
}

}  // namespace quire::test
