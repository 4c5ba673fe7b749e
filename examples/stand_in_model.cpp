#include "examples/stand_in_model.h"

#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>

#include "examples/carver.h"
#include "examples/stand_in_rows.h"
#include "examples/verify.h"

namespace quire::serving {
namespace {

std::vector<float> made_up(std::size_t count, std::uint32_t key, float centre, float spread) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = centre + spread * 0.25f * row_value(key, static_cast<std::int32_t>(i));
  }
  return values;
}

LayerWeights make_weights(LayerKind kind, std::uint32_t layer) {
  const auto key = [layer](std::uint32_t part) { return mix(layer * 16 + part + 1); };
  LayerWeights weights;
  weights.window_norm = made_up(512, key(0), 1.0f, 0.2f);
  if (kind == LayerKind::kCsa) {
    weights.csa_bias = made_up(8 * 512, key(1), 0.0f, 1.0f);
    weights.csa_norm = made_up(512, key(2), 1.0f, 0.2f);
    weights.indexer_bias = made_up(8 * 128, key(3), 0.0f, 1.0f);
    weights.indexer_norm = made_up(128, key(4), 1.0f, 0.2f);
  } else if (kind == LayerKind::kHca) {
    weights.hca_bias = made_up(128 * 512, key(5), 0.0f, 1.0f);
    weights.hca_norm = made_up(512, key(6), 1.0f, 0.2f);
  }
  return weights;
}

StandInParams carve_arrays(Carver& carver, const Limits& limits) {
  StandInParams arrays;
  arrays.seat_seed = carver.take<std::uint32_t>(limits.seats_max);
  arrays.seat_prompt_tokens = carver.take<std::int32_t>(limits.seats_max);
  arrays.seat_tokens_max = carver.take<std::int32_t>(limits.seats_max);
  arrays.seat_next_token = carver.take<std::uint32_t>(limits.seats_max);
  arrays.seat_first_token = carver.take<std::uint32_t>(limits.seats_max);
  arrays.kept = carver.take<std::int32_t>(limits.rows_max);
  arrays.stop = carver.take<std::uint8_t>(limits.rows_max);
  arrays.pass_positions = carver.take<std::int32_t>(limits.draft_max * limits.rows_max);
  arrays.window = carver.take<std::uint16_t>(limits.tokens_max * 512);
  arrays.csa = carver.take<float>(limits.tokens_max * 2048);
  arrays.indexer = carver.take<float>(limits.tokens_max * 512);
  arrays.hca = carver.take<float>(limits.tokens_max * 1024);
  return arrays;
}

std::int64_t bytes_needed(const ModelSpec& spec, const Limits& limits) {
  Carver carver(nullptr);
  carve_arrays(carver, limits);
  carver.take<float>(2 * limits.context_max * kRopeDim);
  for (std::size_t layer = 0; layer < spec.layers.size(); ++layer) {  // no kind has more
    for (const std::int64_t count : {512, 128 * 512, 512, 8 * 128, 128}) carver.take<float>(count);
  }
  return carver.used();
}

void rows_host(const StandInParams& params) {
  const auto fill = [&](const RowToken& row, RowPart part, std::int32_t width, auto* out,
                        auto element) {
    const std::uint32_t key = row_key(row.token, row.position, params.layer, part);
    for (std::int32_t c = 0; c < width; ++c) out[c] = element(row, key, c);
  };
  for (std::int32_t t = 0; t < params.shape.tokens; ++t) {
    const RowToken row = token_of_row(params, t);
    const auto at = static_cast<std::size_t>(t);
    fill(row, RowPart::kWindow, 512, params.window + at * 512, row_element_bf16);
    if (params.kind == LayerKind::kCsa) {
      fill(row, RowPart::kCsa, 2048, params.csa + at * 2048, row_element);
      fill(row, RowPart::kIndexer, 512, params.indexer + at * 512, row_element);
    } else if (params.kind == LayerKind::kHca) {
      fill(row, RowPart::kHca, 1024, params.hca + at * 1024, row_element);
    }
  }
}

}  // namespace

StandInModel::StandInModel(Backend& backend, const ModelSpec& spec, const Limits& limits,
                           Stream& stream, float draft_acceptance)
    : backend_(&backend),
      spec_(spec),
      limits_(limits),
      pool_(backend, bytes_needed(spec, limits)),
      memory_(pool_, bytes_needed(spec, limits), stream) {
  Carver carver(memory_.data());
  arrays_ = carve_arrays(carver, limits);
  arrays_.draft_acceptance = draft_acceptance;
  arrays_.draft_max = static_cast<std::int32_t>(limits.draft_max);
  arrays_.rows_max = limits.rows_max;
  const auto place = [&](const std::vector<float>& values) -> const float* {
    if (values.empty()) return nullptr;
    float* to = carver.take<float>(static_cast<std::int64_t>(values.size()));
    backend.copy(to, values.data(), static_cast<std::int64_t>(values.size() * sizeof(float)),
                 stream);
    return to;
  };
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    const auto index = static_cast<std::size_t>(group);
    rope_[index].resize(static_cast<std::size_t>(limits.context_max * kRopeDim));
    make_rope_table(group, limits.context_max, RopeLayout::kInterleaved, rope_[index]);
    rope_tables_[index] = {place(rope_[index]), limits.context_max, RopeLayout::kInterleaved};
  }
  weights_.reserve(spec.layers.size());  // copies in flight read from the elements
  for (std::size_t layer = 0; layer < spec.layers.size(); ++layer) {
    weights_.push_back(make_weights(spec.layers[layer], static_cast<std::uint32_t>(layer)));
    const LayerWeights& weights = weights_.back();
    LayerBinding binding;
    binding.window_norm = place(weights.window_norm);
    binding.csa_bias = place(weights.csa_bias);
    binding.csa_norm = place(weights.csa_norm);
    binding.indexer_bias = place(weights.indexer_bias);
    binding.indexer_norm = place(weights.indexer_norm);
    binding.hca_bias = place(weights.hca_bias);
    binding.hca_norm = place(weights.hca_norm);
    binding.bias_order = BiasOrder::kKernel;
    bindings_.push_back(binding);
  }
  stream.wait();
}

void StandInModel::bind(DeviceCache& cache) const {
  for (std::size_t layer = 0; layer < bindings_.size(); ++layer) {
    cache.bind_layer(LayerId(static_cast<std::int32_t>(layer)), bindings_[layer]);
  }
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    cache.bind_rope(group, rope_tables_[static_cast<std::size_t>(group)]);
  }
}

void StandInModel::begin_request(SeatId seat, const SeatRequest& request, StreamView stream) {
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    begin_stand_in_cuda(arrays_, seat, request, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue([arrays = arrays_, seat, request] {
    begin_seat(arrays, seat.value, request.seed, static_cast<std::int32_t>(request.prompt_tokens),
               static_cast<std::int32_t>(request.tokens_max));
  });
}

void StandInModel::run(StandInOp op, const StandInParams& params, StreamView stream) const {
#ifdef QUIRE_WITH_CUDA
  if (!stream.is_host()) {
    run_stand_in_cuda(op, params, stream.cuda());
    return;
  }
#endif
  stream.host()->enqueue([op, params] { run_stand_in_host(op, params); });
}

void StandInModel::enqueue_step(DeviceCache& cache, PlanBufferId buffer, StepShape shape,
                                StreamView stream) const {
  StandInParams params = arrays_;
  params.shape = shape;
  params.views = cache.views(buffer);
  cache.enqueue_plan(buffer, stream);
  enqueue_layers(cache, buffer, params, LayerGroup::kTarget, stream);
  run(StandInOp::kSample, params, stream);
  if (shape.is_decode()) {
    StopRowsParams stop;
    stop.rows = shape.rows;
    stop.tokens_per_row = shape.tokens_per_row;
    stop.tokens_stride = shape.tokens_per_row;
    stop.records = cache.plan_buffer(buffer).rows;
    stop.length_limit = arrays_.seat_tokens_max;
    stop.kept = arrays_.kept;
    stop.stop = arrays_.stop;
    backend_->stop_rows(stop, Pdl::kOff, stream);
    cache.enqueue_commit(buffer, arrays_.kept, arrays_.stop, stream);
  } else {
    cache.enqueue_commit(buffer, nullptr, nullptr, stream);
  }
  if (spec_.draft_layers > 0) enqueue_draft_layers(cache, buffer, params, stream);
}

// The draft layers follow with what was kept; then each pass goes one draft further.
void StandInModel::enqueue_draft_layers(DeviceCache& cache, PlanBufferId buffer,
                                        StandInParams params, StreamView stream) const {
  PlanInputs extension{LayerGroup::kDraft};
  if (params.shape.is_decode()) extension.row_tokens = arrays_.kept;
  params.stage = StandInStage::kExtend;
  cache.enqueue_plan(buffer, stream, extension);
  enqueue_layers(cache, buffer, params, LayerGroup::kDraft, stream);
  cache.enqueue_commit(buffer, nullptr, nullptr, stream);
  const std::int32_t passes = params.shape.tokens_per_row - 2;  // the extension gives a draft too
  if (passes <= 0) return;
  run(StandInOp::kPasses, params, stream);
  params.stage = StandInStage::kPass;
  params.shape = StepShape::decode(params.shape.rows);
  for (std::int32_t pass = 0; pass < passes; ++pass) {
    cache.enqueue_plan(buffer, stream,
                       {.group = LayerGroup::kDraft,
                        .tokens_per_row = 1,
                        .positions = arrays_.pass_positions + pass * limits_.rows_max});
    enqueue_layers(cache, buffer, params, LayerGroup::kDraft, stream);
  }
}

void StandInModel::enqueue_layers(DeviceCache& cache, PlanBufferId buffer, StandInParams params,
                                  LayerGroup group, StreamView stream) const {
  for (std::size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    params.layer = static_cast<std::int32_t>(layer);
    params.kind = spec_.layers[layer];
    if (spec_.group_of(LayerId(params.layer)) != group) continue;
    run(StandInOp::kRows, params, stream);
    AppendInputs inputs;
    inputs.window.data = params.window;
    if (params.kind == LayerKind::kCsa) {
      inputs.csa.data = params.csa;
      inputs.indexer.data = params.indexer;
    } else if (params.kind == LayerKind::kHca) {
      inputs.hca.data = params.hca;
    }
    cache.append(LayerId(params.layer), buffer, inputs, stream);
  }
}

std::int64_t StandInModel::wait_to_verify(const DeviceCache& cache, Stream& stream,
                                          const ServedRequest& request) {
  return verify_request(cache, *this, stream, request);
}

const LayerWeights& StandInModel::weights(LayerId layer) const {
  return weights_[static_cast<std::size_t>(layer.value)];
}

const std::vector<float>& StandInModel::rope(RopeGroup group) const {
  return rope_[static_cast<std::size_t>(group)];
}

void run_stand_in_host(StandInOp op, const StandInParams& params) {
  if (op == StandInOp::kRows) return rows_host(params);
  for (std::int32_t row = 0; row < params.shape.rows; ++row) run_for_row(op, params, row);
}

}  // namespace quire::serving
