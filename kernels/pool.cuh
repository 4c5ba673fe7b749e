// Pooling of one CSA entry on the device: eight rows folded in ascending order, four channels a
// thread (SPEC 1.3, 3.7). Shared by append and by the single operations.
#pragma once

#include <cstdint>
#include <quire/kernels/entry.cuh>

namespace quire::cuda {

// Rows that an entry pools: 4 of the window before, which count by their overlap halves, and 4 of
// its own.
inline constexpr int kC4Window = 8;
inline constexpr int kC4Overlap = 4;

struct Folds {
  exact::Fold of[kChannels];
};

// First row of the window of the entry that closes at p: the first entry has no older window.
__device__ inline int first_window_row(std::int64_t p) {
  return p < kC4Window - 1 ? kC4Overlap : 0;
}

// A token's row is kv_overlap, kv, score_overlap, score, each of kDim channels. Where the thread's
// channels of window row i stand in it:
template <int kDim>
__device__ inline int value_channel(int i) {
  return (i < kC4Overlap ? 0 : kDim) + Place<kDim>::channel();
}
template <int kDim>
__device__ inline int score_channel(int i) {
  return 2 * kDim + value_channel<kDim>(i);
}

__device__ inline void fold_row(Folds& folds, bool is_first, const Four& score, const Four& bias,
                                const Four& value) {
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    const float s = exact::add(score.v[k], bias.v[k]);
    folds.of[k] =
        is_first ? exact::fold_first(s, value.v[k]) : exact::fold_next(folds.of[k], s, value.v[k]);
  }
}

// Folds window rows [begin, end) into `folds`; row `first` starts them. `load(i, value, score)` is
// called for all of them before anything is folded: the loads overlap.
template <class Load>
__device__ inline void fold_rows(Folds& folds, const Four (&bias)[kC4Window], int first, int begin,
                                 int end, const Load& load) {
  Four value[kC4Window];
  Four score[kC4Window];
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    if (i >= begin && i < end) load(i, value[i], score[i]);
  }
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    // Only these two can be first: the others need no check.
    const bool is_first = (i == 0 || i == kC4Overlap) && i == first;
    if (i >= begin && i < end) fold_row(folds, is_first, score[i], bias[i], value[i]);
  }
}

__device__ inline Four pooled(const Folds& folds) {
  Four entry;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) entry.v[k] = exact::fold_entry(folds.of[k]);
  return entry;
}

}  // namespace quire::cuda
