// Pooling of one CSA entry on the device: eight rows folded in ascending order (SPEC 1.3,
// 3.7). Shared by append and by the single operations.
#pragma once

#include <cstdint>
#include <quire/kernels/entry.cuh>

namespace quire::cuda {

// Rows that an entry pools: 4 of the window before, which count by their overlap halves, and 4 of
// its own.
inline constexpr int kC4Window = 8;
inline constexpr int kC4Overlap = 4;

template <int kCount>
struct Folds {
  exact::Fold of[kCount];
};

// Before the first row (exact::fold_none).
template <int kCount>
__device__ inline Folds<kCount> empty_folds() {
  Folds<kCount> folds;
#pragma unroll
  for (int k = 0; k < kCount; ++k) folds.of[k] = exact::fold_none();
  return folds;
}

// First row of the window of the entry that closes at p: the first entry has no older window.
__device__ inline int first_window_row(std::int64_t p) {
  return p < kC4Window - 1 ? kC4Overlap : 0;
}

// A token's row is kv_overlap, kv, score_overlap, score, each of P::kDim channels. Where the
// thread's channels of window row i stand in it:
template <class P>
__device__ inline int value_channel(int i) {
  return (i < kC4Overlap ? 0 : P::kDim) + P::channel();
}
template <class P>
__device__ inline int score_channel(int i) {
  return 2 * P::kDim + value_channel<P>(i);
}

// Without NaN (exact::fold_next) where the folds end in an entry, and are not kept.
template <bool kWithNan = true, int kCount>
__device__ inline void fold_row(Folds<kCount>& folds, bool is_first, const Channels<kCount>& score,
                                const Channels<kCount>& bias, const Channels<kCount>& value) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float s = exact::add(score.v[k], bias.v[k]);
    folds.of[k] = is_first ? exact::fold_first(s, value.v[k])
                           : exact::fold_next<kWithNan>(folds.of[k], s, value.v[k]);
  }
}

// Folds window rows [begin, end) into `folds`; row `first` starts them. `load(i, value, score)` is
// called for all of them before anything is folded: the loads overlap.
template <int kCount, class Load>
__device__ inline void fold_rows(Folds<kCount>& folds, const Channels<kCount> (&bias)[kC4Window],
                                 int first, int begin, int end, const Load& load) {
  Channels<kCount> value[kC4Window];
  Channels<kCount> score[kC4Window];
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    if (i >= begin && i < end) load(i, value[i], score[i]);
  }
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    // Only these two can be first: the others need no check.
    const bool is_first = (i == 0 || i == kC4Overlap) && i == first;
    if (i >= begin && i < end) fold_row<false>(folds, is_first, score[i], bias[i], value[i]);
  }
}

// Of folds with or without NaN.
template <int kCount>
__device__ inline Channels<kCount> pooled(const Folds<kCount>& folds) {
  Channels<kCount> entry;
#pragma unroll
  for (int k = 0; k < kCount; ++k) entry.v[k] = exact::fold_entry_without_nan(folds.of[k]);
  return entry;
}

// The same, the quotients side by side: sooner done, with a few registers more.
template <int kCount>
__device__ inline Channels<kCount> pooled_together(const Folds<kCount>& folds) {
  Channels<kCount> entry;
  bool plain = true;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    entry.v[k] = exact::plain_quotient(folds.of[k].a, folds.of[k].z);
    plain &= exact::is_plain_quotient(folds.of[k].a, folds.of[k].z);
  }
  if (!plain) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) entry.v[k] = exact::fold_entry(folds.of[k]);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (exact::is_nan(folds.of[k].m)) entry.v[k] = exact::from_bits(exact::kNanBits);
  }
  return entry;
}

}  // namespace quire::cuda
