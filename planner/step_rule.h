// How a step's update, plan and commit treat one batch row or one token, written once: the host
// form loops over these functions, the kernels call them from one thread each.
#pragma once

#include <cstdint>
#include <cstring>

#include <quire/kernels/params.h>
#include <quire/planner/plan.h>
#include <quire/planner/plan_rule.h>
#include <quire/planner/read_rule.h>
#include <quire/runtime/base/host_device.h>

namespace quire {

// --- Apply ---

// Change `index` of those that begin `offset` bytes into the chunk. Every offset is a multiple
// of 4.
template <class Change>
QUIRE_HOST_DEVICE Change change_at(const ApplyParams& params, std::int64_t offset,
                                   std::int32_t index) {
  const std::byte* from =
      params.changes + offset + static_cast<std::int64_t>(index) * std::int64_t{sizeof(Change)};
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Change*>(from);  // words, where memcpy would move bytes
#else
  Change change;
  std::memcpy(&change, from, sizeof(change));
  return change;
#endif
}

QUIRE_HOST_DEVICE inline void apply_batch_row(const ApplyParams& params, std::int32_t index) {
  const auto row = change_at<BatchRowUpdate>(params, 0, index);
  const StepTable& table = params.table;
  params.plan.row_seats[params.first_batch_row + index] = row.seat;
  params.plan.row_tokens[params.first_batch_row + index] = row.tokens;
  if (row.seat < 0) return;
  table.limit[row.seat] = row.limit;
  if ((row.flags & BatchRowUpdate::kNewOwner) != 0) table.length[row.seat] = 0;
  if ((row.flags & (BatchRowUpdate::kNewOwner | BatchRowUpdate::kResume)) != 0) {
    table.stopped[row.seat] = 0;
  }
}

QUIRE_HOST_DEVICE inline void apply_cell(const ApplyParams& params, std::int32_t index) {
  const std::int64_t offset = params.batch_rows * std::int64_t{sizeof(BatchRowUpdate)};
  const auto change = change_at<CellUpdate>(params, offset, index);
  params.table.page_table[change.seat * params.table.cells + change.cell] = change.page;
}

QUIRE_HOST_DEVICE inline void apply_lowered_limit(const ApplyParams& params, std::int32_t index) {
  const std::int64_t offset = params.batch_rows * std::int64_t{sizeof(BatchRowUpdate)} +
                              params.cells * std::int64_t{sizeof(CellUpdate)};
  const auto change = change_at<LimitUpdate>(params, offset, index);
  params.table.limit[change.seat] = change.limit;
}

// Batch rows of the shape that the update does not name.
QUIRE_HOST_DEVICE inline std::int32_t padding_rows(const ApplyParams& params) {
  return params.first_chunk ? max_of(params.header.shape.rows - params.header.batch_rows, 0) : 0;
}

QUIRE_HOST_DEVICE inline void apply_padding_row(const ApplyParams& params, std::int32_t index) {
  params.plan.row_seats[params.header.batch_rows + index] = -1;
  params.plan.row_tokens[params.header.batch_rows + index] = 0;
}

// Starts the visit of the plan buffer over: its header, and a report with nothing in it.
QUIRE_HOST_DEVICE inline void apply_header(const ApplyParams& params) {
  PlanHeader header{};
  header.rows = params.header.shape.rows;
  header.tokens_per_row = params.header.shape.tokens_per_row;
  header.tokens = params.header.shape.tokens;
  header.steps_left = params.header.repeat;
  *params.plan.header = header;
  DeviceReport report{};
  report.first_failing_seat = DeviceReport::kNoSeat;
  *params.plan.report = report;
}

// --- Plan ---

QUIRE_HOST_DEVICE inline bool is_applied_shape(const PlanHeader& header, const StepShape& shape) {
  return header.rows == shape.rows && header.tokens_per_row == shape.tokens_per_row &&
         header.tokens == shape.tokens;
}

struct AppliedRow {
  std::int32_t seat;
  std::int32_t tokens;
};

// Behind the applied shape stands what an earlier update left: padding. Under another shape no row
// takes room.
QUIRE_HOST_DEVICE inline AppliedRow applied_row(const PlanBuffer& plan, bool same_shape,
                                                std::int32_t batch_row) {
  if (batch_row >= plan.header->rows) return {-1, 0};
  return {plan.row_seats[batch_row], same_shape ? max_of(plan.row_tokens[batch_row], 0) : 0};
}

// `room`: tokens of the shape that are left for the row. One that does not fit, which no checked
// update has, is inert: nothing is written beyond the shape.
QUIRE_HOST_DEVICE inline ResolvedRow plan_batch_row(const PlanParams& params, bool same_shape,
                                                    const AppliedRow& row, std::int32_t first_token,
                                                    std::int64_t room) {
  return resolve_batch_row(*params.plan.header, same_shape && row.tokens <= room, params.table,
                           row.seat, row.tokens, first_token);
}

// First input row of a ragged batch row with `before` tokens in front of it.
QUIRE_HOST_DEVICE inline std::int32_t ragged_first_token(const PlanParams& params,
                                                         std::int64_t before) {
  return static_cast<std::int32_t>(min_of(before, std::int64_t{params.shape.tokens}));
}

QUIRE_HOST_DEVICE inline ResolvedRow plan_ragged_row(const PlanParams& params, bool same_shape,
                                                     const AppliedRow& row, std::int64_t before) {
  return plan_batch_row(params, same_shape, row, ragged_first_token(params, before),
                        params.shape.tokens - before);
}

QUIRE_HOST_DEVICE inline ResolvedRow plan_decode_row(const PlanParams& params, bool same_shape,
                                                     const AppliedRow& row,
                                                     std::int32_t batch_row) {
  return plan_batch_row(params, same_shape, row, batch_row * params.shape.tokens_per_row,
                        params.shape.tokens_per_row);
}

QUIRE_HOST_DEVICE inline void write_batch_row(const PlanParams& params, std::int32_t batch_row,
                                              const BatchRowRecord& record) {
  params.plan.rows[batch_row] = record;
  write_row_views(params.plan.views, batch_row, record);
}

QUIRE_HOST_DEVICE inline void write_token(const PlanParams& params, std::int32_t token,
                                          const TokenRecord& record) {
  params.plan.tokens[token] = record;
  write_token_views(params.plan.views, params.geometry, token, record);
  write_read_lengths(params.plan.read, token, record);
}

// Entries of each ratio: what a batch row closes, or how many stand in the compact lists.
struct EntryCounts {
  std::int32_t csa = 0;
  std::int32_t hca = 0;

  friend QUIRE_HOST_DEVICE EntryCounts operator+(const EntryCounts& a, const EntryCounts& b) {
    return {a.csa + b.csa, a.hca + b.hca};
  }
};

QUIRE_HOST_DEVICE inline EntryCounts entries_closed_by(const BatchRowRecord& record) {
  return {compress_count(kCsaRule, record.start, record.live_tokens),
          compress_count(kHcaRule, record.start, record.live_tokens)};
}

// Token `token` of the ragged batch row, and the records of the entries that it closes; `base` is
// the place of the row's first in the compact lists.
QUIRE_HOST_DEVICE inline void write_ragged_token(const PlanParams& params, std::int32_t token,
                                                 std::int32_t batch_row, const BatchRowRecord& row,
                                                 const EntryCounts& base) {
  const std::int32_t j = token - row.first_token;
  const TokenRecord record = plan_token(params.geometry, params.table, row, batch_row, j);
  write_token(params, token, record);
  if (record.seat < 0) return;
  const auto put = [&](CompressionRule rule, PlanRecord* list, std::int32_t capacity,
                       std::int32_t first) {
    if (!closes_entry(rule, record.position)) return;
    const std::int32_t at = first + compress_index(rule, row.start, record.position);
    if (at < capacity) list[at] = plan_record(rule, token, batch_row, row.start, j);
  };
  put(kCsaRule, params.plan.csa_entries, params.csa_entry_capacity, base.csa);
  put(kHcaRule, params.plan.hca_entries, params.hca_entry_capacity, base.hca);
}

// Cells that the page table row of a batch row shows.
QUIRE_HOST_DEVICE inline std::int32_t shown_cells(const BatchRowRecord& row) {
  return row.live_tokens > 0 ? static_cast<std::int32_t>(
                                   ceil_div(std::int64_t{row.start} + row.live_tokens, kPageTokens))
                             : 0;
}

// The counter that a row made inert adds to; null: nothing to report.
QUIRE_HOST_DEVICE inline std::int32_t* report_counter(DeviceReport& report, Inert why) {
  switch (why) {
    case Inert::kStopped:
      return &report.rows_stopped;
    case Inert::kAtLimit:
      return &report.rows_at_limit;
    case Inert::kOutOfSteps:
      return &report.rows_out_of_steps;
    case Inert::kWrongShape:
      return &report.rows_wrong_shape;
    case Inert::kNo:
    case Inert::kPadding:
    case Inert::kEmpty:
      break;
  }
  return nullptr;
}

// --- Commit ---

// Only of what was planned: an update without its plan has records of an earlier one.
QUIRE_HOST_DEVICE inline bool may_commit(const CommitParams& params) {
  return params.plan.header->steps_at_plan > 0 &&
         is_applied_shape(*params.plan.header, params.shape);
}

// False: `kept` is out of range, nothing was changed and it must be reported.
QUIRE_HOST_DEVICE inline bool commit_batch_row(const CommitParams& params, std::int32_t batch_row) {
  const BatchRowRecord row = params.plan.rows[batch_row];
  if (row.seat < 0 || row.live_tokens <= 0) return true;
  const std::int32_t kept = params.kept != nullptr ? params.kept[batch_row] : row.live_tokens;
  if (kept < 0 || kept > row.live_tokens) return false;
  // A longer row's state is that after its last token: there is nothing to fall back to.
  if (row.live_tokens > params.draft_max + 1 && kept != row.live_tokens) return false;
  params.table.length[row.seat] = row.start + kept;
  if (params.stop != nullptr && params.stop[batch_row] != 0) params.table.stopped[row.seat] = 1;
  return true;
}

}  // namespace quire
