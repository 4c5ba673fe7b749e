// The steps of kernels/host/entry.h. Loops that call fma run over a constant number of channels and
// are built for old and new x86 (QUIRE_HOST_FMA_CLONES); both give the same bits.
#include <quire/kernels/host/entry.h>

#include <cstring>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>

namespace quire::host {
namespace {

constexpr std::int64_t kBlock = 128;  // channels of one inner loop
constexpr std::int64_t kTiles = kNopeDim / kTileDim;

QUIRE_HOST_FMA_CLONES
void fold_block(float* __restrict m, float* __restrict z, float* __restrict a,
                const float* __restrict score, const float* __restrict bias,
                const float* __restrict value) {
  for (std::int64_t c = 0; c < kBlock; ++c) {
    const exact::Fold next =
        exact::fold_next({m[c], z[c], a[c]}, exact::add(score[c], bias[c]), value[c]);
    m[c] = next.m;
    z[c] = next.z;
    a[c] = next.a;
  }
}

QUIRE_HOST_FMA_CLONES
void rotate_pairs(float* __restrict pairs, const float* __restrict cos,
                  const float* __restrict sin) {
  for (std::int64_t i = 0; i < kRopeDim / 2; ++i) {
    const exact::Pair turned =
        exact::rotate({pairs[2 * i], pairs[2 * i + 1]}, cos[i], sin[i]);
    pairs[2 * i] = turned.x;
    pairs[2 * i + 1] = turned.y;
  }
}

// Largest magnitude, NaN ignored, not below the floor.
float largest(const float* x, std::int64_t count, float floor) {
  float amax = floor;
  for (std::int64_t c = 0; c < count; ++c) amax = exact::max_num(amax, exact::magnitude(x[c]));
  return amax;
}

bool all_finite(const float* x, std::int64_t count) {
  std::uint32_t most = 0;  // magnitudes of floats order as their bits do
  for (std::int64_t c = 0; c < count; ++c) {
    most = max_of(most, exact::bits(exact::magnitude(x[c])));
  }
  return most < exact::kInfBits;
}

}  // namespace

SourceRow row_of(const void* data, ElementType type, std::int64_t stride, std::int64_t index) {
  return {static_cast<const std::byte*>(data) + index * stride * bytes_of(type), type};
}

void widen(SourceRow row, std::int64_t first, std::int64_t count, float* to) {
  if (row.type == ElementType::kFloat32) {
    std::memcpy(to, static_cast<const float*>(row.data) + first,
                static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  const std::uint16_t* from = static_cast<const std::uint16_t*>(row.data) + first;
  for (std::int64_t c = 0; c < count; ++c) to[c] = exact::from_bf16(from[c]);
}

void fold_first_row(ChannelFolds& folds, std::int64_t channels, const float* score,
                    const float* bias, const float* value) {
  for (std::int64_t c = 0; c < channels; ++c) {
    const exact::Fold first = exact::fold_first(exact::add(score[c], bias[c]), value[c]);
    folds.m[c] = first.m;
    folds.z[c] = first.z;
    folds.a[c] = first.a;
  }
}

void fold_next_row(ChannelFolds& folds, std::int64_t channels, const float* score,
                   const float* bias, const float* value) {
  for (std::int64_t c = 0; c < channels; c += kBlock) {
    fold_block(folds.m + c, folds.z + c, folds.a + c, score + c, bias + c, value + c);
  }
}

void fold_entries(const ChannelFolds& folds, std::int64_t channels, float* entry) {
  for (std::int64_t c = 0; c < channels; ++c) {
    entry[c] = exact::fold_entry({folds.m[c], folds.z[c], folds.a[c]});
  }
}

void fold_hca_row(ChannelFolds& folds, SourceRow row, const float* bias, std::int32_t position) {
  float value[kHeadDim];
  float score[kHeadDim];
  widen(row, 0, kHeadDim, value);
  widen(row, kHeadDim, kHeadDim, score);
  const std::int32_t place = position % kHcaRule.ratio;
  (place == 0 ? fold_first_row : fold_next_row)(folds, kHeadDim, score, bias + place * kHeadDim,
                                                value);
}

void pool_c4(std::int64_t d, const SourceRow (&rows)[kC4Rows],
             const float* const (&biases)[kC4Rows], float* entry) {
  ChannelFolds folds;
  float value[kHeadDim];
  float score[kHeadDim];
  bool first = true;
  for (std::int32_t i = 0; i < kC4Rows; ++i) {
    if (rows[i].data == nullptr) continue;
    // A row is kv_overlap, kv, score_overlap, score; older tokens count by their overlap halves.
    const std::int64_t half = i < kC4Rows / 2 ? 0 : d;
    widen(rows[i], half, d, value);
    widen(rows[i], 2 * d + half, d, score);
    (first ? fold_first_row : fold_next_row)(folds, d, score, biases[i], value);
    first = false;
  }
  fold_entries(folds, d, entry);
}

void bias_rows(const float* bias, BiasOrder order, std::int64_t d,
               const float* (&biases)[kC4Rows]) {
  for (std::int32_t i = 0; i < kC4Rows; ++i) {
    const std::int32_t overlap_first = i < 4 ? 2 * i : 2 * (i - 4) + 1;
    biases[i] = bias + (order == BiasOrder::kKernel ? i : overlap_first) * d;
  }
}

float tree_sum(float* leaves, std::int64_t count) {
  for (std::int64_t half = count / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) {
      leaves[i] = exact::add(leaves[2 * i], leaves[2 * i + 1]);
    }
  }
  return leaves[0];
}

void normalise(float* entry, std::int64_t d, const float* weight, float eps) {
  float squares[kHeadDim];
  for (std::int64_t c = 0; c < d; ++c) squares[c] = exact::mul(entry[c], entry[c]);
  const float inverse_dim = exact::div(1.0f, static_cast<float>(d));
  const float scale = exact::rms_scale(tree_sum(squares, d), inverse_dim, eps);
  for (std::int64_t c = 0; c < d; ++c) {
    entry[c] = exact::mul(exact::mul(entry[c], scale), weight[c]);
  }
}

void rotate_tail(float* entry, std::int64_t d, const RopeTable& rope, std::int64_t position) {
  const float* values = rope.values + position * kRopeDim;
  float cos[kRopeDim / 2];
  float sin[kRopeDim / 2];
  for (std::int64_t i = 0; i < kRopeDim / 2; ++i) {
    const bool interleaved = rope.layout == RopeLayout::kInterleaved;
    cos[i] = values[interleaved ? 2 * i : i];
    sin[i] = values[interleaved ? 2 * i + 1 : kRopeDim / 2 + i];
  }
  rotate_pairs(entry + d - kRopeDim, cos, sin);
}

void hadamard(float* entry) {
  for (std::int64_t bit = 1; bit < kIndexerDim; bit *= 2) {
    for (std::int64_t i = 0; i < kIndexerDim; ++i) {
      if ((i & bit) != 0) continue;
      const float a = entry[i];
      const float b = entry[i + bit];
      entry[i] = exact::add(a, b);
      entry[i + bit] = exact::sub(a, b);
    }
  }
  for (std::int64_t i = 0; i < kIndexerDim; ++i) {
    entry[i] = exact::mul(entry[i], exact::kHadamardScale);
  }
}

std::int32_t store_main_entry(const float* entry, const EntryPool& pool, std::int64_t location,
                              float scale_floor) {
  std::uint16_t halves[kHeadDim];
  float rounded[kHeadDim];
  for (std::int64_t c = 0; c < kHeadDim; ++c) {
    halves[c] = exact::to_bf16(entry[c]);
    rounded[c] = exact::from_bf16(halves[c]);
  }
  std::uint8_t data[kMainDataBytes];
  std::uint8_t scales[kMainScaleBytes] = {};  // the eighth stays 0
  std::int32_t nonfinite = 0;
  for (std::int64_t tile = 0; tile < kTiles; ++tile) {
    const float* x = rounded + tile * kTileDim;
    nonfinite += all_finite(x, kTileDim) ? 0 : 1;
    scales[tile] = exact::scale_byte(largest(x, kTileDim, scale_floor));
    for (std::int64_t c = 0; c < kTileDim; ++c) {
      data[tile * kTileDim + c] = exact::quantise_main(x[c], scales[tile]);
    }
  }
  std::memcpy(data + kNopeDim, halves + kNopeDim, 2 * kRopeDim);
  std::memcpy(pool.main_data(location), data, sizeof data);
  std::memcpy(pool.main_scales(location), scales, sizeof scales);
  return nonfinite;
}

std::int32_t store_indexer_entry(const float* entry, const EntryPool& pool, std::int64_t location,
                                 float scale_floor) {
  const float scale = exact::indexer_scale(largest(entry, kIndexerDim, scale_floor));
  const float inverse = exact::div(1.0f, scale);
  std::uint8_t values[kIndexerDim];
  for (std::int64_t c = 0; c < kIndexerDim; ++c) {
    values[c] = exact::quantise_indexer(entry[c], scale, inverse);
  }
  std::memcpy(pool.indexer_values(location), values, sizeof values);
  std::memcpy(pool.indexer_scale(location), &scale, sizeof scale);
  return all_finite(entry, kIndexerDim) ? 0 : 1;
}

void report_nonfinite(DeviceReport* report, std::int32_t tiles, std::int32_t seat) {
  if (tiles == 0 || report == nullptr) return;
  report->nonfinite_tiles += tiles;
  report->first_failing_seat = min_of(report->first_failing_seat, seat);
}

}  // namespace quire::host
