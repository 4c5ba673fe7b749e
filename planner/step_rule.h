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
  if ((row.flags & BatchRowUpdate::kNewOwner) != 0) {
    ++table.owner[row.seat];
    for (std::int32_t group = 0; group < table.groups; ++group) {
      table.length_of(static_cast<LayerGroup>(group))[row.seat] = 0;
    }
  }
  if ((row.flags & (BatchRowUpdate::kNewOwner | BatchRowUpdate::kResume)) != 0) {
    table.stopped[row.seat] = 0;
  }
  params.plan.row_owners[params.first_batch_row + index] = table.owner[row.seat];
  params.plan.row_lives[params.first_batch_row + index] = 1;
  params.plan.results[params.first_batch_row + index] = {
      table.length_of(LayerGroup::kTarget)[row.seat], table.stopped[row.seat]};
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
  params.plan.row_owners[params.header.batch_rows + index] = 0;
  params.plan.row_lives[params.header.batch_rows + index] = 1;
  params.plan.results[params.header.batch_rows + index] = {0, 0};
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

// Whether a plan of `shape` is one of what was applied: the same shape; or, of the draft group,
// with fewer tokens in each batch row. No branches: a thread's loads of the header need not wait
// for each other.
QUIRE_HOST_DEVICE inline bool is_applied_shape(const PlanHeader& header, const StepShape& shape,
                                               LayerGroup group) {
  const bool rows = header.rows == shape.rows;
  const bool tokens_per_row = header.tokens_per_row == shape.tokens_per_row;
  const bool tokens = header.tokens == shape.tokens;
  const bool fewer = shape.is_decode() & (shape.tokens_per_row < header.tokens_per_row);
  return rows & ((tokens_per_row & tokens) | ((group == LayerGroup::kDraft) & fewer));
}

// What a plan needs of its buffer's header. A draft pass belongs to the step whose target plan went
// before it; that may have committed, and have been the last.
struct AppliedPlan {
  std::int32_t rows, steps_left;
  bool same_shape;  // as is being planned
};

QUIRE_HOST_DEVICE inline AppliedPlan applied_plan(const PlanParams& params) {
  const PlanHeader& header = *params.plan.header;
  const bool target = params.group == LayerGroup::kTarget;
  return {header.rows, target ? header.steps_left : header.steps_at_plan,
          is_applied_shape(header, params.shape, params.group)};
}

// Says what was planned, in fields that no plan of the same group reads. Under another shape than
// the applied one nothing was: no append and no commit finds its plan, and behind the target's no
// draft group lives.
QUIRE_HOST_DEVICE inline void note_plan(const PlanParams& params, const AppliedPlan& applied) {
  PlanHeader& header = *params.plan.header;
  header.planned_rows = applied.same_shape ? params.shape.rows : -1;
  header.planned_form = plan_form(params.shape.tokens_per_row, params.group);
  header.planned_tokens = params.shape.tokens;
  if (params.group == LayerGroup::kTarget) {
    header.steps_at_plan = applied.same_shape ? applied.steps_left : 0;
  }
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

// As it stands in memory. The arrays hold every row of every shape: they are read beside the
// header, not after.
QUIRE_HOST_DEVICE inline AppliedRow load_row(const PlanParams& params, std::int32_t batch_row) {
  const PlanBuffer& plan = params.plan;
  AppliedRow row{plan.row_seats[batch_row], plan.row_tokens[batch_row], plan.row_owners[batch_row],
                 1};
  if (params.group == LayerGroup::kDraft) row.lives = plan.row_lives[batch_row];
  load_here(row.seat, row.tokens);
  load_here(row.owner, row.lives);
  return row;
}

// Behind the applied shape stands what an earlier update left: padding. Under another shape no row
// takes room.
QUIRE_HOST_DEVICE inline AppliedRow applied_row(const AppliedRow& loaded,
                                                const AppliedPlan& applied,
                                                std::int32_t batch_row) {
  const bool is_applied = batch_row < applied.rows;
  return {is_applied ? loaded.seat : -1,
          is_applied && applied.same_shape ? max_of(loaded.tokens, 0) : 0, loaded.owner,
          loaded.lives};
}

QUIRE_HOST_DEVICE inline AppliedRow applied_row(const PlanParams& params,
                                                const AppliedPlan& applied,
                                                std::int32_t batch_row) {
  return applied_row(load_row(params, batch_row), applied, batch_row);
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
  return resolve_batch_row(applied.steps_left, fits, state, row, row.tokens,
                           ragged_first_token(params, before));
}

// Whether positions that the engine supplied for a batch row can be planned: from the group's
// length on and ascending by one, so far that the seat's rings and banks still hold what was
// committed.
QUIRE_HOST_DEVICE inline bool positions_fit(const PlanParams& params, std::int32_t first_token,
                                            std::int32_t tokens, std::int32_t length) {
  const std::int32_t start = params.positions[first_token];
  // In an order in which nothing overflows.
  bool fit = start >= length && start - length <= params.geometry.draft_max + 1 - tokens;
  for (std::int32_t j = 1; j < tokens; ++j) {
    fit = fit && params.positions[first_token + j] == start + j;
  }
  return fit;
}

QUIRE_HOST_DEVICE inline ResolvedRow plan_decode_row(const PlanParams& params,
                                                     std::int32_t batch_row) {
  const AppliedPlan applied = applied_plan(params);
  const AppliedRow row = applied_row(params, applied, batch_row);
  const std::int32_t tokens_per_row = params.shape.tokens_per_row;
  const std::int32_t first_token = batch_row * tokens_per_row;
  SeatState state = seat_state(params.table, params.group, row.seat);
  std::int32_t tokens = min_of(row.tokens, tokens_per_row);
  SuppliedRow supplied;
  if (params.row_tokens != nullptr) {
    const std::int32_t count = params.row_tokens[batch_row];
    supplied.tokens_fit = count >= 0 && count <= tokens;
    tokens = supplied.tokens_fit ? count : tokens;
  }
  const std::int32_t length = state.length;
  if (params.positions != nullptr) {
    supplied.positions_fit = positions_fit(params, first_token, tokens, length);
    if (supplied.positions_fit) state.length = params.positions[first_token];
  }
  ResolvedRow resolved = resolve_batch_row(applied.steps_left, applied.same_shape, state, row,
                                           tokens, first_token, supplied);
  // What is inert stays where it is, whatever was supplied.
  if (resolved.why != Inert::kNo && resolved.why != Inert::kFormerOwner) {
    resolved.record.start = length;
  }
  return resolved;
}

QUIRE_HOST_DEVICE inline void write_batch_row(const PlanParams& params, std::int32_t batch_row,
                                              const BatchRowRecord& record) {
  store_record(params.plan.rows + batch_row, record);
  if (params.group == LayerGroup::kTarget) {
    params.plan.row_lives[batch_row] = record.live_tokens > 0 ? 1 : 0;
  }
  write_row_views(params.plan.views, batch_row, record);
}

// What a token's record says, for others to read: what needs no page table cell, and the rest.
QUIRE_HOST_DEVICE inline void show_place(const PlanParams& params, std::int32_t token,
                                         const TokenRecord& record) {
  write_place_views(params.plan.views, params.geometry, token, record);
  write_read_lengths(params.plan.read, token, record);
}

QUIRE_HOST_DEVICE inline void show_entries(const PlanParams& params, std::int32_t token,
                                           const TokenRecord& record) {
  write_entry_views(params.plan.views, params.geometry, token, record);
}

QUIRE_HOST_DEVICE inline void write_token(const PlanParams& params, std::int32_t token,
                                          const TokenRecord& record) {
  params.plan.tokens[token] = record;
  show_place(params, token, record);
  show_entries(params, token, record);
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
// is the place of the row's first in the compact lists. (The kernel goes the other way, from a
// place of a list to its token.)
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
    case Inert::kWrongPositions:
      return &report.rows_wrong_positions;
    case Inert::kWrongTokens:
      return &report.rows_wrong_tokens;
    case Inert::kFormerOwner:
      return &report.rows_of_former_owners;
    case Inert::kNo:
    case Inert::kPadding:
    case Inert::kEmpty:
    case Inert::kTargetInert:  // the target's plan has reported it
      break;
  }
  return nullptr;
}

// --- Commit ---

// Only of what was planned last: an update without its plan has records of an earlier one. What may
// not is counted in `DeviceReport::commits_unplanned`.
QUIRE_HOST_DEVICE inline bool may_commit(const CommitParams& params) {
  return is_planned(*params.plan.header, params.shape,
                    plan_form(params.shape.tokens_per_row, params.group));
}

enum class Committed : std::int32_t { kYes, kKeptWrong, kPaddingKept, kFormerOwner };

// Whether `kept` is what a live batch row can keep. A longer row's state is that after its last
// token: there is nothing to fall back to. A plan beyond the length would leave a gap. The draft
// group may not get ahead of the target: pages follow what the target keeps.
QUIRE_HOST_DEVICE inline bool can_keep(const CommitParams& params, const BatchRowRecord& row,
                                       std::int32_t kept) {
  if (kept < 0 || kept > row.live_tokens) return false;
  if (row.live_tokens > params.draft_max + 1 && kept != row.live_tokens) return false;
  if (params.group == LayerGroup::kDraft &&
      row.start + kept > params.table.length_of(LayerGroup::kTarget)[row.seat]) {
    return false;
  }
  return !params.positions_supplied || row.start <= params.table.length_of(params.group)[row.seat];
}

// Anything but kYes: nothing was changed, and it must be reported.
QUIRE_HOST_DEVICE inline Committed commit_batch_row(const CommitParams& params,
                                                    std::int32_t batch_row) {
  const BatchRowRecord row = params.plan.rows[batch_row];
  const bool supplied = params.kept != nullptr;
  const std::int32_t kept = supplied ? params.kept[batch_row] : row.live_tokens;
  const bool stops = params.stop != nullptr && params.stop[batch_row] != 0;
  if (row.seat < 0) {
    return (supplied && kept != 0) || stops ? Committed::kPaddingKept : Committed::kYes;
  }
  const bool target = params.group == LayerGroup::kTarget;
  RowResult& result = params.plan.results[batch_row];
  const bool lives = row.live_tokens > 0;
  if (params.plan.row_owners[batch_row] != params.table.owner[row.seat]) {
    if (target) result.stopped = 1;  // whose length stands there now is not this row's to see
    return lives ? Committed::kFormerOwner : Committed::kYes;
  }
  if (!lives || !can_keep(params, row, kept)) {
    // Since the update a visit of another plan buffer may have moved or stopped it.
    if (target) {
      result = {params.table.length_of(LayerGroup::kTarget)[row.seat],
                params.table.stopped[row.seat]};
    }
    return lives ? Committed::kKeptWrong : Committed::kYes;
  }
  params.table.length_of(params.group)[row.seat] = row.start + kept;
  if (stops) params.table.stopped[row.seat] = 1;
  if (target) result.length = row.start + kept;
  if (target && stops) result.stopped = 1;  // sticky: a second commit may come without the flag
  return Committed::kYes;
}

// Where what a commit did not do is counted, and whose seat is failing; null and -1: none.
struct CommitReport {
  std::int32_t* counter;
  std::int32_t seat;
};

QUIRE_HOST_DEVICE inline CommitReport commit_report(const CommitParams& params, Committed committed,
                                                    std::int32_t batch_row) {
  DeviceReport& report = *params.plan.report;
  switch (committed) {
    case Committed::kKeptWrong:
      return {&report.rows_kept_wrong, params.plan.rows[batch_row].seat};
    case Committed::kFormerOwner:
      return {&report.rows_of_former_owners, params.plan.rows[batch_row].seat};
    case Committed::kPaddingKept:
      return {&report.padding_rows_kept, DeviceReport::kNoSeat};
    case Committed::kYes:
      break;
  }
  return {nullptr, DeviceReport::kNoSeat};
}

}  // namespace quire
