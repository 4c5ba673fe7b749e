// What GraphExec::handle() points to with the CUDA backend: the executable graph, and the captured
// one that it was made from, whose nodes and edges can be inspected.
#pragma once

#include <cuda_runtime_api.h>

namespace quire::cuda {

struct CudaGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
};

}  // namespace quire::cuda
