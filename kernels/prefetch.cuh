// Brings into L2 what the next layer's decode append loads in front of its wait: state of the same
// seats, and weights. A launch that starts early hides a latency of the L2 behind that of the plan
// record, but not one of the memory; so the append in front, which has the records, asks for it.
// Reads nothing and writes nothing: it may stand anywhere.
#pragma once

#include <cstdint>

#include <quire/kernels/params.h>
#include <quire/planner/plan_rule.h>
#include <quire/kernels/pool.cuh>

namespace quire::cuda {

// Line `line` of `floats` floats; null or behind them: nothing. To be evicted last: an engine
// streams weights past it, as many as the L2 holds, before it is read (docs/PERFORMANCE.md).
__device__ inline void prefetch_line(const float* from, std::int64_t floats, int line) {
  constexpr int kLineFloats = kLineBytes / static_cast<int>(sizeof(float));
  if (from == nullptr || line * kLineFloats >= floats) return;
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(
      __cvta_generic_to_global(from + line * kLineFloats)));
}

// Values and scores of the rows before the closing one, as far as earlier steps wrote them.
template <std::int64_t kDim>
__device__ inline void prefetch_older_rows(const float* state, std::int32_t ring_tokens,
                                           const TokenRecord& token, int lane) {
  constexpr int kOlder = kC4Window - 1;
  constexpr int kQuarterLines =
      static_cast<int>(kDim) * static_cast<int>(sizeof(float)) / kLineBytes;
  if (state == nullptr) return;
  const int first = first_window_row(token.position);
  const int end = min_of(window_len(kCsaRule, token.index), kOlder);
  const std::int32_t oldest = (token.position + ring_tokens - kOlder) % ring_tokens;
  const float* ring = state + std::int64_t{token.seat} * ring_tokens * (4 * kDim);
#pragma unroll
  for (int n = 0; n < 2 * kOlder * kQuarterLines; n += kWarp) {
    const int run = (n + lane) / kQuarterLines;
    const int i = run / 2;
    if (i < first || i >= end) continue;
    const std::int32_t at = oldest + i < ring_tokens ? oldest + i : oldest + i - ring_tokens;
    const int quarter = 2 * (run % 2) + (i < kC4Overlap ? 0 : 1);
    prefetch_line(ring + (4 * at + quarter) * kDim, kDim, lane % kQuarterLines);
  }
}

// The fold and the bias row of an HCA layer.
__device__ inline void prefetch_fold(const NextLayer& next, const TokenRecord& token, int lane) {
  if (next.hca_state == nullptr) return;
  const std::int32_t in_window = token.position % kHcaRule.ratio;
  prefetch_line(next.hca_bias + in_window * kHeadDim, kHeadDim, lane);
  if (token.index > 0 || in_window == 0) return;
  const std::int64_t bank =
      std::int64_t{token.seat} * next.hca_banks + token.position % next.hca_banks;
  const float* fold = next.hca_state + bank * kHcaBankFloats;
  prefetch_line(fold, kHcaBankFloats, lane);
  prefetch_line(fold, kHcaBankFloats, lane + kWarp);
}

__device__ inline void prefetch_weights(const NextLayer& next, int lane) {
  prefetch_line(next.window_norm, kHeadDim, lane);
  prefetch_line(next.csa_norm, kHeadDim, lane);
  prefetch_line(next.indexer_norm, kIndexerDim, lane);
  prefetch_line(next.hca_norm, kHeadDim, lane);
  prefetch_line(next.indexer_bias, kC4Window * kIndexerDim, lane);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    prefetch_line(next.csa_bias, kC4Window * kHeadDim, n * kWarp + lane);
  }
}

// By one warp, for a token that lives.
__device__ inline void prefetch_next(const NextLayer& next, const TokenRecord& token) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if (blockIdx.x == 0) prefetch_weights(next, lane);
  prefetch_fold(next, token, lane);
  if (token.csa_location < 0) return;
  prefetch_older_rows<kHeadDim>(next.csa_state, next.csa_ring_tokens, token, lane);
  prefetch_older_rows<kIndexerDim>(next.indexer_state, next.csa_ring_tokens, token, lane);
}

}  // namespace quire::cuda
