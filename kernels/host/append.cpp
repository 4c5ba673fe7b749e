// All cache work of one layer on the host: window entries into ring and scratch, pooled entries
// into their pages, raw rows and folds into the seats (DESIGN 4, SPEC 1 to 3).
//
// Two phases, for every shape: first all entries, which read state and ring, then the seats. So the
// order of tokens inside a phase does not matter.
#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/kernels/host/hca.h>
#include <quire/kernels/host/operations.h>

#include <cstring>

namespace quire::host {
namespace {

void copy_main_entry(const EntryPool& from, std::int64_t source, const EntryPool& to,
                     std::int64_t target) {
  std::memcpy(to.main_data(target), from.main_data(source), kMainDataBytes);
  std::memcpy(to.main_scales(target), from.main_scales(source), kMainScaleBytes);
}

// --- Phase 1 ---

// Short rows are read from the ring, the others from the scratch; the latter's last tokens follow
// into the ring in phase 2.
void append_window_entry(const AppendParams& params, std::int64_t token) {
  const TokenRecord& record = params.tokens[token];
  const WindowPart& part = params.window;
  const bool to_scratch = record.scratch_location >= 0;
  const std::int64_t location = to_scratch ? record.scratch_location : record.ring_location;
  if (location < 0) return;

  float entry[kHeadDim];
  widen(row_of(part.rows.data, part.rows.type, part.rows.stride, token), 0, kHeadDim, entry);
  if (part.norm_weight != nullptr) normalise(entry, kHeadDim, part.norm_weight, params.norm_eps);
  rotate_tail(entry, kHeadDim, params.rope, record.position);
  const std::int32_t tiles = store_main_entry(entry, to_scratch ? part.scratch : part.ring,
                                              location, params.scale_floor);
  report_nonfinite(params.report, tiles, record.seat);
}

void copy_older_window(const AppendParams& params, const BatchRowRecord& row,
                       std::int32_t batch_row) {
  for (std::int32_t p = max_of(0, row.start - 127); p < row.start; ++p) {
    copy_main_entry(params.window.ring, ring_location(params.geometry, row.seat, p),
                    params.window.scratch,
                    scratch_location(row.first_token, batch_row, p - row.start));
  }
}

float* state_row(const CsaPart& part, std::int64_t d, std::int32_t seat, std::int32_t position) {
  const std::int64_t row =
      static_cast<std::int64_t>(seat) * part.ring_tokens + position % part.ring_tokens;
  return part.state + row * 4 * d;
}

// The entry that `token` closes: each of its eight rows is an input row of this step, or lies in
// the state where its token precedes the step.
void pool_entry(const CsaPart& part, std::int64_t d, const TokenRecord& record, std::int64_t token,
                float* entry) {
  const std::int32_t older = window_len(kCsaRule, record.index);
  SourceRow rows[kC4Rows];
  for (std::int32_t i = record.position == 3 ? 4 : 0; i < kC4Rows; ++i) {
    rows[i] = i >= older ? row_of(part.rows.data, part.rows.type, part.rows.stride, token - 7 + i)
                         : SourceRow{state_row(part, d, record.seat, record.position - 7 + i),
                                     ElementType::kFloat32};
  }
  const float* biases[kC4Rows];
  bias_rows(part.bias, part.bias_order, d, biases);
  pool_c4(d, rows, biases, entry);
}

void append_csa_entry(const AppendParams& params, const CsaPart& part, std::int64_t d,
                      std::int64_t token) {
  const TokenRecord& record = params.tokens[token];
  if (part.rows.data == nullptr || record.seat < 0 || record.csa_location < 0) return;

  float entry[kHeadDim];
  pool_entry(part, d, record, token, entry);
  normalise(entry, d, part.norm_weight, params.norm_eps);
  rotate_tail(entry, d, params.rope, record.position - 3);
  std::int32_t tiles = 0;
  if (d == kHeadDim) {
    tiles = store_main_entry(entry, part.pages, record.csa_location, params.scale_floor);
  } else {
    if (params.hadamard) hadamard(entry);
    tiles = store_indexer_entry(entry, part.pages, record.csa_location, params.scale_floor);
  }
  report_nonfinite(params.report, tiles, record.seat);
}

void append_entries(const AppendParams& params) {
  if (params.window.rows.data != nullptr) {
    for (std::int32_t token = 0; token < params.shape.tokens; ++token) {
      if (params.tokens[token].seat >= 0) append_window_entry(params, token);
    }
  }
  const auto append_both = [&](std::int64_t token) {
    append_csa_entry(params, params.csa, kHeadDim, token);
    append_csa_entry(params, params.indexer, kIndexerDim, token);
  };
  if (params.shape.is_decode()) {
    for (std::int32_t token = 0; token < params.shape.tokens; ++token) append_both(token);
    return;
  }
  for (std::int32_t i = 0; i < params.csa_entry_capacity; ++i) {
    const std::uint32_t ragged_id = params.csa_entries[i].ragged_id;
    if (ragged_id != kPaddingRaggedId) append_both(ragged_id);
  }
  if (!params.window.copy_older_window) return;
  for (std::int32_t r = 0; r < params.shape.rows; ++r) {
    const BatchRowRecord& row = params.rows[r];
    if (row.live_tokens > 0 && !is_short(params.geometry, row.live_tokens)) {
      copy_older_window(params, row, r);
    }
  }
}

// --- Phase 2 ---

// Raw bits; bf16 is widened.
void write_state(const CsaPart& part, std::int64_t d, const TokenRecord& record,
                 std::int64_t token) {
  if (part.rows.data == nullptr) return;
  widen(row_of(part.rows.data, part.rows.type, part.rows.stride, token), 0, 4 * d,
        state_row(part, d, record.seat, record.position));
}

void write_seats(const AppendParams& params) {
  const WindowPart& window = params.window;
  for (std::int32_t token = 0; token < params.shape.tokens; ++token) {
    const TokenRecord& record = params.tokens[token];
    if (record.seat < 0) continue;
    if (window.rows.data != nullptr && record.scratch_location >= 0 && record.ring_location >= 0) {
      copy_main_entry(window.scratch, record.scratch_location, window.ring, record.ring_location);
    }
    const BatchRowRecord& row = params.rows[record.batch_row];
    if (!writes_csa_state(params.geometry, row, record.index)) continue;
    write_state(params.csa, kHeadDim, record, token);
    write_state(params.indexer, kIndexerDim, record, token);
  }
}

}  // namespace

void append(const AppendParams& params) {
  if (!is_planned(*params.header, params.shape, params.planned_form)) {
    if (params.report != nullptr) ++params.report->appends_unplanned;
    return;
  }
  const FloatEnvironment environment;
  append_entries(params);
  if (params.hca.rows.data != nullptr) append_hca_entries(params);
  write_seats(params);
  if (params.hca.rows.data != nullptr) keep_hca_folds(params);
}

}  // namespace quire::host
