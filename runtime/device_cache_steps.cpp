// What DeviceCache binds and enqueues: updates, plans, appends, commits. Everything is checked
// before anything is enqueued, so a call that throws UsageError has changed nothing.
#include <quire/planner/apply_chunks.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache_state.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>

namespace quire {
namespace {

// Input rows of one part may lie over so many elements: offsets stay far inside 64 bits.
constexpr std::int64_t kInputElementsMax = std::int64_t{1} << 40;

constexpr std::uint8_t kWindowBit = 1;
constexpr std::uint8_t kCsaBit = 2;
constexpr std::uint8_t kIndexerBit = 4;
constexpr std::uint8_t kHcaBit = 8;

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

void check_bound_pointer(const Backend& backend, LayerId layer, LayerKind kind, const char* name,
                         const float* pointer, bool needed) {
  if (pointer == nullptr) {
    QUIRE_CHECK(!needed, "layer ", layer.value, " is of kind ", name_of(kind),
                ": LayerBinding::", name, " is null, but the kind needs it");
    return;
  }
  QUIRE_CHECK(aligned(pointer, 16), "layer ", layer.value, ": LayerBinding::", name, " at ",
              static_cast<const void*>(pointer), " is not 16-byte aligned");
  backend.check_memory(pointer, name);
}

RopeGroup group_of(LayerKind kind) {
  return kind == LayerKind::kSliding ? RopeGroup::kSliding : RopeGroup::kCompressing;
}

const char* name_of(RopeGroup group) {
  return group == RopeGroup::kSliding ? "sliding" : "compressing";
}

// Validates the rows of one part and gives them their type and stride.
InputRows resolve_rows(const AppendInputs::Rows& rows, ElementType type, std::int64_t width,
                       std::int64_t tokens, const char* part) {
  if (rows.data == nullptr) return {};
  QUIRE_CHECK(aligned(rows.data, 16), "AppendInputs::", part, " at ", rows.data,
              " is not 16-byte aligned");
  const std::int64_t stride = rows.stride == 0 ? width : rows.stride;
  const std::int64_t most = kInputElementsMax / tokens;
  QUIRE_CHECK(stride >= width && stride <= most && stride * bytes_of(type) % 16 == 0,
              "AppendInputs::", part, ".stride is ", stride, " elements of ", bytes_of(type),
              " bytes; supported: at least ", width, ", at most ", most, " for ", tokens,
              " tokens, and a multiple of 16 bytes");
  return {rows.data, stride, type};
}

CsaPart make_csa_part(const InputRows& rows, const LayerBinding& binding, const float* bias,
                      const float* norm, float* state, std::int64_t ring, const EntryPool& pages) {
  CsaPart part;
  if (rows.data == nullptr) return part;
  part.rows = rows;
  part.bias = bias;
  part.bias_order = binding.bias_order;
  part.norm_weight = norm;
  part.state = state;
  part.ring_tokens = static_cast<std::int32_t>(ring);
  part.pages = pages;
  return part;
}

HcaPart make_hca_part(const InputRows& rows, const LayerBinding& binding, const LayerState& layer,
                      std::int64_t banks) {
  HcaPart part;
  if (rows.data == nullptr) return part;
  part.rows = rows;
  part.bias = binding.hca_bias;
  part.norm_weight = binding.hca_norm;
  part.state = layer.hca_state;
  part.banks = static_cast<std::int32_t>(banks);
  part.pages = layer.hca_pages;
  return part;
}

// Capacity of a compact list for this shape; decode shapes have one record per token instead.
std::int32_t entry_capacity(CompressionRule rule, StepShape shape) {
  if (shape.is_decode()) return 0;
  return static_cast<std::int32_t>(compress_capacity(rule, shape.rows, shape.tokens));
}

}  // namespace

void DeviceCache::bind_layer(LayerId layer, const LayerBinding& binding) {
  State& state = *state_;
  state.check_usable();
  const std::size_t index = state.index_of(layer);
  const LayerKind kind = state.spec.layers[index];
  const bool csa = kind == LayerKind::kCsa;
  const bool hca = kind == LayerKind::kHca;
  const auto check = [&](const char* name, const float* pointer, bool needed) {
    check_bound_pointer(state.backend, layer, kind, name, pointer, needed);
  };
  check("window_norm", binding.window_norm, false);
  check("csa_bias", binding.csa_bias, csa);
  check("csa_norm", binding.csa_norm, csa);
  check("indexer_bias", binding.indexer_bias, csa);
  check("indexer_norm", binding.indexer_norm, csa);
  check("hca_bias", binding.hca_bias, hca);
  check("hca_norm", binding.hca_norm, hca);
  state.layers[index].binding = binding;
}

void DeviceCache::bind_rope(RopeGroup group, const RopeTable& table) {
  State& state = *state_;
  state.check_usable();
  const auto index = static_cast<std::size_t>(group);
  QUIRE_CHECK(index < 2, "RopeGroup ", index, " does not exist; supported: sliding, compressing");
  QUIRE_CHECK(table.values != nullptr, "RopeTable::values of group ", name_of(group), " is null");
  QUIRE_CHECK(aligned(table.values, 16), "RopeTable::values of group ", name_of(group), " at ",
              static_cast<const void*>(table.values), " is not 16-byte aligned");
  QUIRE_CHECK(table.positions >= state.limits.context_max, "RopeTable::positions of group ",
              name_of(group), " is ", table.positions, "; Limits::context_max needs ",
              state.limits.context_max);
  state.backend.check_memory(table.values, "RopeTable::values");
  state.rope[index] = table;
}

void DeviceCache::use_sink(PageId page) {
  State& state = *state_;
  state.check_usable();
  QUIRE_CHECK(page.value >= 0 && page.value < state.limits.pages, "use_sink: page ", page.value,
              " does not exist; pages are 0 to ", state.limits.pages - 1);
  state.geometry.padding_csa_location = std::int64_t{page.value} * kCsaPageEntries;
  state.geometry.padding_hca_location = std::int64_t{page.value} * kHcaPageEntries;
}

void DeviceCache::check_can_apply(StreamView stream) const {
  state_->check_usable();
  state_->backend.check_stream(stream);
  QUIRE_CHECK(
      !state_->backend.is_capturing(stream),
      "DeviceCache: apply and clear on a stream that is capturing: they differ from step to "
      "step, enqueue them outside of the graph");
}

void DeviceCache::apply(const StepUpdate& update, StreamView stream) {
  State& state = *state_;
  check_can_apply(stream);
  QUIRE_CHECK(update.id() == kPaddingStep || update.id() == state.next_id, "update of step ",
              update.id(), " is out of order: step ", state.next_id, " comes next");
  check_update(update, state.limits, state.named_seats);
  PlanBufferState& buffer = state.buffers[state.index_of(update.plan_buffer())];

  const auto what = [&] { return concat("the update of step ", update.id()); };
  state.do_whole(what, [&](bool& begun) {
    // Nobody reads these bytes: half a clear without its update may be left, and made again.
    if (state.options.clear_on_reuse) state.clear_for_new_owners(update, stream);
    for_each_apply_chunk(update, state.table, buffer.plan, [&](const ApplyParams& chunk) {
      state.backend.apply(chunk, stream);
      begun = true;
    });
  });

  if (update.id() != kPaddingStep) ++state.next_id;
  buffer.start_plan({update.shape()});
  buffer.applied = update.shape();
  buffer.appended_parts.assign(buffer.appended_parts.size(), 0);
  buffer.has_long_rows = std::any_of(
      update.batch_rows().begin(), update.batch_rows().end(),
      [&](const BatchRowUpdate& row) { return row.tokens > state.limits.draft_max + 1; });
}

namespace {

// The shape that `inputs` plan of an applied one.
StepShape shape_of(const PlanInputs& inputs, StepShape applied) {
  if (inputs.tokens_per_row == 0) return applied;
  const std::int32_t most = inputs.group == LayerGroup::kDraft ? applied.tokens_per_row : 0;
  QUIRE_CHECK(inputs.tokens_per_row >= 1 && inputs.tokens_per_row <= most,
              "PlanInputs::tokens_per_row is ", inputs.tokens_per_row,
              "; supported: 0, or in a decode step of the draft group 1 to what was applied, here ",
              most);
  return StepShape::decode(applied.rows, inputs.tokens_per_row);
}

void check_supplied(const Backend& backend, bool checked, const char* name,
                    const std::int32_t* pointer, StepShape shape) {
  if (pointer == nullptr) return;
  QUIRE_CHECK(shape.is_decode(), "PlanInputs::", name,
              " belongs to decode steps; the applied step is ragged");
  QUIRE_CHECK(aligned(pointer, alignof(std::int32_t)), "PlanInputs::", name, " at ",
              static_cast<const void*>(pointer), " is not 4-byte aligned");
  if (checked) backend.check_memory(pointer, name);
}

}  // namespace

void DeviceCache::enqueue_plan(PlanBufferId id, StreamView stream, const PlanInputs& inputs) {
  State& state = *state_;
  state.check_usable();
  state.backend.check_stream(stream);
  PlanBufferState& buffer = state.buffers[state.index_of(id)];
  QUIRE_CHECK(buffer.applied.has_value(), "enqueue_plan: no update was applied to plan buffer ",
              id.value, " yet; apply one first (for a capture, that of padding_update)");
  PlanParams params;
  const bool draft = inputs.group == LayerGroup::kDraft;
  QUIRE_CHECK(inputs.group == LayerGroup::kTarget || (draft && state.spec.draft_layers > 0),
              "enqueue_plan: the model has no layers of group ", name_of(inputs.group),
              "; ModelSpec::draft_layers is ", state.spec.draft_layers);
  params.shape = shape_of(inputs, *buffer.applied);
  check_supplied(state.backend, state.options.checked, "positions", inputs.positions, params.shape);
  check_supplied(state.backend, state.options.checked, "row_tokens", inputs.row_tokens,
                 params.shape);
  params.group = inputs.group;
  params.positions = inputs.positions;
  params.row_tokens = inputs.row_tokens;
  params.geometry = state.geometry;
  params.table = state.table;
  params.plan = buffer.plan;
  params.csa_entry_capacity = entry_capacity(kCsaRule, params.shape);
  params.hca_entry_capacity = entry_capacity(kHcaRule, params.shape);
  state.backend.plan(params, stream);

  buffer.start_plan({params.shape, inputs.group, inputs.positions != nullptr});
  buffer.planned = !state.backend.is_capturing(stream);  // what is captured has not run
  buffer.plan_stream = stream;
  auto& captured = buffer.captured_plans;
  if (state.backend.is_capturing(stream) &&
      std::find(captured.begin(), captured.end(), buffer.plan_now) == captured.end()) {
    captured.push_back(buffer.plan_now);
  }
}

const Planned& DeviceCache::State::planned(PlanBufferId id, const char* call) const {
  const PlanBufferState& buffer = buffers[index_of(id)];
  QUIRE_CHECK(buffer.applied.has_value(), call, ": no update was applied to plan buffer ", id.value,
              " yet; apply one and enqueue_plan first");
  const auto& captured = buffer.captured_plans;
  QUIRE_CHECK(buffer.planned ||
                  std::find(captured.begin(), captured.end(), buffer.plan_now) != captured.end(),
              call, ": plan buffer ", id.value,
              " was not planned since its last update; enqueue_plan first");
  return buffer.plan_now;
}

namespace {

// A plain launch is the full edge behind the planner (docs/PDL.md). Ragged kernels load nothing
// mutable before their wait.
Pdl effective_pdl(const PlanBufferState& buffer, StepShape shape, StreamView stream, Pdl wanted) {
  if (buffer.next_append_is_plain || buffer.plan_stream != stream) return Pdl::kOff;
  if (wanted == Pdl::kPrologue && !shape.is_decode()) return Pdl::kWaitOnly;
  return wanted;
}

// What a decode append of the layer in front brings into L2. Nothing behind the last layer: the
// next step has other positions.
NextLayer next_layer(const LayerState& layer, std::int64_t csa_ring_tokens,
                     std::int64_t hca_banks) {
  if (!layer.binding.has_value()) return {};
  const LayerBinding& binding = *layer.binding;
  return {binding.window_norm,
          binding.csa_bias,
          binding.csa_norm,
          layer.csa_state,
          binding.indexer_bias,
          binding.indexer_norm,
          layer.indexer_state,
          binding.hca_bias,
          binding.hca_norm,
          layer.hca_state,
          static_cast<std::int32_t>(csa_ring_tokens),
          static_cast<std::int32_t>(hca_banks)};
}

struct ResolvedInputs {
  InputRows window, csa, indexer, hca;
  std::uint8_t parts = 0;
};

ResolvedInputs resolve_inputs(const AppendInputs& inputs, const LayerBinding& binding,
                              LayerKind kind, LayerId layer, std::int64_t tokens) {
  const auto check_kind = [&](const AppendInputs::Rows& rows, LayerKind needed, const char* part) {
    QUIRE_CHECK(kind == needed || rows.data == nullptr, "AppendInputs::", part, ": layer ",
                layer.value, " is of kind ", name_of(kind), ", which has no such part");
  };
  check_kind(inputs.csa, LayerKind::kCsa, "csa");
  check_kind(inputs.indexer, LayerKind::kCsa, "indexer");
  check_kind(inputs.hca, LayerKind::kHca, "hca");
  ResolvedInputs resolved;
  const ElementType type = binding.compressor_rows;
  resolved.window = resolve_rows(inputs.window, binding.window_rows, kHeadDim, tokens, "window");
  resolved.csa = resolve_rows(inputs.csa, type, 4 * kHeadDim, tokens, "csa");
  resolved.indexer = resolve_rows(inputs.indexer, type, 4 * kIndexerDim, tokens, "indexer");
  resolved.hca = resolve_rows(inputs.hca, type, 2 * kHeadDim, tokens, "hca");
  if (resolved.window.data != nullptr) resolved.parts |= kWindowBit;
  if (resolved.csa.data != nullptr) resolved.parts |= kCsaBit;
  if (resolved.indexer.data != nullptr) resolved.parts |= kIndexerBit;
  if (resolved.hca.data != nullptr) resolved.parts |= kHcaBit;
  return resolved;
}

}  // namespace

void DeviceCache::append(LayerId layer, PlanBufferId id, const AppendInputs& inputs,
                         StreamView stream, const AppendOptions& options) {
  State& state = *state_;
  state.check_usable();
  state.backend.check_stream(stream);
  const std::size_t index = state.index_of(layer);
  const LayerKind kind = state.spec.layers[index];
  LayerState& of_layer = state.layers[index];
  QUIRE_CHECK(of_layer.binding.has_value(), "append: layer ", layer.value,
              " is not bound; bind_layer first");
  const LayerBinding& binding = *of_layer.binding;
  const RopeGroup group = group_of(kind);
  const auto& rope = state.rope[static_cast<std::size_t>(group)];
  QUIRE_CHECK(rope.has_value(), "append: no RoPE table is bound for group ", name_of(group),
              ", which layer ", layer.value, " needs; bind_rope first");
  const Planned& planned = state.planned(id, "append");
  const StepShape shape = planned.shape;
  const LayerGroup layers = state.spec.group_of(layer);
  QUIRE_CHECK(planned.group == layers, "append: layer ", layer.value, " is of the ",
              name_of(layers), " group, but plan buffer ", id.value, " was planned for the ",
              name_of(planned.group), " group; enqueue_plan with PlanInputs::group first");
  const ResolvedInputs rows = resolve_inputs(inputs, binding, kind, layer, shape.tokens);
  QUIRE_CHECK(rows.parts != 0 || !shape.is_decode(), "append: no part was given for layer ",
              layer.value);
  PlanBufferState& buffer = state.buffers[state.index_of(id)];
  if (state.options.checked) {
    for (const InputRows* part : {&rows.window, &rows.csa, &rows.indexer, &rows.hca}) {
      if (part->data != nullptr) state.backend.check_memory(part->data, "AppendInputs");
    }
    QUIRE_CHECK(!buffer.has_long_rows || (buffer.appended_parts[index] & rows.parts) == 0,
                "append: a part of layer ", layer.value,
                " was appended before; a step with rows of "
                "more than draft_max + 1 tokens runs once");
  }

  const Pdl pdl = effective_pdl(buffer, shape, stream, options.pdl);
  AppendParams params;
  params.shape = shape;
  params.planned_form = plan_form(shape.tokens_per_row, layers);
  params.geometry = state.geometry;
  params.header = buffer.plan.header;
  params.rows = buffer.plan.rows;
  params.tokens = buffer.plan.tokens;
  params.csa_entries = buffer.plan.csa_entries;
  params.csa_entry_capacity = entry_capacity(kCsaRule, shape);
  params.hca_entries = buffer.plan.hca_entries;
  params.hca_entry_capacity = entry_capacity(kHcaRule, shape);
  params.window.rows = rows.window;
  params.window.norm_weight = binding.window_norm;
  params.window.ring = of_layer.window_ring;
  params.window.scratch = buffer.scratch;
  params.window.copy_older_window = !shape.is_decode() && buffer.older_window_copied[index] == 0;
  params.csa = make_csa_part(rows.csa, binding, binding.csa_bias, binding.csa_norm,
                             of_layer.csa_state, state.layout.csa_ring_tokens, of_layer.csa_pages);
  params.indexer =
      make_csa_part(rows.indexer, binding, binding.indexer_bias, binding.indexer_norm,
                    of_layer.indexer_state, state.layout.csa_ring_tokens, of_layer.indexer_pages);
  params.hca = make_hca_part(rows.hca, binding, of_layer, state.limits.hca_banks());
  const LayerId behind(layer.value + 1);
  if (shape.is_decode() && index + 1 < state.layers.size() &&
      state.spec.group_of(behind) == layers) {
    params.next =
        next_layer(state.layers[index + 1], state.layout.csa_ring_tokens, state.limits.hca_banks());
  }
  params.rope = *rope;
  params.norm_eps = state.options.norm_eps;
  params.scale_floor = state.options.scale_floor;
  params.hadamard = state.options.hadamard;
  params.load_after_wait = pdl == Pdl::kWaitOnly;
  params.report = buffer.plan.report;
  state.backend.append(params, pdl, stream);

  buffer.older_window_copied[index] = 1;
  buffer.appended_parts[index] |= rows.parts;
  if (buffer.plan_stream == stream) buffer.next_append_is_plain = false;
}

void DeviceCache::enqueue_commit(PlanBufferId id, const std::int32_t* kept,
                                 const std::uint8_t* stop, StreamView stream,
                                 const AppendOptions& options) {
  State& state = *state_;
  state.check_usable();
  state.backend.check_stream(stream);
  CommitParams params;
  const Planned& planned = state.planned(id, "enqueue_commit");
  QUIRE_CHECK(stop == nullptr || planned.group == LayerGroup::kTarget,
              "enqueue_commit: stop flags belong to the commit of the target group");
  params.shape = planned.shape;
  params.group = planned.group;
  params.positions_supplied = planned.positions_supplied;
  QUIRE_CHECK(aligned(kept, alignof(std::int32_t)), "enqueue_commit: kept at ",
              static_cast<const void*>(kept), " is not 4-byte aligned");
  if (state.options.checked) {
    if (kept != nullptr) state.backend.check_memory(kept, "kept");
    if (stop != nullptr) state.backend.check_memory(stop, "stop");
  }
  const PlanBufferState& buffer = state.buffers[state.index_of(id)];
  params.table = state.table;
  params.plan = buffer.plan;
  params.kept = kept;
  params.stop = stop;
  params.draft_max = state.geometry.draft_max;
  state.backend.commit(params, effective_pdl(buffer, params.shape, stream, options.pdl), stream);
}

}  // namespace quire
