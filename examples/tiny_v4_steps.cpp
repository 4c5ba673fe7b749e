// One step of tiny_v4 as an engine enqueues it: plan, layers, sampling, what is kept, commit; and,
// where the model has draft layers, what they do: they are extended by what was kept, and run on
// from there, a token of each batch row at a time, to draft for the next step.
#include <quire/runtime/host/host_stream.h>

#include "examples/tiny_v4.h"
#include "examples/tiny_v4_drafts.h"
#ifdef QUIRE_WITH_CUDA
#include "examples/tiny_v4_gemms.h"
#endif

namespace quire::serving {
namespace {

RopeGroup rope_group_of(LayerKind kind) {
  return kind == LayerKind::kSliding ? RopeGroup::kSliding : RopeGroup::kCompressing;
}

// Rows do not know of each other, so the host may leave the padding out.
std::int64_t gemm_rows(const TinyV4Step& step, StreamView stream) {
  return stream.is_host() ? step.shape.tokens : step.padded_tokens();
}

}  // namespace

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

Gemm TinyV4::draft_gemm(std::int64_t rows) const {
  return {arrays_.drafts.input,
          2 * std::int64_t{config_.hidden},
          weights_.draft_input,
          arrays_.x,
          config_.hidden,
          rows,
          2 * config_.hidden,
          config_.hidden,
          false};
}

TinyV4Step TinyV4::make_step(const DeviceCache& cache, PlanBufferId buffer, StepShape shape) const {
  TinyV4Step step;
  step.config = config_;
  step.arrays = arrays_;
  step.shape = shape;
  step.views = cache.views(buffer);
  step.row_seats = cache.plan_buffer(buffer).row_seats;
  step.row_tokens = cache.plan_buffer(buffer).row_tokens;
  step.seat_lengths = cache.step_table().length_of(LayerGroup::kTarget);
  step.context_max = limits_.context_max;
  step.rows_max = limits_.rows_max;
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
  step.rope = weights_.rope[static_cast<std::size_t>(rope_group_of(step.layer.kind))].values;
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
  const TinyV4Step step = make_step(cache, buffer, shape);
  const TinyV4Drafts& drafts = arrays_.drafts;
  PlanInputs plan;
  if (shape.tokens_per_row > 1) {
    run(TinyV4Op::kRowTokens, step, stream);
    plan.row_tokens = drafts.row_tokens;
  }
  cache.enqueue_plan(buffer, stream, plan);
  run(TinyV4Op::kEmbed, step, stream);
  enqueue_layers(cache, buffer, step, LayerGroup::kTarget, stream);
  enqueue_logits(step, stream);
  run(TinyV4Op::kAccept, step, stream);
  cache.enqueue_commit(buffer, shape.is_decode() ? drafts.kept : nullptr, drafts.stop, stream);
  if (spec_.draft_layers > 0) {
    enqueue_extension(cache, buffer, step, stream);
    enqueue_passes(cache, buffer, step, stream);
  }
}

// The hidden states of what was kept still stand in the input rows where the target layers left
// them: the plan of the extension has the same rows.
void TinyV4::enqueue_extension(DeviceCache& cache, PlanBufferId buffer, TinyV4Step step,
                               StreamView stream) const {
  step.stage = TinyV4Stage::kExtend;
  PlanInputs plan{LayerGroup::kDraft};
  if (step.shape.is_decode()) plan.row_tokens = arrays_.drafts.kept;
  enqueue_draft_layers(cache, buffer, step, plan, stream);
  cache.enqueue_commit(buffer, nullptr, nullptr, stream);
}

// The extension has drafted the first token. Each pass drafts another, from what the one before it
// gave, and is not committed.
void TinyV4::enqueue_passes(DeviceCache& cache, PlanBufferId buffer, TinyV4Step step,
                            StreamView stream) const {
  const std::int32_t drafts = step.shape.tokens_per_row - 1;
  step.stage = TinyV4Stage::kPass;
  step.extended_tokens_per_row = step.shape.tokens_per_row;
  step.shape = StepShape::decode(step.shape.rows);
  for (std::int32_t pass = 1; pass < drafts; ++pass) {
    const PlanInputs plan{
        .group = LayerGroup::kDraft,
        .tokens_per_row = 1,
        .positions = arrays_.drafts.pass_positions + (pass - 1) * limits_.rows_max};
    enqueue_draft_layers(cache, buffer, step, plan, stream);
    step.extended_tokens_per_row = 0;
  }
}

void TinyV4::enqueue_draft_layers(DeviceCache& cache, PlanBufferId buffer, const TinyV4Step& step,
                                  const PlanInputs& plan, StreamView stream) const {
  const std::int64_t hidden = config_.hidden;
  const std::int64_t rows = gemm_rows(step, stream);
  float* const input = arrays_.drafts.input;
  cache.enqueue_plan(buffer, stream, plan);
  run(TinyV4Op::kDraftInput, step, stream);
  for (const auto& [part, weight] : {std::pair{input, weights_.draft_hidden_norm},
                                     std::pair{input + hidden, weights_.draft_token_norm}}) {
    normalise({part, 2 * hidden, part, 2 * hidden, weight, rows, config_.hidden, step.norm_eps},
              stream);
  }
  multiply(draft_gemm(rows), stream);
  enqueue_layers(cache, buffer, step, LayerGroup::kDraft, stream);
  if (limits_.draft_max > 0) enqueue_logits(step, stream);
}

void TinyV4::enqueue_layers(DeviceCache& cache, PlanBufferId buffer, TinyV4Step step,
                            LayerGroup group, StreamView stream) const {
  const std::int64_t rows = gemm_rows(step, stream);
  for (std::size_t i = 0; i < weights_.layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    if (spec_.group_of(layer) != group) continue;
    point_at_layer(step, cache, layer);
    const auto [projections, queries, output] = gemms_of(step.layer, rows);
    normalise({arrays_.x, config_.hidden, arrays_.normed, config_.hidden, step.layer.norm, rows,
               config_.hidden, step.norm_eps},
              stream);
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
}

void TinyV4::enqueue_logits(const TinyV4Step& step, StreamView stream) const {
  const std::int64_t rows = gemm_rows(step, stream);
  normalise({arrays_.x, config_.hidden, arrays_.normed, config_.hidden, weights_.final_norm, rows,
             config_.hidden, step.norm_eps},
            stream);
  multiply(head_gemm(rows), stream);
  run(TinyV4Op::kSample, step, stream);
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
