#include "benchmarks/support/decode_world.h"

#include <random>
#include <utility>

#include "benchmarks/support/next_set.h"
#include "benchmarks/support/program.h"

namespace quire::bench {
namespace {

constexpr std::int64_t kPrefillMin = 128, kPrefillMax = 256;  // first tokens of a request
constexpr std::int64_t kDecoded = 256;  // tokens decoded before a request begins anew
constexpr std::int64_t kContext = kPrefillMax + kDecoded;
constexpr std::int64_t kSetsMax = 1024;
constexpr std::uint32_t kSeed = 20261130;

// Elements of one input row of all parts, and where each part's rows begin.
struct Widths {
  static constexpr std::int64_t kWindow = 512, kCsa = 2048, kIndexer = 512, kHca = 1024;
  static constexpr std::int64_t kAll = kWindow + kCsa + kIndexer + kHca;
};

constexpr std::int64_t kRopeFloats = kContext * kRopeDim;
// Of one layer: both biases and three norms, or the HCA bias and two norms.
constexpr std::int64_t kLayerWeights = 128 * 512 + 2 * 512;

// Bytes of seat state that a decode step surely touches for one token of a layer: what it writes.
std::int64_t state_bytes(LayerKind kind) {
  if (kind == LayerKind::kCsa) return 4 * (kHeadDim + kIndexerDim) * 4;
  return kind == LayerKind::kHca ? kHcaBankFloats * 4 : kMainDataBytes;
}

// Sliding layers read no state: there are never more than kSetsMax for them.
std::int64_t sets_of(const ModelSpec& spec, std::int64_t batch) {
  std::int64_t bytes = 0;
  for (const LayerKind kind : spec.layers) bytes += batch * state_bytes(kind);
  return min_of(ceil_div(3 * this_device().l2_bytes, bytes) + 1, kSetsMax);
}

Limits limits_of(std::int64_t batch, std::int64_t sets) {
  Limits limits;
  limits.seats_max = batch * sets;
  limits.pages = limits.seats_max * ceil_div(kContext, kPageTokens);
  limits.rows_max = batch;
  limits.tokens_max = batch * kPrefillMax;
  limits.context_max = kContext;
  limits.repeat_max = kDecoded;
  return limits;
}

std::int64_t floats_of(const ModelSpec& spec, std::int64_t batch, std::int64_t sets) {
  return batch * kPrefillMax * Widths::kAll + kRopeFloats +
         static_cast<std::int64_t>(spec.layers.size()) * kLayerWeights +
         round_up<std::int64_t>(batch * sets, 4) + 4;
}

}  // namespace

DecodeWorld::DecodeWorld(Backend& backend, const ModelSpec& spec, std::int64_t batch)
    : backend_(&backend),
      spec_(spec),
      batch_(batch),
      sets_(sets_of(spec, batch)),
      stream_(backend),
      cache_(std::make_unique<CacheManager>(backend, spec, limits_of(batch, sets_))),
      pool_(backend, floats_of(spec, batch, sets_) * 4),
      memory_(pool_, floats_of(spec, batch, sets_) * 4, stream_) {
  fill_random(reinterpret_cast<float*>(memory_.data()), memory_.bytes() / 4, kSeed, stream_);
  bind();
  for (std::int64_t set = 0; set < sets_; ++set) prefill(set);
  upload_seats();
}

void DecodeWorld::bind() {
  const float* rope =
      reinterpret_cast<const float*>(memory_.data()) + batch_ * kPrefillMax * Widths::kAll;
  const RopeTable table{rope, kContext, RopeLayout::kInterleaved};
  cache_->device().bind_rope(RopeGroup::kSliding, table);
  cache_->device().bind_rope(RopeGroup::kCompressing, table);
  const float* weights = rope + kRopeFloats;
  for (std::int32_t layer = 0; layer < layers(); ++layer, weights += kLayerWeights) {
    LayerBinding binding;
    binding.window_rows = ElementType::kFloat32;
    binding.window_norm = weights;
    binding.csa_norm = binding.hca_norm = weights + 512;
    binding.csa_bias = binding.hca_bias = weights + 1024;
    binding.indexer_bias = weights + 1024 + 8 * 512;
    binding.indexer_norm = weights + 1024 + 8 * 512 + 8 * 128;
    cache_->device().bind_layer(LayerId(layer), binding);
  }
}

AppendInputs DecodeWorld::inputs_of(std::int64_t layer) const {
  const float* rows = reinterpret_cast<const float*>(memory_.data());
  // Parts stand behind one another, dense for the rows of a decode step.
  AppendInputs inputs;
  inputs.window.data = rows;
  const LayerKind kind = spec_.layers[static_cast<std::size_t>(layer)];
  const float* compressors = rows + batch_ * kPrefillMax * Widths::kWindow;
  if (kind == LayerKind::kCsa) {
    inputs.csa.data = compressors;
    inputs.indexer.data = compressors + batch_ * kPrefillMax * Widths::kCsa;
  } else if (kind == LayerKind::kHca) {
    inputs.hca.data = compressors + batch_ * kPrefillMax * (Widths::kCsa + Widths::kIndexer);
  }
  return inputs;
}

void DecodeWorld::prefill(std::int64_t set) {
  std::mt19937 random(kSeed + static_cast<std::uint32_t>(set));
  std::uniform_int_distribution<std::int32_t> length(kPrefillMin, kPrefillMax);
  std::vector<BatchRow> rows;
  std::vector<Outcome> outcomes;
  std::int32_t tokens_of_step = 0;
  for (std::int64_t i = 0; i < batch_; ++i) {
    const RequestId request = cache_->ledger().admit(kContext, kContext).value();
    const std::int32_t tokens = length(random);
    cache_->ledger().reserve(request, tokens).value();
    requests_.push_back(request);
    rows.push_back({request, tokens});
    outcomes.push_back({tokens, false});
    tokens_of_step += tokens;
  }
  const StepShape whole = StepShape::ragged(static_cast<std::int32_t>(batch_), tokens_of_step);
  const StepId id = cache_->begin_step(rows, whole, PlanBufferId(0), stream_);
  enqueue_plan();
  for (std::int64_t layer = 0; layer < layers(); ++layer) enqueue_append(layer);
  enqueue_commit();
  cache_->ledger().settle(id, outcomes);

  // Pages and limits of all tokens that the set will decode, and the shape to capture.
  constexpr auto kSteps = static_cast<std::int32_t>(kDecoded);
  for (BatchRow& row : rows) {
    cache_->ledger().reserve(row.request, kDecoded).value();
    row.tokens = 1;
  }
  outcomes.assign(outcomes.size(), {kSteps, false});
  const StepId decode = cache_->begin_step(rows, shape(), PlanBufferId(0), stream_, kSteps);
  cache_->ledger().settle(decode, outcomes);
  stream_.wait();
}

void DecodeWorld::upload_seats() {
  std::vector<std::int32_t> seats;
  for (const RequestId request : requests_) {
    seats.push_back(cache_->ledger().info(request).seat.value);
  }
  std::byte* end = memory_.data() + memory_.bytes();
  set_ = reinterpret_cast<std::int32_t*>(end - 16);
  auto* to =
      reinterpret_cast<std::int32_t*>(end - 16 - round_up<std::int64_t>(batch_ * sets_, 4) * 4);
  backend_->copy(to, seats.data(), static_cast<std::int64_t>(seats.size()) * 4, stream_);
  backend_->fill(set_, 0, 16, stream_);
  stream_.wait();
  seats_ = to;
}

void DecodeWorld::next_set() {
  const DeviceCache& cache = cache_->device();
  enqueue_next_set(
      {seats_, set_, static_cast<std::int32_t>(batch_), static_cast<std::int32_t>(sets_),
       static_cast<std::int32_t>(kDecoded), cache.plan_buffer(PlanBufferId(0)), cache.step_table()},
      stream_);
}

void DecodeWorld::check() {
  DeviceReport report{};
  cache_->device().report(PlanBufferId(0), &report, stream_);
  stream_.wait();
  check_all_lived(report);
}

void DecodeWorld::enqueue_plan() { cache_->device().enqueue_plan(PlanBufferId(0), stream_); }

void DecodeWorld::enqueue_append(std::int64_t layer, Pdl pdl) {
  enqueue_append(layer, inputs_of(layer), pdl);
}

void DecodeWorld::enqueue_append(std::int64_t layer, const AppendInputs& inputs, Pdl pdl) {
  cache_->device().append(LayerId(static_cast<std::int32_t>(layer)), PlanBufferId(0), inputs,
                          stream_, {pdl});
}

void DecodeWorld::enqueue_commit() {
  cache_->device().enqueue_commit(PlanBufferId(0), nullptr, nullptr, stream_);
}

void DecodeWorld::touch_rows() {
  auto* rows = reinterpret_cast<float*>(memory_.data());
  std::int64_t part = 0;
  for (const std::int64_t width : {Widths::kWindow, Widths::kCsa, Widths::kIndexer, Widths::kHca}) {
    touch(rows + batch_ * kPrefillMax * part, batch_ * width, stream_);
    part += width;
  }
}

}  // namespace quire::bench
