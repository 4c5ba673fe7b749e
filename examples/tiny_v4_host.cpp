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

#include "examples/tiny_v4_drafts.h"

namespace quire::serving {
namespace {

// Loops over so many columns or channels at once. Long enough that the compiler vectorises them
// instead of unrolling them away.
constexpr std::int64_t kPanel = 64;

// As a tree: halves are added until one is left.
[[gnu::always_inline]] inline float sum_of(float (&sums)[kPanel]) {
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

// a += fa[i] x rows[i] and b += fb[i] x rows[i], i ascending, four rows at a time: each row is
// loaded once for both, each sum once for all four. Plain arrays and scalars, or it does not
// vectorise.
[[gnu::always_inline]] inline void add_rows(float (&a)[kPanel], float (&b)[kPanel], const float* fa,
                                            const float* fb, const float* const (&rows)[4]) {
  const float a0 = fa[0], a1 = fa[1], a2 = fa[2], a3 = fa[3];
  const float b0 = fb[0], b1 = fb[1], b2 = fb[2], b3 = fb[3];
  const float *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
  for (std::int64_t j = 0; j < kPanel; ++j) {
    a[j] = (((a[j] + a0 * r0[j]) + a1 * r1[j]) + a2 * r2[j]) + a3 * r3[j];
    b[j] = (((b[j] + b0 * r0[j]) + b1 * r1[j]) + b2 * r2[j]) + b3 * r3[j];
  }
}

float inverse_rms(const float* row, std::int64_t width, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(row, width) / static_cast<float>(width) + eps);
}

// Two rows of kPanel columns; a lone last row is computed twice.
[[gnu::always_inline]] inline void multiply_panel(const Gemm& gemm, std::int64_t row,
                                                  std::int64_t column) {
  const std::int64_t width = gemm.width;
  const std::int64_t rows[2] = {row, std::min(row + 1, gemm.rows - 1)};
  const float* in[2] = {gemm.in + rows[0] * gemm.in_stride, gemm.in + rows[1] * gemm.in_stride};
  float sums[2][kPanel] = {};
  for (std::int64_t k = 0; k < gemm.depth; k += 4) {
    const float* weights = gemm.weights + k * width + column;
    add_rows(sums[0], sums[1], in[0] + k, in[1] + k,
             {weights, weights + width, weights + 2 * width, weights + 3 * width});
  }
  for (std::int64_t r = 0; r <= rows[1] - rows[0]; ++r) {
    float* out = gemm.out + rows[r] * gemm.out_stride + column;
    for (std::int64_t j = 0; j < kPanel; ++j) {
      out[j] = sums[r][j] + (gemm.accumulate ? out[j] : 0.0f);
    }
  }
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
  const float* weights =
      step.arrays.projected + t * step.config.projected_stride() + step.config.head_weights_at();
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
    const std::int32_t* cells = step.views.page_table + batch_row * step.views.page_table_stride;
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

// kPanel channels of two heads, from channel c on.
[[gnu::always_inline]] inline void sum_panel(const float* wa, const float* wb,
                                             const float* const* rows, std::int64_t count,
                                             std::int64_t c, float* out_a, float* out_b) {
  float sums[2][kPanel] = {};
  for (std::int64_t i = 0; i < count; i += 4) {
    const float* const four[4] = {rows[i] + c, rows[i + 1] + c, rows[i + 2] + c, rows[i + 3] + c};
    add_rows(sums[0], sums[1], wa + i, wb + i, four);
  }
  for (std::int64_t j = 0; j < kPanel; ++j) {
    out_a[c + j] = sums[0][j];
    out_b[c + j] = sums[1][j];
  }
}

// out[h] = sum of weights[h][i] x rows[i] in the order of i, heads in pairs; a lone last head is
// computed twice. `count` is a multiple of four.
QUIRE_HOST_FMA_CLONES void sum_values(std::int32_t heads, const float* weights,
                                      const float* const* rows, std::int64_t count, float* out) {
  for (std::int32_t h = 0; h < heads; h += 2) {
    const std::int64_t other = std::min(h + 1, heads - 1);
    for (std::int64_t c = 0; c < kHeadDim; c += kPanel) {
      sum_panel(weights + h * count, weights + other * count, rows, count, c, out + h * kHeadDim,
                out + other * kHeadDim);
    }
  }
}

// One softmax over all entries and the sink, which has no value. `weights` [count]: what each entry
// counts, not yet divided by the sum, which is returned.
QUIRE_HOST_FMA_CLONES float softmax_weights(const float* q, float sink, const float* const* rows,
                                            std::size_t count, float* weights) {
  float most = sink;
  for (std::size_t i = 0; i < count; ++i) {
    weights[i] = dot_of<kHeadDim>(q, rows[i]) * kAttentionScale;
    most = std::max(most, weights[i]);
  }
  float sum = exact::exp0(sink - most);
  for (std::size_t i = 0; i < count; ++i) {
    weights[i] = exact::exp0(weights[i] - most);
    sum += weights[i];
  }
  return sum;
}

void attend(const TinyV4Step& step) {
  EntryTile tile;
  std::vector<const float*> rows;
  std::vector<float> weights;
  const std::int64_t width = step.config.attended_width();
  std::fill_n(step.arrays.attended, step.padded_tokens() * width, 0.0f);
  for (std::int64_t t = 0; t < step.shape.tokens; ++t) {
    const Attended list = attended_by(step, t);
    if (list.window == 0) continue;
    tile.load(step, t, list, rows);
    const std::size_t entries = rows.size();
    const std::size_t count = round_up<std::size_t>(entries, 4);
    rows.resize(count, rows.front());
    weights.assign(count * static_cast<std::size_t>(step.config.heads), 0.0f);
    float sums[kHeadsMax];
    for (std::int32_t h = 0; h < step.config.heads; ++h) {
      const float* q = step.arrays.queries + t * step.config.query_stride() + h * kHeadDim;
      sums[h] = softmax_weights(q, step.layer.sinks[h], rows.data(), entries,
                                weights.data() + static_cast<std::size_t>(h) * count);
    }
    float* out = step.arrays.attended + t * width;
    sum_values(step.config.heads, weights.data(), rows.data(), static_cast<std::int64_t>(count),
               out);
    for (std::int32_t h = 0; h < step.config.heads; ++h, out += kHeadDim) {
      for (std::int64_t c = 0; c < kHeadDim; ++c) out[c] /= sums[h];
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
    place_sample(step, t, static_cast<std::int32_t>(best - logits));
  }
}

void draft_input(const TinyV4Step& step) {
  const std::int64_t hidden = step.config.hidden;
  for (std::int64_t t = 0; t < step.padded_tokens(); ++t) {
    const std::int32_t token = token_behind(step, t);
    float* input = step.arrays.drafts.input + t * 2 * hidden;
    if (token < 0) {
      std::fill_n(input, 2 * hidden, 0.0f);
      continue;
    }
    std::copy_n(step.arrays.x + hidden_row(step, t) * hidden, hidden, input);
    std::copy_n(step.embedding + token * hidden, hidden, input + hidden);
  }
}

}  // namespace

QUIRE_HOST_FMA_CLONES void multiply_host(const Gemm& gemm) {
  for (std::int64_t column = 0; column < gemm.width; column += kPanel) {
    for (std::int64_t row = 0; row < gemm.rows; row += 2) multiply_panel(gemm, row, column);
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
    case TinyV4Op::kRowTokens:
      for (std::int32_t r = 0; r < step.shape.rows; ++r) {
        step.arrays.drafts.row_tokens[r] = tokens_to_try(step, r);
      }
      return;
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
    case TinyV4Op::kAccept:
      for (std::int32_t r = 0; r < step.shape.rows; ++r) accept_row(step, r);
      return;
    case TinyV4Op::kDraftInput:
      return draft_input(step);
  }
}

}  // namespace quire::serving
