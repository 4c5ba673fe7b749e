// The two instructions of programmatic dependent launch, for Quire's kernels and for an engine's.
//
// A kernel launched with the attribute may start while its predecessor on the stream still runs.
//   pdl_wait()     returns when the predecessor has finished and its stores can be seen. Every
//                  thread executes it, on every path, before it reads what the predecessor writes,
//                  before its first global store and before it returns.
//   pdl_trigger()  lets the successor start. It publishes nothing, and counts for the block as soon
//                  as one thread of it gets there; leaving the kernel counts as well.
//
// Where a producer in front of Quire's appends should trigger: after its own wait and before its
// epilogue, as the main loop of a GEMM ends. The append's prologue (plan records, weights, state of
// earlier steps) then runs beside the epilogue. Later, or never, is as right but hides little.
// What it must do is wait: a producer launched with the attribute that ends without waiting lets
// its successors overtake the kernels in front of it.
//
// Below sm_90 both are empty: such code must be launched without the attribute.
#pragma once

namespace quire::cuda {

// The clobbers keep the compiler from moving loads and stores across; they cost nothing.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace quire::cuda
