// GEMMs through cuBLASLt as a decoder needs them whose bits do not depend on the batch: always the
// same number of rows, one algorithm per shape, chosen once and kept, no split-K, workspace given.
#pragma once

#include <cstddef>
#include <memory>

#include "examples/tiny_v4.h"

namespace quire::serving {

class PinnedGemms {
 public:
  // The workspace has kGemmWorkspaceBytes and stays valid. Blocks: loads cuBLASLt.
  explicit PinnedGemms(std::byte* workspace);
  ~PinnedGemms();
  PinnedGemms(const PinnedGemms&) = delete;
  PinnedGemms& operator=(const PinnedGemms&) = delete;

  // Chooses the algorithm for this depth, width and these strides, if none was chosen yet.
  void prepare(const Gemm& gemm);

  // One launch per tile of kGemmRows rows. May be captured. UsageError where not prepared.
  void enqueue(const Gemm& gemm, CUstream_st* stream) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace quire::serving
