// Rows that stop themselves: from the tokens that a step has sampled to the flags and counts that
// `DeviceCache::enqueue_commit` takes (docs/ARCHITECTURE.md).
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// Enqueues, does not block, may be captured. Waits for its predecessor before it loads anything.
// CudaError where the launch fails.
void launch_stop_rows(const StopRowsParams& params, Pdl pdl, CUstream_st* stream);

// Loads the kernel on the current device, so that no later launch does.
void load_stop_rows_kernel();

}  // namespace quire::cuda
