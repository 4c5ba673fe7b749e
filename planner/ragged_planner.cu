// Plans a ragged shape in two kernels. One block sums tokens and closed entries over the batch
// rows, tile by tile, so that any number of rows works; then a thread per token finds its batch row
// in the sums and writes its record. Every place follows from the sums: no order is left to chance.
#include <quire/planner/planner.cuh>
#include <quire/planner/read_lists.cuh>

namespace quire::cuda {

namespace {

struct RowSums {
  std::int64_t tokens = 0;  // wide: rows that do not fit the shape are summed before they are met
  EntryCounts entries;

  friend __host__ __device__ RowSums operator+(const RowSums& a, const RowSums& b) {
    return {a.tokens + b.tokens, a.entries + b.entries};
  }
};

// What one batch row adds to the sums. Rows that do not fit are the last ones, so what they add
// here reaches nobody.
struct CountBatchRow {
  const PlanParams* params;
  bool same_shape;

  __host__ __device__ RowSums operator()(std::int32_t batch_row) const {
    const AppliedRow applied = applied_row(params->plan, same_shape, batch_row);
    const ResolvedRow resolved = plan_ragged_row(*params, same_shape, applied, 0);
    return {applied.tokens, entries_closed_by(resolved.record)};
  }
};

__global__ void __launch_bounds__(kScanThreads)
    ragged_rows_kernel(const __grid_constant__ PlanParams params) {
  __shared__ std::int32_t short_rows, csa_entries, hca_entries;
  if (threadIdx.x == 0) {
    short_rows = params.shape.rows;
    csa_entries = 0;
    hca_entries = 0;
  }
  __syncthreads();
  const bool same_shape = is_applied_shape(*params.plan.header, params.shape);
  const auto counts = thrust::make_transform_iterator(thrust::counting_iterator<std::int32_t>(0),
                                                      CountBatchRow{&params, same_shape});
  const auto visit = [&](std::int32_t r, const RowSums& before) {
    const AppliedRow applied = applied_row(params.plan, same_shape, r);
    const ResolvedRow resolved = plan_ragged_row(params, same_shape, applied, before.tokens);
    write_batch_row(params, r, resolved.record);
    params.plan.row_csa_base[r] = before.entries.csa;
    params.plan.row_hca_base[r] = before.entries.hca;
    add_to_report(*params.plan.report, report_counter(*params.plan.report, resolved.why),
                  resolved.record.seat);
    // A minimum and a maximum: the same whoever comes first.
    if (!is_short(params.geometry, applied.tokens)) atomicMin(&short_rows, r);
    const EntryCounts closed = entries_closed_by(resolved.record);
    if (closed.csa > 0) atomicMax(&csa_entries, before.entries.csa + closed.csa);
    if (closed.hca > 0) atomicMax(&hca_entries, before.entries.hca + closed.hca);
  };
  const RowSums all = sum_over_rows<kScanThreads, RowSums>(params.shape.rows, counts, visit);
  __syncthreads();
  if (threadIdx.x == 0) {
    PlanHeader& header = *params.plan.header;
    header.steps_at_plan = header.steps_left;
    header.short_rows = short_rows;
    header.csa_entries = min_of(csa_entries, params.csa_entry_capacity);
    header.hca_entries = min_of(hca_entries, params.hca_entry_capacity);
    params.plan.views.cu_extend[params.shape.rows] = ragged_first_token(params, all.tokens);
  }
}

__device__ void expand_token(const PlanParams& params, std::int32_t token) {
  const std::int32_t* cu_extend = params.plan.views.cu_extend;
  const std::int32_t rows = params.shape.rows;
  if (token >= cu_extend[rows]) {
    write_token(params, token, inert_token());
    return;
  }
  const std::int32_t r = row_holding(cu_extend, rows, token);
  write_ragged_token(params, token, r, params.plan.rows[r],
                     {params.plan.row_csa_base[r], params.plan.row_hca_base[r]});
}

__host__ __device__ std::int64_t token_blocks(const PlanParams& params) {
  const std::int32_t capacity = max_of(params.csa_entry_capacity, params.hca_entry_capacity);
  return ceil_div(std::int64_t{max_of(params.shape.tokens, capacity)},
                  std::int64_t{kPlannerThreads});
}

// Tokens whose window lists one warp writes, after one search for the batch row of the first.
constexpr int kTokensPerWarp = 8;
constexpr int kTokensPerListBlock = kPlannerThreads / 32 * kTokensPerWarp;

std::int64_t window_list_blocks(const PlanParams& params) {
  return params.plan.read.window_locations == nullptr
             ? 0
             : ceil_div(std::int64_t{params.shape.tokens}, std::int64_t{kTokensPerListBlock});
}

__device__ void write_window_lists(const PlanParams& params, std::int64_t first) {
  const std::int32_t* cu_extend = params.plan.views.cu_extend;
  const std::int32_t rows = params.shape.rows;
  const std::int32_t live_end = cu_extend[rows];
  std::int32_t r = first < live_end ? row_holding(cu_extend, rows, first) : rows;
  const std::int64_t end = min_of(first + kTokensPerWarp, std::int64_t{params.shape.tokens});
  for (std::int64_t token = first; token < end; ++token) {
    const auto t = static_cast<std::int32_t>(token);
    if (t >= live_end) {
      write_window_list(params, t, no_batch_row(), -1, 0);
      continue;
    }
    while (cu_extend[r + 1] <= t) ++r;
    const BatchRowRecord row = params.plan.rows[r];
    write_window_list(params, t, row, r, t - row.first_token);
  }
}

// Blocks behind those of the tokens, where lists are bound: pieces of HCA lists, one list a batch
// row, then window lists.
__device__ void write_list_block(const PlanParams& params, std::int64_t block) {
  const std::int64_t pieces = hca_list_pieces(params.plan.read);
  const std::int64_t hca_blocks = params.shape.rows * pieces;
  if (block < hca_blocks) {
    const auto [r, piece] = list_and_piece(block, pieces);
    const BatchRowRecord row = params.plan.rows[r];
    write_hca_list(params, r, piece, row, hca_entries_after(row));
    return;
  }
  const std::int64_t warp = (block - hca_blocks) * (kPlannerThreads / 32) + threadIdx.x / 32;
  write_window_lists(params, warp * kTokensPerWarp);
}

// Blocks of batch rows first, a page table row each: a long row takes longest. Then the blocks of
// tokens; the same threads pad the compact lists. Then the read lists, compiled apart: without them
// the kernel is as small as it was.
template <bool kReadLists>
__global__ void __launch_bounds__(kPlannerThreads)
    ragged_tokens_kernel(const __grid_constant__ PlanParams params) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) - params.shape.rows;
  if (block < 0) {
    const auto r = static_cast<std::int32_t>(blockIdx.x);
    copy_page_table_row(params, r, params.plan.rows[r]);
    return;
  }
  if constexpr (kReadLists) {
    if (block >= token_blocks(params)) {
      write_list_block(params, block - token_blocks(params));
      return;
    }
  }
  const std::int64_t i = block * kPlannerThreads + threadIdx.x;
  if (i < params.shape.tokens) expand_token(params, static_cast<std::int32_t>(i));
  if (i >= params.plan.header->csa_entries && i < params.csa_entry_capacity) {
    params.plan.csa_entries[i] = kPaddingRecord;
  }
  if (i >= params.plan.header->hca_entries && i < params.hca_entry_capacity) {
    params.plan.hca_entries[i] = kPaddingRecord;
  }
}

}  // namespace

void launch_ragged_plan(const PlanParams& params, cudaStream_t stream) {
  launch_plain(ragged_rows_kernel, 1, kScanThreads, params, stream);
  const std::int64_t list_blocks =
      params.shape.rows * hca_list_pieces(params.plan.read) + window_list_blocks(params);
  const std::int64_t blocks = params.shape.rows + token_blocks(params) + list_blocks;
  const auto kernel = list_blocks > 0 ? ragged_tokens_kernel<true> : ragged_tokens_kernel<false>;
  if (blocks > 0) launch_plain(kernel, blocks, kPlannerThreads, params, stream);
}

void load_ragged_planner() {
  load_kernel(ragged_rows_kernel);
  load_kernel(ragged_tokens_kernel<false>);
  load_kernel(ragged_tokens_kernel<true>);
}

}  // namespace quire::cuda
