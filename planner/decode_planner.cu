// Plans a decode shape in one kernel, which stands in front of every decode step: a block per batch
// row. Every thread resolves the row for itself, from two rounds of loads that are the same for
// all; then its warps work side by side: on the batch row, on its tokens, on its page table cells.
// Where read lists are bound, blocks behind those write them, some for each token.
#include <quire/planner/planner.cuh>
#include <quire/planner/read_lists.cuh>

namespace quire::cuda {

namespace {

constexpr int kDecodeThreads = 128;

// Fields that no thread of this kernel reads.
__device__ void finish_decode_plan(const PlanParams& params) {
  PlanHeader& header = *params.plan.header;
  note_plan(params, applied_plan(params));
  header.short_rows = params.shape.rows;
  header.csa_entries = 0;
  header.hca_entries = 0;
  header.used_tokens = params.shape.tokens;
  header.used_rows = params.shape.rows;
  params.plan.views.cu_extend[params.shape.rows] = params.shape.rows * params.shape.tokens_per_row;
}

// Locations of an HCA list that one block writes.
constexpr int kListPiece = 2048;

__host__ __device__ std::int64_t hca_list_pieces(const ReadLists& read) {
  return read.hca_locations == nullptr ? 0 : ceil_div(read.hca_width, std::int64_t{kListPiece});
}

struct ListPiece {
  std::int32_t list, piece;
};

// What block `block` of those that write lists works on. A grid has less than 2^31 blocks: 32-bit
// division, which is short.
__device__ ListPiece list_and_piece(std::int64_t block, std::int64_t pieces) {
  const auto at = static_cast<std::uint32_t>(block);
  const auto per_list = static_cast<std::uint32_t>(pieces);
  return {static_cast<std::int32_t>(at / per_list), static_cast<std::int32_t>(at % per_list)};
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
  const BatchRowRecord row = plan_decode_row(params, r).record;
  const std::int32_t j = token - row.first_token;
  if (read.window_locations != nullptr && piece == 0 && threadIdx.x < 32) {
    write_window_list(params, token, row, r, j);
  }
  if (read.hca_locations != nullptr) {
    const std::int64_t begin = std::int64_t{piece} * kListPiece;
    write_hca_list(params, token, begin, min_of(begin + kListPiece, read.hca_width), row,
                   hca_entries_at(row, j), static_cast<int>(threadIdx.x), kDecodeThreads);
  }
}

// Thread `first` becomes 0, so that another warp than the first begins.
__device__ int thread_from(int first) {
  return (static_cast<int>(threadIdx.x) + kDecodeThreads - first) % kDecodeThreads;
}

__global__ void __launch_bounds__(kDecodeThreads)
    decode_plan_kernel(const __grid_constant__ PlanParams params) {
  before_stores();
  const auto r = static_cast<std::int32_t>(blockIdx.x);
  if (r >= params.shape.rows) {
    if (r == 0 && threadIdx.x == 0) finish_decode_plan(params);  // there are no rows
    const std::int64_t block = std::int64_t{r} - params.shape.rows;
    if (block < params.shape.tokens * list_blocks_per_token(params.plan.read)) {
      write_token_lists(params, block);
    }
    return;
  }

  const ResolvedRow resolved = plan_decode_row(params, r);
  const BatchRowRecord& row = resolved.record;
  if (thread_from(0) == 0) {
    write_batch_row(params, r, row);
    add_to_report(*params.plan.report, report_counter(*params.plan.report, resolved.why), row.seat);
    if (r == 0) finish_decode_plan(params);
  }
  for (int j = thread_from(32); j < params.shape.tokens_per_row; j += kDecodeThreads) {
    write_token(params, row.first_token + j, plan_token(params.geometry, params.table, row, r, j));
  }
  copy_page_table_cells<8>(params, r, row.seat, 0, shown_cells(row), thread_from(64),
                           kDecodeThreads);
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
