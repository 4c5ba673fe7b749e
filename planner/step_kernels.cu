// The two ends of a step: `apply` carries a chunk of an update out of its own parameters, so that
// nothing is staged and nothing can be overwritten on the way; `commit` moves lengths by seat.
#include <cstring>

#include <quire/planner/apply_chunks.h>
#include <quire/kernels/pdl.cuh>
#include <quire/planner/planner.cuh>

namespace quire::cuda {

namespace {

// The changes of a chunk may be carried out in any order (cache/step_update.h).
template <std::size_t kBytes>
__global__ void __launch_bounds__(kPlannerThreads)
    apply_kernel(const __grid_constant__ ApplyParamsOf<kBytes> params) {
  std::int64_t i = thread_in_grid();
  if (i == 0 && params.first_chunk) apply_header(params);
  if (i < params.batch_rows) return apply_batch_row(params, static_cast<std::int32_t>(i));
  i -= params.batch_rows;
  if (i < params.cells) return apply_cell(params, static_cast<std::int32_t>(i));
  i -= params.cells;
  if (i < params.lowered_limits) return apply_lowered_limit(params, static_cast<std::int32_t>(i));
  i -= params.lowered_limits;
  if (i < padding_rows(params)) apply_padding_row(params, static_cast<std::int32_t>(i));
}

__global__ void __launch_bounds__(kPlannerThreads)
    commit_kernel(const __grid_constant__ CommitParams params) {
  pdl_wait();
  pdl_trigger();
  if (!may_commit(params)) {
    if (thread_in_grid() == 0) atomicAdd(&params.plan.report->commits_unplanned, 1);
    return;
  }
  const std::int64_t i = thread_in_grid();
  if (i == 0 && params.group == LayerGroup::kTarget) {
    // No thread of this kernel reads it.
    params.plan.header->steps_left = params.plan.header->steps_at_plan - 1;
  }
  if (i >= params.shape.rows) return;
  const auto r = static_cast<std::int32_t>(i);
  const CommitReport missed = commit_report(params, commit_batch_row(params, r), r);
  add_to_report(*params.plan.report, missed.counter, missed.seat);
}

}  // namespace

void launch_apply(const ApplyParams& params, cudaStream_t stream) {
  const std::int64_t changes =
      std::int64_t{params.batch_rows} + params.cells + params.lowered_limits + padding_rows(params);
  const std::int64_t blocks = blocks_for(changes, kPlannerThreads);
  const std::int64_t used = used_bytes(params);
  if (used > std::int64_t{sizeof(SmallApplyParams)}) {
    launch_plain(apply_kernel<kUpdateChunkBytes>, blocks, kPlannerThreads, params, stream);
    return;
  }
  SmallApplyParams small;
  std::memcpy(static_cast<void*>(&small), &params, static_cast<std::size_t>(used));
  launch_plain(apply_kernel<kSmallUpdateBytes>, blocks, kPlannerThreads, small, stream);
}

void launch_commit(const CommitParams& params, Pdl pdl, cudaStream_t stream) {
  launch(commit_kernel, linear_grid(blocks_for(params.shape.rows, kPlannerThreads)),
         dim3(kPlannerThreads), 0, stream, pdl != Pdl::kOff, params);
}

void load_step_kernels() {
  load_kernel(apply_kernel<kUpdateChunkBytes>);
  load_kernel(apply_kernel<kSmallUpdateBytes>);
  load_kernel(commit_kernel);
}

void load_planner_kernels() {
  load_step_kernels();
  load_clear_kernel();
  load_decode_planner();
  load_ragged_planner();
  load_record_planner();
}

}  // namespace quire::cuda
