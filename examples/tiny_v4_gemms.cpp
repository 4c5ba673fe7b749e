#include "examples/tiny_v4_gemms.h"

#include <cublasLt.h>

#include <algorithm>
#include <vector>

#include <quire/runtime/base/errors.h>

namespace quire::serving {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(concat("cuBLASLt: ", what, " failed: ", cublasLtGetStatusString(status)));
}

// Row-major out [64, width] = in [64, depth] x weights [depth, width] reads column-major as
// out^T = weights^T x in^T, without a transposition.
struct Problem {
  std::int32_t depth, width;
  std::int64_t in_stride, out_stride;

  bool is_of(const Gemm& gemm) const {
    return depth == gemm.depth && width == gemm.width && in_stride == gemm.in_stride &&
           out_stride == gemm.out_stride;
  }
};

cublasLtMatrixLayout_t make_layout(std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  cublasLtMatrixLayout_t layout{};
  check(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), stride),
        "cublasLtMatrixLayoutCreate");
  return layout;
}

struct Prepared {
  Problem problem;
  cublasLtMatrixLayout_t weights, in, out;
  cublasLtMatmulAlgo_t algorithm;
};

template <class T>
T config_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t what) {
  T value{};
  check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, what, &value, sizeof value, nullptr),
        "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

bool splits_depth(const cublasLtMatmulAlgo_t& algorithm) {
  return config_of<std::int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
         config_of<std::uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) !=
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

}  // namespace

struct PinnedGemms::State {
  cublasLtHandle_t handle{};
  cublasLtMatmulDesc_t operation{};
  std::byte* workspace;
  std::vector<Prepared> prepared;

  const Prepared* find(const Gemm& gemm) const {
    const auto found = std::find_if(prepared.begin(), prepared.end(),
                                    [&](const Prepared& p) { return p.problem.is_of(gemm); });
    return found == prepared.end() ? nullptr : &*found;
  }
};

PinnedGemms::PinnedGemms(std::byte* workspace) : state_(std::make_unique<State>()) {
  state_->workspace = workspace;
  check(cublasLtCreate(&state_->handle), "cublasLtCreate");
  // Plain fp32: no TF32.
  check(cublasLtMatmulDescCreate(&state_->operation, CUBLAS_COMPUTE_32F_PEDANTIC, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
}

PinnedGemms::~PinnedGemms() {
  for (const Prepared& p : state_->prepared) {
    for (const auto layout : {p.weights, p.in, p.out}) cublasLtMatrixLayoutDestroy(layout);
  }
  if (state_->operation != nullptr) cublasLtMatmulDescDestroy(state_->operation);
  if (state_->handle != nullptr) cublasLtDestroy(state_->handle);
}

void PinnedGemms::prepare(const Gemm& gemm) {
  if (state_->find(gemm) != nullptr) return;
  Prepared next{{gemm.depth, gemm.width, gemm.in_stride, gemm.out_stride},
                make_layout(gemm.width, gemm.depth, gemm.width),
                make_layout(gemm.depth, kGemmRows, gemm.in_stride),
                make_layout(gemm.width, kGemmRows, gemm.out_stride),
                {}};
  cublasLtMatmulPreference_t preference{};
  check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kGemmWorkspaceBytes});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  constexpr int kCandidates = 32;
  std::vector<cublasLtMatmulHeuristicResult_t> candidates(kCandidates);
  int count = 0;
  check(cublasLtMatmulAlgoGetHeuristic(state_->handle, state_->operation, next.weights, next.in,
                                       next.out, next.out, preference, kCandidates,
                                       candidates.data(), &count),
        "cublasLtMatmulAlgoGetHeuristic");
  cublasLtMatmulPreferenceDestroy(preference);
  candidates.resize(static_cast<std::size_t>(count));
  const auto chosen = std::find_if(candidates.begin(), candidates.end(), [](const auto& candidate) {
    return candidate.state == CUBLAS_STATUS_SUCCESS && !splits_depth(candidate.algo);
  });
  if (chosen == candidates.end()) {
    throw Error(concat("cuBLASLt: none of ", count, " algorithms for ", kGemmRows, " x ",
                       gemm.depth, " x ", gemm.width, " in fp32 works without split-K"));
  }
  next.algorithm = chosen->algo;
  state_->prepared.push_back(next);
}

void PinnedGemms::enqueue(const Gemm& gemm, CUstream_st* stream) const {
  const Prepared* prepared = state_->find(gemm);
  QUIRE_CHECK(prepared != nullptr, "PinnedGemms: depth ", gemm.depth, ", width ", gemm.width,
              " was not prepared");
  QUIRE_CHECK(gemm.rows % kGemmRows == 0, "PinnedGemms: ", gemm.rows,
              " rows; supported: multiples of ", kGemmRows);
  const float one = 1.0f;
  const float added = gemm.accumulate ? 1.0f : 0.0f;
  for (std::int64_t row = 0; row < gemm.rows; row += kGemmRows) {
    float* out = gemm.out + row * gemm.out_stride;
    check(cublasLtMatmul(state_->handle, state_->operation, &one, gemm.weights, prepared->weights,
                         gemm.in + row * gemm.in_stride, prepared->in, &added, out, prepared->out,
                         out, prepared->out, &prepared->algorithm, state_->workspace,
                         static_cast<std::size_t>(kGemmWorkspaceBytes), stream),
          "cublasLtMatmul");
  }
}

}  // namespace quire::serving
