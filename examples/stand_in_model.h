// A model that costs nothing: its input rows and tokens are hashes (stand_in_math.h), its weights are
// made up. It stands where an engine's GEMMs, attention and sampling stand, on either backend.
#pragma once

#include <cstdint>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/owners.h>

#include "examples/serving_model.h"

namespace quire::serving {

// Weights on the host, as the model file would hold them. Shapes as in LayerBinding.
struct LayerWeights {
  std::vector<float> window_norm, csa_bias, csa_norm, indexer_bias, indexer_norm;
  std::vector<float> hca_bias, hca_norm;
};

struct StandInParams {
  std::int32_t layer = 0;
  LayerKind kind = LayerKind::kSliding;
  StepShape shape;
  PlanViews views;
  std::uint32_t* seat_seed = nullptr;          // [seats]
  std::int32_t* seat_prompt_tokens = nullptr;  // [seats]
  std::uint32_t* seat_next_token = nullptr;    // [seats]
  std::uint16_t* window = nullptr;             // [tokens, 512] bf16
  float* csa = nullptr;                        // [tokens, 2048]
  float* indexer = nullptr;                    // [tokens, 512]
  float* hca = nullptr;                        // [tokens, 1024]
};

class StandInModel : public ServingModel {
 public:
  // Makes weights from the seed and copies them to the backend; blocks.
  StandInModel(Backend& backend, const ModelSpec& spec, const Limits& limits, Stream& stream);

  void bind(DeviceCache& cache) const override;
  void begin_request(SeatId seat, std::uint32_t seed, std::int64_t prompt_tokens,
                     StreamView stream) override;
  void enqueue_step(DeviceCache& cache, PlanBufferId buffer, StepShape shape,
                    StreamView stream) const override;
  // Byte for byte against SPEC.md (verify.h).
  std::int64_t wait_to_verify(const DeviceCache& cache, Stream& stream,
                              const ServedRequest& request) override;

  const LayerWeights& weights(LayerId layer) const;
  const std::vector<float>& rope(RopeGroup group) const;  // [context_max, 64], interleaved

 private:
  Backend* backend_;
  ModelSpec spec_;
  Limits limits_;
  std::vector<LayerWeights> weights_;
  std::vector<float> rope_[2];
  std::vector<LayerBinding> bindings_;
  RopeTable rope_tables_[2];
  MemoryPool pool_;
  Memory memory_;
  StandInParams arrays_;
};

// The model's two operations, on the host and on CUDA.
void stand_in_rows_host(const StandInParams& params);
void stand_in_sample_host(const StandInParams& params);
#ifdef QUIRE_WITH_CUDA
void stand_in_rows_cuda(const StandInParams& params, CUstream_st* stream);
void stand_in_sample_cuda(const StandInParams& params, CUstream_st* stream);
void stand_in_begin_cuda(const StandInParams& params, std::int32_t seat, std::uint32_t seed,
                         std::int32_t prompt_tokens, CUstream_st* stream);
#endif

}  // namespace quire::serving
