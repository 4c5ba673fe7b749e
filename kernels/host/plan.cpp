// Update, plan and commit of a step, and the plan records of the single operations: plain loops
// over the planning rule, in batch row order. Integers only, so the floating-point environment
// does not matter here.
#include <quire/kernels/host/operations.h>

#include <algorithm>
#include <cstring>

#include <quire/planner/step_rule.h>

namespace quire::host {

namespace {

void add_to_report(DeviceReport& report, std::int32_t* counter, std::int32_t seat) {
  if (counter == nullptr) return;
  ++*counter;
  report.first_failing_seat = std::min(report.first_failing_seat, seat);
}

void copy_page_table_row(const PlanParams& params, std::int32_t batch_row,
                         const BatchRowRecord& row) {
  if (row.seat < 0) return;
  const std::int32_t* from = params.table.page_table + row.seat * params.table.cells;
  std::int32_t* to = params.plan.views.page_table + batch_row * params.plan.views.page_table_stride;
  std::copy_n(from, shown_cells(row), to);
}

BatchRowRecord plan_row(const PlanParams& params, std::int32_t batch_row,
                        const ResolvedRow& resolved) {
  write_batch_row(params, batch_row, resolved.record);
  copy_page_table_row(params, batch_row, resolved.record);
  add_to_report(*params.plan.report, report_counter(*params.plan.report, resolved.why),
                resolved.record.seat);
  return resolved.record;
}

void plan_decode(const PlanParams& params) {
  const StepShape& shape = params.shape;
  for (std::int32_t r = 0; r < shape.rows; ++r) {
    const BatchRowRecord row = plan_row(params, r, plan_decode_row(params, r));
    for (std::int32_t j = 0; j < shape.tokens_per_row; ++j) {
      write_token(params, row.first_token + j,
                  plan_token(params.geometry, params.table, row, r, j));
    }
  }
  params.plan.views.cu_extend[shape.rows] = shape.rows * shape.tokens_per_row;
  params.plan.header->short_rows = shape.rows;
  params.plan.header->csa_entries = 0;
  params.plan.header->hca_entries = 0;
  params.plan.header->used_tokens = shape.tokens;
  params.plan.header->used_rows = shape.rows;
}

// Pads a compact list behind its entries; returns how many of them it holds.
std::int32_t pad_entries(PlanRecord* list, std::int32_t entries, std::int32_t capacity) {
  const std::int32_t held = std::min(entries, capacity);
  std::fill(list + held, list + capacity, kPaddingRecord);
  return held;
}

void plan_ragged(const PlanParams& params) {
  const StepShape& shape = params.shape;
  const AppliedPlan applied = applied_plan(params);
  std::int64_t before = 0;
  EntryCounts entries;
  std::int32_t short_rows = shape.rows;
  std::int32_t used_rows = 0;
  for (std::int32_t r = 0; r < shape.rows; ++r) {
    const AppliedRow applied_to = applied_row(params, applied, r);
    const SeatState state = seat_state(params.table, params.group, applied_to.seat);
    const BatchRowRecord row =
        plan_row(params, r, plan_ragged_row(params, applied, applied_to, state, before));
    before += applied_to.tokens;
    const std::int32_t end = ragged_first_token(params, before);
    for (std::int32_t token = row.first_token; token < end; ++token) {
      const std::int32_t j = token - row.first_token;
      const TokenRecord record = plan_token(params.geometry, params.table, row, r, j);
      write_token(params, token, record);
      write_closed_entries(params, token, record, row, entries);
    }
    entries = entries + entries_closed_by(row);
    if (!is_short(params.geometry, applied_to.tokens)) short_rows = std::min(short_rows, r);
    if (applied_to.seat >= 0) used_rows = r + 1;
  }
  const std::int32_t tokens = ragged_first_token(params, before);
  for (std::int32_t token = tokens; token < shape.tokens; ++token) {
    write_token(params, token, inert_token());
  }
  params.plan.views.cu_extend[shape.rows] = tokens;
  params.plan.header->short_rows = short_rows;
  params.plan.header->used_tokens = tokens;
  params.plan.header->used_rows = used_rows;
  params.plan.header->csa_entries =
      pad_entries(params.plan.csa_entries, entries.csa, params.csa_entry_capacity);
  params.plan.header->hca_entries =
      pad_entries(params.plan.hca_entries, entries.hca, params.hca_entry_capacity);
}

void write_window_list(const PlanParams& params, std::int32_t token, const BatchRowRecord& row,
                       std::int32_t batch_row, std::int32_t j) {
  const ReadLists& read = params.plan.read;
  if (read.window_locations == nullptr) return;
  std::int32_t* list = read.window_locations + std::int64_t{token} * kWindowListWidth;
  for (std::int32_t i = 0; i < kWindowListWidth; ++i) {
    list[i] = window_read_location(params.geometry, row, batch_row, j, i, read.padding_location);
  }
}

void write_hca_list(const PlanParams& params, std::int64_t list, const BatchRowRecord& row,
                    std::int32_t entries) {
  const ReadLists& read = params.plan.read;
  if (read.hca_locations == nullptr) return;
  for (std::int64_t e = 0; e < read.hca_width; ++e) {
    read.hca_locations[list * read.hca_width + e] = hca_read_location(params, row, entries, e);
  }
}

// After the records: the lists follow from them.
void write_read_lists(const PlanParams& params) {
  const bool decode = params.shape.is_decode();
  const std::int32_t* cu_extend = params.plan.views.cu_extend;
  for (std::int32_t r = 0; r < params.shape.rows; ++r) {
    const BatchRowRecord& row = params.plan.rows[r];
    for (std::int32_t token = cu_extend[r]; token < cu_extend[r + 1]; ++token) {
      const std::int32_t j = token - row.first_token;
      write_window_list(params, token, row, r, j);
      if (decode) write_hca_list(params, token, row, hca_entries_at(row, j));
    }
    if (!decode) write_hca_list(params, r, row, hca_entries_after(row));
  }
  for (std::int32_t token = cu_extend[params.shape.rows]; token < params.shape.tokens; ++token) {
    write_window_list(params, token, no_batch_row(), -1, 0);
  }
}

}  // namespace

void apply(const ApplyParams& params) {
  if (params.first_chunk) apply_header(params);
  for (std::int32_t i = 0; i < params.batch_rows; ++i) apply_batch_row(params, i);
  for (std::int32_t i = 0; i < padding_rows(params); ++i) apply_padding_row(params, i);
  for (std::int32_t i = 0; i < params.cells; ++i) apply_cell(params, i);
  for (std::int32_t i = 0; i < params.lowered_limits; ++i) apply_lowered_limit(params, i);
}

void clear(const ClearParams& params) {
  for (std::int32_t i = 0; i < params.owned_count; ++i) {
    for (std::int32_t piece = 0; piece < params.piece_count; ++piece) {
      const OwnedBytes& bytes = params.pieces[piece];
      std::memset(bytes.of(params.owned[i]), 0, static_cast<std::size_t>(bytes.bytes));
    }
  }
}

void plan(const PlanParams& params) {
  if (params.shape.is_decode()) {
    plan_decode(params);
  } else {
    plan_ragged(params);
  }
  write_read_lists(params);
  note_plan(params, applied_plan(params));
}

void commit(const CommitParams& params) {
  if (!may_commit(params)) {
    ++params.plan.report->commits_unplanned;
    return;
  }
  for (std::int32_t r = 0; r < params.shape.rows; ++r) {
    const CommitReport missed = commit_report(params, commit_batch_row(params, r), r);
    add_to_report(*params.plan.report, missed.counter, missed.seat);
  }
  PlanHeader& header = *params.plan.header;
  if (params.group == LayerGroup::kTarget) header.steps_left = header.steps_at_plan - 1;
}

void plan_records(const RecordPlanParams& params) {
  const CompressionRule rule = params.rule;
  std::int32_t tokens = 0;
  std::int32_t compress = 0;
  std::int32_t write = 0;
  const auto put = [](PlanRecord* list, std::int64_t capacity, std::int32_t at,
                      const PlanRecord& record) {
    if (list != nullptr && at < capacity) list[at] = record;
  };
  for (std::int32_t r = 0; r < params.rows; ++r) {
    params.cu_extend[r] = tokens;
    params.cu_compress[r] = compress;
    params.cu_write[r] = write;
    const std::int32_t P0 = params.prefix[r];
    const std::int32_t E = params.extend[r];
    for (std::int32_t j = 0; j < E; ++j) {
      const std::int32_t p = P0 + j;
      const PlanRecord record = plan_record(rule, tokens + j, r, P0, j);
      if (closes_entry(rule, p)) {
        put(params.compress, params.compress_capacity, compress + compress_index(rule, P0, p),
            record);
      }
      if (const std::int32_t index = write_index(rule, P0, E, p); index >= 0) {
        put(params.write, params.write_capacity, write + index, record);
      }
    }
    tokens += E;
    compress += compress_count(rule, P0, E);
    write += write_count(rule, P0, E);
  }
  params.cu_extend[params.rows] = tokens;
  params.cu_compress[params.rows] = compress;
  params.cu_write[params.rows] = write;
  const auto pad = [](PlanRecord* list, std::int64_t capacity, std::int64_t from) {
    if (list != nullptr)
      std::fill(list + std::min(from, capacity), list + capacity, kPaddingRecord);
  };
  pad(params.compress, params.compress_capacity, compress);
  pad(params.write, params.write_capacity, write);
}

}  // namespace quire::host
