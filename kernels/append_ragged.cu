// All cache work of one layer in a ragged step (DESIGN 4, 7): entries first, one kernel for each
// kind of entry, and the seat last, once everything that reads it has been read. Nothing that a
// kernel in front may write is loaded before the wait.
//
// Entries stream: few blocks stay for the whole step and have the rows of their next entry on their
// way to shared memory while they fold and store the one in front. How many entries there are
// is read on the device: capacity costs nothing.
#include <quire/kernels/append.h>

#include <quire/kernels/append_parts.cuh>
#include <quire/kernels/c4_stream.cuh>
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
constexpr int kHcaBlocksPerSm = 1;
constexpr int kWindowBlocksPerSm = 4;
constexpr int kSeatBlocksPerSm = 12;
constexpr int kSeatBlocksPerSmWithHca = 7;

// A block is one main entry, or four indexer entries.
template <class P>
constexpr int kEntriesPerBlock = kThreads / P::kThreads;
template <class P>
__device__ std::int64_t entry_of_thread(std::int64_t block) {
  return block * kEntriesPerBlock<P> + threadIdx.x / P::kThreads;
}

// --- CSA entries ---

// Half the rows of one main entry, or of four indexer entries.
constexpr int kPieceBytes = kPerThread * static_cast<int>(sizeof(float));
using CsaStage = C4Stage<kThreads, kPieceBytes>;

// A value: device code has no address of the constant, which a choice between two would take.
__device__ inline PlanRecord padding_record() { return kPaddingRecord; }

// Entries of one part, as c4_stream.cuh has them: number `first` of the compact list and every
// `step`-th behind it.
template <class P_, ElementType kType>
class CsaEntries {
 public:
  using P = P_;
  using Half = C4Half<P, kType, ElementType::kFloat32, CsaStage>;
  static constexpr int kElement = static_cast<int>(bytes_of(kType));

  struct Entry {
    std::int32_t position;  // negative: no entry
    std::int32_t older;     // leading window rows that stand in the seat
    std::int32_t seat;
    std::int64_t location;
    __device__ bool live() const { return position >= 0; }
    __device__ int first() const { return first_window_row(position); }
    __device__ int from_state() const { return older; }
  };

  // Asks for the first record, beside the header.
  __device__ CsaEntries(const AppendParams& params, int first, int step, Scratch<P>* scratch)
      : params_(params),
        part_(csa_part<P>(params)),
        index_(first),
        step_(step),
        ahead_(first < params.csa_entry_capacity ? params.csa_entries[first] : padding_record()),
        scratch_(scratch) {}

  // Now that it is known how many there are.
  __device__ void start(int entries) {
    entries_ = entries;
    if (index_ >= entries_) ahead_ = padding_record();
  }

  __device__ Entry next() {
    Entry entry{static_cast<std::int32_t>(ahead_.position),
                static_cast<std::int32_t>(ahead_.window_len), -1, -1};
    if (entry.live()) {
      const auto input_row = static_cast<std::int32_t>(ahead_.ragged_id);  // of the closing token
      const TokenRecord& token = params_.tokens[input_row];
      entry.seat = token.seat;
      entry.location = token.csa_location;
      row_ = static_cast<const std::byte*>(part_.rows.data) +
             (std::int64_t{input_row} - (kC4Window - 1) + entry.first()) * stride_bytes() +
             value_channel<P>(entry.first()) * kElement;
      index_ += step_;
      ahead_ = index_ < entries_ ? params_.csa_entries[index_] : padding_record();
    }
    return entry;
  }

  __device__ void send(const Entry& entry, int begin, CsaStage& stage) {
    Half::send(stage, begin, entry.older, row_, stride_bytes(), [&](int i) {
      return reinterpret_cast<const std::byte*>(
          state_row<P>(part_, entry.seat, entry.position - (kC4Window - 1) + i) +
          value_channel<P>(i));
    });
    row_ += kC4HalfRows * stride_bytes() + P::kDim * kElement;  // to the second half
  }

  __device__ void prepare(const Entry& entry) {
    finish_ = load_csa_finish<P>(params_, part_, entry.position);
  }

  __device__ void finish(const Entry& entry, const Folds<kPerThread>& folds) {
    Scratch<P>& scratch = scratch_[turn_];
    turn_ ^= 1;
    if (entry.seat < 0 || entry.location < 0) {
      P::sync();  // one barrier an entry: the scratch of the entry in front is free behind the next
      return;
    }
    finish_csa<P>(params_, part_, finish_, folds, entry.location, entry.seat, scratch);
  }

 private:
  __device__ std::int64_t stride_bytes() const { return part_.rows.stride * kElement; }

  const AppendParams& params_;
  const CsaPart& part_;
  const std::byte* row_ = nullptr;  // the thread's value piece of the row to send next
  int index_, step_, entries_ = 0;
  PlanRecord ahead_;
  Scratch<P>* scratch_;
  int turn_ = 0;
  Finish<P> finish_{};
};

// Block `block` of the `blocks` that share the entries of one part out.
template <class P, ElementType kType>
__device__ void append_csa_entries(const AppendParams& params, int block, int blocks,
                                   CsaStage* stages, Scratch<P>* scratch) {
  CsaEntries<P, kType> job(params, static_cast<int>(entry_of_thread<P>(block)),
                           blocks * kEntriesPerBlock<P>, scratch);
  Channels<kPerThread> bias[kC4Window];
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) bias[i] = load_c4_bias<P>(csa_part<P>(params), i);
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape, params.planned_form)) return;
  job.start(min_of(header.csa_entries, params.csa_entry_capacity));
  stream_c4_entries(job, bias, stages);
}

template <ElementType kType>
__global__ void __launch_bounds__(kThreads, kCsaBlocksPerSm)
    append_ragged_csa(const __grid_constant__ AppendParams params) {
  extern __shared__ CsaStage stages[];
  __shared__ Scratch<Main> main_scratch[2];
  __shared__ Scratch<Keys> keys_scratch[2];
  pdl_wait();
  pdl_trigger();
  // An indexer entry has a quarter of a main entry's channels: one block in five.
  const int blocks = static_cast<int>(gridDim.x);
  const int indexer = !has(params.csa.rows)       ? blocks
                      : !has(params.indexer.rows) ? 0
                                                  : ceil_div(blocks, 5);
  const int block = static_cast<int>(blockIdx.x);
  if (block < indexer) {
    append_csa_entries<Keys, kType>(params, block, indexer, stages, keys_scratch);
  } else {
    append_csa_entries<Main, kType>(params, block - indexer, blocks - indexer, stages,
                                    main_scratch);
  }
}

// --- HCA entries ---

// One block stays on a multiprocessor, with room for some entries at once: each group of 128
// threads folds one. So entries spread evenly over the multiprocessors, whatever blocks of the
// kernel in front still stand: blocks of one entry each would crowd where there is room.
constexpr int kHcaGroups = 4;
constexpr int kHcaThreads = kHcaGroups * kThreads;

struct HcaGroup : Main {
  __device__ static int group() { return static_cast<int>(threadIdx.x) / kThreads; }
  __device__ static void sync() {
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(1 + group()), "n"(kThreads) : "memory");
  }
};

// The tokens of a batch row that no entry of the step has taken.
__device__ inline HcaSpan folded_span(const PlanGeometry& geometry, const BatchRowRecord& row) {
  const std::int32_t first = first_folded_position(geometry, row);
  return {row.first_token + std::int64_t{first - row.start}, first,
          row.start + row.live_tokens - first};
}

// The fold that a long batch row leaves for later steps.
template <ElementType kType>
__device__ void keep_long_fold(const AppendParams& params, const BatchRowRecord& row,
                               HcaStages& stages) {
  const HcaPart& part = params.hca;
  const HcaSpan span = folded_span(params.geometry, row);
  if (span.count == 0) return;
  HcaRows<kType> rows(stages, part, span);
  Folds<kPerThread> folds = begin_fold<Main>(part, row.seat, row.start, span.position);
  rows.template fold<true>(folds);
  store_fold<Main>(part, row.seat, row.start + row.live_tokens, folds);
}

// Its window goes through the scratch, and it leaves one fold behind.
__device__ inline bool is_long_and_lives(const AppendParams& params, const BatchRowRecord& row) {
  return row.seat >= 0 && row.live_tokens > 0 && !is_short(params.geometry, row.live_tokens);
}

// Whether an entry of the step reads the bank that the seat had: its group writes the next one.
__device__ inline bool resumes_entry(const AppendParams& params, const BatchRowRecord& row) {
  return row.start % kHcaWindow != 0 && first_folded_position(params.geometry, row) > row.start;
}

// One HCA entry: its fold so far, where the window began before this step, and the rows since.
template <ElementType kType>
__device__ void append_hca_entry(const AppendParams& params, const PlanRecord& record,
                                 HcaStages& stages, Scratch<HcaGroup>& scratch) {
  using P = HcaGroup;
  const HcaPart& part = params.hca;
  const std::int64_t input_row = record.ragged_id;
  const auto p = static_cast<std::int32_t>(record.position);
  const int count = kHcaWindow - static_cast<int>(record.window_len);
  const HcaSpan span{input_row - (count - 1), p - (count - 1), count};
  HcaRows<kType> rows(stages, part, span);  // on their way while the rest is looked up
  const TokenRecord& token = params.tokens[input_row];
  const std::int32_t seat = token.seat;
  const std::int64_t location = token.hca_location;
  const Finish<P> finish = load_hca_finish<P>(params, p);
  if (seat < 0 || location < 0) {
    wait_for_copies<0>();
    P::sync();  // as in CsaEntries::finish
    return;
  }
  // Inside a window only the first position of the step can stand first.
  Folds<kPerThread> folds = begin_fold<P>(part, seat, span.position, span.position);
  rows.template fold<false>(folds);
  finish_main<P>(params, part.pages, finish, folds, location, seat, scratch);
}

// What a group does: an entry, and behind one that has read the seat's bank the fold that is kept
// next, by threads that each write what they have read; behind the entries, the folds of batch rows
// whose bank no entry reads.
template <ElementType kType>
__device__ void append_hca_items(const AppendParams& params, const PlanHeader& header,
                                 HcaStages& stages, Scratch<HcaGroup> (&scratch)[2]) {
  const std::int64_t entries = min_of(header.hca_entries, params.hca_entry_capacity);
  const std::int64_t items = entries + header.used_rows;
  int turn = 0;
  // All blocks get an item before one gets its second.
  for (std::int64_t index = std::int64_t{HcaGroup::group()} * gridDim.x + blockIdx.x; index < items;
       index += std::int64_t{gridDim.x} * kHcaGroups) {
    if (index >= entries) {
      const BatchRowRecord row = params.rows[index - entries];
      if (is_long_and_lives(params, row) && !resumes_entry(params, row)) {
        keep_long_fold<kType>(params, row, stages);
      }
      continue;
    }
    const PlanRecord record = params.hca_entries[index];
    append_hca_entry<kType>(params, record, stages, scratch[turn]);
    turn ^= 1;
    if (record.window_len == 0) continue;
    const BatchRowRecord row = params.rows[record.batch_id];
    if (is_long_and_lives(params, row)) keep_long_fold<kType>(params, row, stages);
  }
}

__global__ void __launch_bounds__(kHcaThreads)
    append_ragged_hca(const __grid_constant__ AppendParams params) {
  extern __shared__ HcaStages hca_stages[];
  __shared__ Scratch<HcaGroup> scratch[kHcaGroups][2];
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape, params.planned_form)) return;
  const int group = HcaGroup::group();
  with_row_type(params.hca.rows, [&](auto type) {
    append_hca_items<decltype(type)::value>(params, header, hca_stages[group], scratch[group]);
  });
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
  if (!is_long_and_lives(params, row)) return;
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
  if (!is_planned(header, params.shape, params.planned_form)) return;
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

// The folds that later steps read, of a short batch row: any prefix may be kept.
__device__ void keep_short_folds(const AppendParams& params, std::int64_t batch_row) {
  const BatchRowRecord row = params.rows[batch_row];
  if (row.seat < 0 || row.live_tokens <= 0 || !is_short(params.geometry, row.live_tokens)) return;
  const HcaPart& part = params.hca;
  const HcaSpan span = folded_span(params.geometry, row);
  Folds<kPerThread> folds = begin_fold<Main>(part, row.seat, row.start, span.position);
  ShortRows<Main, 2> rows;
  rows.load_bias(part, span, 0);
  fold_short(folds, rows, part, span, [&](int i) {
    const std::int32_t p = span.position + i;
    if (keeps_fold(params.geometry, row, p)) store_fold<Main>(part, row.seat, p + 1, folds);
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
  if (!is_long_and_lives(params, row)) return;
  for_window_entries(part, [&](int k) {
    const std::int32_t j = row.live_tokens - 1 - k;
    if (j < 0) return;
    const TokenRecord& token = params.tokens[std::int64_t{row.first_token} + j];
    if (token.ring_location < 0 || token.scratch_location < 0) return;
    copy_entry(params.window.scratch, token.scratch_location, params.window.ring,
               token.ring_location);
  });
}

// Folding takes registers that copying need not: layers without HCA do without.
template <bool kWithHca>
__global__ void __launch_bounds__(kThreads)
    append_ragged_seat(const __grid_constant__ AppendParams params) {
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape, params.planned_form)) {
    if (threadIdx.x < kWarp) report_unplanned(params);
    return;
  }
  const SeatWork work = seat_work(params, header.used_rows);
  for (std::int64_t block = blockIdx.x; block < work.total(); block += gridDim.x) {
    std::int64_t at = block;
    if (at < work.hca) {
      if constexpr (kWithHca) {
        keep_short_folds(params, at);
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
                       std::size_t shared_bytes = 0, int threads = kThreads) {
    if (shared_bytes > 0) allow_shared_bytes(kernel, shared_bytes);
    launch(kernel, linear_grid(blocks_of(most, blocks_per_sm)),
           dim3(static_cast<unsigned>(threads)), shared_bytes, stream, pdl != Pdl::kOff, params);
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
    run(kernel,
        (csa ? entries : 0) +
            (indexer ? ceil_div<std::int64_t>(entries, kEntriesPerBlock<Keys>) : 0),
        kCsaBlocksPerSm, kC4Stages * sizeof(CsaStage));
  }
  // One block even for no work: it is the one that reports a missing plan.
  const std::int64_t seat = max_of<std::int64_t>(seat_work(params, rows).total(), 1);
  if (!has(params.hca.rows)) return run(append_ragged_seat<false>, seat, kSeatBlocksPerSm);
  run(append_ragged_hca, params.hca_entry_capacity + rows, kHcaBlocksPerSm,
      kHcaGroups * sizeof(HcaStages), kHcaThreads);
  run(append_ragged_seat<true>, seat, kSeatBlocksPerSmWithHca);
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
