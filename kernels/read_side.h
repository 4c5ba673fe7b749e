// What attention and the indexer's logits need around the cache, as single operations: picks to
// locations, dequantised entries, keys laid out for non-paged logits (SPEC 6, docs/READ_SIDE.md).
#pragma once

#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// All enqueue, do not block and may be captured. All wait for their predecessor before they load
// anything. CudaError where a launch fails.
void launch_translate_picks(const TranslatePicksParams& params, Pdl pdl, CUstream_st* stream);
void launch_gather_main(const GatherMainParams& params, Pdl pdl, CUstream_st* stream);

// Two kernels: where each request begins, then the copies.
void launch_gather_indexer(const GatherIndexerParams& params, Pdl pdl, CUstream_st* stream);

// Loads every kernel of this file on the current device, so that no later launch does.
void load_read_side_kernels();

}  // namespace quire::cuda
