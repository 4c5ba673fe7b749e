// A GEMM as an engine's projections are: cuBLASLt, bf16 in, fp32 out, the algorithm that its
// heuristic prefers. How it is launched, and in how many kernels, is cuBLASLt's affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <quire/runtime/owners.h>

namespace quire::bench {

inline constexpr std::int64_t kBenchGemmWorkspaceBytes = std::int64_t{32} << 20;

class Gemm {
 public:
  // The workspace has kBenchGemmWorkspaceBytes and stays valid. Blocks: loads cuBLASLt.
  Gemm(std::int64_t rows, std::int64_t depth, std::int64_t width, std::byte* workspace);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // out [rows, width] fp32 = in [rows, depth] x weights [width, depth] transposed, bf16. May be
  // captured, once it has run.
  void enqueue(const void* weights, const void* in, float* out, const Stream& stream) const;

  // The algorithm, in words.
  std::string describe() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace quire::bench
