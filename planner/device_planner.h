// Launches everything around a step on the device: update, plan and commit, and the plan records of
// the single operations. Kernels only, deterministic, no allocation, nothing read by the host: all
// may be captured, `launch_apply` and `launch_clear` apart, whose changes travel by value.
// CudaError where a launch fails; none blocks. The rule is planner/step_rule.h, the same as the
// host's.
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// One chunk of an update (planner/apply_chunks.h). One kernel.
void launch_apply(const ApplyParams& params, CUstream_st* stream);

// One part of what an update gives to new owners (planner/clear_chunks.h). One kernel, launched
// plainly.
void launch_clear(const ClearParams& params, CUstream_st* stream);

// One kernel. Launched plainly: the full edge that the first append behind a plan relies on begins
// here.
void launch_plan(const PlanParams& params, CUstream_st* stream);

// One kernel, at the tail of the step; waits for its predecessor, then triggers.
void launch_commit(const CommitParams& params, Pdl pdl, CUstream_st* stream);

// Two kernels: counts and sums per batch row, then one thread per record of each list.
void launch_plan_records(const RecordPlanParams& params, CUstream_st* stream);

// Loads every kernel of this folder on the current device, so that no later launch does.
void load_planner_kernels();

}  // namespace quire::cuda
