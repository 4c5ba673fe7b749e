// The weights and the memory of tiny_v4: made once from the seed, in one piece, at fixed addresses.
#include "examples/tiny_v4.h"

#include <cmath>
#include <optional>
#include <span>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>

#include "examples/carver.h"
#include "examples/stand_in_math.h"
#include "examples/tiny_v4_drafts.h"
#ifdef QUIRE_WITH_CUDA
#include "examples/tiny_v4_gemms.h"
#endif

namespace quire::serving {
namespace {

// Makes weights from a seed, one key per array, and copies each to its place. A maker without a
// backend only measures.
class WeightMaker {
 public:
  WeightMaker(Carver& carver, std::uint32_t seed) : carver_(carver), key_(mix(seed)) {}
  WeightMaker(Carver& carver, std::uint32_t seed, Backend& backend, StreamView stream)
      : carver_(carver), key_(mix(seed)), backend_(&backend), stream_(stream) {}

  // [in, out]: outputs of unit inputs have a variance of about gain squared.
  const float* matrix(std::int64_t in, std::int64_t out, float gain = 1.0f) {
    return vector(in * out, 0.0f, gain / std::sqrt(static_cast<float>(in)));
  }

  // `deviation` is the standard one; the values are uniform.
  const float* vector(std::int64_t count, float centre, float deviation) {
    const std::uint32_t key = mix(key_++);
    constexpr float kUnit = 0.4330127f;  // row_value is uniform in [-4, 4)
    return place(count, [&](std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = centre + deviation * kUnit * row_value(key, static_cast<std::int32_t>(i));
      }
    });
  }

  RopeTable rope(RopeGroup group, std::int64_t positions) {
    const float* values = place(positions * kRopeDim, [&](std::span<float> table) {
      make_rope_table(group, positions, RopeLayout::kInterleaved, table);
    });
    return {values, positions, RopeLayout::kInterleaved};
  }

 private:
  template <class Fill>
  const float* place(std::int64_t count, const Fill& fill) {
    float* to = carver_.take<float>(count);
    if (backend_ == nullptr) return nullptr;
    std::vector<float> values(static_cast<std::size_t>(count));
    fill(std::span(values));
    backend_->copy(to, values.data(), count * static_cast<std::int64_t>(sizeof(float)), *stream_);
    backend_->wait(*stream_);  // the copy reads from here
    return to;
  }

  Carver& carver_;
  std::uint32_t key_;
  Backend* backend_ = nullptr;
  std::optional<StreamView> stream_;
};

void make_layer(WeightMaker& maker, LayerKind kind, const TinyV4Config& config,
                TinyV4Weights& weights) {
  constexpr float kOutputGain = 2.0f;  // what was read counts as much as the last token
  TinyV4Layer layer;
  layer.kind = kind;
  layer.norm = maker.vector(config.hidden, 1.0f, 0.1f);
  layer.q_norm = maker.vector(config.q_rank, 1.0f, 0.1f);
  layer.sinks = maker.vector(config.heads, 0.0f, 1.0f);
  layer.projections = maker.matrix(config.hidden, config.projected_width(kind));
  layer.queries = maker.matrix(config.q_rank, config.query_width(kind));
  layer.output = maker.matrix(config.attended_width(), config.hidden, kOutputGain);
  weights.layers.push_back(layer);

  LayerBinding binding;
  binding.window_rows = ElementType::kFloat32;
  binding.bias_order = BiasOrder::kKernel;
  binding.window_norm = maker.vector(kHeadDim, 1.0f, 0.1f);
  if (kind == LayerKind::kCsa) {
    binding.csa_bias = maker.vector(8 * kHeadDim, 0.0f, 0.5f);
    binding.csa_norm = maker.vector(kHeadDim, 1.0f, 0.1f);
    binding.indexer_bias = maker.vector(8 * kIndexerDim, 0.0f, 0.5f);
    binding.indexer_norm = maker.vector(kIndexerDim, 1.0f, 0.1f);
  } else if (kind == LayerKind::kHca) {
    binding.hca_bias = maker.vector(128 * kHeadDim, 0.0f, 0.5f);
    binding.hca_norm = maker.vector(kHeadDim, 1.0f, 0.1f);
  }
  weights.bindings.push_back(binding);
}

TinyV4Weights make_weights(WeightMaker& maker, const ModelSpec& spec, std::int64_t context_max,
                           const TinyV4Config& config) {
  TinyV4Weights weights;
  weights.embedding = maker.vector(std::int64_t{config.vocabulary} * config.hidden, 0.0f, 1.0f);
  weights.final_norm = maker.vector(config.hidden, 1.0f, 0.1f);
  weights.head = maker.matrix(config.hidden, config.vocabulary);
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    weights.rope[static_cast<std::size_t>(group)] = maker.rope(group, context_max);
  }
  for (const LayerKind kind : spec.layers) make_layer(maker, kind, config, weights);
  if (spec.draft_layers > 0) {
    weights.draft_hidden_norm = maker.vector(config.hidden, 1.0f, 0.1f);
    weights.draft_token_norm = maker.vector(config.hidden, 1.0f, 0.1f);
    weights.draft_input = maker.matrix(2 * std::int64_t{config.hidden}, config.hidden);
  }
  return weights;
}

TinyV4Drafts carve_drafts(Carver& carver, const Limits& limits, const TinyV4Config& config) {
  const std::int64_t positions = limits.seats_max * (limits.context_max + 1);
  TinyV4Drafts drafts;
  drafts.seat_tokens_max = carver.take<std::int32_t>(limits.seats_max);
  drafts.seat_count = carver.take<std::int32_t>(limits.seats_max);
  drafts.drafted = carver.take<std::int32_t>(positions);
  drafts.truth = carver.take<std::int32_t>(positions);
  drafts.input = carver.take<float>(round_up(limits.tokens_max, kGemmRows) * 2 * config.hidden);
  drafts.row_tokens = carver.take<std::int32_t>(limits.rows_max);
  drafts.kept = carver.take<std::int32_t>(limits.rows_max);
  drafts.stop = carver.take<std::uint8_t>(limits.rows_max);
  drafts.pass_positions = carver.take<std::int32_t>(limits.draft_max * limits.rows_max);
  return drafts;
}

TinyV4Arrays carve_arrays(Carver& carver, const Limits& limits, const TinyV4Config& config) {
  const std::int64_t rows = round_up(limits.tokens_max, kGemmRows);
  const std::int64_t positions = limits.seats_max * (limits.context_max + 1);
  TinyV4Arrays arrays;
  arrays.seat_seed = carver.take<std::uint32_t>(limits.seats_max);
  arrays.seat_prompt_tokens = carver.take<std::int32_t>(limits.seats_max);
  arrays.history = carver.take<std::int32_t>(positions);
  arrays.predicted = carver.take<std::int32_t>(positions);
  arrays.x = carver.take<float>(rows * config.hidden);
  arrays.normed = carver.take<float>(rows * config.hidden);
  arrays.projected = carver.take<float>(rows * config.projected_stride());
  arrays.q_low = carver.take<float>(rows * config.q_rank);
  arrays.queries = carver.take<float>(rows * config.query_stride());
  arrays.attended = carver.take<float>(rows * config.attended_width());
  arrays.logits = carver.take<float>(rows * config.vocabulary);
  arrays.picks = carver.take<std::int32_t>(rows * config.index_topk);
  arrays.workspace = carver.take<std::byte>(kGemmWorkspaceBytes);
  arrays.drafts = carve_drafts(carver, limits, config);
  return arrays;
}

std::int64_t bytes_needed(const ModelSpec& spec, const Limits& limits, const TinyV4Config& config) {
  config.check();
  Carver carver(nullptr);
  carve_arrays(carver, limits, config);
  WeightMaker maker(carver, config.seed);
  make_weights(maker, spec, limits.context_max, config);
  return carver.used();
}

}  // namespace

void TinyV4Config::check() const {
  const auto in = [](const char* name, std::int64_t value, std::int64_t step, std::int64_t most) {
    QUIRE_CHECK(value > 0 && value % step == 0 && value <= most, "TinyV4Config::", name, " is ",
                value, "; supported: multiples of ", step, " up to ", most);
  };
  in("hidden", hidden, 64, 1 << 14);
  in("heads", heads, 1, kHeadsMax);
  in("q_rank", q_rank, 64, 1 << 14);
  in("indexer_heads", indexer_heads, 1, kHeadsMax);
  in("index_topk", index_topk, 64, kTopkMax);
  in("vocabulary", vocabulary, 64, 1 << 20);
}

std::int64_t TinyV4Config::projected_width(LayerKind kind) const {
  switch (kind) {
    case LayerKind::kCsa:
      return projected_stride();
    case LayerKind::kHca:
      return compressor_at() + 2 * kHeadDim;
    case LayerKind::kSliding:
      break;
  }
  return compressor_at();
}

std::int64_t TinyV4Config::query_width(LayerKind kind) const {
  return kind == LayerKind::kCsa ? query_stride() : attended_width();
}

TinyV4::TinyV4(Backend& backend, const ModelSpec& spec, const Limits& limits, Stream& stream,
               const TinyV4Config& config)
    : backend_(&backend),
      spec_(spec),
      limits_(limits),
      config_(config),
      pool_(backend, bytes_needed(spec, limits, config)),
      memory_(pool_, bytes_needed(spec, limits, config), stream) {
  Carver carver(memory_.data());
  arrays_ = carve_arrays(carver, limits, config);
  const std::int64_t arrays_bytes = carver.used();
  WeightMaker maker(carver, config.seed, backend, stream);
  weights_ = make_weights(maker, spec, limits.context_max, config);
  backend.fill(memory_.data(), 0, arrays_bytes, stream);
  stream.wait();
#ifdef QUIRE_WITH_CUDA
  if (backend.kind() == BackendKind::kCuda) {
    gemms_ = std::make_shared<PinnedGemms>(arrays_.workspace);
    for (const TinyV4Layer& layer : weights_.layers) {
      for (const Gemm& gemm : gemms_of(layer, 0)) gemms_->prepare(gemm);
    }
    gemms_->prepare(head_gemm(0));
    if (spec.draft_layers > 0) gemms_->prepare(draft_gemm(0));
  }
#endif
}

void TinyV4::bind(DeviceCache& cache) const {
  for (std::size_t layer = 0; layer < weights_.bindings.size(); ++layer) {
    cache.bind_layer(LayerId(static_cast<std::int32_t>(layer)), weights_.bindings[layer]);
  }
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    cache.bind_rope(group, weights_.rope[static_cast<std::size_t>(group)]);
  }
}

void TinyV4::begin_request(SeatId seat, const SeatRequest& request, StreamView stream) {
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    begin_request_cuda(arrays_, seat, request, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue(
      [arrays = arrays_, seat, request] { begin_seat(arrays, seat.value, begun_of(request)); });
}

void TinyV4::set_truth(SeatId seat, std::span<const std::int32_t> tokens, StreamView stream) {
  QUIRE_CHECK(static_cast<std::int64_t>(tokens.size()) <= limits_.context_max + 1,
              "TinyV4::set_truth: ", tokens.size(), " tokens; context_max is ",
              limits_.context_max);
  backend_->copy(arrays_.drafts.truth + seat.value * (limits_.context_max + 1), tokens.data(),
                 static_cast<std::int64_t>(tokens.size_bytes()), stream);
}

}  // namespace quire::serving
