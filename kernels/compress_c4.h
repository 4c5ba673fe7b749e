// The c4 compressor alone, in the original kernels' form (SPEC 1.3 to 1.9): state, input and bias
// of one type, ring of 8 or pages of 4. For engines that want just this, and for the goldens.
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// Both enqueue, do not block and may be captured. UsageError that lists what is supported where no
// kernel fits the types or head_dim; CudaError where a launch fails.
void launch_compress_c4_decode(const CompressC4DecodeParams& params, Pdl pdl, CUstream_st* stream);

// Two kernels: entries, then state.
void launch_compress_c4_prefill(const CompressC4PrefillParams& params, Pdl pdl,
                                CUstream_st* stream);

// Loads every kernel of this file on the current device, so that no later launch does.
void load_compress_c4_kernels();

}  // namespace quire::cuda
