// tiny_v4 on CUDA: simple kernels in which one block or warp works on one input row, in an order of
// reduction that depends on nothing but that row. All launched plainly; all may be captured.
#include <cuda_runtime_api.h>

#include <quire/runtime/base/errors.h>

#include "examples/tiny_v4_drafts.h"

namespace quire::serving {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMainPairs = kHeadDim / (2 * kWarp);        // pairs of channels that a lane holds: 8
constexpr int kIndexerPairs = kIndexerDim / (2 * kWarp);  // 2
constexpr unsigned kAll = 0xFFFFFFFFu;

// Every lane gets the same sum: a butterfly adds the same pairs on both sides.
__device__ inline float warp_sum(float x) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    x = exact::add(x, __shfl_xor_sync(kAll, x, lane));
  }
  return x;
}

__device__ inline float warp_max(float x) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    const float other = __shfl_xor_sync(kAll, x, lane);
    x = other > x ? other : x;
  }
  return x;
}

__global__ void embed_kernel(const __grid_constant__ TinyV4Step step) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t hidden = step.config.hidden;
  const std::int32_t token = token_of_row(step, t);
  for (std::int64_t c = threadIdx.x; c < hidden; c += blockDim.x) {
    step.arrays.x[t * hidden + c] = token < 0 ? 0.0f : step.embedding[token * hidden + c];
  }
}

// One warp per row.
__global__ void normalise_kernel(const __grid_constant__ NormRows norm) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  if (t >= norm.rows) return;
  const float* in = norm.in + t * norm.in_stride;
  float sum = 0.0f;
  for (int c = lane; c < norm.width; c += kWarp) sum = exact::fma(in[c], in[c], sum);
  const float scale =
      exact::rms_scale(warp_sum(sum), 1.0f / static_cast<float>(norm.width), norm.eps);
  float* out = norm.out + t * norm.out_stride;
  for (int c = lane; c < norm.width; c += kWarp) {
    out[c] = exact::mul(exact::mul(in[c], scale), norm.weight[c]);
  }
}

// A warp holds a head: lane l has channels 64 i + 2 l and the next, so that its last pair is pair l
// of the rotated tail.
template <int kPairs>
__device__ inline void load_head(exact::Pair (&head)[kPairs], const float* from, int lane) {
  for (int i = 0; i < kPairs; ++i) {
    head[i] = {from[2 * kWarp * i + 2 * lane], from[2 * kWarp * i + 2 * lane + 1]};
  }
}
template <int kPairs>
__device__ inline void store_head(const exact::Pair (&head)[kPairs], float* to, int lane) {
  for (int i = 0; i < kPairs; ++i) {
    to[2 * kWarp * i + 2 * lane] = head[i].x;
    to[2 * kWarp * i + 2 * lane + 1] = head[i].y;
  }
}

// Butterflies over the bits of the channel: within the pair, across lanes, across pairs.
__device__ inline void hadamard_head(exact::Pair (&head)[kIndexerPairs], int lane) {
  for (exact::Pair& pair : head) {
    pair = {exact::add(pair.x, pair.y), exact::sub(pair.x, pair.y)};
    for (int bit = 1; bit < kWarp; bit *= 2) {
      const exact::Pair other{__shfl_xor_sync(kAll, pair.x, bit),
                              __shfl_xor_sync(kAll, pair.y, bit)};
      const bool upper = (lane & bit) != 0;
      pair.x = upper ? exact::sub(other.x, pair.x) : exact::add(pair.x, other.x);
      pair.y = upper ? exact::sub(other.y, pair.y) : exact::add(pair.y, other.y);
    }
  }
  const exact::Pair low = head[0];
  const exact::Pair high = head[1];
  const float scale = exact::kHadamardScale;
  head[0] = {exact::mul(exact::add(low.x, high.x), scale),
             exact::mul(exact::add(low.y, high.y), scale)};
  head[1] = {exact::mul(exact::sub(low.x, high.x), scale),
             exact::mul(exact::sub(low.y, high.y), scale)};
}

// One block per token, its warps take turns over the heads.
__global__ void queries_kernel(const __grid_constant__ TinyV4Step step) {
  const std::int64_t t = blockIdx.x;
  const auto warp = static_cast<int>(threadIdx.x / kWarp);
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  const float* table = step.rope + step.views.positions[t] * kRopeDim;
  const float cos = table[2 * lane];
  const float sin = table[2 * lane + 1];
  float* row = step.arrays.queries + t * step.config.query_stride();
  for (int h = warp; h < step.config.heads; h += kWarps) {
    exact::Pair head[kMainPairs];
    load_head(head, row + h * kHeadDim, lane);
    float sum = 0.0f;
    for (const exact::Pair& pair : head) {
      sum = exact::fma(pair.x, pair.x, sum);
      sum = exact::fma(pair.y, pair.y, sum);
    }
    const float scale =
        exact::mul(exact::rms_scale(warp_sum(sum), 1.0f / kHeadDim, step.norm_eps), kQueryGain);
    for (exact::Pair& pair : head) {
      pair = {exact::mul(pair.x, scale), exact::mul(pair.y, scale)};
    }
    head[kMainPairs - 1] = exact::rotate(head[kMainPairs - 1], cos, sin);
    store_head(head, row + h * kHeadDim, lane);
  }
  if (step.layer.kind != LayerKind::kCsa) return;
  for (int h = warp; h < step.config.indexer_heads; h += kWarps) {
    float* at = row + step.config.attended_width() + h * kIndexerDim;
    exact::Pair head[kIndexerPairs];
    load_head(head, at, lane);
    head[kIndexerPairs - 1] = exact::rotate(head[kIndexerPairs - 1], cos, sin);
    if (step.hadamard) hadamard_head(head, lane);
    store_head(head, at, lane);
  }
}

// --- The indexer: scores of all complete entries, and the best of them ---

struct IndexQuery {
  float q[kHeadsMax * kIndexerDim];
  float weights[kHeadsMax];
};

// Channels in ascending order, then heads: nothing is reduced across threads.
__device__ inline float index_score(const TinyV4Step& step, const IndexQuery& query,
                                    std::int64_t location) {
  const std::byte* values = step.keys.indexer_values(location);
  const float scale = *reinterpret_cast<const float*>(step.keys.indexer_scale(location));
  float products[kHeadsMax] = {};
  for (int c = 0; c < kIndexerDim; c += 4) {
    const auto four = *reinterpret_cast<const std::uint32_t*>(values + c);
    for (int i = 0; i < 4; ++i) {
      const float k = exact::from_e4m3(static_cast<std::uint8_t>(four >> (8 * i)));
#pragma unroll
      for (int h = 0; h < kHeadsMax; ++h) {
        if (h < step.config.indexer_heads) {
          products[h] = exact::fma(query.q[h * kIndexerDim + c + i], k, products[h]);
        }
      }
    }
  }
  float score = 0.0f;
#pragma unroll
  for (int h = 0; h < kHeadsMax; ++h) {
    if (h >= step.config.indexer_heads) break;
    const float product = exact::mul(products[h], scale);
    score = exact::fma(query.weights[h], product > 0.0f ? product : 0.0f, score);
  }
  return score;
}

// Descending, one key per thread. All threads of the block take part.
__device__ inline void sort_keys(std::uint64_t (&keys)[kThreads]) {
  const auto i = static_cast<int>(threadIdx.x);
  for (int size = 2; size <= kThreads; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int j = i ^ stride;
      if (j > i) {
        const bool descending = (i & size) == 0;
        const std::uint64_t a = keys[i];
        const std::uint64_t b = keys[j];
        if ((a < b) == descending) {
          keys[i] = b;
          keys[j] = a;
        }
      }
    }
  }
  __syncthreads();
}

// One block per token. The best so far stand in front; the rest of the block scores new entries,
// and a sort brings the best of both to the front. The result is the set of the best keys, which
// are all different, and so does not depend on how the entries are cut.
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ TinyV4Step step) {
  __shared__ IndexQuery query;
  __shared__ std::uint64_t keys[kThreads];
  const std::int64_t t = blockIdx.x;
  const auto i = static_cast<int>(threadIdx.x);
  const int topk = step.config.index_topk;
  const std::int32_t batch_row = step.views.token_batch_row[t];
  if (batch_row < 0) return;
  std::int32_t* picks = step.arrays.picks + t * topk;
  const std::int32_t entries = step.views.token_csa_length[t];
  if (entries <= topk) {
    if (i < topk) picks[i] = i < entries ? i : -1;
    return;
  }
  const float* q =
      step.arrays.queries + t * step.config.query_stride() + step.config.attended_width();
  for (int c = i; c < step.config.indexer_heads * kIndexerDim; c += kThreads) query.q[c] = q[c];
  if (i < step.config.indexer_heads) {
    query.weights[i] =
        step.arrays
            .projected[t * step.config.projected_stride() + step.config.head_weights_at() + i];
  }
  keys[i] = 0;  // below every score
  __syncthreads();
  const std::int32_t* cells = step.views.page_table + batch_row * step.views.page_table_stride;
  const int fresh = kThreads - topk;
  for (std::int32_t first = 0; first < entries; first += fresh) {
    if (i >= topk) {
      const std::int32_t e = first + i - topk;
      keys[i] = e < entries
                    ? rank_key(index_score(step, query,
                                           entry_location(cells, step.keys.entries_per_page, e)),
                               e)
                    : 0;
    }
    sort_keys(keys);
  }
  // In ascending order of entries: the order in which attention adds them up.
  const std::uint64_t pick = static_cast<std::uint32_t>(entry_of_key(keys[i]));
  __syncthreads();
  keys[i] = i < topk ? pick : 0xFFFFFFFFu;
  sort_keys(keys);  // descending: the topk entries stand last
  if (i >= kThreads - topk) picks[kThreads - 1 - i] = static_cast<std::int32_t>(keys[i]);
}

// --- Attention ---

constexpr int kTile = 16;  // entries that are decoded at a time

struct AttentionShared {
  float q[kHeadsMax][kHeadDim];
  std::uint32_t entries[kTile][kHeadDim / 2];  // pairs of bf16, which hold a decoded entry exactly
  float scores[kHeadsMax][kTile];
  float rescale[kHeadsMax];
  float sums[kHeadsMax];
};

__device__ inline exact::Pair unpack(std::uint32_t pair) {
  return {exact::from_bits(pair << 16), exact::from_bits(pair & 0xFFFF0000u)};
}

// One warp decodes entry `place` of the tile into shared memory and scores it for every head.
__device__ inline void score_entry(const TinyV4Step& step, const StoredEntry& entry,
                                   AttentionShared& shared, int place, int lane) {
  float sums[kHeadsMax] = {};
#pragma unroll
  for (int i = 0; i < kMainPairs; ++i) {
    std::uint32_t pair;
    if (i < kMainPairs - 1) {
      const auto two =
          *reinterpret_cast<const std::uint16_t*>(entry.data + 2 * kWarp * i + 2 * lane);
      const float scale = tile_scale(entry.scales[i]);
      const float x = exact::mul(exact::from_e4m3(static_cast<std::uint8_t>(two)), scale);
      const float y = exact::mul(exact::from_e4m3(static_cast<std::uint8_t>(two >> 8)), scale);
      pair = (exact::bits(x) >> 16) | (exact::bits(y) & 0xFFFF0000u);
    } else {
      pair = *reinterpret_cast<const std::uint32_t*>(entry.data + kNopeDim + 4 * lane);
    }
    const int at = kWarp * i + lane;
    shared.entries[place][at] = pair;
    const exact::Pair v = unpack(pair);
#pragma unroll
    for (int h = 0; h < kHeadsMax; ++h) {
      if (h < step.config.heads) {
        sums[h] = exact::fma(shared.q[h][2 * at], v.x, sums[h]);
        sums[h] = exact::fma(shared.q[h][2 * at + 1], v.y, sums[h]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeadsMax; ++h) {
    if (h >= step.config.heads) break;
    const float sum = warp_sum(sums[h]);
    if (lane == 0) shared.scores[h][place] = exact::mul(sum, kAttentionScale);
  }
}

// One block per token: warps score the entries of a tile, warp h turns head h's scores into
// weights, and every thread adds up its two channels for all heads. The running maximum starts at
// the sink, which counts in the sum and has no value.
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ TinyV4Step step) {
  __shared__ AttentionShared shared;
  const std::int64_t t = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  const int heads = step.config.heads;
  float* out = step.arrays.attended + t * step.config.attended_width();
  const bool live = t < step.shape.tokens && step.views.token_batch_row[t] >= 0;
  if (!live) {
    for (int c = thread; c < heads * kHeadDim; c += kThreads) out[c] = 0.0f;
    return;
  }
  const Attended list = attended_by(step, t);
  const float* q = step.arrays.queries + t * step.config.query_stride();
  for (int c = thread; c < heads * kHeadDim; c += kThreads)
    shared.q[c / kHeadDim][c % kHeadDim] = q[c];

  float most = warp < heads ? step.layer.sinks[warp] : 0.0f;  // of head `warp`
  float sum = 1.0f;
  exact::Pair values[kHeadsMax] = {};
  const std::int32_t count = list.window + list.compressed;
  for (std::int32_t first = 0; first < count; first += kTile) {
    const std::int32_t here = min_of<std::int32_t>(kTile, count - first);
    __syncthreads();  // the last tile is used up; the queries are there
    for (int place = warp; place < here; place += kWarps) {
      score_entry(step, entry_of(step, list, first + place), shared, place, lane);
    }
    __syncthreads();
    if (warp < heads) {
      const bool mine = lane < here;
      const float score = mine ? shared.scores[warp][lane] : most;
      const float top = warp_max(score > most ? score : most);
      const float weight = mine ? exact::exp0(exact::sub(score, top)) : 0.0f;
      const float rescale = exact::exp0(exact::sub(most, top));
      sum = exact::fma(sum, rescale, warp_sum(weight));
      most = top;
      if (mine) shared.scores[warp][lane] = weight;
      if (lane == 0) shared.rescale[warp] = rescale;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeadsMax; ++h) {
      if (h >= heads) break;
      values[h] = {exact::mul(values[h].x, shared.rescale[h]),
                   exact::mul(values[h].y, shared.rescale[h])};
      for (int place = 0; place < here; ++place) {
        const exact::Pair v = unpack(shared.entries[place][thread]);
        const float weight = shared.scores[h][place];
        values[h] = {exact::fma(weight, v.x, values[h].x), exact::fma(weight, v.y, values[h].y)};
      }
    }
  }
  if (warp < heads && lane == 0) shared.sums[warp] = sum;
  __syncthreads();

  constexpr int kFirstRotated = kNopeDim / 2;
  const bool rotated = thread >= kFirstRotated;
  const float* table = step.rope + step.views.positions[t] * kRopeDim;
  const float cos = rotated ? table[2 * (thread - kFirstRotated)] : 1.0f;
  const float sin = rotated ? table[2 * (thread - kFirstRotated) + 1] : 0.0f;
#pragma unroll
  for (int h = 0; h < kHeadsMax; ++h) {
    if (h >= heads) break;
    const exact::Pair mean{exact::div(values[h].x, shared.sums[h]),
                           exact::div(values[h].y, shared.sums[h])};
    const exact::Pair back = rotated ? exact::rotate(mean, cos, exact::negate(sin)) : mean;
    out[h * kHeadDim + 2 * thread] = back.x;
    out[h * kHeadDim + 2 * thread + 1] = back.y;
  }
}
static_assert(kThreads * 2 == kHeadDim);
static_assert(kHeadsMax <= kWarps && kTile <= kWarp);

// One warp per token.
__global__ void sample_kernel(const __grid_constant__ TinyV4Step step) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  if (t >= step.shape.tokens || step.views.token_batch_row[t] < 0) return;
  const float* logits = step.arrays.logits + t * step.config.vocabulary;
  std::uint64_t best = 0;
  for (int token = lane; token < step.config.vocabulary; token += kWarp) {
    const std::uint64_t key = rank_key(logits[token], token);
    best = key > best ? key : best;
  }
  for (int other = kWarp / 2; other > 0; other /= 2) {
    const std::uint64_t key = __shfl_xor_sync(kAll, best, other);
    best = key > best ? key : best;
  }
  if (lane == 0) place_sample(step, t, entry_of_key(best));
}

// --- Drafts: one thread per batch row, or one block per input row ---

__global__ void row_tokens_kernel(const __grid_constant__ TinyV4Step step) {
  const auto r = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (r < step.shape.rows) step.arrays.drafts.row_tokens[r] = tokens_to_try(step, r);
}

__global__ void accept_kernel(const __grid_constant__ TinyV4Step step) {
  const auto r = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (r < step.shape.rows) accept_row(step, r);
}

__global__ void draft_input_kernel(const __grid_constant__ TinyV4Step step) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t hidden = step.config.hidden;
  const std::int32_t token = token_behind(step, t);
  const float* from = token < 0 ? nullptr : step.arrays.x + hidden_row(step, t) * hidden;
  float* input = step.arrays.drafts.input + t * 2 * hidden;
  for (std::int64_t c = threadIdx.x; c < hidden; c += blockDim.x) {
    input[c] = token < 0 ? 0.0f : from[c];
    input[hidden + c] = token < 0 ? 0.0f : step.embedding[token * hidden + c];
  }
}

__global__ void begin_kernel(const __grid_constant__ TinyV4Arrays arrays, std::int32_t seat,
                             BegunSeat begun) {
  begin_seat(arrays, seat, begun);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw CudaError(error, concat("launch of ", what, ": ", cudaGetErrorString(error)));
  }
}

unsigned blocks_of(std::int64_t count) { return static_cast<unsigned>(count); }

}  // namespace

void run_cuda(TinyV4Op op, const TinyV4Step& step, CUstream_st* stream) {
  const unsigned tokens = blocks_of(step.shape.tokens);
  const unsigned padded = blocks_of(step.padded_tokens());
  const unsigned rows = blocks_of(ceil_div<std::int64_t>(step.shape.rows, kThreads));
  switch (op) {
    case TinyV4Op::kRowTokens:
      row_tokens_kernel<<<rows, kThreads, 0, stream>>>(step);
      return check_launch("row_tokens_kernel");
    case TinyV4Op::kEmbed:
      embed_kernel<<<padded, kThreads, 0, stream>>>(step);
      return check_launch("embed_kernel");
    case TinyV4Op::kQueries:
      queries_kernel<<<tokens, kThreads, 0, stream>>>(step);
      return check_launch("queries_kernel");
    case TinyV4Op::kSelect:
      select_kernel<<<tokens, kThreads, 0, stream>>>(step);
      return check_launch("select_kernel");
    case TinyV4Op::kAttend:
      attend_kernel<<<padded, kThreads, 0, stream>>>(step);
      return check_launch("attend_kernel");
    case TinyV4Op::kSample:
      sample_kernel<<<blocks_of(ceil_div<std::int64_t>(tokens, kWarps)), kThreads, 0, stream>>>(
          step);
      return check_launch("sample_kernel");
    case TinyV4Op::kAccept:
      accept_kernel<<<rows, kThreads, 0, stream>>>(step);
      return check_launch("accept_kernel");
    case TinyV4Op::kDraftInput:
      draft_input_kernel<<<padded, kThreads, 0, stream>>>(step);
      return check_launch("draft_input_kernel");
  }
}

void normalise_rows_cuda(const NormRows& norm, CUstream_st* stream) {
  normalise_kernel<<<blocks_of(ceil_div<std::int64_t>(norm.rows, kWarps)), kThreads, 0, stream>>>(
      norm);
  check_launch("normalise_kernel");
}

void begin_request_cuda(const TinyV4Arrays& arrays, SeatId seat, const SeatRequest& request,
                        CUstream_st* stream) {
  begin_kernel<<<1, 1, 0, stream>>>(arrays, seat.value, begun_of(request));
  check_launch("begin_kernel");
}

}  // namespace quire::serving
