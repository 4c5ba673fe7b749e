// All cache work of one layer in a ragged step (DESIGN 4, 7): entries first, one kernel for each
// kind of entry, and the seat last, once everything that reads it has been read. Nothing that a
// kernel in front may write is loaded before the wait.
//
// Entries stream: few blocks stay for the whole step and have the rows of their next entry on their
// way to shared memory while they fold and store the one in front. How many entries there are
// is read on the device: capacity costs nothing.
#include <quire/kernels/append.h>

#include <quire/kernels/append_parts.cuh>
#include <quire/kernels/async_copy.cuh>
#include <quire/kernels/hca_stream.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kPerThread = 4;
using Main = MainPlace<kPerThread>;
using Keys = KeysPlace<kPerThread>;
constexpr int kThreads = Main::kThreads;
constexpr int kWarps = Main::kWarps;

// Blocks of each kernel that stay on a multiprocessor.
constexpr int kCsaBlocksPerSm = 4;
constexpr int kHcaBlocksPerSm = 4;
constexpr int kWindowBlocksPerSm = 4;
constexpr int kSeatBlocksPerSm = 12;

// A block is one main entry, or four indexer entries.
template <class P>
constexpr int kEntriesPerBlock = kThreads / P::kThreads;
template <class P>
__device__ std::int64_t entry_of_thread(std::int64_t block) {
  return block * kEntriesPerBlock<P> + threadIdx.x / P::kThreads;
}

// --- CSA entries ---

// One piece is what a thread reads of one row: its channels of the values or of the scores.
constexpr int kPieceBytes = kPerThread * static_cast<int>(sizeof(float));
constexpr int kHalfRows = kC4Overlap;  // the rows of the window before, and the entry's own
constexpr int kCsaStages = 3;

// Half the rows of one main entry, or of four indexer entries. A thread reads what it has copied
// itself.
struct alignas(kLineBytes) CsaStage {
  std::byte pieces[2 * kHalfRows][kThreads][kPieceBytes];
};

// One entry of the plan, as far as its rows are concerned.
struct CsaEntry {
  std::int64_t input_row = 0;  // of the closing token
  std::int32_t position = 0;
  int first = 0;                       // window row that starts the fold
  int from_state = 0;                  // leading window rows that stand in the seat
  const TokenRecord* token = nullptr;  // null: no entry

  __device__ bool live() const { return token != nullptr; }
};

__device__ inline CsaEntry csa_entry(const AppendParams& params, const PlanRecord& record) {
  if (record.ragged_id == kPaddingRaggedId) return {};
  const auto p = static_cast<std::int32_t>(record.position);
  return {record.ragged_id, p, first_window_row(p), static_cast<int>(record.window_len),
          params.tokens + record.ragged_id};
}

// Record `index` of the compact list; padding where there is none.
__device__ inline PlanRecord record_at(const AppendParams& params, std::int64_t entries,
                                       std::int64_t index) {
  if (index < entries) return params.csa_entries[index];
  return {kPaddingRaggedId, kPaddingRaggedId, kPaddingRaggedId, kPaddingRaggedId};
}

// Sends half of the entry's rows, those from `begin`; of the first entry of a sequence there is
// only the second half.
template <class P, ElementType kType>
__device__ void send_rows(const CsaPart& part, const CsaEntry& entry, int begin, CsaStage& stage) {
  constexpr int kElement = kType == ElementType::kFloat32 ? 4 : 2;
  constexpr int kBytes = kPerThread * kElement;
  if (entry.live() && begin >= entry.first) {
    const std::int64_t stride = part.rows.stride * kElement;
    const std::byte* row = static_cast<const std::byte*>(part.rows.data) +
                           (entry.input_row - (kC4Window - 1) + begin) * stride +
                           value_channel<P>(begin) * kElement;
    constexpr int kToScores = 2 * P::kDim;
    const bool all_input = begin >= entry.from_state;
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i, row += stride) {
      std::byte* value = stage.pieces[2 * i][threadIdx.x];
      std::byte* score = stage.pieces[2 * i + 1][threadIdx.x];
      if (all_input || begin + i >= entry.from_state) {
        copy_to_shared<kBytes, false>(value, row);
        copy_to_shared<kBytes, false>(score, row + kToScores * kElement);
      }
    }
    if (all_input) return commit_copies();
#pragma unroll 1
    for (int i = 0; i < min_of(entry.from_state - begin, kHalfRows); ++i) {
      const float* state =
          state_row<P>(part, entry.token->seat, entry.position - (kC4Window - 1) + begin + i) +
          value_channel<P>(begin);
      copy_to_shared<kPieceBytes, false>(stage.pieces[2 * i][threadIdx.x], state);
      copy_to_shared<kPieceBytes, false>(stage.pieces[2 * i + 1][threadIdx.x], state + kToScores);
    }
  }
  commit_copies();
}

template <ElementType kType>
__device__ Channels<kPerThread> read_piece(const std::byte* piece, bool from_state) {
  if (kType == ElementType::kFloat32 || from_state) {
    return load_fresh<kPerThread>(reinterpret_cast<const float*>(piece));
  }
  return load_fresh_bf16<kPerThread>(reinterpret_cast<const std::uint16_t*>(piece));
}

// Folds half of the entry's rows, those from kBegin. No row is a branch.
template <int kBegin, ElementType kType>
__device__ void fold_half(Folds<kPerThread>& folds, const CsaEntry& entry,
                          const Channels<kPerThread> (&bias)[kC4Window], const CsaStage& stage) {
  Channels<kPerThread> value[kHalfRows], score[kHalfRows];
#pragma unroll
  for (int i = 0; i < kHalfRows; ++i) {
    const bool from_state = kBegin + i < entry.from_state;
    value[i] = read_piece<kType>(stage.pieces[2 * i][threadIdx.x], from_state);
    score[i] = read_piece<kType>(stage.pieces[2 * i + 1][threadIdx.x], from_state);
  }
#pragma unroll
  for (int i = 0; i < kHalfRows; ++i) {
    const bool is_first = i == 0 && (kBegin == 0 || entry.first == kBegin);
    fold_row<false>(folds, is_first, score[i], bias[kBegin + i], value[i]);
  }
}

template <class P>
__device__ void finish_csa_entry(const AppendParams& params, const CsaEntry& entry,
                                 const Finish<P>& finish, const Folds<kPerThread>& folds,
                                 Scratch<P>& scratch) {
  const std::int32_t seat = entry.token->seat;
  const std::int64_t location = entry.token->csa_location;
  if (seat < 0 || location < 0) {
    P::sync();  // one barrier an entry: the scratch of the entry in front is free behind the next
    return;
  }
  finish_csa<P>(params, csa_part<P>(params), finish, folds, location, seat, scratch);
}

// Entries of one part: block `block` of the `blocks` that share them out. While half an entry is
// folded, the next two halves are on their way, and of the entry behind there is the record.
template <class P, ElementType kType>
__device__ void stream_csa_entries(const AppendParams& params, std::int64_t entries,
                                   std::int64_t block, std::int64_t blocks, CsaStage* stages,
                                   Scratch<P>* scratch) {
  const CsaPart& part = csa_part<P>(params);
  Channels<kPerThread> bias[kC4Window];
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) bias[i] = load_c4_bias<P>(part, i);
  std::int64_t index = entry_of_thread<P>(block);
  const std::int64_t step = blocks * kEntriesPerBlock<P>;
  CsaEntry entry = csa_entry(params, record_at(params, entries, index));
  PlanRecord ahead = record_at(params, entries, index + step);
  CsaStage *first = stages, *second = stages + 1, *third = stages + 2;
  send_rows<P, kType>(part, entry, 0, *first);
  send_rows<P, kType>(part, entry, kHalfRows, *second);
  int turn = 0;
  for (; block * kEntriesPerBlock<P> < entries; block += blocks) {
    const CsaEntry next = csa_entry(params, ahead);
    send_rows<P, kType>(part, next, 0, *third);
    ahead = record_at(params, entries, index + 2 * step);
    index += step;
    Folds<kPerThread> folds{};
    Finish<P> finish{};
    wait_for_copies<2>();
    if (entry.live()) {
      finish = load_csa_finish<P>(params, part, entry.position);
      if (entry.first == 0) fold_half<0, kType>(folds, entry, bias, *first);
    }
    send_rows<P, kType>(part, next, kHalfRows, *first);
    wait_for_copies<2>();
    if (entry.live()) {
      fold_half<kHalfRows, kType>(folds, entry, bias, *second);
      finish_csa_entry<P>(params, entry, finish, folds, scratch[turn]);
    } else {
      P::sync();  // one barrier an entry, in any case
    }
    turn ^= 1;
    entry = next;
    CsaStage* read = second;
    second = first;
    first = third;
    third = read;
  }
}

template <ElementType kType>
__global__ void __launch_bounds__(kThreads, kCsaBlocksPerSm)
    append_ragged_csa(const __grid_constant__ AppendParams params) {
  extern __shared__ CsaStage stages[];
  __shared__ Scratch<Main> main_scratch[2];
  __shared__ Scratch<Keys> keys_scratch[2];
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape)) return;
  const std::int64_t entries = min_of(header.csa_entries, params.csa_entry_capacity);
  // An indexer entry has a quarter of a main entry's channels: one block in five.
  const std::int64_t blocks = gridDim.x;
  const std::int64_t indexer = !has(params.csa.rows)       ? blocks
                               : !has(params.indexer.rows) ? 0
                                                           : ceil_div<std::int64_t>(blocks, 5);
  const std::int64_t block = blockIdx.x;
  if (block < indexer) {
    stream_csa_entries<Keys, kType>(params, entries, block, indexer, stages, keys_scratch);
  } else {
    stream_csa_entries<Main, kType>(params, entries, block - indexer, blocks - indexer, stages,
                                    main_scratch);
  }
}

// --- HCA entries ---

// One HCA entry: its fold so far, where the window began before this step, and the rows since.
template <ElementType kType>
__device__ void append_hca_entry(const AppendParams& params, const PlanRecord& record,
                                 HcaStages& stages, Scratch<Main>& scratch) {
  const HcaPart& part = params.hca;
  const std::int64_t input_row = record.ragged_id;
  const auto p = static_cast<std::int32_t>(record.position);
  const int count = kHcaWindow - static_cast<int>(record.window_len);
  const HcaSpan span{input_row - (count - 1), p - (count - 1), count};
  HcaRows<kType> rows(stages, part, span);  // on their way while the rest is looked up
  const TokenRecord& token = params.tokens[input_row];
  const std::int32_t seat = token.seat;
  const std::int64_t location = token.hca_location;
  const Finish<Main> finish = load_hca_finish<Main>(params, p);
  if (seat < 0 || location < 0) {
    wait_for_copies<0>();
    Main::sync();  // as in finish_csa_entry
    return;
  }
  // Inside a window only the first position of the step can stand first.
  Folds<kPerThread> folds = begin_fold<Main>(part, seat, span.position, span.position);
  rows.fold<false>(folds);
  finish_main<Main>(params, part.pages, finish, folds, location, seat, scratch);
}

__global__ void __launch_bounds__(kThreads)
    append_ragged_hca(const __grid_constant__ AppendParams params) {
  extern __shared__ HcaStages hca_stages[];
  __shared__ Scratch<Main> scratch[2];
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  PlanRecord record = params.hca_entries[blockIdx.x];
  if (!is_planned(header, params.shape)) return;
  const std::int64_t entries = min_of(header.hca_entries, params.hca_entry_capacity);
  int turn = 0;
  for (std::int64_t index = blockIdx.x; index < entries; turn ^= 1) {
    with_row_type(params.hca.rows, [&](auto type) {
      append_hca_entry<decltype(type)::value>(params, record, hca_stages[0], scratch[turn]);
    });
    index += gridDim.x;
    if (index < entries) record = params.hca_entries[index];
  }
}

// --- Window entries ---

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

__device__ inline bool reads_scratch(const AppendParams& params, const BatchRowRecord& row) {
  return row.seat >= 0 && row.live_tokens > 0 && !is_short(params.geometry, row.live_tokens);
}

// A long batch row's window of at most 128 entries is copied by some warps, each a part of it.
constexpr int kCopyWarpsPerRow = 16;
constexpr int kCopyEntriesPerWarp = 128 / kCopyWarpsPerRow;

// Calls `copy(k)` for the warp's part of k in [0, 128).
template <class Copy>
__device__ void for_window_entries(std::int64_t part, const Copy& copy) {
  const int first = static_cast<int>(part % kCopyWarpsPerRow) * kCopyEntriesPerWarp;
#pragma unroll 2
  for (int n = 0; n < kCopyEntriesPerWarp; ++n) copy(first + n);
}

// The window before the chunk, to where the chunk's attention reads it. By one warp.
__device__ void copy_older_window(const AppendParams& params, std::int64_t part) {
  const auto batch_row = static_cast<std::int32_t>(part / kCopyWarpsPerRow);
  const BatchRowRecord row = params.rows[batch_row];
  if (!reads_scratch(params, row)) return;
  for_window_entries(part, [&](int k) {
    const std::int32_t j = k - 127;  // relative to the chunk's first token
    if (j >= 0 || row.start + j < 0) return;
    copy_entry(params.window.ring, ring_location(params.geometry, row.seat, row.start + j),
               params.window.scratch, scratch_location(row.first_token, batch_row, j));
  });
}

// A window entry is a warp's: sixteen channels a lane, and nothing to wait for within a block.
using WindowPlace = MainPlace<16>;

// A token's row and where its entry goes, loaded while the token in front is worked on.
struct WindowItem {
  WindowPlace::Values x;
  std::int32_t seat, position;
  std::int64_t ring_location, scratch_location;
};

__device__ inline WindowItem load_window_item(const AppendParams& params, std::int64_t input_row) {
  const TokenRecord& token = params.tokens[input_row];
  return {
      load_input<WindowPlace::kPerThread>(params.window.rows, input_row, WindowPlace::channel()),
      token.seat, token.position, token.ring_location, token.scratch_location};
}

__device__ void append_window_entry(const AppendParams& params, const WindowItem& item,
                                    Scratch<WindowPlace>& scratch) {
  using P = WindowPlace;
  const bool in_scratch = item.scratch_location >= 0;
  const std::int64_t location = in_scratch ? item.scratch_location : item.ring_location;
  if (item.seat < 0 || location < 0) return;
  const Finish<P> finish = load_finish<P>(params.window.norm_weight, params.rope, item.position);
  const EntryPool& pool = in_scratch ? params.window.scratch : params.window.ring;
  finish_window<P>(params, finish, item.x, main_entry(pool, location), item.seat, scratch);
}

// What the warps of the kernel share out: parts of older windows, then tokens.
struct WindowWork {
  std::int64_t older, tokens;
  __host__ __device__ std::int64_t total() const { return older + tokens; }
};
__host__ __device__ inline WindowWork window_work(const AppendParams& params, std::int64_t rows,
                                                  std::int64_t tokens) {
  return {params.window.copy_older_window ? kCopyWarpsPerRow * rows : 0,
          has(params.window.rows) ? tokens : 0};
}

__global__ void __launch_bounds__(kThreads, kWindowBlocksPerSm)
    append_ragged_window(const __grid_constant__ AppendParams params) {
  __shared__ Scratch<WindowPlace> scratch;  // that a single warp does not use
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape)) return;
  const WindowWork work = window_work(params, header.used_rows, header.used_tokens);
  const std::int64_t warps = std::int64_t{gridDim.x} * kWarps;
  std::int64_t at = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  for (; at < work.older; at += warps) copy_older_window(params, at);
  std::int64_t token = at - work.older;
  if (token >= work.tokens) return;
  WindowItem next = load_window_item(params, token);
  while (token < work.tokens) {
    const WindowItem item = next;
    token += warps;
    if (token < work.tokens) next = load_window_item(params, token);
    append_window_entry(params, item, scratch);
  }
}

// --- The seat ---

// State rows that one batch row of a ragged step can write.
__host__ __device__ inline std::int32_t state_writes_max(const PlanGeometry& geometry) {
  return max_of(2 * kCsaRule.ratio - 1, geometry.draft_max + 1);
}

// What the blocks of the kernel share out, part after part; one that is not there has nothing.
struct SeatWork {
  std::int64_t hca, csa, indexer, window;
  __host__ __device__ std::int64_t total() const { return hca + csa + indexer + window; }
};

constexpr int kCopyBlocksPerRow = kCopyWarpsPerRow / kWarps;

__host__ __device__ inline SeatWork seat_work(const AppendParams& params, std::int64_t rows) {
  const std::int64_t writes = state_writes_max(params.geometry) * rows;
  return {has(params.hca.rows) ? rows : 0, has(params.csa.rows) ? writes : 0,
          has(params.indexer.rows) ? ceil_div<std::int64_t>(writes, kEntriesPerBlock<Keys>) : 0,
          has(params.window.rows) ? kCopyBlocksPerRow * rows : 0};
}

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
  Folds<kPerThread> folds = begin_fold<Main>(part, row.seat, row.start, first);
  with_row_type(part.rows, [&](auto type) {
    constexpr ElementType kType = decltype(type)::value;
    if (!is_short(params.geometry, row.live_tokens)) {
      HcaRows<kType>(stages, part, span).template fold<true>(folds);
      store_fold<Main>(part, row.seat, length, folds);
      return;
    }
    ShortRows<Main, 2> rows;
    rows.load_bias(part, span, 0);
    fold_short(folds, rows, part, span, [&](int i) {
      const std::int32_t p = first + i;
      if (keeps_fold(params.geometry, row, p)) store_fold<Main>(part, row.seat, p + 1, folds);
    });
  });
}

// Raw rows of the batch row's last tokens, for the entries of later steps.
template <class P>
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
  const CsaPart& part = csa_part<P>(params);
  store_state<P>(state_row<P>(part, row.seat, row.start + j),
                 load_raw_row<P>(part, std::int64_t{row.first_token} + j));
}

// The last tokens of a long row, from scratch to the seat's ring. By one warp.
__device__ void keep_window(const AppendParams& params, std::int64_t part) {
  const BatchRowRecord row = params.rows[part / kCopyWarpsPerRow];
  if (!reads_scratch(params, row)) return;
  for_window_entries(part, [&](int k) {
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
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape)) {
    if (threadIdx.x < kWarp) report_unplanned(params);
    return;
  }
  const SeatWork work = seat_work(params, header.used_rows);
  for (std::int64_t block = blockIdx.x; block < work.total(); block += gridDim.x) {
    std::int64_t at = block;
    if (at < work.hca) {
      if constexpr (kWithHca) {
        extern __shared__ HcaStages hca_stages[];
        keep_hca_folds(params, at, hca_stages[0]);
      }
      continue;
    }
    at -= work.hca;
    if (at < work.csa) {
      write_state<Main>(params, at);
      continue;
    }
    at -= work.csa;
    if (at < work.indexer) {
      write_state<Keys>(params, entry_of_thread<Keys>(at));
    } else {
      keep_window(params, (at - work.indexer) * kWarps + threadIdx.x / kWarp);
    }
  }
}

// Blocks for all the work that the shape can have, but no more than stay at once: each goes on
// until nothing is left.
std::int64_t blocks_of(std::int64_t most, int blocks_per_sm) {
  return min_of(most, std::int64_t{multiprocessors()} * blocks_per_sm);
}

}  // namespace

void launch_ragged_append(const AppendParams& params, Pdl pdl, cudaStream_t stream) {
  const auto run = [&](void (*kernel)(AppendParams), std::int64_t most, int blocks_per_sm,
                       std::size_t shared_bytes = 0) {
    launch(kernel, linear_grid(blocks_of(most, blocks_per_sm)), dim3(kThreads), shared_bytes,
           stream, pdl != Pdl::kOff, params);
  };
  const std::int64_t rows = params.shape.rows;
  run(append_ragged_window,
      ceil_div<std::int64_t>(window_work(params, rows, params.shape.tokens).total(), kWarps),
      kWindowBlocksPerSm);
  const bool csa = has(params.csa.rows), indexer = has(params.indexer.rows);
  if (csa || indexer) {
    const ElementType type = csa ? params.csa.rows.type : params.indexer.rows.type;
    const auto kernel = type == ElementType::kFloat32 ? append_ragged_csa<ElementType::kFloat32>
                                                      : append_ragged_csa<ElementType::kBfloat16>;
    const std::int64_t entries = params.csa_entry_capacity;
    constexpr std::size_t kSharedBytes = kCsaStages * sizeof(CsaStage);
    allow_shared_bytes(kernel, kSharedBytes);
    run(kernel,
        (csa ? entries : 0) +
            (indexer ? ceil_div<std::int64_t>(entries, kEntriesPerBlock<Keys>) : 0),
        kCsaBlocksPerSm, kSharedBytes);
  }
  // One block even for no work: it is the one that reports a missing plan.
  const std::int64_t seat = max_of<std::int64_t>(seat_work(params, rows).total(), 1);
  if (!has(params.hca.rows)) return run(append_ragged_seat<false>, seat, kSeatBlocksPerSm);
  allow_shared_bytes(append_ragged_hca, sizeof(HcaStages));
  run(append_ragged_hca, params.hca_entry_capacity, kHcaBlocksPerSm, sizeof(HcaStages));
  run(append_ragged_seat<true>, seat, kHcaBlocksPerSm, sizeof(HcaStages));
}

void load_ragged_append_kernels() {
  load_kernel(append_ragged_csa<ElementType::kFloat32>);
  load_kernel(append_ragged_csa<ElementType::kBfloat16>);
  load_kernel(append_ragged_hca);
  load_kernel(append_ragged_window);
  load_kernel(append_ragged_seat<true>);
  load_kernel(append_ragged_seat<false>);
}

}  // namespace quire::cuda
