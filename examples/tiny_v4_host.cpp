// The operations of tiny_v4 in plain C++. Every sum has a fixed shape, so a row's bits depend on
// that row alone; channels or columns are the inner loops, so that they vectorise. Nothing here is
// exact arithmetic shared with the device: its sums have other shapes.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>

#include "examples/tiny_v4_math.h"

namespace quire::serving {
namespace {

// Loops over so many columns or channels at once. Long enough that the compiler vectorises them
// instead of unrolling them away.
constexpr std::int64_t kPanel = 64;

// As a tree: halves are added until one is left.
float sum_of(float (&sums)[kPanel]) {
  for (std::int64_t half = kPanel / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// Every 64th product is summed in order, then the 64 sums as a tree.
template <std::int64_t kCount>
[[gnu::always_inline]] inline float dot_of(const float* a, const float* b) {
  float sums[kPanel];
  for (std::int64_t j = 0; j < kPanel; ++j) {
    float sum = 0.0f;
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kCount; i += kPanel) sum += a[i + j] * b[i + j];
    sums[j] = sum;
  }
  return sum_of(sums);
}
QUIRE_HOST_FMA_CLONES float dot_main(const float* a, const float* b) {
  return dot_of<kHeadDim>(a, b);
}
QUIRE_HOST_FMA_CLONES float dot_indexer(const float* a, const float* b) {
  return dot_of<kIndexerDim>(a, b);
}

// `width` is a multiple of 64.
QUIRE_HOST_FMA_CLONES float sum_of_squares(const float* row, std::int64_t width) {
  float sums[kPanel] = {};
  for (std::int64_t i = 0; i < width; i += kPanel) {
    for (std::int64_t j = 0; j < kPanel; ++j) sums[j] += row[i + j] * row[i + j];
  }
  return sum_of(sums);
}

// sums += factor x row, four rows at a time: in the order of the rows, each sum loaded and stored
// once for all four.
[[gnu::always_inline]] inline void add_rows(float (&sums)[kPanel], const float (&factors)[4],
                                            const float* const (&rows)[4]) {
  for (std::int64_t j = 0; j < kPanel; ++j) {
    float sum = sums[j];
    sum += factors[0] * rows[0][j];
    sum += factors[1] * rows[1][j];
    sum += factors[2] * rows[2][j];
    sum += factors[3] * rows[3][j];
    sums[j] = sum;
  }
}

float inverse_rms(const float* row, std::int64_t width, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(row, width) / static_cast<float>(width) + eps);
}

// e4m3 codes as numbers.
std::array<float, 256> make_codes() {
  std::array<float, 256> codes;
  for (int code = 0; code < 256; ++code) {
    codes[static_cast<std::size_t>(code)] = exact::from_e4m3(static_cast<std::uint8_t>(code));
  }
  return codes;
}

void dequantise(const std::array<float, 256>& codes, const StoredEntry& entry, float* to) {
  for (std::int64_t tile = 0; tile < kNopeDim / kTileDim; ++tile) {
    const float scale = tile_scale(entry.scales[tile]);
    for (std::int64_t c = tile * kTileDim; c < (tile + 1) * kTileDim; ++c) {
      to[c] = codes[static_cast<std::size_t>(entry.data[c])] * scale;
    }
  }
  std::uint16_t tail[kRopeDim];
  std::memcpy(tail, entry.data + kNopeDim, sizeof tail);
  for (std::int64_t c = 0; c < kRopeDim; ++c) to[kNopeDim + c] = exact::from_bf16(tail[c]);
}

void embed(const TinyV4Step& step) {
  const std::int64_t hidden = step.config.hidden;
  for (std::int64_t t = 0; t < step.padded_tokens(); ++t) {
    const std::int32_t token = token_of_row(step, t);
    float* x = step.arrays.x + t * hidden;
    if (token < 0) {
      std::fill_n(x, hidden, 0.0f);
    } else {
      std::copy_n(step.embedding + token * hidden, hidden, x);
    }
  }
}

// Rotates the last 64 of `width` channels by the table's row, or back.
void rotate(const float* table, float* row, std::int64_t width, float direction) {
  float* tail = row + width - kRopeDim;
  for (std::int64_t i = 0; i < kRopeDim; i += 2) {
    const float cos = table[i];
    const float sin = direction * table[i + 1];
    const float x = tail[i];
    const float y = tail[i + 1];
    tail[i] = x * cos - y * sin;
    tail[i + 1] = x * sin + y * cos;
  }
}

void queries(const TinyV4Step& step) {
  for (std::int64_t t = 0; t < step.shape.tokens; ++t) {
    const float* table = step.rope + step.views.positions[t] * kRopeDim;
    float* row = step.arrays.queries + t * step.config.query_stride();
    for (std::int32_t h = 0; h < step.config.heads; ++h) {
      float* q = row + h * kHeadDim;
      const float scale = inverse_rms(q, kHeadDim, step.norm_eps) * kQueryGain;
      for (std::int64_t c = 0; c < kHeadDim; ++c) q[c] *= scale;
      rotate(table, q, kHeadDim, 1.0f);
    }
    if (step.layer.kind != LayerKind::kCsa) continue;
    for (std::int32_t h = 0; h < step.config.indexer_heads; ++h) {
      float* q = row + step.config.attended_width() + h * kIndexerDim;
      rotate(table, q, kIndexerDim, 1.0f);
      if (step.hadamard) host::hadamard(q);
    }
  }
}

// Score of one entry for one token: sum over heads of weight x relu(q . k).
float index_score(const TinyV4Step& step, std::int64_t t, const float* key) {
  const float* q =
      step.arrays.queries + t * step.config.query_stride() + step.config.attended_width();
  const float* weights = step.arrays.projected + t * step.config.projected_stride() +
                         step.config.head_weights_at();
  float score = 0.0f;
  for (std::int32_t h = 0; h < step.config.indexer_heads; ++h) {
    const float product = dot_indexer(q + h * kIndexerDim, key);
    score += weights[h] * (product > 0.0f ? product : 0.0f);
  }
  return score;
}

void select(const TinyV4Step& step) {
  const std::array<float, 256> codes = make_codes();
  const std::int32_t topk = step.config.index_topk;
  std::vector<float> keys;  // of one batch row, dequantised once for all its tokens
  std::vector<std::uint64_t> ranks;
  std::int32_t keys_of = -1;
  for (std::int64_t t = 0; t < step.shape.tokens; ++t) {
    const std::int32_t batch_row = step.views.token_batch_row[t];
    if (batch_row < 0) continue;
    std::int32_t* picks = step.arrays.picks + t * topk;
    std::fill_n(picks, topk, -1);
    const std::int32_t entries = step.views.token_csa_length[t];
    if (entries <= topk) {
      for (std::int32_t e = 0; e < entries; ++e) picks[e] = e;
      continue;
    }
    const std::int32_t* cells =
        step.views.page_table + batch_row * step.views.page_table_stride;
    if (keys_of != batch_row) keys.clear();
    keys_of = batch_row;
    for (auto e = static_cast<std::int32_t>(keys.size() / kIndexerDim); e < entries; ++e) {
      const std::int64_t at = entry_location(cells, step.keys.entries_per_page, e);
      float scale;
      std::memcpy(&scale, step.keys.indexer_scale(at), sizeof scale);
      const std::byte* values = step.keys.indexer_values(at);
      for (std::int64_t c = 0; c < kIndexerDim; ++c) {
        keys.push_back(codes[static_cast<std::size_t>(values[c])] * scale);
      }
    }
    ranks.clear();
    for (std::int32_t e = 0; e < entries; ++e) {
      ranks.push_back(rank_key(index_score(step, t, keys.data() + e * kIndexerDim), e));
    }
    std::nth_element(ranks.begin(), ranks.begin() + topk, ranks.end(), std::greater<>());
    for (std::int32_t k = 0; k < topk; ++k) {
      picks[k] = entry_of_key(ranks[static_cast<std::size_t>(k)]);
    }
    std::sort(picks, picks + topk);
  }
}

// Dequantised entries of the token at hand. Window entries of a batch row are kept by position:
// the next token of the row shares all but one of them.
class EntryTile {
 public:
  EntryTile() : codes_(make_codes()), window_(128 * kHeadDim) { held_.fill(-1); }

  // Points `rows` at the entries of the list.
  void load(const TinyV4Step& step, std::int64_t t, const Attended& list,
            std::vector<const float*>& rows) {
    if (batch_row_ != step.views.token_batch_row[t]) held_.fill(-1);
    batch_row_ = step.views.token_batch_row[t];
    rows.clear();
    for (std::int32_t i = 0; i < list.window; ++i) {
      const std::int32_t p = list.first_position + i;
      const auto place = static_cast<std::size_t>(p % 128);
      float* entry = window_.data() + place * kHeadDim;
      if (held_[place] != p) dequantise(codes_, entry_of(step, list, i), entry);
      held_[place] = p;
      rows.push_back(entry);
    }
    compressed_.resize(static_cast<std::size_t>(list.compressed * kHeadDim));
    for (std::int32_t k = 0; k < list.compressed; ++k) {
      float* entry = compressed_.data() + k * kHeadDim;
      dequantise(codes_, entry_of(step, list, list.window + k), entry);
      rows.push_back(entry);
    }
  }

 private:
  std::array<float, 256> codes_;
  std::vector<float> window_;
  std::vector<float> compressed_;
  std::array<std::int32_t, 128> held_;
  std::int32_t batch_row_ = -1;
};

// out = sum of weights[i] x rows[i], over `count` rows in order.
QUIRE_HOST_FMA_CLONES void weighted_sum(const float* weights, const float* const* rows,
                                        std::size_t count, float* out) {
  for (std::int64_t c = 0; c < kHeadDim; c += kPanel) {
    float sums[kPanel] = {};
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4) {
      add_rows(sums, {weights[i], weights[i + 1], weights[i + 2], weights[i + 3]},
               {rows[i] + c, rows[i + 1] + c, rows[i + 2] + c, rows[i + 3] + c});
    }
    for (; i < count; ++i) {
      const float weight = weights[i];
      const float* row = rows[i] + c;
      for (std::int64_t j = 0; j < kPanel; ++j) sums[j] += weight * row[j];
    }
    std::copy_n(sums, kPanel, out + c);
  }
}

// One softmax over all entries and the sink, which has no value.
void attend_head(const float* q, float sink, const std::vector<const float*>& rows,
                 std::vector<float>& scores, float* out) {
  scores.resize(rows.size());
  float most = sink;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    scores[i] = dot_main(q, rows[i]) * kAttentionScale;
    most = std::max(most, scores[i]);
  }
  float sum = exact::exp0(sink - most);
  for (float& score : scores) {
    score = exact::exp0(score - most);
    sum += score;
  }
  weighted_sum(scores.data(), rows.data(), rows.size(), out);
  for (std::int64_t c = 0; c < kHeadDim; ++c) out[c] /= sum;
}

void attend(const TinyV4Step& step) {
  EntryTile tile;
  std::vector<const float*> rows;
  std::vector<float> scores;
  const std::int64_t width = step.config.attended_width();
  std::fill_n(step.arrays.attended, step.padded_tokens() * width, 0.0f);
  for (std::int64_t t = 0; t < step.shape.tokens; ++t) {
    const Attended list = attended_by(step, t);
    if (list.window == 0) continue;
    tile.load(step, t, list, rows);
    for (std::int32_t h = 0; h < step.config.heads; ++h) {
      float* out = step.arrays.attended + t * width + h * kHeadDim;
      attend_head(step.arrays.queries + t * step.config.query_stride() + h * kHeadDim,
                  step.layer.sinks[h], rows, scores, out);
      rotate(step.rope + step.views.positions[t] * kRopeDim, out, kHeadDim, -1.0f);
    }
  }
}

void sample(const TinyV4Step& step) {
  const std::int32_t vocabulary = step.config.vocabulary;
  for (std::int64_t t = 0; t < step.shape.tokens; ++t) {
    if (step.views.token_batch_row[t] < 0) continue;
    const float* logits = step.arrays.logits + t * vocabulary;
    const float* best = std::max_element(logits, logits + vocabulary);  // the first of several
    place_token(step, t, static_cast<std::int32_t>(best - logits));
  }
}

}  // namespace

QUIRE_HOST_FMA_CLONES void multiply_host(const Gemm& gemm) {
  const std::int64_t width = gemm.width;
  for (std::int64_t column = 0; column < width; column += kPanel) {
    for (std::int64_t row = 0; row < gemm.rows; ++row) {
      const float* in = gemm.in + row * gemm.in_stride;
      float sums[kPanel] = {};
      for (std::int64_t k = 0; k < gemm.depth; k += 4) {
        const float* weights = gemm.weights + k * width + column;
        add_rows(sums, {in[k], in[k + 1], in[k + 2], in[k + 3]},
                 {weights, weights + width, weights + 2 * width, weights + 3 * width});
      }
      float* out = gemm.out + row * gemm.out_stride + column;
      for (std::int64_t j = 0; j < kPanel; ++j) out[j] = sums[j] + (gemm.accumulate ? out[j] : 0);
    }
  }
}

void normalise_rows_host(const NormRows& norm) {
  const host::FloatEnvironment environment;
  for (std::int64_t t = 0; t < norm.rows; ++t) {
    const float* in = norm.in + t * norm.in_stride;
    float* out = norm.out + t * norm.out_stride;
    const float scale = inverse_rms(in, norm.width, norm.eps);
    for (std::int64_t c = 0; c < norm.width; ++c) out[c] = in[c] * scale * norm.weight[c];
  }
}

void run_host(TinyV4Op op, const TinyV4Step& step) {
  const host::FloatEnvironment environment;
  switch (op) {
    case TinyV4Op::kEmbed:
      return embed(step);
    case TinyV4Op::kQueries:
      return queries(step);
    case TinyV4Op::kSelect:
      return select(step);
    case TinyV4Op::kAttend:
      return attend(step);
    case TinyV4Op::kSample:
      return sample(step);
  }
}

}  // namespace quire::serving
