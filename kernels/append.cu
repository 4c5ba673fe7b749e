// All cache work of one layer (DESIGN 4, 7). Decode: one kernel whose blocks are one CSA entry,
// four indexer entries, one window entry, or the HCA fold of one batch row. Ragged: entries first,
// the seat afterwards.
//
// In the decode kernel everything before the one wait may run beside the kernel in front: only plan
// records, immutable weights and tables, and seat state of earlier steps are loaded there, each by
// its own helper. The ragged kernels wait before anything else.
#include <quire/kernels/append.h>
#include <quire/planner/plan_rule.h>

#include <quire/kernels/entry.cuh>
#include <quire/kernels/hca.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/kernels/pool.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kMain = static_cast<int>(kHeadDim);
constexpr int kKeys = static_cast<int>(kIndexerDim);

// --- One compressed entry ---

template <int kDim>
__device__ const CsaPart& csa_part(const AppendParams& params) {
  return kDim == kMain ? params.csa : params.indexer;
}

// The thread's channels of all eight bias rows, in the order in which window rows count.
template <int kDim>
__device__ void load_bias(const CsaPart& part, Four (&bias)[kC4Window]) {
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    const int checkpoint_row = i < kC4Overlap ? 2 * i : 2 * (i - kC4Overlap) + 1;
    const int row = part.bias_order == BiasOrder::kKernel ? i : checkpoint_row;
    bias[i] = load_constant(part.bias + row * kDim + Place<kDim>::channel());
  }
}

template <int kDim>
__device__ float* state_row(const CsaPart& part, std::int64_t seat, std::int32_t position) {
  return part.state + (seat * part.ring_tokens + position % part.ring_tokens) * (4 * kDim);
}

// Window rows before `end`, which precede the step, from the seat's ring.
template <int kDim>
__device__ void fold_state_rows(Folds& folds, const Four (&bias)[kC4Window], const CsaPart& part,
                                std::int32_t seat, std::int32_t p, int end) {
  const int first = first_window_row(p);
  fold_rows(folds, bias, first, first, end, [&](int i, Four& value, Four& score) {
    const float* row = state_row<kDim>(part, seat, p - (kC4Window - 1) + i);
    value = load_state(row + value_channel<kDim>(i));
    score = load_state(row + score_channel<kDim>(i));
  });
}

// Window rows [begin, end) of this step. `input_row` is that of the closing token.
template <int kDim>
__device__ void fold_input_rows(Folds& folds, const Four (&bias)[kC4Window], const CsaPart& part,
                                std::int64_t input_row, std::int32_t p, int begin, int end) {
  const int first = first_window_row(p);
  fold_rows(folds, bias, first, max_of(begin, first), end, [&](int i, Four& value, Four& score) {
    const std::int64_t from = input_row - (kC4Window - 1) + i;
    value = load_input(part.rows, from, value_channel<kDim>(i));
    score = load_input(part.rows, from, score_channel<kDim>(i));
  });
}

// Pooled channels to stored bytes. All threads of the entry call it.
template <int kDim>
__device__ void finish_csa(const AppendParams& params, const CsaPart& part, const Finish& finish,
                           const Folds& folds, std::int64_t location, std::int32_t seat,
                           float* partial) {
  Four x = normalise<kDim>(pooled(folds), finish.weight, params.norm_eps, partial);
  if (is_rotated<kDim>()) x = rotate(x, finish.rotation);
  if constexpr (kDim == kMain) {
    store_main_entry(part.pages, location, x, params.scale_floor, seat, params.report);
  } else {
    if (params.hadamard) x = hadamard(x);
    store_indexer_entry(part.pages, location, x, params.scale_floor, seat, params.report);
  }
}

// The raw row of a token: kv_overlap, kv, score_overlap, score of the thread's channels.
struct RawRow {
  Four quarter[4];
};

template <int kDim>
__device__ RawRow load_raw_row(const CsaPart& part, std::int64_t input_row) {
  RawRow row;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    row.quarter[q] = load_input(part.rows, input_row, q * kDim + Place<kDim>::channel());
  }
  return row;
}

// Copied as bits; bf16 was widened.
template <int kDim>
__device__ void store_state(const CsaPart& part, const RawRow& row, std::int32_t seat,
                            std::int32_t position) {
  float* to = state_row<kDim>(part, seat, position);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    store_four(to + q * kDim + Place<kDim>::channel(), row.quarter[q]);
  }
}

// --- One window entry ---

__device__ void append_window(const AppendParams& params, const Finish& finish,
                              std::int64_t input_row, const EntryPool& pool, std::int64_t location,
                              std::int32_t seat, float* partial) {
  const WindowPart& part = params.window;
  Four x = load_input(part.rows, input_row, Place<kMain>::channel());
  if (part.norm_weight != nullptr) {
    x = normalise<kMain>(x, finish.weight, params.norm_eps, partial);
  }
  if (is_rotated<kMain>()) x = rotate(x, finish.rotation);
  store_main_entry(pool, location, x, params.scale_floor, seat, params.report);
}

// Copies one stored entry, 576 + 8 bytes, by a warp.
__device__ void copy_entry(const EntryPool& from, std::int64_t from_location, const EntryPool& to,
                           std::int64_t to_location) {
  constexpr int kWords = static_cast<int>(kMainDataBytes) / 16;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int4* data = reinterpret_cast<const int4*>(from.main_data(from_location));
  int4* copy = reinterpret_cast<int4*>(to.main_data(to_location));
  for (int word = lane; word < kWords; word += kWarp) copy[word] = data[word];
  if (lane == kWarp - 1) {
    *reinterpret_cast<uint2*>(to.main_scales(to_location)) =
        *reinterpret_cast<const uint2*>(from.main_scales(from_location));
  }
}

// --- Which block does what ---

// Blocks of one launch stand in this order; a part that is not there has none.
struct Blocks {
  std::int64_t hca, csa, indexer, window, copies;
  __host__ __device__ std::int64_t total() const { return hca + csa + indexer + window + copies; }
};

__host__ __device__ inline bool has(const InputRows& rows) { return rows.data != nullptr; }

__host__ __device__ inline Blocks decode_blocks(const AppendParams& params) {
  const std::int64_t tokens = params.shape.tokens;
  return {has(params.hca.rows) ? params.shape.rows : 0, has(params.csa.rows) ? tokens : 0,
          has(params.indexer.rows) ? ceil_div<std::int64_t>(tokens, kWarps) : 0,
          has(params.window.rows) ? tokens : 0, 0};
}

// A long batch row's window of at most 128 entries is copied by eight blocks, one warp an entry.
constexpr int kCopyBlocksPerRow = 8;
constexpr int kCopyEntriesPerWarp = 128 / (kCopyBlocksPerRow * kWarps);

__host__ __device__ inline Blocks ragged_entry_blocks(const AppendParams& params) {
  const std::int64_t entries = params.csa_entry_capacity;
  return {
      0,  // HCA entries have a launch of their own: they need more registers
      has(params.csa.rows) ? entries : 0,
      has(params.indexer.rows) ? ceil_div<std::int64_t>(entries, kWarps) : 0,
      has(params.window.rows) ? params.shape.tokens : 0,
      params.window.copy_older_window ? std::int64_t{kCopyBlocksPerRow} * params.shape.rows : 0};
}

// State rows that one batch row of a ragged step can write.
__host__ __device__ inline std::int32_t state_writes_max(const PlanGeometry& geometry) {
  return max_of(2 * kCsaRule.ratio - 1, geometry.draft_max + 1);
}

__host__ __device__ inline Blocks ragged_seat_blocks(const AppendParams& params) {
  const std::int64_t writes = std::int64_t{state_writes_max(params.geometry)} * params.shape.rows;
  return {has(params.hca.rows) ? params.shape.rows : 0, has(params.csa.rows) ? writes : 0,
          has(params.indexer.rows) ? ceil_div<std::int64_t>(writes, kWarps) : 0, 0,
          has(params.window.rows) ? std::int64_t{kCopyBlocksPerRow} * params.shape.rows : 0};
}

// --- Decode ---

struct DecodeWork {
  TokenRecord token;
  Four bias[kC4Window];
  Folds folds;
  Finish finish;
};

__device__ inline bool is_live(const TokenRecord& token) { return token.seat >= 0; }

template <int kDim>
__device__ void prepare_csa(const AppendParams& params, DecodeWork& work) {
  if (!is_live(work.token) || work.token.csa_location < 0) return;
  const CsaPart& part = csa_part<kDim>(params);
  const std::int32_t p = work.token.position;
  load_bias<kDim>(part, work.bias);
  work.finish = load_finish<kDim>(part.norm_weight, params.rope, p - (kCsaRule.ratio - 1));
  fold_state_rows<kDim>(work.folds, work.bias, part, work.token.seat, p,
                        window_len(kCsaRule, work.token.index));
}

template <int kDim>
__device__ void complete_csa(const AppendParams& params, std::int64_t input_row, DecodeWork& work,
                             float* partial) {
  if (!is_live(work.token)) return;
  const CsaPart& part = csa_part<kDim>(params);
  const TokenRecord& token = work.token;
  const RawRow row = load_raw_row<kDim>(part, input_row);
  store_state<kDim>(part, row, token.seat, token.position);
  if (token.csa_location < 0) return;
  // With drafts, some rows before the closing one are of this step too.
  fold_input_rows<kDim>(work.folds, work.bias, part, input_row, token.position,
                        window_len(kCsaRule, token.index), kC4Window - 1);
  fold_row(work.folds, false, row.quarter[3], work.bias[kC4Window - 1], row.quarter[1]);
  finish_csa<kDim>(params, part, work.finish, work.folds, token.csa_location, token.seat, partial);
}

// Pooled channels to a stored HCA entry. All threads of the block call it.
__device__ void finish_hca(const AppendParams& params, const Finish& finish, const Folds& folds,
                           std::int64_t location, std::int32_t seat, float* partial) {
  Four x = normalise<kMain>(pooled(folds), finish.weight, params.norm_eps, partial);
  if (is_rotated<kMain>()) x = rotate(x, finish.rotation);
  store_main_entry(params.hca.pages, location, x, params.scale_floor, seat, params.report);
}

__device__ inline Finish load_hca_finish(const AppendParams& params, std::int32_t p) {
  return load_finish<kMain>(params.hca.norm_weight, params.rope, p - (kHcaWindow - 1));
}

// Behind the wait. Whoever forgot to plan finds it in the report.
__device__ inline void report_unplanned(const AppendParams& params) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.report != nullptr) {
    atomicAdd(&params.report->appends_unplanned, 1);
  }
}

// The tokens of one batch row, in order. Prologue, wait and all.
template <ElementType kType>
__device__ void decode_hca(const AppendParams& params, bool planned, std::int64_t batch_row,
                           float* partial) {
  const HcaPart& part = params.hca;
  const BatchRowRecord row = load_record(params.rows + batch_row);
  HcaSpan span{row.first_token, row.start, planned && row.seat >= 0 ? row.live_tokens : 0};
  ShortRows rows;
  Folds folds{};
  // Of the entry that closes first; with as many drafts as a window has tokens, more may follow.
  const int closing = kHcaWindow - 1 - row.start % kHcaWindow;
  std::int64_t location = -1;
  Finish finish{};
  if (span.count > 0) {
    folds = begin_fold(part, row.seat, row.start, row.start);
    rows.load_bias(part, span, 0);
    if (closing < span.count) {
      location = load_record(params.tokens + span.input_row + closing).hca_location;
      finish = load_hca_finish(params, row.start + closing);
    }
  }

  pdl_wait();
  pdl_trigger();
  if (!planned) {
    report_unplanned(params);
    return;
  }

  fold_short<kType>(folds, rows, part, span, [&](int i) {
    const std::int32_t p = row.start + i;
    if (keeps_fold(params.geometry, row, p)) store_fold(part, row.seat, p + 1, folds);
    if (!closes_entry(kHcaRule, p)) return;
    if (i != closing) {
      __syncthreads();  // `partial` is used again
      location = load_record(params.tokens + span.input_row + i).hca_location;
      finish = load_hca_finish(params, p);
    }
    if (location >= 0) finish_hca(params, finish, folds, location, row.seat, partial);
  });
}

__global__ void __launch_bounds__(kThreads)
    append_decode(const __grid_constant__ AppendParams params) {
  __shared__ float partial[kWarps];
  if (params.load_after_wait) pdl_wait();

  const bool planned = is_planned(load_header(params.header), params.shape);
  const Blocks blocks = decode_blocks(params);
  std::int64_t block = blockIdx.x;
  if (block < blocks.hca) {
    with_row_type(params.hca.rows, [&](auto type) {
      decode_hca<decltype(type)::value>(params, planned, block, partial);
    });
    return;
  }
  block -= blocks.hca;
  const bool is_csa = block < blocks.csa;
  const bool is_indexer = !is_csa && block < blocks.csa + blocks.indexer;
  const std::int64_t input_row = is_csa       ? block
                                 : is_indexer ? Place<kKeys>::entry(block - blocks.csa)
                                              : block - blocks.csa - blocks.indexer;

  DecodeWork work{};
  work.token.seat = -1;
  if (planned && input_row < params.shape.tokens) {
    work.token = load_record(params.tokens + input_row);
  }
  if (is_csa) {
    prepare_csa<kMain>(params, work);
  } else if (is_indexer) {
    prepare_csa<kKeys>(params, work);
  } else if (is_live(work.token)) {
    work.finish = load_finish<kMain>(params.window.norm_weight, params.rope, work.token.position);
  }

  pdl_wait();
  pdl_trigger();
  if (!planned) {
    report_unplanned(params);
    return;
  }

  if (is_csa) {
    complete_csa<kMain>(params, input_row, work, partial);
  } else if (is_indexer) {
    complete_csa<kKeys>(params, input_row, work, partial);
  } else if (is_live(work.token)) {
    append_window(params, work.finish, input_row, params.window.ring, work.token.ring_location,
                  work.token.seat, partial);
  }
}

// --- Ragged, first launches: whatever reads the seat ---

template <int kDim>
__device__ void append_csa_entry(const AppendParams& params, std::int64_t index, float* partial) {
  if (index >= params.csa_entry_capacity) return;
  const PlanRecord record = params.csa_entries[index];
  if (record.ragged_id == kPaddingRaggedId) return;
  const CsaPart& part = csa_part<kDim>(params);
  const std::int64_t input_row = record.ragged_id;
  const auto p = static_cast<std::int32_t>(record.position);
  const auto from_state = static_cast<int>(record.window_len);
  const TokenRecord& token = params.tokens[input_row];
  const std::int32_t seat = token.seat;
  const std::int64_t location = token.csa_location;
  if (seat < 0 || location < 0) return;

  Four bias[kC4Window];
  load_bias<kDim>(part, bias);
  const Finish finish = load_finish<kDim>(part.norm_weight, params.rope, p - (kCsaRule.ratio - 1));
  Folds folds{};
  fold_state_rows<kDim>(folds, bias, part, seat, p, from_state);
  fold_input_rows<kDim>(folds, bias, part, input_row, p, from_state, kC4Window);
  finish_csa<kDim>(params, part, finish, folds, location, seat, partial);
}

// One HCA entry: its fold so far, where the window began before this step, and the rows since.
__device__ void append_hca_entry(const AppendParams& params, std::int64_t index, HcaStages& stages,
                                 float* partial) {
  const PlanRecord record = params.hca_entries[index];
  if (record.ragged_id == kPaddingRaggedId) return;
  const HcaPart& part = params.hca;
  const std::int64_t input_row = record.ragged_id;
  const auto p = static_cast<std::int32_t>(record.position);
  const int count = kHcaWindow - static_cast<int>(record.window_len);
  const TokenRecord& token = params.tokens[input_row];
  const std::int32_t seat = token.seat;
  const std::int64_t location = token.hca_location;
  if (seat < 0 || location < 0) return;

  const HcaSpan span{input_row - (count - 1), p - (count - 1), count};
  // Inside a window only the first position of the step can stand first.
  Folds folds = begin_fold(part, seat, span.position, span.position);
  with_row_type(part.rows, [&](auto type) {
    fold_in_window<decltype(type)::value>(folds, part, span, stages);
  });
  finish_hca(params, load_hca_finish(params, p), folds, location, seat, partial);
}

__device__ void append_ragged_window(const AppendParams& params, std::int64_t input_row,
                                     float* partial) {
  const TokenRecord& token = params.tokens[input_row];
  const std::int32_t seat = token.seat;
  const bool in_scratch = token.scratch_location >= 0;
  const std::int64_t location = in_scratch ? token.scratch_location : token.ring_location;
  if (seat < 0 || location < 0) return;
  const Finish finish = load_finish<kMain>(params.window.norm_weight, params.rope, token.position);
  append_window(params, finish, input_row, in_scratch ? params.window.scratch : params.window.ring,
                location, seat, partial);
}

__device__ inline bool reads_scratch(const AppendParams& params, const BatchRowRecord& row) {
  return row.seat >= 0 && row.live_tokens > 0 && !is_short(params.geometry, row.live_tokens);
}

// Calls `copy(k)` for k in [0, 128) of a batch row, one warp each.
template <class Copy>
__device__ void for_window_entries(std::int64_t block, const Copy& copy) {
  const int warp =
      static_cast<int>(block % kCopyBlocksPerRow) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  for (int n = 0; n < kCopyEntriesPerWarp; ++n) copy(warp * kCopyEntriesPerWarp + n);
}

// The window before the chunk, to where the chunk's attention reads it.
__device__ void copy_older_window(const AppendParams& params, std::int64_t block) {
  const auto batch_row = static_cast<std::int32_t>(block / kCopyBlocksPerRow);
  const BatchRowRecord row = params.rows[batch_row];
  if (!reads_scratch(params, row)) return;
  for_window_entries(block, [&](int k) {
    const std::int32_t j = k - 127;  // relative to the chunk's first token
    if (j >= 0 || row.start + j < 0) return;
    copy_entry(params.window.ring, ring_location(params.geometry, row.seat, row.start + j),
               params.window.scratch, scratch_location(row.first_token, batch_row, j));
  });
}

__global__ void __launch_bounds__(kThreads)
    append_ragged_entries(const __grid_constant__ AppendParams params) {
  __shared__ float partial[kWarps];
  pdl_wait();
  pdl_trigger();
  if (!is_planned(load_header(params.header), params.shape)) {
    report_unplanned(params);
    return;
  }
  const Blocks blocks = ragged_entry_blocks(params);
  std::int64_t block = blockIdx.x;
  if (block < blocks.csa) {
    append_csa_entry<kMain>(params, block, partial);
    return;
  }
  block -= blocks.csa;
  if (block < blocks.indexer) {
    append_csa_entry<kKeys>(params, Place<kKeys>::entry(block), partial);
    return;
  }
  block -= blocks.indexer;
  if (block < blocks.window) {
    append_ragged_window(params, block, partial);
  } else {
    copy_older_window(params, block - blocks.window);
  }
}

__global__ void __launch_bounds__(kThreads)
    append_ragged_hca(const __grid_constant__ AppendParams params) {
  __shared__ HcaStages stages;
  __shared__ float partial[kWarps];
  pdl_wait();
  pdl_trigger();
  if (!is_planned(load_header(params.header), params.shape)) return;
  append_hca_entry(params, blockIdx.x, stages, partial);
}

// --- Ragged, last launch: the seat ---

// The folds that later steps read, of one batch row.
__device__ void keep_hca_folds(const AppendParams& params, std::int64_t batch_row,
                               HcaStages& stages) {
  const BatchRowRecord row = params.rows[batch_row];
  if (row.seat < 0 || row.live_tokens <= 0) return;
  const HcaPart& part = params.hca;
  const std::int32_t first = first_folded_position(params.geometry, row);
  const std::int32_t length = row.start + row.live_tokens;
  const HcaSpan span{row.first_token + std::int64_t{first - row.start}, first, length - first};
  if (span.count == 0) return;
  Folds folds = begin_fold(part, row.seat, row.start, first);
  with_row_type(part.rows, [&](auto type) {
    constexpr ElementType kType = decltype(type)::value;
    if (!is_short(params.geometry, row.live_tokens)) {
      fold_in_window<kType>(folds, part, span, stages);
      store_fold(part, row.seat, length, folds);
      return;
    }
    ShortRows rows;
    rows.load_bias(part, span, 0);
    fold_short<kType>(folds, rows, part, span, [&](int i) {
      const std::int32_t p = first + i;
      if (keeps_fold(params.geometry, row, p)) store_fold(part, row.seat, p + 1, folds);
    });
  });
}

// Raw rows of the batch row's last tokens, for the entries of later steps.
template <int kDim>
__device__ void write_state(const AppendParams& params, std::int64_t index) {
  const std::int32_t writes_max = state_writes_max(params.geometry);
  const std::int64_t batch_row = index / writes_max;
  const auto k = static_cast<std::int32_t>(index % writes_max);
  if (batch_row >= params.shape.rows) return;
  const BatchRowRecord row = params.rows[batch_row];
  if (row.seat < 0 || row.live_tokens <= 0) return;
  // Those that are written are a row's last tokens.
  const std::int32_t j = row.live_tokens - writes_max + k;
  if (j < 0 || !writes_csa_state(params.geometry, row, j)) return;
  const CsaPart& part = csa_part<kDim>(params);
  store_state<kDim>(part, load_raw_row<kDim>(part, std::int64_t{row.first_token} + j), row.seat,
                    row.start + j);
}

// The last tokens of a long row, from scratch to the seat's ring.
__device__ void keep_window(const AppendParams& params, std::int64_t block) {
  const BatchRowRecord row = params.rows[block / kCopyBlocksPerRow];
  if (!reads_scratch(params, row)) return;
  for_window_entries(block, [&](int k) {
    const std::int32_t j = row.live_tokens - 1 - k;
    if (j < 0) return;
    const TokenRecord& token = params.tokens[std::int64_t{row.first_token} + j];
    if (token.ring_location < 0 || token.scratch_location < 0) return;
    copy_entry(params.window.scratch, token.scratch_location, params.window.ring,
               token.ring_location);
  });
}

// Folding takes registers and shared memory that copying need not: layers without HCA do without.
template <bool kWithHca>
__global__ void __launch_bounds__(kThreads)
    append_ragged_seat(const __grid_constant__ AppendParams params) {
  pdl_wait();
  pdl_trigger();
  if (!is_planned(load_header(params.header), params.shape)) return;
  const Blocks blocks = ragged_seat_blocks(params);
  std::int64_t block = blockIdx.x;
  if constexpr (kWithHca) {
    __shared__ HcaStages stages;
    if (block < blocks.hca) {
      keep_hca_folds(params, block, stages);
      return;
    }
    block -= blocks.hca;
  }
  if (block < blocks.csa) {
    write_state<kMain>(params, block);
    return;
  }
  block -= blocks.csa;
  if (block < blocks.indexer) {
    write_state<kKeys>(params, Place<kKeys>::entry(block));
  } else {
    keep_window(params, block - blocks.indexer);
  }
}

}  // namespace

void launch_append(const AppendParams& params, Pdl pdl, cudaStream_t stream) {
  const bool programmatic = pdl != Pdl::kOff;
  if (params.shape.is_decode()) {
    AppendParams decode = params;
    decode.load_after_wait = params.load_after_wait || pdl == Pdl::kWaitOnly;
    launch(append_decode, linear_grid(decode_blocks(decode).total()), dim3(kThreads), 0, stream,
           programmatic, decode);
    return;
  }
  launch(append_ragged_entries, linear_grid(ragged_entry_blocks(params).total()), dim3(kThreads), 0,
         stream, programmatic, params);
  const dim3 seat_grid = linear_grid(ragged_seat_blocks(params).total());
  if (has(params.hca.rows)) {
    launch(append_ragged_hca, linear_grid(params.hca_entry_capacity), dim3(kThreads), 0, stream,
           programmatic, params);
    launch(append_ragged_seat<true>, seat_grid, dim3(kThreads), 0, stream, programmatic, params);
  } else {
    launch(append_ragged_seat<false>, seat_grid, dim3(kThreads), 0, stream, programmatic, params);
  }
}

void load_append_kernels() {
  load_kernel(append_decode);
  load_kernel(append_ragged_entries);
  load_kernel(append_ragged_hca);
  load_kernel(append_ragged_seat<true>);
  load_kernel(append_ragged_seat<false>);
}

}  // namespace quire::cuda
