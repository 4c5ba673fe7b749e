// What the planning kernels share: sums over any number of batch rows in one block, the search for
// the batch row of a value, page table rows, the report, and the plain launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include <cub/block/block_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <quire/kernels/pdl.cuh>
#include <quire/planner/device_planner.h>
#include <quire/planner/step_rule.h>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {

inline constexpr int kPlannerThreads = 256;
inline constexpr int kScanThreads = 1024;

// Without the attribute: a full edge to what is in front.
template <class Params>
void launch_plain(void (*kernel)(Params), std::int64_t blocks, int threads, const Params& params,
                  cudaStream_t stream) {
  launch(kernel, linear_grid(blocks), dim3(static_cast<unsigned>(threads)), 0, stream, false,
         params);
}

// Each file loads its own.
void load_step_kernels();
void load_clear_kernel();
void load_decode_planner();
void load_ragged_planner();
void load_record_planner();

// Blocks of `threads` for `items`; one even for none, which an empty grid is not.
inline std::int64_t blocks_for(std::int64_t items, int threads) {
  return max_of(ceil_div(items, std::int64_t{threads}), std::int64_t{1});
}

__device__ inline std::int64_t thread_in_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Every thread of a plan passes here before its first store. In a test's own build of the planner
// it lets successors go and sleeps: a kernel behind it that does not wait meets the plan before.
__device__ inline void before_stores() {
#ifdef QUIRE_PLANNER_SLEEPS_NS
  pdl_trigger();
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - start < QUIRE_PLANNER_SLEEPS_NS);
#endif
}

// Sums and a minimum: the order of the adding threads does not show.
__device__ inline void add_to_report(DeviceReport& report, std::int32_t* counter,
                                     std::int32_t seat) {
  if (counter == nullptr) return;
  atomicAdd(counter, 1);
  atomicMin(&report.first_failing_seat, seat);
}

struct AddSums {
  template <class Sums>
  __host__ __device__ Sums operator()(const Sums& a, const Sums& b) const {
    return a + b;
  }
};

// visit(row, sum over the rows in front of it) for every row, by one block of kThreads threads.
// Returns the sum over all rows to every thread. `Sums` has operator+ and is zero when made.
template <int kThreads, class Sums, class CountIterator, class Visit>
__device__ Sums sum_over_rows(std::int32_t rows, CountIterator counts, Visit visit) {
  using Scan = cub::BlockScan<Sums, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  Sums tiles_before{};
  for (std::int64_t tile = 0; tile < rows; tile += kThreads) {
    const std::int64_t row = tile + threadIdx.x;
    const Sums count = row < rows ? counts[row] : Sums{};
    Sums before, tile_sum;
    Scan(storage).ExclusiveScan(count, before, Sums{}, AddSums{}, tile_sum);
    if (row < rows) visit(static_cast<std::int32_t>(row), tiles_before + before);
    tiles_before = tiles_before + tile_sum;
    __syncthreads();  // the storage serves the next tile
  }
  return tiles_before;
}

// The row whose half-open range begin[row]..begin[row + 1] holds `value`, which lies below
// begin[rows]. Empty ranges are passed over.
__device__ inline std::int32_t row_holding(const std::int32_t* begin, std::int32_t rows,
                                           std::int64_t value) {
  std::int32_t low = 0;
  std::int32_t high = rows;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    if (begin[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Copies cells `begin` to `end` of a batch row's page table, by threads 0 to `threads`. kAtOnce
// loads of each are on their way together: one by one they would take longer than the plan.
template <int kAtOnce>
__device__ void copy_page_table_cells(const PlanParams& params, std::int32_t batch_row,
                                      std::int32_t seat, int begin, int end, int thread,
                                      int threads) {
  const std::int32_t* from = params.table.page_table + seat * params.table.cells;
  std::int32_t* to = params.plan.views.page_table + batch_row * params.plan.views.page_table_stride;
  for (int first = begin + thread; first < end; first += kAtOnce * threads) {
    std::int32_t cell[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * threads < end) cell[i] = from[first + i * threads];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * threads < end) to[first + i * threads] = cell[i];
    }
  }
}

}  // namespace quire::cuda
