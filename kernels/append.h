// Launches the cache work of one layer (see AppendParams). A decode shape takes one kernel. A
// ragged shape takes one for each part that reads the seat, and a last one that writes the seat,
// only once everything that reads it has been read.
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// Enqueue; do not block; may be captured. With Pdl::kWaitOnly everything is loaded after the wait,
// whatever params.load_after_wait says. CudaError where a launch fails.
void launch_decode_append(const AppendParams& params, Pdl pdl, CUstream_st* stream);
void launch_ragged_append(const AppendParams& params, Pdl pdl, CUstream_st* stream);

inline void launch_append(const AppendParams& params, Pdl pdl, CUstream_st* stream) {
  return params.shape.is_decode() ? launch_decode_append(params, pdl, stream)
                                  : launch_ragged_append(params, pdl, stream);
}

// Blocks, one a token, that the current device holds at once of the kernel that a decode append of
// so many tokens launches. Two appends behind one another overlap as far as both find places.
std::int64_t decode_append_places(LayerKind kind, std::int64_t tokens);

// Load the kernels on the current device, so that no later launch does.
void load_decode_append_kernels();
void load_ragged_append_kernels();

}  // namespace quire::cuda
