// Plan records of explicit prefixes and extends, for the single operations (SPEC 1.8). One block
// sums over the batch rows, then one thread per place of each list computes the record that belongs
// there, or pads. The number of tokens need not be known, the lists' capacities bound the grid.
#include <quire/planner/planner.cuh>

namespace quire::cuda {

namespace {

struct RecordSums {
  std::int32_t tokens = 0;
  std::int32_t compress = 0;
  std::int32_t write = 0;

  friend __host__ __device__ RecordSums operator+(const RecordSums& a, const RecordSums& b) {
    return {a.tokens + b.tokens, a.compress + b.compress, a.write + b.write};
  }
};

struct CountRecords {
  const RecordPlanParams* params;

  __host__ __device__ RecordSums operator()(std::int32_t batch_row) const {
    const std::int32_t P0 = params->prefix[batch_row];
    const std::int32_t E = params->extend[batch_row];
    return {E, compress_count(params->rule, P0, E), write_count(params->rule, P0, E)};
  }
};

__device__ void write_sums(const RecordPlanParams& params, std::int32_t row,
                           const RecordSums& before) {
  params.cu_extend[row] = before.tokens;
  params.cu_compress[row] = before.compress;
  params.cu_write[row] = before.write;
}

__global__ void __launch_bounds__(kScanThreads)
    record_rows_kernel(const __grid_constant__ RecordPlanParams params) {
  const auto counts = thrust::make_transform_iterator(thrust::counting_iterator<std::int32_t>(0),
                                                      CountRecords{&params});
  const RecordSums all = sum_over_rows<kScanThreads, RecordSums>(
      params.rows, counts,
      [&](std::int32_t row, const RecordSums& before) { write_sums(params, row, before); });
  if (threadIdx.x == 0) write_sums(params, params.rows, all);
}

// Record `at` of the list whose rows begin at `begin`; position_of(P0, E, k) gives the k-th of a
// row.
template <class PositionOf>
__device__ PlanRecord record_at(const RecordPlanParams& params, const std::int32_t* begin,
                                std::int64_t at, PositionOf position_of) {
  if (at >= begin[params.rows]) return kPaddingRecord;
  const std::int32_t r = row_holding(begin, params.rows, at);
  const std::int32_t P0 = params.prefix[r];
  const std::int32_t k = static_cast<std::int32_t>(at) - begin[r];
  const std::int32_t j = position_of(P0, params.extend[r], k) - P0;
  return plan_record(params.rule, params.cu_extend[r] + j, r, P0, j);
}

__global__ void __launch_bounds__(kPlannerThreads)
    record_lists_kernel(const __grid_constant__ RecordPlanParams params) {
  const CompressionRule rule = params.rule;
  const std::int64_t i = thread_in_grid();
  if (params.compress != nullptr && i < params.compress_capacity) {
    params.compress[i] = record_at(params, params.cu_compress, i,
                                   [&](std::int32_t P0, std::int32_t, std::int32_t k) {
                                     return compress_position(rule, P0, k);
                                   });
  }
  if (params.write != nullptr && i < params.write_capacity) {
    params.write[i] =
        record_at(params, params.cu_write, i, [&](std::int32_t P0, std::int32_t E, std::int32_t k) {
          return write_position(rule, P0, E, k);
        });
  }
}

}  // namespace

void launch_plan_records(const RecordPlanParams& params, cudaStream_t stream) {
  launch_plain(record_rows_kernel, 1, kScanThreads, params, stream);
  const std::int64_t compress = params.compress != nullptr ? params.compress_capacity : 0;
  const std::int64_t write = params.write != nullptr ? params.write_capacity : 0;
  const std::int64_t records = max_of(compress, write);
  if (records == 0) return;
  launch_plain(record_lists_kernel, blocks_for(records, kPlannerThreads), kPlannerThreads, params,
               stream);
}

void load_record_planner() {
  load_kernel(record_rows_kernel);
  load_kernel(record_lists_kernel);
}

}  // namespace quire::cuda
