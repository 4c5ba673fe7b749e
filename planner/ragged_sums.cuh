// What the roles of the ragged planner share: the batch rows of a tile, loaded at once and summed
// by a whole block, and the places of a block (tokens, entries) with the rows that they belong to.
#pragma once

#include <cstdint>

#include <quire/planner/planner.cuh>

namespace quire::cuda {

// What the compiler fixes about a launch.
template <int kThreadsOf, int kTokensOf, int kOwnRowsOf, bool kReadListsOf>
struct RaggedSizes {
  static constexpr int kThreads = kThreadsOf;  // of a block; entries it writes, one a thread
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRowsPerThread = 2;  // of a tile
  static constexpr int kTileRows = kThreads * kRowsPerThread;
  static constexpr int kTokens = kTokensOf;    // of a block that writes tokens
  static constexpr int kOwnRows = kOwnRowsOf;  // of a block that writes batch rows
  static constexpr int kThreadsPerRow = kThreads / kOwnRows;
  static constexpr bool kReadLists = kReadListsOf;
  static_assert(kThreads % kOwnRows == 0 && kTokens <= kThreads && kWarps <= 32);
};

// Rows that do not fit the shape are summed too: the sum stops here, which is as good as any number
// above the shape's tokens.
inline constexpr std::uint32_t kTokenSumMost = INT32_MAX;

struct AddTokens {
  __device__ std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const {
    return min_of(a + b, kTokenSumMost);
  }
};

// What stands at a place of a block: a batch row, and its first entry where entries are placed.
struct alignas(16) HeldRow {
  BatchRowRecord record;
  std::int32_t batch_row, base, unused[2];
};

template <class Sizes>
struct RaggedShared {
  std::uint32_t totals[2][2][Sizes::kWarps];  // by tile parity and by what is summed
  // Place i of the block belongs to the row held at the highest bit that is set at i or below.
  std::uint32_t begins[Sizes::kWarps];
  HeldRow held[Sizes::kThreads];
  TokenRecord records[Sizes::kTokens];  // on their way to memory
  std::uint32_t own_before[Sizes::kOwnRows];
  BatchRowRecord own[Sizes::kOwnRows];
};

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x / 32); }

// --- Sums ---

template <class Add>
__device__ std::uint32_t sum_up_to_lane(std::uint32_t value, Add add) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t behind = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = add(value, behind);
  }
  return value;
}

struct BlockSum {
  std::uint32_t before, all;
};

// Of one value a thread. Holds one barrier; `totals` is free again behind the next one.
template <class Sizes, class Add>
__device__ BlockSum sum_over_block(std::uint32_t value, std::uint32_t* totals, Add add) {
  const int lane = lane_of_thread();
  const int warp = warp_of_thread();
  const std::uint32_t through = sum_up_to_lane(value, add);
  std::uint32_t before = __shfl_up_sync(~0u, through, 1);
  if (lane == 0) before = 0;
  if (lane == 31) totals[warp] = through;
  __syncthreads();
  if constexpr (Sizes::kWarps <= 4) {
    std::uint32_t all = 0, warps_before = 0;
#pragma unroll
    for (int i = 0; i < Sizes::kWarps; ++i) {
      if (i == warp) warps_before = all;
      all = add(all, totals[i]);
    }
    return {add(warps_before, before), all};
  } else {
    const std::uint32_t warps = sum_up_to_lane(lane < Sizes::kWarps ? totals[lane] : 0u, add);
    const std::uint32_t up_to = __shfl_sync(~0u, warps, max_of(warp - 1, 0));
    const std::uint32_t warps_before = warp == 0 ? 0u : up_to;
    return {add(warps_before, before), __shfl_sync(~0u, warps, Sizes::kWarps - 1)};
  }
}

// --- The batch rows of a tile that one thread works on ---

template <class Sizes>
struct LoadedRows {
  AppliedRow rows[Sizes::kRowsPerThread];  // as they stand in memory
};

// On their way beside the header.
template <class Sizes>
__device__ LoadedRows<Sizes> load_rows(const PlanParams& params, std::int64_t tile) {
  const std::int64_t first = tile + static_cast<int>(threadIdx.x) * Sizes::kRowsPerThread;
  LoadedRows<Sizes> loaded;
#pragma unroll
  for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
    loaded.rows[i] = {-1, 0, 0, 1};
    if (first + i < params.shape.rows) {
      loaded.rows[i] = load_row(params, static_cast<std::int32_t>(first + i));
    }
  }
  return loaded;
}

template <class Sizes>
struct ThreadRows {
  std::int32_t first;
  AppliedRow applied[Sizes::kRowsPerThread];
  std::uint32_t tokens_before[Sizes::kRowsPerThread];
};

// Of the tile that was loaded; loads the next one, if there is one, for the next call.
template <class Sizes>
__device__ ThreadRows<Sizes> applied_rows(LoadedRows<Sizes>& loaded, const PlanParams& params,
                                          const AppliedPlan& plan, std::int64_t tile) {
  ThreadRows<Sizes> rows;
  rows.first = static_cast<std::int32_t>(tile) +
               static_cast<std::int32_t>(threadIdx.x) * Sizes::kRowsPerThread;
#pragma unroll
  for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
    rows.applied[i] = applied_row(loaded.rows[i], plan, rows.first + i);
  }
  if (tile + Sizes::kTileRows < params.shape.rows) {
    loaded = load_rows<Sizes>(params, tile + Sizes::kTileRows);
  }
  return rows;
}

template <class Sizes>
__device__ void load_states(const PlanParams& params, const ThreadRows<Sizes>& rows,
                            SeatState* states) {
#pragma unroll
  for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
    states[i] = seat_state(params.table, params.group, rows.applied[i].seat);
  }
}

// Sets tokens_before; returns the sum behind the tile. One barrier.
template <class Sizes>
__device__ std::uint32_t sum_tokens(ThreadRows<Sizes>& rows, std::uint32_t before,
                                    std::uint32_t* totals) {
  const AddTokens add;
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
    rows.tokens_before[i] = sum;
    sum = add(sum, static_cast<std::uint32_t>(rows.applied[i].tokens));
  }
  const BlockSum block = sum_over_block<Sizes>(sum, totals, add);
  const std::uint32_t in_front = add(before, block.before);
#pragma unroll
  for (int i = 0; i < Sizes::kRowsPerThread; ++i) {
    rows.tokens_before[i] = add(in_front, rows.tokens_before[i]);
  }
  return add(before, block.all);
}

// --- Places of a block, and the rows that they belong to ---

// Where a row whose places begin at `begin` is held in a block of `places` from 0; -1: not there.
__device__ inline std::int32_t place_of(std::int64_t begin, std::int64_t count, int places) {
  if (count <= 0 || begin >= places || begin + count <= 0) return -1;
  return static_cast<std::int32_t>(max_of(begin, std::int64_t{0}));
}

template <class Sizes>
__device__ void hold_row(RaggedShared<Sizes>& shared, std::int32_t at, const HeldRow& row) {
  shared.held[at] = row;
  atomicOr(&shared.begins[at / 32], 1u << at % 32);  // several rows of a warp, in any order
}

// Index in `held` of the row that place `place` belongs to; -1: none. Whole warps.
template <class Sizes>
__device__ int held_index(const RaggedShared<Sizes>& shared, int place) {
  const int lane = lane_of_thread();
  const int at = place / 32;
  const std::uint32_t word = lane < Sizes::kWarps ? shared.begins[lane] : 0;
  const unsigned earlier_words = __ballot_sync(~0u, word != 0) & ((1u << at) - 1);
  const int earlier = 31 - __clz(static_cast<int>(earlier_words));  // -1: none
  const std::uint32_t here = __shfl_sync(~0u, word, at) & (~0u >> (31 - place % 32));
  const std::uint32_t there = __shfl_sync(~0u, word, max_of(earlier, 0));
  if (here != 0) return at * 32 + 31 - __clz(static_cast<int>(here));
  return earlier < 0 ? -1 : earlier * 32 + 31 - __clz(static_cast<int>(there));
}

}  // namespace quire::cuda
