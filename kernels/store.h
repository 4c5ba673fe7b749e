// Quantise and store rows of bf16 that are normed and rotated already (SPEC 3.4, 3.5): the single
// operations of engines that want just this, and of the goldens.
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// Both enqueue, do not block and may be captured. CudaError where a launch fails.
void launch_store_flashmla(const StoreParams& params, Pdl pdl, CUstream_st* stream);  // d = 512
void launch_store_indexer(const StoreParams& params, Pdl pdl, CUstream_st* stream);   // d = 128

// Loads every kernel of this file on the current device, so that no later launch does.
void load_store_kernels();

}  // namespace quire::cuda
