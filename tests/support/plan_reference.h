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

// What a plan is asked for; empty vectors: nothing is supplied.
struct PlanRequest {
  StepShape shape;
  LayerGroup group = LayerGroup::kTarget;
  std::vector<std::int32_t> positions = {};   // [shape.tokens]
  std::vector<std::int32_t> row_tokens = {};  // [shape.rows]
};

// And a commit; empty `kept` keeps all, empty `stop` stops none.
struct CommitRequest {
  StepShape shape;
  std::vector<std::int32_t> kept = {};  // [shape.rows]
  std::vector<std::uint8_t> stop = {};  // [shape.rows]
  LayerGroup group = LayerGroup::kTarget;
  bool positions_supplied = false;  // to the plan
};

// Lengths lie group after group, in the order target, draft.
inline std::int32_t& length_at(const PlanPlaces& at, LayerGroup group, std::int32_t seat) {
  return at.table.length[(group == LayerGroup::kDraft ? at.table.seats : 0) + seat];
}

inline void reference_apply(PlanImage& image, const StepUpdate& update) {
  const PlanPlaces at = image.places();
  const StepShape shape = update.shape();
  PlanHeader header{};
  header.rows = shape.rows;
  header.tokens_per_row = shape.tokens_per_row;
  header.tokens = shape.tokens;
  header.steps_left = update.header().repeat;
  *at.plan.header = header;
  DeviceReport report{};
  report.first_failing_seat = INT32_MAX;
  *at.plan.report = report;
  std::fill_n(at.plan.row_seats, shape.rows, -1);
  std::fill_n(at.plan.row_tokens, shape.rows, 0);
  std::fill_n(at.plan.row_owners, shape.rows, 0);
  std::fill_n(at.plan.row_lives, shape.rows, 1);
  std::fill_n(at.plan.results, shape.rows, RowResult{0, 0});
  std::size_t r = 0;
  for (const BatchRowUpdate& row : update.batch_rows()) {
    at.table.limit[row.seat] = row.limit;
    if ((row.flags & 1) != 0) {
      ++at.table.owner[row.seat];
      length_at(at, LayerGroup::kTarget, row.seat) = 0;
      if (at.table.groups == 2) length_at(at, LayerGroup::kDraft, row.seat) = 0;
    }
    if (row.flags != 0) at.table.stopped[row.seat] = 0;
    at.plan.row_seats[r] = row.seat;
    at.plan.row_tokens[r] = row.tokens;
    at.plan.row_owners[r] = at.table.owner[row.seat];
    at.plan.results[r] = {length_at(at, LayerGroup::kTarget, row.seat), at.table.stopped[row.seat]};
    ++r;
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
  ReferencePlanner(PlanImage& image, const PlanRequest& request, const PlanGeometry& geometry,
                   std::int32_t csa_entry_capacity, std::int32_t hca_entry_capacity)
      : at_(image.places()),
        request_(request),
        shape_(request.shape),
        geometry_(geometry),
        csa_capacity_(csa_entry_capacity),
        hca_capacity_(hca_entry_capacity) {}

  void run() {
    PlanHeader& header = *at_.plan.header;
    same_shape_ = is_a_plan_of({header.rows, header.tokens_per_row, header.tokens});
    steps_ = is_target() ? header.steps_left : header.steps_at_plan;
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
    header.planned_rows = same_shape_ ? shape_.rows : -1;
    header.planned_form = is_target() ? shape_.tokens_per_row : -1 - shape_.tokens_per_row;
    header.planned_tokens = shape_.tokens;
    if (is_target()) header.steps_at_plan = same_shape_ ? header.steps_left : 0;
    if (decode()) return;
    const PlanRecord padding{~0u, ~0u, ~0u, ~0u};
    csa_entries_.resize(static_cast<std::size_t>(csa_capacity_), padding);
    hca_entries_.resize(static_cast<std::size_t>(hca_capacity_), padding);
    std::copy(csa_entries_.begin(), csa_entries_.end(), at_.plan.csa_entries);
    std::copy(hca_entries_.begin(), hca_entries_.end(), at_.plan.hca_entries);
  }

 private:
  bool decode() const { return shape_.tokens_per_row > 0; }
  bool is_target() const { return request_.group == LayerGroup::kTarget; }

  // Draft passes may have fewer tokens in each batch row than were applied.
  bool is_a_plan_of(StepShape applied) const {
    if (applied == shape_) return true;
    return !is_target() && decode() && shape_.rows == applied.rows &&
           shape_.tokens_per_row < applied.tokens_per_row;
  }

  std::int32_t applied_seat(std::int32_t r) const {
    return r < at_.plan.header->rows ? at_.plan.row_seats[r] : -1;
  }
  std::int32_t applied_tokens(std::int32_t r) const {
    return r < at_.plan.header->rows && same_shape_ ? at_.plan.row_tokens[r] : 0;
  }

  // How many tokens the row asks for, of those that were applied and have room; -1: more than
  // those, or fewer than none.
  std::int32_t wanted_tokens(std::int32_t r) const {
    std::int32_t room = applied_tokens(r);
    if (decode() && room > shape_.tokens_per_row) room = shape_.tokens_per_row;
    if (request_.row_tokens.empty()) return room;
    const std::int32_t asked = request_.row_tokens[static_cast<std::size_t>(r)];
    return 0 <= asked && asked <= room ? asked : -1;
  }

  // Where the row's tokens stand, one after the other, if that is at or above the group's length
  // and the last is at most draft_max beyond it; -1: not so.
  std::int64_t wanted_start(std::int32_t r, std::int32_t tokens) const {
    const std::int64_t length = length_at(at_, request_.group, applied_seat(r));
    if (request_.positions.empty()) return length;
    const std::size_t first = static_cast<std::size_t>(r * shape_.tokens_per_row);
    const std::int64_t start = request_.positions[first];
    for (std::int32_t j = 0; j < tokens; ++j) {
      const std::int64_t p = request_.positions[first + static_cast<std::size_t>(j)];
      if (p != start + j || p < length || p > length + geometry_.draft_max) return -1;
    }
    return start;
  }

  struct Life {
    std::int32_t start = 0, tokens = 0;  // no tokens: inert
  };

  // Counts in the report why a row is inert.
  Life life_of(std::int32_t r) {
    const std::int32_t seat = applied_seat(r);
    if (seat < 0) return {};
    const Life inert{length_at(at_, request_.group, seat), 0};
    DeviceReport& report = *at_.plan.report;
    const auto fail = [&](std::int32_t& counter) {
      ++counter;
      report.first_failing_seat = std::min(report.first_failing_seat, seat);
      return inert;
    };
    if (!same_shape_) return fail(report.rows_wrong_shape);
    if (at_.plan.row_owners[r] != at_.table.owner[seat]) {
      fail(report.rows_of_former_owners);
      return {};
    }
    const bool is_draft = request_.group == LayerGroup::kDraft;
    if (is_draft && at_.plan.row_lives[r] == 0) return inert;
    const std::int32_t tokens = wanted_tokens(r);
    if (tokens == 0 || applied_tokens(r) == 0) return inert;
    if (steps_ <= 0) return fail(report.rows_out_of_steps);
    if (!is_draft && at_.table.stopped[seat] != 0) return fail(report.rows_stopped);
    if (tokens < 0) return fail(report.rows_wrong_tokens);
    const std::int64_t start = wanted_start(r, tokens);
    if (start < 0) return fail(report.rows_wrong_positions);
    if (start + tokens > at_.table.limit[seat]) return fail(report.rows_at_limit);
    return {static_cast<std::int32_t>(start), tokens};
  }

  void batch_row(std::int32_t r, std::int32_t first_token) {
    const std::int32_t seat = applied_seat(r);
    const auto [start, tokens] = life_of(r);
    const std::int32_t length = tokens > 0 ? start + tokens : 0;
    at_.plan.rows[r] = {seat, start, tokens, first_token};
    if (request_.group == LayerGroup::kTarget) at_.plan.row_lives[r] = tokens > 0 ? 1 : 0;
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
  PlanRequest request_;
  StepShape shape_;
  PlanGeometry geometry_;
  std::int32_t csa_capacity_, hca_capacity_;
  bool same_shape_ = false;
  std::int32_t steps_ = 0;  // that are left for a plan of this group
  std::vector<PlanRecord> csa_entries_, hca_entries_;
};

inline void reference_commit(PlanImage& image, const CommitRequest& request,
                             std::int32_t draft_max) {
  const PlanPlaces at = image.places();
  PlanHeader& header = *at.plan.header;
  const bool planned_draft = header.planned_form < 0;
  const StepShape planned{header.planned_rows,
                          planned_draft ? -1 - header.planned_form : header.planned_form,
                          header.planned_tokens};
  const bool is_target = request.group == LayerGroup::kTarget;
  DeviceReport& report = *at.plan.report;
  // Not planned since the update, or one run too many: no steps.
  if (!(planned == request.shape) || planned_draft == is_target || header.steps_at_plan == 0) {
    ++report.commits_unplanned;
    return;
  }
  for (std::int32_t r = 0; r < request.shape.rows; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const BatchRowRecord& row = at.plan.rows[r];
    const bool stops = !request.stop.empty() && request.stop[i] != 0;
    if (row.seat < 0) {
      if (stops || (!request.kept.empty() && request.kept[i] != 0)) ++report.padding_rows_kept;
      continue;
    }
    if (at.plan.row_owners[r] != at.table.owner[row.seat]) {
      if (row.live_tokens > 0) {
        ++report.rows_of_former_owners;
        report.first_failing_seat = std::min(report.first_failing_seat, row.seat);
      }
      if (is_target) at.plan.results[r].stopped = 1;
      continue;
    }
    std::int32_t& length = length_at(at, request.group, row.seat);
    if (row.live_tokens > 0) {
      const std::int32_t keep = request.kept.empty() ? row.live_tokens : request.kept[i];
      const bool runs_once = row.live_tokens > draft_max + 1;
      const bool leaves_a_gap = request.positions_supplied && row.start > length;
      const bool gets_ahead = !is_target && std::int64_t{row.start} + keep >
                                                length_at(at, LayerGroup::kTarget, row.seat);
      if (keep < 0 || keep > row.live_tokens || (runs_once && keep < row.live_tokens) ||
          leaves_a_gap || gets_ahead) {
        ++report.rows_kept_wrong;
        report.first_failing_seat = std::min(report.first_failing_seat, row.seat);
      } else {
        length = row.start + keep;
        if (stops) at.table.stopped[row.seat] = 1;
      }
    }
    if (is_target) at.plan.results[r] = {length, at.table.stopped[row.seat]};
  }
  if (is_target) header.steps_left = header.steps_at_plan - 1;
}

}  // namespace quire::test
