// The work of a CSA layer in decode as the separate operations that it is elsewhere (CUDA_NOTES):
// compress main, compress indexer, norm + RoPE + FlashMLA store, norm + RoPE + Hadamard + indexer
// store, and the window entry as a fifth. The baseline of the decode chain, each as good as its
// fused form: programmatic, vectorised, the same arithmetic.
#pragma once

#include "benchmarks/support/decode_world.h"

namespace quire::bench {

class SeparateOperations {
 public:
  // State of its own for so many layers. Blocks.
  SeparateOperations(DecodeWorld& world, int layers);
  // All five of one layer, behind a plan.
  void enqueue(int layer);

 private:
  DecodeWorld* world_;
  std::int64_t batch_;
  std::int64_t seats_;  // of all sets
  MemoryPool pool_;
  Memory memory_;  // per layer main and indexer state; then bias and norms; then pooled entries
};

}  // namespace quire::bench
