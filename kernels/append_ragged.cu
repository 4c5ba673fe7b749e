// All cache work of one layer in a ragged step (DESIGN 4, 7): entries first, one kernel for each kind
// of entry, and the seat last, once everything that reads it has been read. Nothing that a kernel in
// front may write is loaded before the wait.
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
constexpr int kThreads = Main::kBlockThreads;
constexpr int kWarps = Main::kBlockWarps;
static_assert(Keys::kEntriesPerBlock == kWarps);

// --- CSA entries ---

// One piece is what a thread reads of one row: its channels of the values or of the scores.
constexpr int kPieceBytes = kPerThread * static_cast<int>(sizeof(float));
constexpr int kCsaStages = 2;
constexpr int kCsaBlocksPerSm = 3;

// Rows of one main entry, or of four indexer entries. A thread reads what it has copied itself.
struct alignas(16) CsaStage {
  std::byte pieces[2 * kC4Window][kThreads][kPieceBytes];
};

// One entry of the plan, as far as its rows are concerned.
struct CsaEntry {
  std::int64_t input_row = 0;  // of the closing token
  std::int32_t position = 0;
  int first = 0;       // window row that starts the fold
  int from_state = 0;  // leading window rows that stand in the seat
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

template <class P, ElementType kType>
__device__ void send_rows(const CsaPart& part, const CsaEntry& entry, CsaStage& stage) {
  constexpr int kBytes = kPerThread * (kType == ElementType::kFloat32 ? 4 : 2);
  constexpr int kElement = kBytes / kPerThread;
  const std::byte* input = static_cast<const std::byte*>(part.rows.data) +
                           (entry.input_row - (kC4Window - 1)) * part.rows.stride * kElement;
  const std::int32_t oldest = entry.position - (kC4Window - 1);
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    if (i < entry.first) continue;
    std::byte* value = stage.pieces[2 * i][threadIdx.x];
    std::byte* score = stage.pieces[2 * i + 1][threadIdx.x];
    if (i < entry.from_state) {
      const float* row = state_row<P>(part, entry.token->seat, oldest + i);
      copy_to_shared<kPieceBytes, false>(value, row + value_channel<P>(i));
      copy_to_shared<kPieceBytes, false>(score, row + score_channel<P>(i));
    } else {
      const std::byte* row = input + i * part.rows.stride * kElement;
      copy_to_shared<kBytes, false>(value, row + value_channel<P>(i) * kElement);
      copy_to_shared<kBytes, false>(score, row + score_channel<P>(i) * kElement);
    }
  }
}

template <ElementType kType>
__device__ Channels<kPerThread> read_piece(const std::byte* piece, bool from_state) {
  if (kType == ElementType::kFloat32 || from_state) {
    return load_fresh<kPerThread>(reinterpret_cast<const float*>(piece));
  }
  return load_fresh_bf16<kPerThread>(reinterpret_cast<const std::uint16_t*>(piece));
}

template <class P, ElementType kType>
__device__ void append_csa_entry(const AppendParams& params, const CsaEntry& entry,
                                 const Channels<kPerThread> (&bias)[kC4Window],
                                 const CsaStage& stage, Scratch<kPerThread>& scratch) {
  const CsaPart& part = csa_part<P>(params);
  const std::int32_t seat = entry.token->seat;
  const std::int64_t location = entry.token->csa_location;
  if (seat < 0 || location < 0) {
    P::sync();  // one barrier an entry: the scratch of the entry in front is free behind the next
    return;
  }
  const Finish<P> finish = load_csa_finish<P>(params, part, entry.position);
  Folds<kPerThread> folds{};
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    if (i < entry.first) continue;
    const bool from_state = i < entry.from_state;
    fold_row(folds, (i == 0 || i == kC4Overlap) && i == entry.first,
             read_piece<kType>(stage.pieces[2 * i + 1][threadIdx.x], from_state), bias[i],
             read_piece<kType>(stage.pieces[2 * i][threadIdx.x], from_state));
  }
  finish_csa<P>(params, part, finish, folds, location, seat, scratch);
}

// Entries of one part: block `block` of the `blocks` that share them out. Of the entry in front
// everything is there, of the next one its rows are on their way, of the one behind it the record.
template <class P, ElementType kType>
__device__ void stream_csa_entries(const AppendParams& params, std::int64_t entries,
                                   std::int64_t block, std::int64_t blocks, CsaStage* stages,
                                   Scratch<kPerThread>* scratch) {
  const CsaPart& part = csa_part<P>(params);
  Channels<kPerThread> bias[kC4Window];
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) bias[i] = load_c4_bias<P>(part, i);
  const auto send = [&](const CsaEntry& entry, int stage) {
    if (entry.live()) send_rows<P, kType>(part, entry, stages[stage]);
    commit_copies();
  };
  std::int64_t index = P::entry(block);
  const std::int64_t step = blocks * P::kEntriesPerBlock;
  CsaEntry entry = csa_entry(params, record_at(params, entries, index));
  PlanRecord ahead = record_at(params, entries, index + step);
  send(entry, 0);
  for (int stage = 0; block * P::kEntriesPerBlock < entries; block += blocks, stage ^= 1) {
    const CsaEntry next = csa_entry(params, ahead);
    send(next, stage ^ 1);
    ahead = record_at(params, entries, index + 2 * step);
    index += step;
    wait_for_copies<1>();
    if (entry.live()) append_csa_entry<P, kType>(params, entry, bias, stages[stage], scratch[stage]);
    entry = next;
  }
}

template <ElementType kType>
__global__ void __launch_bounds__(kThreads, kCsaBlocksPerSm)
    append_ragged_csa(const __grid_constant__ AppendParams params) {
  extern __shared__ CsaStage stages[];
  __shared__ Scratch<kPerThread> scratch[kCsaStages];
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  if (!is_planned(header, params.shape)) return;
  const std::int64_t entries = min_of(header.csa_entries, params.csa_entry_capacity);
  // An indexer entry has a quarter of a main entry's channels: one block in five.
  const std::int64_t blocks = gridDim.x;
  const std::int64_t indexer = !has(params.csa.rows)       ? blocks
                               : !has(params.indexer.rows) ? 0
                                                           : max_of<std::int64_t>(blocks / 5, 1);
  const std::int64_t block = blockIdx.x;
  if (block < indexer) {
    stream_csa_entries<Keys, kType>(params, entries, block, indexer, stages, scratch);
  } else {
    stream_csa_entries<Main, kType>(params, entries, block - indexer, blocks - indexer, stages,
                                    scratch);
  }
}

// --- HCA entries ---

// Entries whose windows one block folds side by side. Two where there are enough for all of the GPU.
constexpr int kHcaEntriesMost = 2;

// kEntries HCA entries: their folds so far, where a window began before this step, and the rows
// since.
template <int kEntries, ElementType kType>
__device__ void append_hca_entries(const AppendParams& params, const PlanRecord (&records)[kEntries],
                                   HcaStages<kEntries>& stages,
                                   Scratch<kPerThread> (&scratch)[kEntries]) {
  const HcaPart& part = params.hca;
  WindowSpan spans[kEntries];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (records[e].ragged_id == kPaddingRaggedId) continue;
    const int first = static_cast<int>(records[e].window_len);
    spans[e] = {std::int64_t{records[e].ragged_id} - (kHcaWindow - 1), first, kHcaWindow};
  }
  HcaRows<kEntries, kType> rows(stages, part, spans);

  Folds<kPerThread> folds[kEntries];
  std::int32_t seat[kEntries];
  std::int64_t location[kEntries];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    seat[e] = -1;
    location[e] = -1;
    if (records[e].ragged_id == kPaddingRaggedId) continue;
    const TokenRecord& token = params.tokens[records[e].ragged_id];
    seat[e] = token.seat;
    location[e] = token.hca_location;
    // Inside a window only the first position of the step can stand first.
    const auto start = static_cast<std::int32_t>(records[e].position) - (kHcaWindow - 1) +
                       static_cast<std::int32_t>(records[e].window_len);
    if (seat[e] >= 0) folds[e] = begin_fold<Main>(part, seat[e], start, start);
  }
  rows.fold(folds);
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (seat[e] < 0 || location[e] < 0) continue;
    const Finish<Main> finish =
        load_hca_finish<Main>(params, static_cast<std::int32_t>(records[e].position));
    finish_hca<Main>(params, finish, folds[e], location[e], seat[e], scratch[e]);
  }
}

template <int kEntries>
__global__ void __launch_bounds__(kThreads)
    append_ragged_hca(const __grid_constant__ AppendParams params) {
  extern __shared__ std::byte hca_stages[];
  __shared__ Scratch<kPerThread> scratch[kEntries];
  pdl_wait();
  pdl_trigger();
  const PlanHeader header = load_header(params.header);
  PlanRecord records[kEntries];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const std::int64_t index = std::int64_t{blockIdx.x} * kEntries + e;
    records[e] = params.hca_entries[min_of<std::int64_t>(index, params.hca_entry_capacity - 1)];
    if (index >= params.hca_entry_capacity) records[e].ragged_id = kPaddingRaggedId;
  }
  if (!is_planned(header, params.shape) || records[0].ragged_id == kPaddingRaggedId) return;
  auto& stages = *reinterpret_cast<HcaStages<kEntries>*>(hca_stages);
  with_row_type(params.hca.rows, [&](auto type) {
    append_hca_entries<kEntries, decltype(type)::value>(params, records, stages, scratch);
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

// A long batch row's window of at most 128 entries is copied by eight blocks, one warp an entry.
constexpr int kCopyBlocksPerRow = 8;
constexpr int kCopyEntriesPerWarp = 128 / (kCopyBlocksPerRow * kWarps);

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

__device__ void append_window_entry(const AppendParams& params, std::int64_t input_row,
                                    Scratch<kPerThread>& scratch) {
  const TokenRecord& token = params.tokens[input_row];
  const auto x = load_input<kPerThread>(params.window.rows, input_row, Main::channel());
  const std::int32_t seat = token.seat;
  const bool in_scratch = token.scratch_location >= 0;
  const std::int64_t location = in_scratch ? token.scratch_location : token.ring_location;
  if (seat < 0 || location < 0) return;
  const Finish<Main> finish =
      load_finish<Main>(params.window.norm_weight, params.rope, token.position);
  const EntryPool& pool = in_scratch ? params.window.scratch : params.window.ring;
  finish_window<Main>(params, finish, x, main_entry(pool, location), seat, scratch);
}

__host__ __device__ inline std::int64_t older_window_blocks(const AppendParams& params) {
  return params.window.copy_older_window ? std::int64_t{kCopyBlocksPerRow} * params.shape.rows : 0;
}

__global__ void __launch_bounds__(kThreads)
    append_ragged_window(const __grid_constant__ AppendParams params) {
  __shared__ Scratch<kPerThread> scratch;
  pdl_wait();
  pdl_trigger();
  if (!is_planned(load_header(params.header), params.shape)) return;
  const std::int64_t older = older_window_blocks(params);
  const std::int64_t block = blockIdx.x;
  if (block < older) {
    copy_older_window(params, block);
  } else {
    append_window_entry(params, block - older, scratch);
  }
}

// --- The seat ---

// State rows that one batch row of a ragged step can write.
__host__ __device__ inline std::int32_t state_writes_max(const PlanGeometry& geometry) {
  return max_of(2 * kCsaRule.ratio - 1, geometry.draft_max + 1);
}

// Blocks of a part stand in front of those of the next; a part that is not there has none.
struct SeatBlocks {
  std::int64_t hca, csa, indexer, window;
  __host__ __device__ std::int64_t total() const { return hca + csa + indexer + window; }
};

__host__ __device__ inline SeatBlocks seat_blocks(const AppendParams& params) {
  const std::int64_t rows = params.shape.rows;
  const std::int64_t writes = state_writes_max(params.geometry) * rows;
  return {has(params.hca.rows) ? rows : 0, has(params.csa.rows) ? writes : 0,
          has(params.indexer.rows) ? ceil_div<std::int64_t>(writes, Keys::kEntriesPerBlock) : 0,
          has(params.window.rows) ? std::int64_t{kCopyBlocksPerRow} * rows : 0};
}

// The folds that later steps read, of one batch row.
__device__ void keep_hca_folds(const AppendParams& params, std::int64_t batch_row,
                               HcaStages<1>& stages) {
  const BatchRowRecord row = params.rows[batch_row];
  if (row.seat < 0 || row.live_tokens <= 0) return;
  const HcaPart& part = params.hca;
  const std::int32_t first = first_folded_position(params.geometry, row);
  const std::int32_t length = row.start + row.live_tokens;
  const HcaSpan span{row.first_token + std::int64_t{first - row.start}, first, length - first};
  if (span.count == 0) return;
  Folds<kPerThread> folds[1] = {begin_fold<Main>(part, row.seat, row.start, first)};
  with_row_type(part.rows, [&](auto type) {
    constexpr ElementType kType = decltype(type)::value;
    if (!is_short(params.geometry, row.live_tokens)) {
      const WindowSpan spans[1] = {window_span(span)};
      HcaRows<1, kType>(stages, part, spans).fold(folds);
      store_fold<Main>(part, row.seat, length, folds[0]);
      return;
    }
    ShortRows<Main> rows;
    rows.load_bias(part, span, 0);
    fold_short<Main>(folds[0], rows, part, span, [&](int i) {
      const std::int32_t p = first + i;
      if (keeps_fold(params.geometry, row, p)) store_fold<Main>(part, row.seat, p + 1, folds[0]);
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
  if (!is_planned(load_header(params.header), params.shape)) {
    report_unplanned(params);
    return;
  }
  const SeatBlocks blocks = seat_blocks(params);
  std::int64_t block = blockIdx.x;
  if constexpr (kWithHca) {
    extern __shared__ std::byte hca_stages[];
    if (block < blocks.hca) {
      keep_hca_folds(params, block, *reinterpret_cast<HcaStages<1>*>(hca_stages));
      return;
    }
    block -= blocks.hca;
  }
  if (block < blocks.csa) {
    write_state<Main>(params, block);
    return;
  }
  block -= blocks.csa;
  if (block < blocks.indexer) {
    write_state<Keys>(params, Keys::entry(block));
  } else {
    keep_window(params, block - blocks.indexer);
  }
}

template <int kEntries, class Run>
void run_hca(const AppendParams& params, const Run& run) {
  constexpr std::size_t kSharedBytes = sizeof(HcaStages<kEntries>);
  allow_shared_bytes(append_ragged_hca<kEntries>, kSharedBytes);
  run(append_ragged_hca<kEntries>,
      ceil_div<std::int64_t>(params.hca_entry_capacity, kEntries), kSharedBytes);
}

}  // namespace

void launch_ragged_append(const AppendParams& params, Pdl pdl, cudaStream_t stream) {
  const auto run = [&](void (*kernel)(AppendParams), std::int64_t blocks,
                       std::size_t shared_bytes = 0) {
    launch(kernel, linear_grid(blocks), dim3(kThreads), shared_bytes, stream, pdl != Pdl::kOff,
           params);
  };
  run(append_ragged_window,
      older_window_blocks(params) + (has(params.window.rows) ? params.shape.tokens : 0));
  const bool csa = has(params.csa.rows), indexer = has(params.indexer.rows);
  if (csa || indexer) {
    const ElementType type = csa ? params.csa.rows.type : params.indexer.rows.type;
    const auto kernel = type == ElementType::kFloat32 ? append_ragged_csa<ElementType::kFloat32>
                                                      : append_ragged_csa<ElementType::kBfloat16>;
    const std::int64_t items = (csa ? std::int64_t{params.csa_entry_capacity} : 0) +
                               (indexer ? ceil_div<std::int64_t>(params.csa_entry_capacity,
                                                                 Keys::kEntriesPerBlock)
                                        : 0);
    constexpr std::size_t kSharedBytes = kCsaStages * sizeof(CsaStage);
    allow_shared_bytes(kernel, kSharedBytes);
    run(kernel, min_of(items, std::int64_t{multiprocessors()} * kCsaBlocksPerSm), kSharedBytes);
  }
  const std::int64_t seat = seat_blocks(params).total();
  if (!has(params.hca.rows)) return run(append_ragged_seat<false>, seat);
  if (params.hca_entry_capacity >= kHcaEntriesMost * multiprocessors()) {
    run_hca<kHcaEntriesMost>(params, run);
  } else {
    run_hca<1>(params, run);
  }
  run(append_ragged_seat<true>, seat, sizeof(HcaStages<1>));
}

void load_ragged_append_kernels() {
  load_kernel(append_ragged_csa<ElementType::kFloat32>);
  load_kernel(append_ragged_csa<ElementType::kBfloat16>);
  load_kernel(append_ragged_hca<1>);
  load_kernel(append_ragged_hca<kHcaEntriesMost>);
  load_kernel(append_ragged_window);
  load_kernel(append_ragged_seat<true>);
  load_kernel(append_ragged_seat<false>);
}

}  // namespace quire::cuda
