// A model that costs nothing: its input rows and tokens are hashes (stand_in_math.h), its weights
// are made up. It stands where an engine's GEMMs, attention and sampling stand, on either backend.
// Drafts are the tokens that will come, or others where a hash says so; then all behind are others
// too, so that what is refused cannot be taken for what belongs there.
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

// Which of a step's plans input rows belong to.
enum class StandInStage : std::int32_t {
  kTarget,  // the step's tokens: in a decode step the sure one and its drafts
  kExtend,  // what was kept of them, through the draft layers
  kPass,    // one more draft of each batch row through the draft layers, never kept
};

enum class StandInOp : std::int32_t {
  kRows,    // input rows of one layer
  kSample,  // what each batch row keeps, and its next token
  kPasses,  // where the draft passes stand
};

struct StandInParams {
  std::int32_t layer = 0;
  LayerKind kind = LayerKind::kSliding;
  StandInStage stage = StandInStage::kTarget;
  StepShape shape;
  PlanViews views;
  float draft_acceptance = 0;
  std::int32_t draft_max = 0;
  std::int64_t rows_max = 0;
  std::uint32_t* seat_seed = nullptr;          // [seats]
  std::int32_t* seat_prompt_tokens = nullptr;  // [seats]
  std::int32_t* seat_tokens_max = nullptr;     // [seats] the request stops at this length
  std::uint32_t* seat_next_token = nullptr;    // [seats] not in the cache yet
  std::uint32_t* seat_first_token = nullptr;   // [seats] that of the newest decode step
  std::int32_t* kept = nullptr;                // [rows] of a decode step
  std::uint8_t* stop = nullptr;                // [rows]
  std::int32_t* pass_positions = nullptr;      // [draft_max, rows_max] of the draft passes
  std::uint16_t* window = nullptr;             // [tokens, 512] bf16
  float* csa = nullptr;                        // [tokens, 2048]
  float* indexer = nullptr;                    // [tokens, 512]
  float* hca = nullptr;                        // [tokens, 1024]
};

class StandInModel : public ServingModel {
 public:
  // Makes weights from the seed and copies them to the backend; blocks. Of the drafts a share of
  // `draft_acceptance` are right.
  StandInModel(Backend& backend, const ModelSpec& spec, const Limits& limits, Stream& stream,
               float draft_acceptance = 0.0f);

  void bind(DeviceCache& cache) const override;
  void begin_request(SeatId seat, const SeatRequest& request, StreamView stream) override;
  // A decode step tries as many drafts in each batch row as its shape has room for.
  void enqueue_step(DeviceCache& cache, PlanBufferId buffer, StepShape shape,
                    StreamView stream) const override;
  // Byte for byte against SPEC.md (verify.h).
  std::int64_t wait_to_verify(const DeviceCache& cache, Stream& stream,
                              const ServedRequest& request) override;

  const LayerWeights& weights(LayerId layer) const;
  const std::vector<float>& rope(RopeGroup group) const;  // [context_max, 64], interleaved

 private:
  void run(StandInOp op, const StandInParams& params, StreamView stream) const;
  void enqueue_layers(DeviceCache& cache, PlanBufferId buffer, StandInParams params,
                      LayerGroup group, StreamView stream) const;
  void enqueue_draft_layers(DeviceCache& cache, PlanBufferId buffer, StandInParams params,
                            StreamView stream) const;

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

// The model's operations, on the host and on CUDA.
void run_stand_in_host(StandInOp op, const StandInParams& params);
#ifdef QUIRE_WITH_CUDA
void run_stand_in_cuda(StandInOp op, const StandInParams& params, CUstream_st* stream);
void begin_stand_in_cuda(const StandInParams& params, SeatId seat, const SeatRequest& request,
                         CUstream_st* stream);
#endif

}  // namespace quire::serving
