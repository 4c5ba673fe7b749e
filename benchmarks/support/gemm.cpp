#include "benchmarks/support/gemm.h"

#include <cublasLt.h>

#include <quire/runtime/base/errors.h>

namespace quire::bench {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(concat("cuBLASLt: ", what, " failed: ", cublasLtGetStatusString(status)));
}

cublasLtMatrixLayout_t make_layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns) {
  cublasLtMatrixLayout_t layout{};
  check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), rows),
        "cublasLtMatrixLayoutCreate");
  return layout;
}

}  // namespace

// Row-major [rows, n] is column-major [n, rows]: out^T = weights x in^T, where the weights, read
// column-major as [depth, width], are transposed.
struct Gemm::State {
  cublasLtHandle_t handle{};
  cublasLtMatmulDesc_t operation{};
  cublasLtMatrixLayout_t weights{}, in{}, out{};
  cublasLtMatmulHeuristicResult_t chosen{};
  std::byte* workspace = nullptr;

  ~State() {
    for (const auto layout : {weights, in, out}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
    if (handle != nullptr) cublasLtDestroy(handle);
  }

  void choose() {
    cublasLtMatmulPreference_t preference{};
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto bytes = static_cast<std::uint64_t>(kBenchGemmWorkspaceBytes);
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    int count = 0;
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(handle, operation, weights, in, out, out, preference,
                                              1, &chosen, &count);
    }
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    if (count == 0) throw Error("cuBLASLt: no algorithm for this GEMM");
    check(chosen.state, "the algorithm that the heuristic prefers");
  }
};

Gemm::Gemm(std::int64_t rows, std::int64_t depth, std::int64_t width, std::byte* workspace)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.workspace = workspace;
  check(cublasLtCreate(&state.handle), "cublasLtCreate");
  check(cublasLtMatmulDescCreate(&state.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check(cublasLtMatmulDescSetAttribute(state.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                       sizeof transposed),
        "cublasLtMatmulDescSetAttribute");
  state.weights = make_layout(CUDA_R_16BF, depth, width);
  state.in = make_layout(CUDA_R_16BF, depth, rows);
  state.out = make_layout(CUDA_R_32F, width, rows);
  state.choose();
}

Gemm::~Gemm() = default;

void Gemm::enqueue(const void* weights, const void* in, float* out, const Stream& stream) const {
  const State& state = *state_;
  const float one = 1.0f, zero = 0.0f;
  check(cublasLtMatmul(state.handle, state.operation, &one, weights, state.weights, in, state.in,
                       &zero, out, state.out, out, state.out, &state.chosen.algo, state.workspace,
                       static_cast<std::size_t>(kBenchGemmWorkspaceBytes), stream.view().cuda()),
        "cublasLtMatmul");
}

std::string Gemm::describe() const {
  const auto config = [&](cublasLtMatmulAlgoConfigAttributes_t what) {
    std::int32_t value = -1;
    check(cublasLtMatmulAlgoConfigGetAttribute(&state_->chosen.algo, what, &value, sizeof value,
                                               nullptr),
          "cublasLtMatmulAlgoConfigGetAttribute");
    return value;
  };
  return concat("cuBLASLt algorithm ", config(CUBLASLT_ALGO_CONFIG_ID), ", tile ",
                config(CUBLASLT_ALGO_CONFIG_TILE_ID), ", split-K ",
                config(CUBLASLT_ALGO_CONFIG_SPLITK_NUM), ", workspace ",
                state_->chosen.workspaceSize, " bytes");
}

}  // namespace quire::bench
