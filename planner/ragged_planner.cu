// Plans a ragged shape in one kernel, without a word between its blocks: each block sums tokens and
// closed entries over all batch rows, tile by tile, so that any number of rows works, and keeps the
// rows that its own tokens belong to. A second kernel, or blocks that wait for each other, would
// take longer than the sums. Every place follows from the sums: no order is left to chance.
#include <quire/planner/planner.cuh>
#include <quire/planner/read_lists.cuh>

namespace quire::cuda {

namespace {

constexpr int kThreads = 512;     // and as many tokens a block: 65,536 of them fill an H200 once
constexpr int kListTokens = 128;  // a block's where there are lists to write, 128 locations a token
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerThread = 2;
constexpr int kTileRows = kThreads * kRowsPerThread;
// Batch row r is written by block r mod blocks, with its page table and its list. There are enough
// blocks that none has more than so many of a tile.
constexpr int kOwnRows = 8;

// A live batch row that has tokens in a block, and the places of its first entries.
struct alignas(16) HeldRow {
  BatchRowRecord record;
  std::int32_t batch_row, csa_base, hca_base, unused;
};

// Rows that do not fit the shape are summed too: the sum stops here, which is as good as any number
// above the shape's tokens.
constexpr std::uint32_t kTokenSumMost = INT32_MAX;

struct AddTokens {
  __host__ __device__ std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const {
    return min_of(a + b, kTokenSumMost);
  }
};

using TokenScan = cub::BlockScan<std::uint32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
using EntryScan = cub::BlockScan<EntryCounts, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

struct Shared {
  typename TokenScan::TempStorage token_scan;
  typename EntryScan::TempStorage entry_scan;
  // Token i of the block belongs to the row held at the highest bit that is set at i or below, or
  // to none that lives.
  std::uint32_t begins[kWarps];
  HeldRow held[kThreads];
  BatchRowRecord own[2]
                    [kOwnRows];   // of this tile and of the one before, which others may still read
  TokenRecord records[kThreads];  // on their way to memory
  std::int32_t short_rows, used_rows;
};

struct Sums {
  std::uint32_t tokens = 0;
  EntryCounts entries;
};

// Input rows that a block writes.
struct TokenRange {
  std::int64_t first;
  int count;
};

// First batch row of the tile that this block writes; the next ones follow at gridDim.x.
__device__ std::uint32_t first_own_row(std::uint32_t tile) {
  const std::uint32_t behind = tile % gridDim.x;
  return tile + (blockIdx.x + gridDim.x - behind) % gridDim.x;
}

__device__ void hold_row(Shared& shared, const TokenRange& tokens, std::int32_t batch_row,
                         const BatchRowRecord& row, const EntryCounts& base) {
  const std::int64_t begin = row.first_token - tokens.first;
  if (row.live_tokens == 0 || begin >= tokens.count || begin + row.live_tokens <= 0) return;
  const auto at = static_cast<std::uint32_t>(max_of(begin, std::int64_t{0}));
  shared.held[at] = {row, batch_row, base.csa, base.hca, 0};
  atomicOr(&shared.begins[at / 32], 1u << at % 32);  // several rows of a warp, in any order
}

__device__ void write_own_row(const PlanParams& params, std::int32_t batch_row,
                              const ResolvedRow& resolved) {
  const BatchRowRecord& row = resolved.record;
  write_batch_row(params, batch_row, row);
  add_to_report(*params.plan.report, report_counter(*params.plan.report, resolved.why), row.seat);
}

// The first long row of the tile and the last with a seat; whole warps. A minimum and a maximum: the
// same whoever comes first.
__device__ void note_rows(Shared& shared, std::int32_t first_row, const bool* is_long,
                          const AppliedRow* applied) {
  static_assert(kRowsPerThread == 2);
  const std::int32_t used = applied[1].seat >= 0 ? 2 : applied[0].seat >= 0 ? 1 : 0;
  const unsigned long_lanes = __ballot_sync(~0u, is_long[0] || is_long[1]);
  const unsigned used_lanes = __ballot_sync(~0u, used > 0);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  if (lane == __ffs(static_cast<int>(long_lanes)) - 1) {
    atomicMin(&shared.short_rows, first_row + (is_long[0] ? 0 : 1));
  }
  if (lane == 31 - __clz(static_cast<int>(used_lanes))) {
    atomicMax(&shared.used_rows, first_row + used);
  }
}

// Sums over the rows of one tile, behind `before`: holds and writes what is this block's. Returns
// the sums behind the tile. Ends with a barrier behind which `own` can be read.
__device__ Sums plan_tile(const PlanParams& params, const AppliedPlan& plan,
                          const TokenRange& block_tokens, std::uint32_t tile, const Sums& before,
                          Shared& shared, BatchRowRecord* own) {
  const std::int32_t first_row = static_cast<std::int32_t>(tile + threadIdx.x * kRowsPerThread);
  AppliedRow applied[kRowsPerThread];
  SeatState states[kRowsPerThread];
  std::uint32_t tokens[kRowsPerThread];
  for (int i = 0; i < kRowsPerThread; ++i) {
    applied[i] = {-1, 0};
    if (first_row + i < params.shape.rows) {
      applied[i] = applied_row(params.plan, plan, first_row + i);
    }
    tokens[i] = static_cast<std::uint32_t>(applied[i].tokens);
  }
  for (int i = 0; i < kRowsPerThread; ++i) states[i] = seat_state(params.table, applied[i].seat);

  // Needs no seat: summed while their states are on the way.
  std::uint32_t tokens_before[kRowsPerThread], tile_tokens;
  TokenScan(shared.token_scan).ExclusiveScan(tokens, tokens_before, 0u, AddTokens{}, tile_tokens);

  ResolvedRow rows[kRowsPerThread];
  EntryCounts entries[kRowsPerThread], entries_before[kRowsPerThread], tile_entries;
  bool is_long[kRowsPerThread];
  for (int i = 0; i < kRowsPerThread; ++i) {
    rows[i] = plan_ragged_row(params, plan, applied[i], states[i],
                              AddTokens{}(before.tokens, tokens_before[i]));
    entries[i] = entries_closed_by(rows[i].record);
    is_long[i] = !is_short(params.geometry, applied[i].tokens);
  }
  EntryScan(shared.entry_scan)
      .ExclusiveScan(entries, entries_before, EntryCounts{}, AddSums{}, tile_entries);

  if (blockIdx.x == 0) note_rows(shared, first_row, is_long, applied);
  const std::uint32_t first_own = first_own_row(tile);
  for (int i = 0; i < kRowsPerThread; ++i) {
    const std::int32_t r = first_row + i;
    if (r >= params.shape.rows) break;
    hold_row(shared, block_tokens, r, rows[i].record, before.entries + entries_before[i]);
    const std::uint32_t behind = static_cast<std::uint32_t>(r) - first_own;
    if (static_cast<std::uint32_t>(r) < first_own || behind % gridDim.x != 0) continue;
    own[behind / gridDim.x] = rows[i].record;
    write_own_row(params, r, rows[i]);
  }
  __syncthreads();
  return {AddTokens{}(before.tokens, tile_tokens), before.entries + tile_entries};
}

// Page tables and HCA lists of this block's rows of a tile; each row begins with other warps.
template <bool kReadLists>
__device__ void write_own_lists(const PlanParams& params, std::uint32_t tile,
                                const BatchRowRecord* own) {
  const auto end = static_cast<std::uint32_t>(
      min_of(std::int64_t{tile} + kTileRows, std::int64_t{params.shape.rows}));
  int at = 0;
  for (std::uint32_t row = first_own_row(tile); row < end; row += gridDim.x, ++at) {
    const auto r = static_cast<std::int32_t>(row);
    const int thread = static_cast<int>(threadIdx.x + kThreads - at * 64u) % kThreads;
    copy_page_table_row<4>(params, r, own[at], thread, kThreads);
    if (kReadLists && params.plan.read.hca_locations != nullptr) {
      write_hca_list(params, r, 0, params.plan.read.hca_width, own[at], hca_entries_after(own[at]));
    }
  }
}

// Index in `held` of the row that token `token` of the block belongs to; -1: none. Whole warps.
__device__ int held_index(const Shared& shared, int token) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int at = token / 32;
  const std::uint32_t word = lane < kWarps ? shared.begins[lane] : 0;
  const unsigned earlier_words = __ballot_sync(~0u, word != 0) & ((1u << at) - 1);
  const int earlier = 31 - __clz(static_cast<int>(earlier_words));  // -1: none
  const std::uint32_t here = __shfl_sync(~0u, word, at) & (~0u >> (31 - token % 32));
  const std::uint32_t there = __shfl_sync(~0u, word, max_of(earlier, 0));
  if (here != 0) return at * 32 + 31 - __clz(static_cast<int>(here));
  return earlier < 0 ? -1 : earlier * 32 + 31 - __clz(static_cast<int>(there));
}

// Records of a warp's tokens through shared memory: stores of neighbouring lanes touch, where 48
// bytes apart each would fill half a sector of the L2.
__device__ void store_records(const PlanParams& params, std::int64_t token,
                              const TokenRecord& record, Shared& shared) {
  shared.records[threadIdx.x] = record;
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first = token - lane;
  constexpr int kPieces = sizeof(TokenRecord) / sizeof(int4);
  const auto pieces =
      static_cast<int>(min_of(std::int64_t{params.shape.tokens} - first, std::int64_t{32})) *
      kPieces;
  const auto* from = reinterpret_cast<const int4*>(&shared.records[threadIdx.x / 32 * 32]);
  auto* to = reinterpret_cast<int4*>(params.plan.tokens + first);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (lane + 32 * i < pieces) to[lane + 32 * i] = from[lane + 32 * i];
  }
}

// The tokens of this block, one a thread; whole warps.
__device__ void write_tokens(const PlanParams& params, const TokenRange& tokens, Shared& shared) {
  const int at = static_cast<int>(threadIdx.x);
  if (at >= tokens.count) return;
  const std::int64_t token = tokens.first + at;
  const int index = held_index(shared, at);
  TokenRecord record = inert_token();
  if (token < params.shape.tokens) {
    const auto t = static_cast<std::int32_t>(token);
    if (index >= 0) {
      const HeldRow held = shared.held[index];
      record = plan_token(params.geometry, params.table, held.record, held.batch_row,
                          t - held.record.first_token);
      write_closed_entries(params, t, record, held.record, {held.csa_base, held.hca_base});
    }
    show_token(params, t, record);
  }
  store_records(params, token, record, shared);
}

// Each warp a few of the block's tokens, one by one.
__device__ void write_window_lists(const PlanParams& params, const TokenRange& tokens,
                                   const Shared& shared) {
  constexpr int kEach = kListTokens / kWarps;
  const int begin = static_cast<int>(threadIdx.x) / 32 * kEach;
  const int indices = held_index(shared, begin + static_cast<int>(threadIdx.x) % kEach);
  for (int i = 0; i < kEach && tokens.first + begin + i < params.shape.tokens; ++i) {
    const auto t = static_cast<std::int32_t>(tokens.first + begin + i);
    const int index = __shfl_sync(~0u, indices, i);
    if (index < 0) {
      write_window_list(params, t, no_batch_row(), -1, 0);
    } else {
      const HeldRow& held = shared.held[index];
      write_window_list(params, t, held.record, held.batch_row, t - held.record.first_token);
    }
  }
}

// Pads a compact list behind its entries; all blocks take part.
__device__ void pad_entries(PlanRecord* list, std::int32_t entries, std::int32_t capacity) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = entries + thread_in_grid(); i < capacity; i += step) {
    list[i] = kPaddingRecord;
  }
}

// With read lists and without, compiled apart: without them the kernel is as small as it can be.
template <bool kReadLists>
__global__ void __launch_bounds__(kThreads, 2)
    ragged_plan_kernel(const __grid_constant__ PlanParams params) {
  __shared__ Shared shared;
  before_stores();
  if (threadIdx.x < kWarps) shared.begins[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.short_rows = params.shape.rows;
    shared.used_rows = 0;
  }
  __syncthreads();
  constexpr int kTokens = kReadLists ? kListTokens : kThreads;
  const TokenRange tokens{std::int64_t{blockIdx.x} * kTokens, kTokens};
  const AppliedPlan plan = applied_plan(params);
  Sums all;
  int parity = 0;
  for (std::int64_t at = 0; at < params.shape.rows; at += kTileRows, parity ^= 1) {
    const auto tile = static_cast<std::uint32_t>(at);
    BatchRowRecord* own = shared.own[parity];
    all = plan_tile(params, plan, tokens, tile, all, shared, own);
    write_own_lists<kReadLists>(params, tile, own);
  }
  if (tokens.first < params.shape.tokens) {
    write_tokens(params, tokens, shared);
    if (kReadLists && params.plan.read.window_locations != nullptr) {
      write_window_lists(params, tokens, shared);
    }
  }
  const std::int32_t csa_entries = min_of(all.entries.csa, params.csa_entry_capacity);
  const std::int32_t hca_entries = min_of(all.entries.hca, params.hca_entry_capacity);
  pad_entries(params.plan.csa_entries, csa_entries, params.csa_entry_capacity);
  pad_entries(params.plan.hca_entries, hca_entries, params.hca_entry_capacity);
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  // Fields that no thread of this kernel reads.
  params.plan.header->steps_at_plan = plan.steps_left;
  params.plan.header->short_rows = shared.short_rows;
  params.plan.header->used_rows = shared.used_rows;
  params.plan.header->used_tokens = ragged_first_token(params, all.tokens);
  params.plan.header->csa_entries = csa_entries;
  params.plan.header->hca_entries = hca_entries;
  params.plan.views.cu_extend[params.shape.rows] = ragged_first_token(params, all.tokens);
}

}  // namespace

void launch_ragged_plan(const PlanParams& params, cudaStream_t stream) {
  const ReadLists& read = params.plan.read;
  const bool lists = read.window_locations != nullptr || read.hca_locations != nullptr;
  const std::int64_t token_blocks = blocks_for(params.shape.tokens, lists ? kListTokens : kThreads);
  const std::int64_t row_blocks = blocks_for(min_of(params.shape.rows, kTileRows), kOwnRows);
  const auto kernel = lists ? ragged_plan_kernel<true> : ragged_plan_kernel<false>;
  launch_plain(kernel, max_of(token_blocks, row_blocks), kThreads, params, stream);
}

void load_ragged_planner() {
  load_kernel(ragged_plan_kernel<false>);
  load_kernel(ragged_plan_kernel<true>);
}

}  // namespace quire::cuda
