// HCA layers (ratio 128): a running fold per seat instead of raw rows (SPEC 2, 3.7; DESIGN 4).
// Entries are folded from their first token again where the step has it, so phase 2 repeats what
// phase 1 did for the tokens that both need.
#include <quire/kernels/host/hca.h>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/host/entry.h>

namespace quire::host {
namespace {

void load_fold(const HcaPart& part, std::int32_t seat, std::int32_t position, ChannelFolds& folds) {
  const float* bank = part.bank(seat, position);
  for (std::int64_t c = 0; c < kHeadDim; ++c) {
    folds.m[c] = bank[c];
    folds.z[c] = bank[kHeadDim + c];
    folds.a[c] = bank[2 * kHeadDim + c];
  }
}

void store_fold(const HcaPart& part, std::int32_t seat, std::int32_t position,
                const ChannelFolds& folds) {
  float* bank = part.bank(seat, position);
  for (std::int64_t c = 0; c < kHeadDim; ++c) {
    bank[c] = exact::canonical(folds.m[c]);
    bank[kHeadDim + c] = exact::canonical(folds.z[c]);
    bank[2 * kHeadDim + c] = exact::canonical(folds.a[c]);
  }
}

// The fold before position p, whose step begins at `start`: nothing where p begins a window (what a
// bank holds then is a former owner's), else what the earlier steps kept.
void begin_fold(const HcaPart& part, std::int32_t seat, std::int32_t start, std::int32_t p,
                ChannelFolds& folds) {
  if (p % kHcaRule.ratio != 0) load_fold(part, seat, start, folds);
}

void fold_token(const HcaPart& part, std::int64_t token, std::int32_t position,
                ChannelFolds& folds) {
  fold_hca_row(folds, row_of(part.rows.data, part.rows.type, part.rows.stride, token), part.bias,
               position);
}

void append_entry(const AppendParams& params, std::int64_t token) {
  const HcaPart& part = params.hca;
  const TokenRecord& record = params.tokens[token];
  if (record.seat < 0 || record.hca_location < 0) return;

  const std::int32_t start = record.position - record.index;
  const std::int32_t window = record.position - (kHcaRule.ratio - 1);
  const std::int32_t first = max_of(window, start);
  ChannelFolds folds;
  begin_fold(part, record.seat, start, first, folds);
  for (std::int32_t p = first; p <= record.position; ++p) {
    fold_token(part, token - (record.position - p), p, folds);
  }
  float entry[kHeadDim];
  fold_entries(folds, kHeadDim, entry);
  normalise(entry, kHeadDim, part.norm_weight, params.norm_eps);
  rotate_tail(entry, kHeadDim, params.rope, window);
  const std::int32_t tiles =
      store_main_entry(entry, part.pages, record.hca_location, params.scale_floor);
  report_nonfinite(params.report, tiles, record.seat);
}

void keep_folds_of(const AppendParams& params, const BatchRowRecord& row) {
  const HcaPart& part = params.hca;
  const std::int32_t first = first_folded_position(params.geometry, row);
  const std::int32_t end = row.start + row.live_tokens;
  if (first == end) return;
  ChannelFolds folds;
  begin_fold(part, row.seat, row.start, first, folds);
  for (std::int32_t p = first; p < end; ++p) {
    fold_token(part, row.first_token + (p - row.start), p, folds);
    if (keeps_fold(params.geometry, row, p)) store_fold(part, row.seat, p + 1, folds);
  }
}

}  // namespace

void append_hca_entries(const AppendParams& params) {
  if (params.shape.is_decode()) {
    for (std::int32_t token = 0; token < params.shape.tokens; ++token) append_entry(params, token);
    return;
  }
  for (std::int32_t i = 0; i < params.hca_entry_capacity; ++i) {
    const std::uint32_t ragged_id = params.hca_entries[i].ragged_id;
    if (ragged_id != kPaddingRaggedId) append_entry(params, ragged_id);
  }
}

void keep_hca_folds(const AppendParams& params) {
  for (std::int32_t r = 0; r < params.shape.rows; ++r) {
    const BatchRowRecord& row = params.rows[r];
    if (row.seat >= 0 && row.live_tokens > 0) keep_folds_of(params, row);
  }
}

}  // namespace quire::host
