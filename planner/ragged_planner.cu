// Plans a ragged shape in one kernel, without a word between its blocks. Blocks have roles, so that
// each has one short chain of dependent loads: some write the records of tokens, some batch rows,
// some long page tables and lists, some the lists of entries, one the header. Each sums what it
// needs over the batch rows, tile by tile, so that any number of rows works. A second kernel, or
// blocks that wait for each other, would take longer than the sums. Every place follows from the
// sums: no order is left to chance.
#include <quire/planner/planner.cuh>
#include <quire/planner/ragged_sums.cuh>
#include <quire/planner/read_lists.cuh>

namespace quire::cuda {

namespace {

// Few warps on each multiprocessor, and many blocks: a chain is as long as its instructions.
// Threads, tokens and batch rows of a block.
struct SmallBlocks : RaggedSizes<128, 128, 8, false> {};
struct LargeBlocks : RaggedSizes<512, 512, 32, false> {};
struct ListBlocks : RaggedSizes<512, 128, 8, true> {};  // 128 locations a token

constexpr std::int32_t kSmallRows = SmallBlocks::kTileRows;
constexpr std::int32_t kSmallTokens = 132 * SmallBlocks::kTokens;  // one block on each of an H200's

// Cells of a row that the block copies which writes the row: its threads, that many each.
constexpr int kCellsAtOnce = 4;
template <class Sizes>
constexpr int kFirstCells = Sizes::kThreadsPerRow* kCellsAtOnce;

// What stands behind is copied by further blocks, a piece by a warp, all of it at once.
constexpr int kPieceAtOnce = 16;
constexpr int kPiece = 32 * kPieceAtOnce;
constexpr std::int64_t kBlocksAtOnce = 2 * 132;  // that many start together, whatever their size

struct RaggedPlanParams {
  PlanParams plan;
  GeometryDivisors<PreparedDivisor> divisors;
  // Blocks of the grid, in this order; behind these one that writes the header, and `table_parts`
  // more for each of `row_blocks`, which share what stands behind the first cells of its rows.
  std::int32_t token_blocks, row_blocks, csa_blocks, hca_blocks, table_parts;
};

// --- Tokens ---

// Records of a warp's tokens through shared memory: stores of neighbouring lanes touch, where 48
// bytes apart each would fill half a sector of the L2.
template <class Sizes>
__device__ void store_records(const PlanParams& params, std::int64_t token,
                              const TokenRecord& record, RaggedShared<Sizes>& shared) {
  shared.records[threadIdx.x] = record;
  __syncwarp();
  const int lane = lane_of_thread();
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

// The tokens of this block, one a thread; whole warps. plan_token() in two parts: what needs no
// page table cell goes out while the cells are on their way.
template <class Sizes>
__device__ void write_tokens(const RaggedPlanParams& ragged, std::int64_t first, int count,
                             RaggedShared<Sizes>& shared) {
  const PlanParams& params = ragged.plan;
  const PlanGeometry& geometry = params.geometry;
  const int at = static_cast<int>(threadIdx.x);
  if (at / 32 * 32 >= count) return;
  const int index = held_index(shared, at);
  const auto t = static_cast<std::int32_t>(first + at);
  PlacedToken token{inert_token(), {-1, 0}, {-1, 0}};
  std::int32_t csa_page = -1;
  std::int32_t hca_page = -1;
  if (index >= 0) {
    const HeldRow held = shared.held[index];
    token = place_token(geometry, ragged.divisors, held.record, held.batch_row,
                        t - held.record.first_token);
    const std::int32_t* cells = params.table.page_table + held.record.seat * params.table.cells;
    if (token.csa.cell >= 0) csa_page = cells[token.csa.cell];
    if (token.hca.cell >= 0) hca_page = cells[token.hca.cell];
  }
  TokenRecord record = token.record;
  if (at < count) show_place(params, t, record);
  load_here(csa_page, hca_page);
  if (token.csa.cell >= 0) {
    record.csa_location =
        location_in_page(csa_page, geometry.csa_entries_per_page, token.csa.in_page);
  }
  if (token.hca.cell >= 0) {
    record.hca_location =
        location_in_page(hca_page, geometry.hca_entries_per_page, token.hca.in_page);
  }
  if (at < count) show_entries(params, t, record);
  store_records(params, first + at, record, shared);
}

// Each warp a few of the block's tokens, one by one.
template <class Sizes>
__device__ void write_window_lists(const PlanParams& params, std::int64_t first, int count,
                                   const RaggedShared<Sizes>& shared) {
  constexpr int kEach = Sizes::kTokens / Sizes::kWarps;
  const int begin = warp_of_thread() * kEach;
  const int indices = held_index(shared, begin + lane_of_thread() % kEach);
  for (int i = 0; i < kEach && begin + i < count; ++i) {
    const auto t = static_cast<std::int32_t>(first + begin + i);
    const int index = __shfl_sync(~0u, indices, i);
    if (index < 0) {
      write_window_list(params, t, no_batch_row(), -1, 0);
    } else {
      const HeldRow& held = shared.held[index];
      write_window_list(params, t, held.record, held.batch_row, t - held.record.first_token);
    }
  }
}

template <class Sizes>
__device__ void plan_tokens(const RaggedPlanParams& ragged, int block,
                            RaggedShared<Sizes>& shared) {
  const PlanParams& params = ragged.plan;
  LoadedRows<Sizes> loaded = load_rows<Sizes>(params, 0);
  const AppliedPlan plan = applied_plan(params);
  const std::int64_t first = std::int64_t{block} * Sizes::kTokens;
  const auto count = static_cast<int>(
      min_of(std::int64_t{params.shape.tokens} - first, std::int64_t{Sizes::kTokens}));
  std::uint32_t before = 0;
  int parity = 0;
  for (std::int64_t tile = 0; tile < params.shape.rows && before < first + count;
       tile += Sizes::kTileRows, parity ^= 1) {
    ThreadRows<Sizes> rows = applied_rows(loaded, params, plan, tile);
    SeatState states[Sizes::kRowsPerThread];
    load_states(params, rows, states);
    // Needs no seat: summed while their states are on the way.
    before = sum_tokens(rows, before, shared.totals[parity][0]);
#pragma unroll
    for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
      const std::int32_t at =
          place_of(std::int64_t{rows.tokens_before[i]} - first, rows.applied[i].tokens, count);
      if (at < 0) continue;
      const ResolvedRow row =
          plan_ragged_row(params, plan, rows.applied[i], states[i], rows.tokens_before[i]);
      hold_row(shared, at, {row.record, rows.first + i, 0, {}});
    }
  }
  __syncthreads();
  write_tokens(ragged, first, count, shared);
  if (Sizes::kReadLists && params.plan.read.window_locations != nullptr) {
    write_window_lists(params, first, count, shared);
  }
}

// --- Batch rows ---

// The batch row of this thread, of those that begin at `first_own`; a few neighbouring threads know
// the same of the same row.
template <class Sizes>
__device__ ResolvedRow resolve_own_row(const PlanParams& params, std::int32_t first_own,
                                       RaggedShared<Sizes>& shared) {
  const int mine = static_cast<int>(threadIdx.x) / Sizes::kThreadsPerRow;
  const std::int32_t r = first_own + mine;
  AppliedRow own{-1, 0, 0, 1};
  if (r < params.shape.rows) own = load_row(params, r);
  LoadedRows<Sizes> loaded = load_rows<Sizes>(params, 0);
  const AppliedPlan plan = applied_plan(params);
  own = applied_row(own, plan, r);
  const SeatState state = seat_state(params.table, params.group, own.seat);

  std::uint32_t before = 0;
  int parity = 0;
  for (std::int64_t tile = 0; tile < std::int64_t{first_own} + Sizes::kOwnRows;
       tile += Sizes::kTileRows, parity ^= 1) {
    ThreadRows<Sizes> rows = applied_rows(loaded, params, plan, tile);
    before = sum_tokens(rows, before, shared.totals[parity][0]);
#pragma unroll
    for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
      const std::int32_t at = rows.first + i - first_own;
      if (at >= 0 && at < Sizes::kOwnRows) shared.own_before[at] = rows.tokens_before[i];
    }
  }
  __syncthreads();
  return plan_ragged_row(params, plan, own, state, shared.own_before[mine]);
}

template <class Sizes>
__device__ void plan_rows(const PlanParams& params, int block, RaggedShared<Sizes>& shared) {
  const std::int32_t first_own = block * Sizes::kOwnRows;
  const int thread = static_cast<int>(threadIdx.x) % Sizes::kThreadsPerRow;
  const std::int32_t r = first_own + static_cast<int>(threadIdx.x) / Sizes::kThreadsPerRow;
  const ResolvedRow resolved = resolve_own_row(params, first_own, shared);
  const BatchRowRecord& row = resolved.record;
  copy_page_table_cells<kCellsAtOnce>(params, r, row.seat, 0,
                                      min_of(shown_cells(row), kFirstCells<Sizes>), thread,
                                      Sizes::kThreadsPerRow);
  if (thread != 0 || r >= params.shape.rows) return;
  write_batch_row(params, r, row);
  add_to_report(*params.plan.report, report_counter(*params.plan.report, resolved.why), row.seat);
}

// --- Long page tables, and HCA lists ---

__host__ __device__ std::int32_t pieces_of(std::int64_t count) {
  return static_cast<std::int32_t>(ceil_div(max_of(count, std::int64_t{0}), std::int64_t{kPiece}));
}

// Pieces of the list of a batch row; lists are written to their end, padding included.
template <class Sizes>
__host__ __device__ std::int32_t list_pieces(const ReadLists& read) {
  const bool lists = Sizes::kReadLists && read.hca_locations != nullptr;
  return lists ? pieces_of(read.hca_width) : 0;
}

// Deals the pieces of these batch rows to the warps of all `table_parts` blocks, row by row: a row
// alone is copied by all of them as well as many are.
template <class Sizes>
__device__ void plan_tables(const RaggedPlanParams& ragged, int block, int part,
                            RaggedShared<Sizes>& shared) {
  const PlanParams& params = ragged.plan;
  const std::int32_t first_own = block * Sizes::kOwnRows;
  const ResolvedRow resolved = resolve_own_row(params, first_own, shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread % Sizes::kThreadsPerRow == 0) {
    shared.own[thread / Sizes::kThreadsPerRow] = resolved.record;
  }
  __syncthreads();
  const int in_lists = list_pieces<Sizes>(params.plan.read);
  int next = part * Sizes::kWarps + warp_of_thread();  // of this warp, counted from the row's first
  for (int i = 0; i < Sizes::kOwnRows && first_own + i < params.shape.rows; ++i) {
    const BatchRowRecord row = shared.own[i];
    const std::int32_t cells = shown_cells(row);
    const int in_cells = pieces_of(cells - kFirstCells<Sizes>);
    for (; next < in_cells + in_lists; next += ragged.table_parts * Sizes::kWarps) {
      if (next < in_cells) {
        const int begin = kFirstCells<Sizes> + next * kPiece;
        copy_page_table_cells<kPieceAtOnce>(params, first_own + i, row.seat, begin,
                                            min_of(begin + kPiece, cells), lane_of_thread(), 32);
      } else {
        const std::int64_t begin = std::int64_t{next - in_cells} * kPiece;
        write_hca_list(params, first_own + i, begin,
                       min_of(begin + kPiece, params.plan.read.hca_width), row,
                       hca_entries_after(row), lane_of_thread(), 32);
      }
    }
    next -= in_cells + in_lists;
  }
}

// --- Entries ---

// Sums the entries of one rule over the batch rows and writes a piece of its compact list, one
// record a thread; behind the entries stands padding.
template <class Sizes, std::int32_t kRatio>
__device__ void plan_entries(const PlanParams& params, int block, PlanRecord* list,
                             std::int32_t capacity, RaggedShared<Sizes>& shared) {
  constexpr CompressionRule kRule = kRatio == kCsaRule.ratio ? kCsaRule : kHcaRule;
  LoadedRows<Sizes> loaded = load_rows<Sizes>(params, 0);
  const AppliedPlan plan = applied_plan(params);
  const std::int64_t first = std::int64_t{block} * Sizes::kThreads;
  std::uint32_t tokens = 0;
  std::uint32_t entries = 0;
  int parity = 0;
  for (std::int64_t tile = 0; tile < params.shape.rows && entries < first + Sizes::kThreads;
       tile += Sizes::kTileRows, parity ^= 1) {
    ThreadRows<Sizes> rows = applied_rows(loaded, params, plan, tile);
    SeatState states[Sizes::kRowsPerThread];
    load_states(params, rows, states);
    tokens = sum_tokens(rows, tokens, shared.totals[parity][0]);
    BatchRowRecord records[Sizes::kRowsPerThread];
    std::uint32_t closed[Sizes::kRowsPerThread], sum = 0;
#pragma unroll
    for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
      records[i] =
          plan_ragged_row(params, plan, rows.applied[i], states[i], rows.tokens_before[i]).record;
      closed[i] = static_cast<std::uint32_t>(
          compress_count(kRule, records[i].start, records[i].live_tokens));
      sum += closed[i];
    }
    const BlockSum block_sum = sum_over_block<Sizes>(sum, shared.totals[parity][1], AddSums{});
    std::uint32_t base = entries + block_sum.before;
#pragma unroll
    for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
      const std::int32_t at = place_of(std::int64_t{base} - first, closed[i], Sizes::kThreads);
      if (at >= 0) {
        hold_row(shared, at, {records[i], rows.first + i, static_cast<std::int32_t>(base), {}});
      }
      base += closed[i];
    }
    entries += block_sum.all;
  }
  __syncthreads();
  const int index = held_index(shared, static_cast<int>(threadIdx.x));
  const std::int64_t entry = first + threadIdx.x;
  if (entry >= capacity) return;
  PlanRecord record = kPaddingRecord;
  if (entry < entries) {
    const HeldRow held = shared.held[index];
    const auto k = static_cast<std::int32_t>(entry) - held.base;
    const std::int32_t j = compress_position(kRule, held.record.start, k) - held.record.start;
    record = plan_record(kRule, held.record.first_token + j, held.batch_row, held.record.start, j);
  }
  store_record(list + entry, record);
}

// --- The header ---

// What is known of all batch rows together: a minimum, a maximum and sums, the same in any order.
struct BatchSums {
  std::int32_t short_rows, used_rows;
  EntryCounts entries;
};

__device__ BatchSums reduce_over_warp(const BatchSums& sums) {
  return {__reduce_min_sync(~0u, sums.short_rows),
          __reduce_max_sync(~0u, sums.used_rows),
          {__reduce_add_sync(~0u, sums.entries.csa), __reduce_add_sync(~0u, sums.entries.hca)}};
}

// Fields that no thread of this kernel reads. By one block, which looks at all batch rows.
template <class Sizes>
__device__ void plan_header(const PlanParams& params, RaggedShared<Sizes>& shared) {
  LoadedRows<Sizes> loaded = load_rows<Sizes>(params, 0);
  const AppliedPlan plan = applied_plan(params);
  const BatchSums none{params.shape.rows, 0, {}};
  BatchSums sums = none;
  std::uint32_t tokens = 0;
  int parity = 0;
  for (std::int64_t tile = 0; tile < params.shape.rows; tile += Sizes::kTileRows, parity ^= 1) {
    ThreadRows<Sizes> rows = applied_rows(loaded, params, plan, tile);
    SeatState states[Sizes::kRowsPerThread];
    load_states(params, rows, states);
    tokens = sum_tokens(rows, tokens, shared.totals[parity][0]);
#pragma unroll
    for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
      const AppliedRow& row = rows.applied[i];
      if (!is_short(params.geometry, row.tokens)) {
        sums.short_rows = min_of(sums.short_rows, rows.first + i);
      }
      if (row.seat >= 0) sums.used_rows = rows.first + i + 1;
      sums.entries =
          sums.entries +
          entries_closed_by(
              plan_ragged_row(params, plan, row, states[i], rows.tokens_before[i]).record);
    }
  }
  auto* warps = reinterpret_cast<BatchSums*>(shared.held);
  static_assert(sizeof(BatchSums) * Sizes::kWarps <= sizeof(shared.held));
  sums = reduce_over_warp(sums);
  if (lane_of_thread() == 0) warps[warp_of_thread()] = sums;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sums = none;
  if (lane_of_thread() < Sizes::kWarps) sums = warps[lane_of_thread()];
  sums = reduce_over_warp(sums);
  if (threadIdx.x != 0) return;
  note_plan(params, plan);
  PlanHeader& header = *params.plan.header;
  header.short_rows = sums.short_rows;
  header.used_rows = sums.used_rows;
  header.used_tokens = ragged_first_token(params, tokens);
  header.csa_entries = min_of(sums.entries.csa, params.csa_entry_capacity);
  header.hca_entries = min_of(sums.entries.hca, params.hca_entry_capacity);
  params.plan.views.cu_extend[params.shape.rows] = ragged_first_token(params, tokens);
}

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, 1024 / Sizes::kThreads)
    ragged_plan_kernel(const __grid_constant__ RaggedPlanParams ragged) {
  __shared__ RaggedShared<Sizes> shared;
  before_stores();
  // Every role that sets bits has a barrier between this and the first.
  if (threadIdx.x < Sizes::kWarps) shared.begins[threadIdx.x] = 0;
  const PlanParams& params = ragged.plan;
  auto block = static_cast<std::int32_t>(blockIdx.x);
  if (block < ragged.token_blocks) return plan_tokens(ragged, block, shared);
  block -= ragged.token_blocks;
  if (block < ragged.row_blocks) return plan_rows(params, block, shared);
  block -= ragged.row_blocks;
  if (block < ragged.csa_blocks) {
    return plan_entries<Sizes, kCsaRule.ratio>(params, block, params.plan.csa_entries,
                                               params.csa_entry_capacity, shared);
  }
  block -= ragged.csa_blocks;
  if (block < ragged.hca_blocks) {
    return plan_entries<Sizes, kHcaRule.ratio>(params, block, params.plan.hca_entries,
                                               params.hca_entry_capacity, shared);
  }
  block -= ragged.hca_blocks;
  if (block == 0) return plan_header(params, shared);
  block -= 1;
  plan_tables(ragged, block % ragged.row_blocks, block / ragged.row_blocks, shared);
}

// Blocks for each of `row_blocks` that copy what stands behind the first cells: as many as have
// something to do at once and start beside the `others`; none where no row can be that long.
template <class Sizes>
std::int32_t table_parts(const PlanParams& params, std::int64_t row_blocks, std::int64_t others) {
  const std::int64_t pieces =
      pieces_of(params.table.cells - kFirstCells<Sizes>) + list_pieces<Sizes>(params.plan.read);
  if (pieces == 0 || row_blocks == 0) return 0;
  const std::int64_t rows = min_of(std::int64_t{params.shape.rows}, std::int64_t{Sizes::kOwnRows});
  const std::int64_t useful = ceil_div(rows * pieces, std::int64_t{Sizes::kWarps});
  const std::int64_t spare = max_of(kBlocksAtOnce - others, kBlocksAtOnce / 4) / row_blocks;
  return static_cast<std::int32_t>(min_of(useful, max_of(spare, std::int64_t{1})));
}

template <class Sizes>
void launch_ragged_blocks(const PlanParams& params, cudaStream_t stream) {
  const auto blocks = [](std::int64_t items, int each) {
    return static_cast<std::int32_t>(ceil_div(items, std::int64_t{each}));
  };
  const PlanGeometry& geometry = params.geometry;
  RaggedPlanParams ragged{params,
                          {prepared_divisor(geometry.window_ring_tokens),
                           prepared_divisor(geometry.csa_entries_per_page),
                           prepared_divisor(geometry.hca_entries_per_page)},
                          blocks(params.shape.tokens, Sizes::kTokens),
                          blocks(params.shape.rows, Sizes::kOwnRows),
                          blocks(params.csa_entry_capacity, Sizes::kThreads),
                          blocks(params.hca_entry_capacity, Sizes::kThreads),
                          0};
  const std::int64_t grid = std::int64_t{1} + ragged.token_blocks + ragged.row_blocks +
                            ragged.csa_blocks + ragged.hca_blocks;
  ragged.table_parts = table_parts<Sizes>(params, ragged.row_blocks, grid);
  launch_plain(ragged_plan_kernel<Sizes>,
               grid + std::int64_t{ragged.table_parts} * ragged.row_blocks, Sizes::kThreads, ragged,
               stream);
}

}  // namespace

void launch_ragged_plan(const PlanParams& params, cudaStream_t stream) {
  const ReadLists& read = params.plan.read;
  if (read.window_locations != nullptr || read.hca_locations != nullptr) {
    return launch_ragged_blocks<ListBlocks>(params, stream);
  }
  if (params.shape.rows <= kSmallRows && params.shape.tokens <= kSmallTokens) {
    return launch_ragged_blocks<SmallBlocks>(params, stream);
  }
  launch_ragged_blocks<LargeBlocks>(params, stream);
}

void load_ragged_planner() {
  load_kernel(ragged_plan_kernel<SmallBlocks>);
  load_kernel(ragged_plan_kernel<LargeBlocks>);
  load_kernel(ragged_plan_kernel<ListBlocks>);
}

}  // namespace quire::cuda
