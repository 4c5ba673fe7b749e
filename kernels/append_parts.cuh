// What the appends of decode and of ragged steps share: one compressed entry, one state row, one
// window entry, with any number of channels a thread (kernels/entry.cuh).
#pragma once

#include <cstdint>

#include <quire/kernels/params.h>
#include <quire/planner/plan_rule.h>
#include <quire/kernels/pool.cuh>

namespace quire::cuda {

__host__ __device__ inline bool has(const InputRows& rows) { return rows.data != nullptr; }

template <class P>
__device__ const CsaPart& csa_part(const AppendParams& params) {
  return P::kDim == kHeadDim ? params.csa : params.indexer;
}

// The thread's channels of the bias of window row i.
template <class P>
__device__ typename P::Values load_c4_bias(const CsaPart& part, int i) {
  const int checkpoint_row = i < kC4Overlap ? 2 * i : 2 * (i - kC4Overlap) + 1;
  const int row = part.bias_order == BiasOrder::kKernel ? i : checkpoint_row;
  return load_constant<P::kPerThread>(part.bias + row * P::kDim + P::channel());
}

template <class P>
__device__ float* state_row(const CsaPart& part, std::int64_t seat, std::int32_t position) {
  return part.state + (seat * part.ring_tokens + position % part.ring_tokens) * (4 * P::kDim);
}

template <class P>
__device__ typename P::Values pooled_entry(const Folds<P::kPerThread>& folds) {
  if constexpr (P::kPerThread < 4) {
    return pooled(folds);
  } else {
    return pooled_together(folds);
  }
}

// Pooled channels to a stored main entry, CSA or HCA. All threads of the entry call it.
template <class P>
__device__ void finish_main(const AppendParams& params, const EntryPool& pages,
                            const Finish<P>& finish, const Folds<P::kPerThread>& folds,
                            std::int64_t location, std::int32_t seat, Scratch<P>& scratch) {
  auto x = normalise<P>(pooled_entry<P>(folds), finish.weight, params.norm_eps, scratch);
  if (is_rotated<P>()) x = rotate(x, finish.rotation);
  store_main_entry<P>(main_entry(pages, location), x, params.scale_floor, seat, params.report);
}

// Pooled channels to a stored entry of one of a CSA layer's compressors. All threads of the entry
// call it.
template <class P>
__device__ void finish_csa(const AppendParams& params, const CsaPart& part, const Finish<P>& finish,
                           const Folds<P::kPerThread>& folds, std::int64_t location,
                           std::int32_t seat, Scratch<P>& scratch) {
  if constexpr (P::kDim == kHeadDim) {
    finish_main<P>(params, part.pages, finish, folds, location, seat, scratch);
  } else {
    auto x = normalise<P>(pooled_entry<P>(folds), finish.weight, params.norm_eps, scratch);
    if (is_rotated<P>()) x = rotate(x, finish.rotation);
    if (params.hadamard) x = hadamard<P>(x, scratch);
    store_indexer_entry<P>(indexer_entry(part.pages, location), x, params.scale_floor, seat,
                           params.report, scratch);
  }
}

template <class P>
__device__ Finish<P> load_csa_finish(const AppendParams& params, const CsaPart& part,
                                     std::int32_t p) {
  return load_finish<P>(part.norm_weight, params.rope, p - (kCsaRule.ratio - 1));
}

// The raw row of a token: kv_overlap, kv, score_overlap, score of the thread's channels.
template <class P>
struct RawRow {
  typename P::Values quarter[4];
};

template <class P>
__device__ RawRow<P> load_raw_row(const CsaPart& part, std::int64_t input_row) {
  RawRow<P> row;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    row.quarter[q] = load_input<P::kPerThread>(part.rows, input_row, q * P::kDim + P::channel());
  }
  return row;
}

// To a state row. Copied as bits; bf16 was widened.
template <class P>
__device__ void store_state(float* to, const RawRow<P>& row) {
#pragma unroll
  for (int q = 0; q < 4; ++q) store_channels(to + q * P::kDim + P::channel(), row.quarter[q]);
}

// All threads of the entry call it.
template <class P>
__device__ void finish_window(const AppendParams& params, const Finish<P>& finish,
                              typename P::Values x, const MainEntry& entry, std::int32_t seat,
                              Scratch<P>& scratch) {
  if (params.window.norm_weight != nullptr) {
    x = normalise<P>(x, finish.weight, params.norm_eps, scratch);
  }
  if (is_rotated<P>()) x = rotate(x, finish.rotation);
  store_main_entry<P>(entry, x, params.scale_floor, seat, params.report);
}

template <class P>
__device__ Finish<P> load_hca_finish(const AppendParams& params, std::int32_t p) {
  return load_finish<P>(params.hca.norm_weight, params.rope, p - (kHcaRule.ratio - 1));
}

// By one warp, behind the wait. Whoever forgot to plan finds it in the report.
__device__ inline void report_unplanned(const AppendParams& params) {
  if (blockIdx.x == 0 && threadIdx.x % kWarp == 0 && params.report != nullptr) {
    atomicAdd(&params.report->appends_unplanned, 1);
  }
}

}  // namespace quire::cuda
