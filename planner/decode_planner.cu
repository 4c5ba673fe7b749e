// Plans a decode shape in one kernel: a block per batch row. Every thread resolves the row for
// itself, the loads are the same for all; then the threads share its tokens and page table cells.
// Where read lists are bound, blocks behind those write them, some for each token.
#include <quire/planner/planner.cuh>
#include <quire/planner/read_lists.cuh>

namespace quire::cuda {

namespace {

constexpr int kDecodeThreads = 128;

__device__ void finish_decode_plan(const PlanParams& params) {
  PlanHeader& header = *params.plan.header;
  header.steps_at_plan = header.steps_left;
  header.short_rows = params.shape.rows;
  header.csa_entries = 0;
  header.hca_entries = 0;
  params.plan.views.cu_extend[params.shape.rows] = params.shape.rows * params.shape.tokens_per_row;
}

// Blocks that one token's lists take: the pieces of the HCA list, the first with the window.
__host__ __device__ std::int64_t list_blocks_per_token(const ReadLists& read) {
  if (read.hca_locations != nullptr) return hca_list_pieces(read);
  return read.window_locations != nullptr ? 1 : 0;
}

__device__ void write_token_lists(const PlanParams& params, std::int64_t block) {
  const ReadLists& read = params.plan.read;
  const auto [token, piece] = list_and_piece(block, list_blocks_per_token(read));
  const std::int32_t r = token / params.shape.tokens_per_row;
  const bool same_shape = is_applied_shape(*params.plan.header, params.shape);
  const AppliedRow applied = applied_row(params.plan, same_shape, r);
  const BatchRowRecord row = plan_decode_row(params, same_shape, applied, r).record;
  const std::int32_t j = token - row.first_token;
  if (read.window_locations != nullptr && piece == 0 && threadIdx.x < 32) {
    write_window_list(params, token, row, r, j);
  }
  if (read.hca_locations != nullptr) {
    write_hca_list(params, token, piece, row, hca_entries_at(row, j));
  }
}

__global__ void __launch_bounds__(kDecodeThreads)
    decode_plan_kernel(const __grid_constant__ PlanParams params) {
  const bool first_thread = threadIdx.x == 0;
  // Fields that no thread of this kernel reads.
  if (blockIdx.x == 0 && first_thread) finish_decode_plan(params);
  const auto r = static_cast<std::int32_t>(blockIdx.x);
  if (r >= params.shape.rows) {
    const std::int64_t block = std::int64_t{r} - params.shape.rows;
    if (block < params.shape.tokens * list_blocks_per_token(params.plan.read)) {
      write_token_lists(params, block);
    }
    return;
  }

  const bool same_shape = is_applied_shape(*params.plan.header, params.shape);
  const AppliedRow applied = applied_row(params.plan, same_shape, r);
  const ResolvedRow resolved = plan_decode_row(params, same_shape, applied, r);
  const BatchRowRecord& row = resolved.record;
  if (first_thread) {
    write_batch_row(params, r, row);
    add_to_report(*params.plan.report, report_counter(*params.plan.report, resolved.why), row.seat);
  }
  for (int j = static_cast<int>(threadIdx.x); j < params.shape.tokens_per_row;
       j += kDecodeThreads) {
    write_token(params, row.first_token + j, plan_token(params.geometry, params.table, row, r, j));
  }
  copy_page_table_row(params, r, row);
}

}  // namespace

void launch_ragged_plan(const PlanParams& params, cudaStream_t stream);

void launch_plan(const PlanParams& params, cudaStream_t stream) {
  if (!params.shape.is_decode()) return launch_ragged_plan(params, stream);
  const std::int64_t blocks =
      params.shape.rows + params.shape.tokens * list_blocks_per_token(params.plan.read);
  launch_plain(decode_plan_kernel, max_of(blocks, std::int64_t{1}), kDecodeThreads, params, stream);
}

void load_decode_planner() { load_kernel(decode_plan_kernel); }

}  // namespace quire::cuda
