// Brings into L2 what the next layer's decode append loads in front of its wait: state of the same
// seats, and weights. A launch that starts early hides a latency of the L2 behind that of the plan
// record, but not one of the memory; so the append in front, which has the records, asks for it.
// Reads nothing and writes nothing: it may stand anywhere.
#pragma once

#include <cstdint>

#include <quire/kernels/params.h>
#include <quire/kernels/pool.cuh>
#include <quire/planner/plan_rule.h>

namespace quire::cuda {

inline constexpr int kLineBytes = 128;

// Line `line` of `floats` floats; null or behind them: nothing.
__device__ inline void prefetch_line(const float* from, std::int64_t floats, int line) {
  constexpr int kLineFloats = kLineBytes / static_cast<int>(sizeof(float));
  if (from == nullptr || line * kLineFloats >= floats) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(
      __cvta_generic_to_global(from + line * kLineFloats)));
}

// The rows before the closing one as runs of lines: values and scores of each, main, then indexer.
inline constexpr int kOlderRows = kC4Window - 1;
inline constexpr int kStateRuns = 2 * kOlderRows;

// By one warp.
__device__ inline void prefetch_state_run(const NextLayer& next, const TokenRecord& token,
                                          int run) {
  const bool main = run < kStateRuns;
  const float* state = main ? next.csa_state : next.indexer_state;
  const std::int64_t dim = main ? kHeadDim : kIndexerDim;
  const int i = run % kStateRuns / 2;
  if (state == nullptr || i < first_window_row(token.position) ||
      i >= window_len(kCsaRule, token.index)) {
    return;
  }
  const std::int32_t position = token.position - kOlderRows + i;
  const std::int64_t row =
      std::int64_t{token.seat} * next.csa_ring_tokens + position % next.csa_ring_tokens;
  const int quarter = 2 * (run % 2) + (i < kC4Overlap ? 0 : 1);
  prefetch_line(state + (4 * row + quarter) * dim, dim, static_cast<int>(threadIdx.x % kWarp));
}

// The fold and the bias row of an HCA layer.
__device__ inline void prefetch_fold(const NextLayer& next, const TokenRecord& token, int line) {
  const std::int32_t in_window = token.position % kHcaRule.ratio;
  prefetch_line(next.hca_bias + in_window * kHeadDim, kHeadDim, line);
  if (token.index > 0 || in_window == 0) return;
  const std::int64_t bank =
      std::int64_t{token.seat} * next.hca_banks + token.position % next.hca_banks;
  prefetch_line(next.hca_state + bank * kHcaBankFloats, kHcaBankFloats, line);
}

__device__ inline void prefetch_weights(const NextLayer& next, int line) {
  prefetch_line(next.window_norm, kHeadDim, line);
  prefetch_line(next.csa_norm, kHeadDim, line);
  prefetch_line(next.csa_bias, kC4Window * kHeadDim, line);
  prefetch_line(next.indexer_norm, kIndexerDim, line);
  prefetch_line(next.indexer_bias, kC4Window * kIndexerDim, line);
  prefetch_line(next.hca_norm, kHeadDim, line);
}

// All threads of the token's block call it, where the token lives.
__device__ inline void prefetch_next(const NextLayer& next, const TokenRecord& token) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (token.csa_location >= 0) {
    for (int run = thread / kWarp; run < 2 * kStateRuns; run += warps) {
      prefetch_state_run(next, token, run);
    }
  }
  if (next.hca_state != nullptr) prefetch_fold(next, token, thread);
  if (blockIdx.x + 1 == gridDim.x) prefetch_weights(next, thread);
}

}  // namespace quire::cuda
