// All cache work of one layer in a decode step, in one kernel (DESIGN 4, 7). A block is one CSA
// entry, four indexer entries, one window entry, or the HCA fold of one batch row.
//
// Everything before the one wait may run beside the kernel in front: only plan records, immutable
// weights and tables, and seat state of earlier steps are loaded there, each by its own helper, and
// older rows are folded. Two channels a thread: what counts here is the way from the wait to the
// last store.
#include <quire/kernels/append.h>

#include <quire/kernels/append_parts.cuh>
#include <quire/kernels/hca.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/kernels/prefetch.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kPerThread = 2;
using Main = MainPlace<kPerThread>;
using Keys = KeysPlace<kPerThread>;
constexpr int kThreads = Main::kBlockThreads;
constexpr int kBlocksPerSm = 4;

// --- In front of the wait ---

// Parameters come through a cache of their own, and their first touch takes as long as a load: here
// it is nobody's loss.
__device__ inline void touch_parameters(const AppendParams& params) {
  constexpr int kLine = 64 / sizeof(std::int32_t);
  const auto* words = reinterpret_cast<const std::int32_t*>(&params);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(AppendParams) / sizeof(std::int32_t)); i += kLine) {
    asm volatile("" ::"r"(words[i]));
  }
}

struct Token {
  TokenRecord record;
  bool planned;
  bool live;
};

// Record and header at once: neither waits for the other.
__device__ inline Token load_token(const AppendParams& params, std::int64_t input_row) {
  const bool exists = input_row < params.shape.tokens;
  const PlanHeader header = load_header(params.header);
  Token token;
  token.record = load_record(params.tokens + (exists ? input_row : 0));
  token.planned = is_planned(header, params.shape);
  token.live = token.planned && exists && token.record.seat >= 0;
  return token;
}

// Waits, and lets the next kernel start. False: nothing was planned, and nothing may be written.
__device__ inline bool wait_and_trigger(const AppendParams& params, bool planned) {
  pdl_wait();
  pdl_trigger();
  if (!planned) report_unplanned(params);
  return planned;
}

// --- Compressor of a CSA layer, main or indexer ---

// Folds those window rows before the closing one that stand in the seat, [first, end), of earlier
// steps. All loads are made before anything is folded, and no row is a branch.
template <class P>
__device__ void fold_older_rows(Folds<kPerThread>& folds, const CsaPart& part, std::int32_t seat,
                                std::int32_t p, int end) {
  constexpr int kOlder = kC4Window - 1;
  typename P::Values value[kOlder] = {}, score[kOlder] = {}, bias[kOlder];
  const int first = first_window_row(p);
  const float* ring = part.state + std::int64_t{seat} * part.ring_tokens * (4 * P::kDim);
  // The ring may begin anew inside the window.
  const std::int32_t oldest = (p + part.ring_tokens - kOlder) % part.ring_tokens;
#pragma unroll
  for (int i = 0; i < kOlder; ++i) {
    if (i < first || i >= end) continue;
    const std::int32_t at = oldest + i < part.ring_tokens ? oldest + i
                                                          : oldest + i - part.ring_tokens;
    const float* row = ring + at * (4 * P::kDim);
    value[i] = load_state<kPerThread>(row + value_channel<P>(i));
    score[i] = load_state<kPerThread>(row + score_channel<P>(i));
  }
#pragma unroll
  for (int i = 0; i < kOlder; ++i) bias[i] = load_c4_bias<P>(part, i);
#pragma unroll
  for (int i = 0; i < kOlder; ++i) {
    Folds<kPerThread> next = folds;
    fold_row(next, (i == 0 || i == kC4Overlap) && i == first, score[i], bias[i], value[i]);
    const bool counts = i >= first && i < end;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      folds.of[k].m = counts ? next.of[k].m : folds.of[k].m;
      folds.of[k].z = counts ? next.of[k].z : folds.of[k].z;
      folds.of[k].a = counts ? next.of[k].a : folds.of[k].a;
    }
  }
}

// With drafts, rows before the closing one, [begin, kC4Window - 1), are of this step too.
template <class P>
__device__ void fold_drafted_rows(Folds<kPerThread>& folds, const CsaPart& part,
                                  std::int64_t input_row, std::int32_t p, int begin) {
  const int first = first_window_row(p);
#pragma unroll 1
  for (int i = max_of(begin, first); i < kC4Window - 1; ++i) {
    const std::int64_t from = input_row - (kC4Window - 1) + i;
    const auto value = load_input<kPerThread>(part.rows, from, value_channel<P>(i));
    const auto score = load_input<kPerThread>(part.rows, from, score_channel<P>(i));
    fold_row(folds, i == first, score, load_c4_bias<P>(part, i), value);
  }
}

template <class P>
__device__ void decode_csa(const AppendParams& params, std::int64_t block,
                           Scratch<kPerThread>& scratch) {
  const CsaPart& part = csa_part<P>(params);
  const std::int64_t input_row = P::entry(block);
  const Token token = load_token(params, input_row);
  const TokenRecord& record = token.record;
  const bool closes = token.live && record.csa_location >= 0;
  Folds<kPerThread> folds{};
  Finish<P> finish{};
  typename P::Values closing_bias{};
  const int from_state = window_len(kCsaRule, record.index);
  if (closes) {
    finish = load_csa_finish<P>(params, part, record.position);
    fold_older_rows<P>(folds, part, record.seat, record.position,
                       min_of(from_state, kC4Window - 1));
    closing_bias = load_c4_bias<P>(part, kC4Window - 1);
  }
  float* own = token.live ? state_row<P>(part, record.seat, record.position) : nullptr;
  asm volatile("" : "+l"(own));  // computed here, not behind the wait

  if (!wait_and_trigger(params, token.planned) || !token.live) return;

  const RawRow<P> row = load_raw_row<P>(part, input_row);
  store_state<P>(own, row);
  if (!closes) return;
  if (from_state < kC4Window - 1) {
    fold_drafted_rows<P>(folds, part, input_row, record.position, from_state);
  }
  fold_row(folds, false, row.quarter[3], closing_bias, row.quarter[1]);
  finish_csa<P>(params, part, finish, folds, record.csa_location, record.seat, scratch);
}

// --- Window entry ---

__device__ void decode_window(const AppendParams& params, std::int64_t input_row,
                              Scratch<kPerThread>& scratch) {
  const Token token = load_token(params, input_row);
  const TokenRecord& record = token.record;
  Finish<Main> finish{};
  MainEntry entry{};
  if (token.live) {
    finish = load_finish<Main>(params.window.norm_weight, params.rope, record.position);
    entry = main_entry(params.window.ring, record.ring_location);
    prefetch_next(params.next, record);
  }

  if (!wait_and_trigger(params, token.planned) || !token.live) return;

  finish_window<Main>(params, finish,
                      load_input<kPerThread>(params.window.rows, input_row, Main::channel()),
                      entry, record.seat, scratch);
}

// --- Compressor of an HCA layer ---

// The tokens of one batch row, in order.
__device__ void decode_hca(const AppendParams& params, std::int64_t batch_row,
                           Scratch<kPerThread>& scratch) {
  const HcaPart& part = params.hca;
  const PlanHeader header = load_header(params.header);
  const BatchRowRecord row = load_record(params.rows + batch_row);
  const bool planned = is_planned(header, params.shape);
  const HcaSpan span{row.first_token, row.start, planned && row.seat >= 0 ? row.live_tokens : 0};
  ShortRows<Main> rows;
  Folds<kPerThread> folds{};
  // Of the entry that closes first; with as many drafts as a window has tokens, more may follow.
  const int closing = kHcaWindow - 1 - row.start % kHcaWindow;
  std::int64_t location = -1;
  Finish<Main> finish{};
  if (span.count > 0) {
    folds = begin_fold<Main>(part, row.seat, row.start, row.start);
    rows.load_bias(part, span, 0);
    if (closing < span.count) {
      location = load_record(params.tokens + span.input_row + closing).hca_location;
      finish = load_hca_finish<Main>(params, row.start + closing);
    }
  }

  if (!wait_and_trigger(params, planned)) return;

  fold_short<Main>(folds, rows, part, span, [&](int i) {
    const std::int32_t p = row.start + i;
    if (keeps_fold(params.geometry, row, p)) store_fold<Main>(part, row.seat, p + 1, folds);
    if (!closes_entry(kHcaRule, p)) return;
    if (i != closing) {
      __syncthreads();  // the scratch is used again
      location = load_record(params.tokens + span.input_row + i).hca_location;
      finish = load_hca_finish<Main>(params, p);
    }
    if (location >= 0) finish_hca<Main>(params, finish, folds, location, row.seat, scratch);
  });
}

// --- One kernel a layer kind ---

// Blocks of a part stand in front of those of the next; a part that is not there has none.
__host__ __device__ inline std::int64_t blocks_of(const AppendParams& params,
                                                  const InputRows& rows, int entries_per_block) {
  return has(rows) ? ceil_div<std::int64_t>(params.shape.tokens, entries_per_block) : 0;
}

__global__ void __launch_bounds__(kThreads)
    append_window(const __grid_constant__ AppendParams params) {
  __shared__ Scratch<kPerThread> scratch;
  if (params.load_after_wait) pdl_wait();
  touch_parameters(params);
  decode_window(params, blockIdx.x, scratch);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_csa(const __grid_constant__ AppendParams params) {
  __shared__ Scratch<kPerThread> scratch;
  if (params.load_after_wait) pdl_wait();
  touch_parameters(params);
  const std::int64_t csa = blocks_of(params, params.csa.rows, Main::kEntriesPerBlock);
  const std::int64_t indexer = blocks_of(params, params.indexer.rows, Keys::kEntriesPerBlock);
  const std::int64_t block = blockIdx.x;
  if (block < csa) {
    decode_csa<Main>(params, block, scratch);
  } else if (block < csa + indexer) {
    decode_csa<Keys>(params, block - csa, scratch);
  } else {
    decode_window(params, block - csa - indexer, scratch);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_hca(const __grid_constant__ AppendParams params) {
  __shared__ Scratch<kPerThread> scratch;
  if (params.load_after_wait) pdl_wait();
  touch_parameters(params);
  const std::int64_t block = blockIdx.x;
  if (block < params.shape.rows) {
    decode_hca(params, block, scratch);
  } else {
    decode_window(params, block - params.shape.rows, scratch);
  }
}

}  // namespace

void launch_decode_append(const AppendParams& params, Pdl pdl, cudaStream_t stream) {
  AppendParams decode = params;
  decode.load_after_wait = params.load_after_wait || pdl == Pdl::kWaitOnly;
  const std::int64_t window = blocks_of(params, params.window.rows, Main::kEntriesPerBlock);
  const auto run = [&](void (*kernel)(AppendParams), std::int64_t blocks) {
    launch(kernel, linear_grid(blocks), dim3(kThreads), 0, stream, pdl != Pdl::kOff, decode);
  };
  if (has(params.hca.rows)) {
    run(append_hca, params.shape.rows + window);
  } else if (has(params.csa.rows) || has(params.indexer.rows)) {
    run(append_csa, blocks_of(params, params.csa.rows, Main::kEntriesPerBlock) +
                        blocks_of(params, params.indexer.rows, Keys::kEntriesPerBlock) + window);
  } else {
    run(append_window, window);
  }
}

void load_decode_append_kernels() {
  load_kernel(append_window);
  load_kernel(append_csa);
  load_kernel(append_hca);
}

}  // namespace quire::cuda
