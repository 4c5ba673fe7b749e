// The fold of HCA layers on the device: rows of a batch row in ascending order, 512 channels a
// block (SPEC 2, 3.7). The state of a seat is the fold itself, in banks by position (DESIGN 4).
// Decode steps and short rows have a few rows at most, which registers hold; long spans are in
// hca_stream.cuh.
#pragma once

#include <cstdint>

#include <quire/planner/plan_rule.h>
#include <quire/kernels/pool.cuh>

namespace quire::cuda {

inline constexpr int kHcaWindow = kHcaRule.ratio;

// --- Banks ---

template <class P>
__device__ inline Folds<P::kPerThread> load_fold(const HcaPart& part, std::int64_t seat,
                                                 std::int32_t position) {
  const float* bank = part.bank(seat, position) + P::channel();
  const auto m = load_state<P::kPerThread>(bank);
  const auto z = load_state<P::kPerThread>(bank + kHeadDim);
  const auto a = load_state<P::kPerThread>(bank + 2 * kHeadDim);
  Folds<P::kPerThread> folds;
#pragma unroll
  for (int k = 0; k < P::kPerThread; ++k) folds.of[k] = {m.v[k], z.v[k], a.v[k]};
  return folds;
}

template <class P>
__device__ inline void store_fold(const HcaPart& part, std::int64_t seat, std::int32_t position,
                                  const Folds<P::kPerThread>& folds) {
  float* bank = part.bank(seat, position) + P::channel();
  typename P::Values m, z, a;
#pragma unroll
  for (int k = 0; k < P::kPerThread; ++k) {
    m.v[k] = exact::canonical(folds.of[k].m);
    z.v[k] = exact::canonical(folds.of[k].z);
    a.v[k] = exact::canonical(folds.of[k].a);
  }
  store_channels(bank, m);
  store_channels(bank + kHeadDim, z);
  store_channels(bank + 2 * kHeadDim, a);
}

// The fold before position p, which the step that begins at `start` folds first: nothing where p
// begins a window (what a bank holds then is a former owner's), else what earlier steps kept.
template <class P>
__device__ inline Folds<P::kPerThread> begin_fold(const HcaPart& part, std::int64_t seat,
                                                  std::int32_t start, std::int32_t p) {
  return p % kHcaWindow == 0 ? Folds<P::kPerThread>{} : load_fold<P>(part, seat, start);
}

// --- Rows ---

template <class P>
__device__ inline typename P::Values load_hca_bias(const HcaPart& part, std::int32_t position) {
  return load_constant<P::kPerThread>(part.bias + (position % kHcaWindow) * kHeadDim +
                                      P::channel());
}

// Consecutive tokens of one batch row.
struct HcaSpan {
  std::int64_t input_row;  // of the first
  std::int32_t position;   // of the first
  int count;
};

// The thread's channels of one row.
template <class P>
struct HcaRow {
  typename P::Values value, score, bias;
};

template <class P>
__device__ inline void load_hca_row(HcaRow<P>& row, const HcaPart& part, const HcaSpan& span,
                                    int i) {
  row.value = load_input<P::kPerThread>(part.rows, span.input_row + i, P::channel());
  row.score = load_input<P::kPerThread>(part.rows, span.input_row + i, kHeadDim + P::channel());
}
template <class P>
__device__ inline void load_hca_bias(HcaRow<P>& row, const HcaPart& part, const HcaSpan& span,
                                     int i) {
  row.bias = load_hca_bias<P>(part, span.position + i);
}
template <class P, bool kWithNan = true>
__device__ inline void fold_hca_row(Folds<P::kPerThread>& folds, bool is_first,
                                    const HcaRow<P>& row) {
  fold_row<kWithNan>(folds, is_first, row.score, row.bias, row.value);
}

// --- Short spans ---

// Rows that a short batch row has in flight at once.
template <class P, int kRowsAhead>
struct ShortRows {
  HcaRow<P> row[kRowsAhead];

  // Before the wait as well.
  __device__ void load_bias(const HcaPart& part, const HcaSpan& span, int first) {
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (first + k < span.count) load_hca_bias<P>(row[k], part, span, first + k);
    }
  }
};

// Folds a span of any windows; `folded(i)` sees the folds behind each row. The bias of the first
// kRowsAhead rows is loaded. After the wait.
template <class P, int kRowsAhead, class Folded>
__device__ inline void fold_short(Folds<P::kPerThread>& folds, ShortRows<P, kRowsAhead>& rows,
                                  const HcaPart& part, const HcaSpan& span, const Folded& folded) {
#pragma unroll 1
  for (int i = 0; i < span.count; i += kRowsAhead) {
    if (i > 0) rows.load_bias(part, span, i);
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (i + k < span.count) load_hca_row<P>(rows.row[k], part, span, i + k);
    }
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (i + k >= span.count) break;
      fold_hca_row<P>(folds, (span.position + i + k) % kHcaWindow == 0, rows.row[k]);
      folded(i + k);
    }
  }
}

}  // namespace quire::cuda
