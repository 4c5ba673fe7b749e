// All cache work of one layer in a decode step, in one kernel (DESIGN 4, 7). A block is one token,
// or in a CSA layer half of one while multiprocessors are free; its warps have parts of their own:
// the compressor's entry or fold, the window entry, the indexer's entry, and one that brings the
// next layer's state into L2.
//
// Everything before the one wait may run beside the kernel in front: only plan records, immutable
// weights and tables, and seat state of earlier steps are loaded there, each by its own helper, and
// older rows are folded. Two channels a thread: what counts is the way to the wait, and from there
// to the last store.
#include <quire/kernels/append.h>

#include <quire/kernels/append_parts.cuh>
#include <quire/kernels/hca.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/kernels/prefetch.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

// Which threads of a block do what, and how many older rows each holds at once.
struct Roomy {
  using Main = MainPlace<2>;
  using Window = MainPlace<2, Main::kThreads>;
  using Keys = KeysPlace<2, Main::kThreads + Window::kThreads>;
  static constexpr int kOlderAtOnce = kC4Window - 1;
  static constexpr int kHcaRowsAhead = 2;
  // Registers are what keeps two kernels apart. Bounded as if a block had 1,024 threads, 64 each:
  // it has room beside a kernel in front that takes less than half of them.
  static constexpr int kBoundThreads = 1024;
  static constexpr int kBlocksPerSm = 1;
};

// Two blocks a token, the main entry's and the other's: their issue slots are not shared.
struct Halves {
  using Main = MainPlace<2>;
  using Window = MainPlace<2>;
  using Keys = KeysPlace<2, Window::kThreads>;
  static constexpr int kOlderAtOnce = kC4Window - 1;
  static constexpr int kThreads = Window::kThreads + Keys::kThreads;
  static constexpr int kBlocksPerSm = 2;
};

// For more tokens than multiprocessors: two blocks have room on each.
struct CrowdedCsa : Roomy {
  static constexpr int kOlderAtOnce = kC4Overlap;
  static constexpr int kBoundThreads = Main::kThreads + Window::kThreads + Keys::kThreads + kWarp;
  static constexpr int kBlocksPerSm = 2;
};
struct CrowdedHca : Roomy {
  using Window = MainPlace<4, Main::kThreads>;
  static constexpr int kBoundThreads = Main::kThreads + Window::kThreads + kWarp;
  static constexpr int kBlocksPerSm = 2;
};

template <class Parts>
constexpr int kHcaThreads = Parts::Main::kThreads + Parts::Window::kThreads;
template <class Parts>
constexpr int kCsaThreads = kHcaThreads<Parts> + Parts::Keys::kThreads;

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
  Token token;
  token.planned = load_is_planned(params);
  token.record = load_record(params.tokens + (exists ? input_row : 0));
  token.live = token.planned && exists && token.record.seat >= 0;
  return token;
}

// Lets the next kernel start. Until here, nothing was read that the kernel in front writes.
__device__ inline void wait_and_trigger() {
  pdl_wait();
  pdl_trigger();
}

// --- Compressor of a CSA layer, main or indexer ---

// Folds those window rows before the closing one that stand in the seat, [first, end), of earlier
// steps, kAtOnce at a time: those are loaded before any is folded, and no row is a branch.
template <class P, int kAtOnce>
__device__ void fold_older_rows(Folds<P::kPerThread>& folds, const CsaPart& part, std::int32_t seat,
                                std::int32_t p, int end) {
  constexpr int kOlder = kC4Window - 1;
  const int first = first_window_row(p);
  const float* ring = part.state + std::int64_t{seat} * part.ring_tokens * (4 * P::kDim);
  // The ring may begin anew inside the window.
  const std::int32_t oldest = (p + part.ring_tokens - kOlder) % part.ring_tokens;
#pragma unroll
  for (int begin = 0; begin < kOlder; begin += kAtOnce) {
    typename P::Values value[kAtOnce] = {}, score[kAtOnce] = {}, bias[kAtOnce] = {};
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = begin + n;
      if (i < first || i >= end) continue;
      const std::int32_t at =
          oldest + i < part.ring_tokens ? oldest + i : oldest + i - part.ring_tokens;
      const float* row = ring + at * (4 * P::kDim);  // at most 65,544 rows: 32 bits hold it
      value[n] = load_state<P::kPerThread>(row + value_channel<P>(i));
      score[n] = load_state<P::kPerThread>(row + score_channel<P>(i));
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (begin + n < kOlder) bias[n] = load_c4_bias<P>(part, begin + n);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce && begin + n < kOlder; ++n) {
      const int i = begin + n;
      Folds<P::kPerThread> next = folds;
      fold_row<false>(next, (i == 0 || i == kC4Overlap) && i == first, score[n], bias[n], value[n]);
      const bool counts = i >= first && i < end;
#pragma unroll
      for (int k = 0; k < P::kPerThread; ++k) {
        folds.of[k].m = counts ? next.of[k].m : folds.of[k].m;
        folds.of[k].z = counts ? next.of[k].z : folds.of[k].z;
        folds.of[k].a = counts ? next.of[k].a : folds.of[k].a;
      }
    }
  }
}

// With drafts, rows before the closing one, [begin, kC4Window - 1), are of this step too.
template <class P>
__device__ void fold_drafted_rows(Folds<P::kPerThread>& folds, const CsaPart& part,
                                  std::int64_t input_row, std::int32_t p, int begin) {
  const int first = first_window_row(p);
#pragma unroll 1
  for (int i = max_of(begin, first); i < kC4Window - 1; ++i) {
    const std::int64_t from = input_row - (kC4Window - 1) + i;
    const auto value = load_input<P::kPerThread>(part.rows, from, value_channel<P>(i));
    const auto score = load_input<P::kPerThread>(part.rows, from, score_channel<P>(i));
    fold_row<false>(folds, i == first, score, load_c4_bias<P>(part, i), value);
  }
}

template <class P, int kAtOnce>
__device__ void decode_csa(const AppendParams& params, std::int64_t input_row,
                           Scratch<P>& scratch) {
  const CsaPart& part = csa_part<P>(params);
  const Token token = load_token(params, input_row);
  const TokenRecord& record = token.record;
  const bool closes = token.live && record.csa_location >= 0;
  Folds<P::kPerThread> folds{};
  Finish<P> finish{};
  typename P::Values closing_bias{};
  const int from_state = window_len(kCsaRule, record.index);
  if (closes) {
    finish = load_csa_finish<P>(params, part, record.position);
    closing_bias = load_c4_bias<P>(part, kC4Window - 1);
    fold_older_rows<P, kAtOnce>(folds, part, record.seat, record.position,
                                min_of(from_state, kC4Window - 1));
  }
  float* own = token.live ? state_row<P>(part, record.seat, record.position) : nullptr;
  asm volatile("" : "+l"(own));  // computed here, not behind the wait

  wait_and_trigger();
  if (!token.live) return;

  const RawRow<P> row = load_raw_row<P>(part, input_row);
  store_state<P>(own, row);
  if (!closes) return;
  if (from_state < kC4Window - 1) {
    fold_drafted_rows<P>(folds, part, input_row, record.position, from_state);
  }
  fold_row<false>(folds, false, row.quarter[3], closing_bias, row.quarter[1]);
  finish_csa<P>(params, part, finish, folds, record.csa_location, record.seat, scratch);
}

// --- Window entry ---

template <class P>
__device__ void decode_window(const AppendParams& params, std::int64_t input_row,
                              Scratch<P>& scratch) {
  const Token token = load_token(params, input_row);
  const TokenRecord& record = token.record;
  Finish<P> finish{};
  MainEntry entry{};
  if (token.live) {
    finish = load_finish<P>(params.window.norm_weight, params.rope, record.position);
    entry = main_entry(params.window.ring, record.ring_location);
  }

  wait_and_trigger();
  if (!token.live) return;

  finish_window<P>(params, finish,
                   load_input<P::kPerThread>(params.window.rows, input_row, P::channel()), entry,
                   record.seat, scratch);
}

// --- Compressor of an HCA layer ---

// The tokens of one batch row, in order.
template <class P, int kRowsAhead>
__device__ void decode_hca(const AppendParams& params, std::int64_t batch_row,
                           Scratch<P>& scratch) {
  const HcaPart& part = params.hca;
  const bool planned = load_is_planned(params);
  const BatchRowRecord row = load_record(params.rows + batch_row);
  const HcaSpan span{row.first_token, row.start, planned && row.seat >= 0 ? row.live_tokens : 0};
  ShortRows<P, kRowsAhead> rows;
  Folds<P::kPerThread> folds{};
  // Of the entry that closes first; with as many drafts as a window has tokens, more may follow.
  const int closing = kHcaWindow - 1 - row.start % kHcaWindow;
  std::int64_t location = -1;
  Finish<P> finish{};
  if (span.count > 0) {
    folds = begin_fold<P>(part, row.seat, row.start, row.start);
    rows.load_bias(part, span, 0);
    if (closing < span.count) {
      location = load_record(params.tokens + span.input_row + closing).hca_location;
      finish = load_hca_finish<P>(params, row.start + closing);
    }
  }

  wait_and_trigger();

  fold_short(folds, rows, part, span, [&](int i) {
    const std::int32_t p = row.start + i;
    if (keeps_fold(params.geometry, row, p)) store_fold<P>(part, row.seat, p + 1, folds);
    if (!closes_entry(kHcaRule, p)) return;
    if (i != closing) {
      P::sync();  // the scratch is used again
      location = load_record(params.tokens + span.input_row + i).hca_location;
      finish = load_hca_finish<P>(params, p);
    }
    if (location >= 0)
      finish_main<P>(params, part.pages, finish, folds, location, row.seat, scratch);
  });
}

// --- The next layer ---

__device__ void decode_prefetch(const AppendParams& params, std::int64_t input_row) {
  const Token token = load_token(params, input_row);
  if (token.live) prefetch_next(params.next, token.record);
  wait_and_trigger();
  if (!token.planned) report_unplanned(params);
}

// --- One kernel a layer kind ---

__device__ inline void begin(const AppendParams& params) {
  if (params.load_after_wait) pdl_wait();
  touch_parameters(params);
}

constexpr int kWindowThreads = MainPlace<2>::kThreads + kWarp;

__global__ void __launch_bounds__(kWindowThreads)
    append_window(const __grid_constant__ AppendParams params) {
  using P = MainPlace<2>;
  __shared__ Scratch<P> scratch;
  begin(params);
  if (threadIdx.x < P::kThreads) {
    decode_window<P>(params, blockIdx.x, scratch);
  } else {
    decode_prefetch(params, blockIdx.x);
  }
}

// A part that is not there waits and leaves.
template <class Parts>
__global__ void __launch_bounds__(Parts::kBoundThreads, Parts::kBlocksPerSm)
    append_csa(const __grid_constant__ AppendParams params) {
  using Main = typename Parts::Main;
  using Window = typename Parts::Window;
  using Keys = typename Parts::Keys;
  __shared__ Scratch<Main> main;
  __shared__ Scratch<Window> window;
  __shared__ Scratch<Keys> keys;
  begin(params);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < Main::kThreads) {
    has(params.csa.rows) ? decode_csa<Main, Parts::kOlderAtOnce>(params, blockIdx.x, main)
                         : wait_and_trigger();
  } else if (thread < kHcaThreads<Parts>) {
    has(params.window.rows) ? decode_window<Window>(params, blockIdx.x, window)
                            : wait_and_trigger();
  } else if (thread < kCsaThreads<Parts>) {
    has(params.indexer.rows) ? decode_csa<Keys, Parts::kOlderAtOnce>(params, blockIdx.x, keys)
                             : wait_and_trigger();
  } else {
    decode_prefetch(params, blockIdx.x);
  }
}

__global__ void __launch_bounds__(Halves::kThreads, Halves::kBlocksPerSm)
    append_csa_halves(const __grid_constant__ AppendParams params) {
  using Main = Halves::Main;
  using Window = Halves::Window;
  using Keys = Halves::Keys;
  __shared__ Scratch<Main> main_or_window;
  __shared__ Scratch<Keys> keys;
  begin(params);
  const auto thread = static_cast<int>(threadIdx.x);
  const int token = static_cast<int>(blockIdx.x) / 2;
  if (blockIdx.x % 2 == 0) {
    if (thread < Main::kThreads) {
      has(params.csa.rows) ? decode_csa<Main, Halves::kOlderAtOnce>(params, token, main_or_window)
                           : wait_and_trigger();
    } else if (thread < Main::kThreads + kWarp) {
      decode_prefetch(params, token);
    } else {
      wait_and_trigger();
    }
  } else if (thread < Window::kThreads) {
    has(params.window.rows) ? decode_window<Window>(params, token, main_or_window)
                            : wait_and_trigger();
  } else {
    has(params.indexer.rows) ? decode_csa<Keys, Halves::kOlderAtOnce>(params, token, keys)
                             : wait_and_trigger();
  }
}

template <class Parts>
__global__ void __launch_bounds__(Parts::kBoundThreads, Parts::kBlocksPerSm)
    append_hca(const __grid_constant__ AppendParams params) {
  using Main = typename Parts::Main;
  using Window = typename Parts::Window;
  __shared__ Scratch<Main> main;
  __shared__ Scratch<Window> window;
  begin(params);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < Main::kThreads) {
    blockIdx.x < params.shape.rows
        ? decode_hca<Main, Parts::kHcaRowsAhead>(params, blockIdx.x, main)
        : wait_and_trigger();
  } else if (thread < kHcaThreads<Parts>) {
    has(params.window.rows) ? decode_window<Window>(params, blockIdx.x, window)
                            : wait_and_trigger();
  } else {
    decode_prefetch(params, blockIdx.x);
  }
}

struct Choice {
  void (*kernel)(AppendParams);
  int threads;
  int blocks_per_token = 1;
};

Choice choose(LayerKind kind, std::int64_t tokens) {
  const bool crowded = tokens > multiprocessors();
  switch (kind) {
    case LayerKind::kHca:
      if (crowded) return {append_hca<CrowdedHca>, kHcaThreads<CrowdedHca> + kWarp};
      return {append_hca<Roomy>, kHcaThreads<Roomy> + kWarp};
    case LayerKind::kCsa:
      if (2 * tokens <= multiprocessors()) return {append_csa_halves, Halves::kThreads, 2};
      if (crowded) return {append_csa<CrowdedCsa>, kCsaThreads<CrowdedCsa> + kWarp};
      return {append_csa<Roomy>, kCsaThreads<Roomy> + kWarp};
    case LayerKind::kSliding:
      break;
  }
  return {append_window, kWindowThreads};
}

}  // namespace

void launch_decode_append(const AppendParams& params, Pdl pdl, cudaStream_t stream) {
  AppendParams decode = params;
  decode.load_after_wait = params.load_after_wait || pdl == Pdl::kWaitOnly;
  const LayerKind kind = has(params.hca.rows)                               ? LayerKind::kHca
                         : has(params.csa.rows) || has(params.indexer.rows) ? LayerKind::kCsa
                                                                            : LayerKind::kSliding;
  const Choice choice = choose(kind, params.shape.tokens);
  launch(choice.kernel, linear_grid(choice.blocks_per_token * params.shape.tokens),
         dim3(static_cast<unsigned>(choice.threads)), 0, stream, pdl != Pdl::kOff, decode);
}

std::int64_t decode_append_places(LayerKind kind, std::int64_t tokens) {
  const Choice choice = choose(kind, tokens);
  int blocks = 0;
  QUIRE_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, reinterpret_cast<const void*>(choice.kernel), choice.threads, 0));
  return std::int64_t{blocks} * multiprocessors() / choice.blocks_per_token;
}

void load_decode_append_kernels() {
  load_kernel(append_window);
  load_kernel(append_csa_halves);
  load_kernel(append_csa<Roomy>);
  load_kernel(append_csa<CrowdedCsa>);
  load_kernel(append_hca<Roomy>);
  load_kernel(append_hca<CrowdedHca>);
}

}  // namespace quire::cuda
