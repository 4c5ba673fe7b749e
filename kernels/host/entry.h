// From raw rows to the stored bytes of one entry, on the host: pooling, norm, RoPE, Hadamard,
// quantisation (SPEC 1.3, 3.1 to 3.7). Each step is one function over all channels of the entry;
// `append`, `compress_c4` and `store` are made of them. Channels are the inner loop, so that
// compilers vectorise across them: the order of operations inside a channel never changes.
// Internal, not installed. Callers hold a FloatEnvironment.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/kernels/params.h>

namespace quire::host {

inline constexpr std::int32_t kC4Rows = 8;  // rows that a CSA entry pools: 4 older, 4 of its own

// One row of a matrix, as it lies in memory.
struct SourceRow {
  const void* data = nullptr;
  ElementType type = ElementType::kFloat32;
};

// Row `index` of a matrix whose rows are `stride` elements apart.
SourceRow row_of(const void* data, ElementType type, std::int64_t stride, std::int64_t index);

// Elements [first, first + count) as fp32; bf16 is widened exactly, fp32 bits are kept.
void widen(SourceRow row, std::int64_t first, std::int64_t count, float* to);

// The running fold of every channel: (m, z, a) of SPEC 3.7.
struct ChannelFolds {
  alignas(64) float m[kHeadDim];
  alignas(64) float z[kHeadDim];
  alignas(64) float a[kHeadDim];
};

// `channels` is a multiple of 128, at most 512.
void fold_first_row(ChannelFolds& folds, std::int64_t channels, const float* score,
                    const float* bias, const float* value);
void fold_next_row(ChannelFolds& folds, std::int64_t channels, const float* score,
                   const float* bias, const float* value);
void fold_entries(const ChannelFolds& folds, std::int64_t channels, float* entry);

// One token's row of an HCA layer, `kv, score` of 512 channels each: starts the folds where the
// position begins a pooling window, continues them elsewhere (SPEC 2.1, 3.7). bias: [128, 512].
void fold_hca_row(ChannelFolds& folds, SourceRow row, const float* bias, std::int32_t position);

// One CSA entry of `d` channels from its eight token rows of width 4d (SPEC 1.1, 1.3). Rows 0..3
// without data are absent, as in the first window. biases[i]: [d].
void pool_c4(std::int64_t d, const SourceRow (&rows)[kC4Rows],
             const float* const (&biases)[kC4Rows], float* entry);

// The eight bias rows of d channels, in either order of SPEC 1.2.
void bias_rows(const float* bias, BiasOrder order, std::int64_t d,
               const float* (&biases)[kC4Rows]);

// Sum over the balanced tree of SPEC 3.7; `count` is a power of two. Overwrites the leaves.
float tree_sum(float* leaves, std::int64_t count);

// RMSNorm in place; `d` is a power of two, at most 512.
void normalise(float* entry, std::int64_t d, const float* weight, float eps);

// Rotates the last 64 of `d` channels in place by the table's row of `position`.
void rotate_tail(float* entry, std::int64_t d, const RopeTable& rope, std::int64_t position);

// In place, over all 128 channels.
void hadamard(float* entry);

// Rounds 512 channels to bf16, quantises and stores at the location, which must not be negative.
// Returns how many of its seven quantised tiles hold a NaN or an infinity.
std::int32_t store_main_entry(const float* entry, const EntryPool& pool, std::int64_t location,
                              float scale_floor);

// Quantises 128 channels from fp32 and stores them. Returns 1 where one is NaN or infinite, else 0.
std::int32_t store_indexer_entry(const float* entry, const EntryPool& pool, std::int64_t location,
                                 float scale_floor);

// Counts what the two above returned. `report` is nullable.
void report_nonfinite(DeviceReport* report, std::int32_t tiles, std::int32_t seat);

}  // namespace quire::host
