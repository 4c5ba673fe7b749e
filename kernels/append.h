// Launches the cache work of one layer (see AppendParams): a decode shape takes one kernel, a
// ragged shape two (an HCA layer three), because there the seat is only written once everything that
// reads it has been read.
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// Enqueues; does not block; may be captured. With Pdl::kWaitOnly everything is loaded after the
// wait, whatever params.load_after_wait says. CudaError where a launch fails.
void launch_append(const AppendParams& params, Pdl pdl, CUstream_st* stream);

// Loads every kernel of this file on the current device, so that no later launch does.
void load_append_kernels();

}  // namespace quire::cuda
