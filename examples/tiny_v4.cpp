#include "examples/tiny_v4.h"

#include <cmath>
#include <optional>
#include <span>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>

#include "examples/carver.h"
#include "examples/stand_in_math.h"
#ifdef QUIRE_WITH_CUDA
#include "examples/tiny_v4_gemms.h"
#endif

namespace quire::serving {
namespace {

RopeGroup group_of(LayerKind kind) {
  return kind == LayerKind::kSliding ? RopeGroup::kSliding : RopeGroup::kCompressing;
}

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
  return weights;
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
  }
#endif
}

Gemm TinyV4::head_gemm(std::int64_t rows) const {
  return {arrays_.normed, config_.hidden, weights_.head,      arrays_.logits, config_.vocabulary,
          rows,           config_.hidden, config_.vocabulary, false};
}

std::array<Gemm, 3> TinyV4::gemms_of(const TinyV4Layer& layer, std::int64_t rows) const {
  const Gemm projections{arrays_.normed,
                         config_.hidden,
                         layer.projections,
                         arrays_.projected,
                         config_.projected_stride(),
                         rows,
                         config_.hidden,
                         static_cast<std::int32_t>(config_.projected_width(layer.kind)),
                         false};
  const Gemm queries{arrays_.q_low,
                     config_.q_rank,
                     layer.queries,
                     arrays_.queries,
                     config_.query_stride(),
                     rows,
                     config_.q_rank,
                     static_cast<std::int32_t>(config_.query_width(layer.kind)),
                     false};
  const Gemm output{arrays_.attended,
                    config_.attended_width(),
                    layer.output,
                    arrays_.x,
                    config_.hidden,
                    rows,
                    static_cast<std::int32_t>(config_.attended_width()),
                    config_.hidden,
                    true};
  return {projections, queries, output};
}

void TinyV4::bind(DeviceCache& cache) const {
  for (std::size_t layer = 0; layer < weights_.bindings.size(); ++layer) {
    cache.bind_layer(LayerId(static_cast<std::int32_t>(layer)), weights_.bindings[layer]);
  }
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    cache.bind_rope(group, weights_.rope[static_cast<std::size_t>(group)]);
  }
}

void TinyV4::begin_request(SeatId seat, std::uint32_t seed, std::int64_t prompt_tokens,
                           StreamView stream) {
  const auto prompt = static_cast<std::int32_t>(prompt_tokens);
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    begin_request_cuda(arrays_, seat.value, seed, prompt, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue([arrays = arrays_, seat, seed, prompt] {
    arrays.seat_seed[seat.value] = seed;
    arrays.seat_prompt_tokens[seat.value] = prompt;
  });
}

TinyV4Step TinyV4::make_step(const DeviceCache& cache, PlanBufferId buffer, StepShape shape) const {
  TinyV4Step step;
  step.config = config_;
  step.arrays = arrays_;
  step.shape = shape;
  step.views = cache.views(buffer);
  step.context_max = limits_.context_max;
  step.window_ring_tokens = cache.window_ring_tokens();
  step.draft_max = limits_.draft_max;
  step.embedding = weights_.embedding;
  step.window_scratch = cache.window_scratch(buffer);
  step.norm_eps = cache.options().norm_eps;
  step.hadamard = cache.options().hadamard;
  return step;
}

void TinyV4::point_at_layer(TinyV4Step& step, const DeviceCache& cache, LayerId layer) const {
  step.layer = weights_.layers[static_cast<std::size_t>(layer.value)];
  step.rope = weights_.rope[static_cast<std::size_t>(group_of(step.layer.kind))].values;
  step.window_ring = cache.window_ring(layer);
  if (step.layer.kind == LayerKind::kCsa) {
    step.compressed = cache.csa_pages(layer);
    step.keys = cache.indexer_pages(layer);
  } else if (step.layer.kind == LayerKind::kHca) {
    step.compressed = cache.hca_pages(layer);
  }
}

AppendInputs TinyV4::rows_of(const TinyV4Step& step) const {
  const auto part = [&](std::int64_t at) {
    return AppendInputs::Rows{arrays_.projected + at, config_.projected_stride()};
  };
  AppendInputs inputs;
  inputs.window = part(0);
  if (step.layer.kind == LayerKind::kCsa) {
    inputs.csa = part(config_.compressor_at());
    inputs.indexer = part(config_.indexer_at());
  } else if (step.layer.kind == LayerKind::kHca) {
    inputs.hca = part(config_.compressor_at());
  }
  return inputs;
}

void TinyV4::enqueue_step(DeviceCache& cache, PlanBufferId buffer, StepShape shape,
                          StreamView stream) const {
  TinyV4Step step = make_step(cache, buffer, shape);
  // Rows do not know of each other, so the host may leave the padding out.
  const std::int64_t rows = stream.is_host() ? shape.tokens : step.padded_tokens();
  const auto normalise_x = [&](const float* weight) {
    normalise({arrays_.x, config_.hidden, arrays_.normed, config_.hidden, weight, rows,
               config_.hidden, step.norm_eps},
              stream);
  };
  cache.enqueue_plan(buffer, stream);
  run(TinyV4Op::kEmbed, step, stream);
  for (std::size_t i = 0; i < weights_.layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    point_at_layer(step, cache, layer);
    const auto [projections, queries, output] = gemms_of(step.layer, rows);
    normalise_x(step.layer.norm);
    multiply(projections, stream);
    normalise({arrays_.projected + kHeadDim, config_.projected_stride(), arrays_.q_low,
               config_.q_rank, step.layer.q_norm, rows, config_.q_rank, step.norm_eps},
              stream);
    multiply(queries, stream);
    run(TinyV4Op::kQueries, step, stream);
    cache.append(layer, buffer, rows_of(step), stream);
    // Reads the window scratch, which all layers share: before the next layer's append.
    if (step.layer.kind == LayerKind::kCsa) run(TinyV4Op::kSelect, step, stream);
    run(TinyV4Op::kAttend, step, stream);
    multiply(output, stream);
  }
  normalise_x(weights_.final_norm);
  multiply(head_gemm(rows), stream);
  run(TinyV4Op::kSample, step, stream);
  cache.enqueue_commit(buffer, nullptr, nullptr, stream);
}

void TinyV4::run(TinyV4Op op, const TinyV4Step& step, StreamView stream) const {
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    run_cuda(op, step, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue([op, step] { run_host(op, step); });
}

void TinyV4::normalise(const NormRows& norm, StreamView stream) const {
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    normalise_rows_cuda(norm, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue([norm] { normalise_rows_host(norm); });
}

void TinyV4::multiply(const Gemm& gemm, StreamView stream) const {
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    gemms_->enqueue(gemm, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue([gemm] { multiply_host(gemm); });
}

}  // namespace quire::serving
