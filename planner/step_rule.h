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
template <class Change, std::size_t kBytes>
QUIRE_HOST_DEVICE Change change_at(const ApplyParamsOf<kBytes>& params, std::int64_t offset,
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

template <std::size_t kBytes>
QUIRE_HOST_DEVICE void apply_batch_row(const ApplyParamsOf<kBytes>& params, std::int32_t index) {
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

template <std::size_t kBytes>
QUIRE_HOST_DEVICE void apply_cell(const ApplyParamsOf<kBytes>& params, std::int32_t index) {
  const std::int64_t offset = params.batch_rows * std::int64_t{sizeof(BatchRowUpdate)};
  const auto change = change_at<CellUpdate>(params, offset, index);
  params.table.page_table[change.seat * params.table.cells + change.cell] = change.page;
}

template <std::size_t kBytes>
QUIRE_HOST_DEVICE void apply_lowered_limit(const ApplyParamsOf<kBytes>& params,
                                           std::int32_t index) {
  const std::int64_t offset = params.batch_rows * std::int64_t{sizeof(BatchRowUpdate)} +
                              params.cells * std::int64_t{sizeof(CellUpdate)};
  const auto change = change_at<LimitUpdate>(params, offset, index);
  params.table.limit[change.seat] = change.limit;
}

// Batch rows of the shape that the update does not name.
template <std::size_t kBytes>
QUIRE_HOST_DEVICE std::int32_t padding_rows(const ApplyParamsOf<kBytes>& params) {
  return params.first_chunk ? max_of(params.header.shape.rows - params.header.batch_rows, 0) : 0;
}

template <std::size_t kBytes>
QUIRE_HOST_DEVICE void apply_padding_row(const ApplyParamsOf<kBytes>& params, std::int32_t index) {
  params.plan.row_seats[params.header.batch_rows + index] = -1;
  params.plan.row_tokens[params.header.batch_rows + index] = 0;
}

// Starts the visit of the plan buffer over: its header, and a report with nothing in it.
template <std::size_t kBytes>
QUIRE_HOST_DEVICE void apply_header(const ApplyParamsOf<kBytes>& params) {
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

// No branches: a thread's loads of the header need not wait for each other.
QUIRE_HOST_DEVICE inline bool is_applied_shape(const PlanHeader& header, const StepShape& shape) {
  const bool rows = header.rows == shape.rows;
  const bool tokens_per_row = header.tokens_per_row == shape.tokens_per_row;
  const bool tokens = header.tokens == shape.tokens;
  return rows & tokens_per_row & tokens;
}

// What a plan needs of its buffer's header.
struct AppliedPlan {
  std::int32_t rows, steps_left;
  bool same_shape;  // as is being planned
};

QUIRE_HOST_DEVICE inline AppliedPlan applied_plan(const PlanParams& params) {
  const PlanHeader& header = *params.plan.header;
  return {header.rows, header.steps_left, is_applied_shape(header, params.shape)};
}

// Compilers like to load where the value is used, behind a branch. On a device that makes one wait
// of two: these values are loaded here.
QUIRE_HOST_DEVICE inline void load_here([[maybe_unused]] std::int32_t& a,
                                        [[maybe_unused]] std::int32_t& b) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(a), "+r"(b));
#endif
}

// In one store; both are 16-byte aligned, which their types do not say.
template <class Record>
QUIRE_HOST_DEVICE void store_record(Record* to, const Record& record) {
  static_assert(sizeof(Record) == 16);
#ifdef __CUDA_ARCH__
  *reinterpret_cast<int4*>(to) = __builtin_bit_cast(int4, record);
#else
  *to = record;
#endif
}

struct AppliedRow {
  std::int32_t seat;
  std::int32_t tokens;
};

// Behind the applied shape stands what an earlier update left: padding. Under another shape no row
// takes room. The arrays hold every row of every shape: they are read beside the header, not after.
QUIRE_HOST_DEVICE inline AppliedRow applied_row(const PlanBuffer& plan, const AppliedPlan& applied,
                                                std::int32_t batch_row) {
  std::int32_t seat = plan.row_seats[batch_row];
  std::int32_t tokens = plan.row_tokens[batch_row];
  load_here(seat, tokens);
  const bool is_applied = batch_row < applied.rows;
  return {is_applied ? seat : -1, is_applied && applied.same_shape ? max_of(tokens, 0) : 0};
}

// First input row of a ragged batch row with `before` tokens in front of it.
QUIRE_HOST_DEVICE inline std::int32_t ragged_first_token(const PlanParams& params,
                                                         std::int64_t before) {
  return static_cast<std::int32_t>(min_of(before, std::int64_t{params.shape.tokens}));
}

// A row for which the shape has no room left, which no checked update has, is inert: nothing is
// written beyond the shape.
QUIRE_HOST_DEVICE inline ResolvedRow plan_ragged_row(const PlanParams& params,
                                                     const AppliedPlan& applied,
                                                     const AppliedRow& row, const SeatState& state,
                                                     std::int64_t before) {
  const bool fits = applied.same_shape && row.tokens <= params.shape.tokens - before;
  return resolve_batch_row(applied.steps_left, fits, state, row.seat, row.tokens,
                           ragged_first_token(params, before));
}

QUIRE_HOST_DEVICE inline ResolvedRow plan_decode_row(const PlanParams& params,
                                                     std::int32_t batch_row) {
  const AppliedPlan applied = applied_plan(params);
  const AppliedRow row = applied_row(params.plan, applied, batch_row);
  const std::int32_t tokens_per_row = params.shape.tokens_per_row;
  const bool fits = applied.same_shape && row.tokens <= tokens_per_row;
  return resolve_batch_row(applied.steps_left, fits, seat_state(params.table, row.seat), row.seat,
                           row.tokens, batch_row * tokens_per_row);
}

QUIRE_HOST_DEVICE inline void write_batch_row(const PlanParams& params, std::int32_t batch_row,
                                              const BatchRowRecord& record) {
  store_record(params.plan.rows + batch_row, record);
  write_row_views(params.plan.views, batch_row, record);
}

// What a token's record says, for others to read.
QUIRE_HOST_DEVICE inline void show_token(const PlanParams& params, std::int32_t token,
                                         const TokenRecord& record) {
  write_token_views(params.plan.views, params.geometry, token, record);
  write_read_lengths(params.plan.read, token, record);
}

QUIRE_HOST_DEVICE inline void write_token(const PlanParams& params, std::int32_t token,
                                          const TokenRecord& record) {
  params.plan.tokens[token] = record;
  show_token(params, token, record);
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

// The records of the entries that token `token` of a ragged batch row closes, if it lives; `base`
// is the place of the row's first in the compact lists.
QUIRE_HOST_DEVICE inline void write_closed_entries(const PlanParams& params, std::int32_t token,
                                                   const TokenRecord& record,
                                                   const BatchRowRecord& row,
                                                   const EntryCounts& base) {
  if (record.seat < 0) return;
  const auto put = [&](CompressionRule rule, PlanRecord* list, std::int32_t capacity,
                       std::int32_t first) {
    if (!closes_entry(rule, record.position)) return;
    const std::int32_t at = first + compress_index(rule, row.start, record.position);
    if (at >= capacity) return;
    store_record(list + at, plan_record(rule, token, record.batch_row, row.start, record.index));
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
