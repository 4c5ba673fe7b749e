// The presets, and which models the byte layouts and kernels can serve: the schedule of layers is
// free, the dims are those of SPEC 5.
#include <quire/cache/model_spec.h>

#include <algorithm>

#include <quire/cache/entry_layout.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

constexpr std::int64_t kLayersMax = 4096;
constexpr std::int64_t kWindowTokens = 128;
constexpr std::int32_t kTopkMax = 1 << 20;

void check_dim(const char* name, std::int64_t value, std::int64_t supported) {
  QUIRE_CHECK(value == supported, "ModelSpec::", name, " is ", value, "; supported: ", supported);
}

void check_kinds(const char* name, const std::vector<LayerKind>& kinds) {
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    QUIRE_CHECK(kinds[i] <= LayerKind::kHca, "ModelSpec::", name, "[", i, "] is kind ",
                static_cast<int>(kinds[i]), "; supported: 0 (sliding), 1 (csa), 2 (hca)");
  }
}

void append_pairs(std::vector<LayerKind>& layers, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    layers.push_back(LayerKind::kCsa);
    layers.push_back(LayerKind::kHca);
  }
}

}  // namespace

const char* name_of(LayerKind kind) {
  switch (kind) {
    case LayerKind::kSliding:
      return "sliding";
    case LayerKind::kCsa:
      return "csa";
    case LayerKind::kHca:
      return "hca";
  }
  return "unknown layer kind";
}

const char* name_of(LayerGroup group) {
  switch (group) {
    case LayerGroup::kTarget:
      return "target";
    case LayerGroup::kDraft:
      return "draft";
  }
  return "unknown layer group";
}

std::int64_t ModelSpec::count(LayerKind kind) const {
  return std::count(layers.begin(), layers.end(), kind);
}

void RopeParameters::check(const char* what) const {
  const auto check = [what](const char* field, double value, double least, double most) {
    // Written so that NaN is refused too.
    QUIRE_CHECK(value >= least && value <= most, what, ".", field, " is ", value,
                "; supported: ", least, " to ", most);
  };
  check("theta", theta, 2.0, 1e12);
  check("yarn_factor", yarn_factor, 1.0, 1e6);
  if (yarn_factor == 1.0) return;
  check("original_positions", static_cast<double>(original_positions), 1.0, 1 << 24);
  check("beta_fast", beta_fast, 1e-6, 1e6);
  check("beta_slow", beta_slow, 1e-6, beta_fast);
}

ModelSpec ModelSpec::deepseek_v4_flash() {
  ModelSpec spec;
  spec.layers = {LayerKind::kSliding, LayerKind::kSliding};
  append_pairs(spec.layers, 20);
  spec.layers.push_back(LayerKind::kCsa);
  spec.mtp_layers = {LayerKind::kSliding};
  return spec;
}

ModelSpec ModelSpec::deepseek_v4_pro() {
  ModelSpec spec;
  spec.layers = {LayerKind::kHca, LayerKind::kHca};
  append_pairs(spec.layers, 29);
  spec.layers.push_back(LayerKind::kCsa);
  spec.mtp_layers = {LayerKind::kSliding};
  spec.index_topk = 1024;
  return spec;
}

ModelSpec ModelSpec::slice(std::int64_t first, std::int64_t length) const {
  const auto all = static_cast<std::int64_t>(layers.size());
  QUIRE_CHECK(first >= 0 && length >= 1 && first <= all - length, "ModelSpec::slice of ", length,
              " layers from layer ", first, "; there are layers 0 to ", all - 1);
  ModelSpec stage = *this;
  stage.layers.assign(layers.begin() + first, layers.begin() + first + length);
  if (first + length < all) stage.mtp_layers.clear();
  stage.draft_layers = std::clamp<std::int64_t>(first + length - (all - draft_layers), 0, length);
  return stage;
}

ModelSpec ModelSpec::with_mtp_layers() const {
  ModelSpec whole = *this;
  whole.layers.insert(whole.layers.end(), mtp_layers.begin(), mtp_layers.end());
  whole.draft_layers += static_cast<std::int64_t>(mtp_layers.size());
  whole.mtp_layers.clear();
  return whole;
}

void ModelSpec::check() const {
  const auto layer_count = static_cast<std::int64_t>(layers.size());
  QUIRE_CHECK(layer_count >= 1 && layer_count <= kLayersMax, "ModelSpec::layers has ", layer_count,
              " layers; supported: 1 to ", kLayersMax);
  QUIRE_CHECK(mtp_layers.size() <= static_cast<std::size_t>(kLayersMax),
              "ModelSpec::mtp_layers has ", mtp_layers.size(), " layers; supported: 0 to ",
              kLayersMax);
  QUIRE_CHECK(draft_layers >= 0 && draft_layers <= layer_count, "ModelSpec::draft_layers is ",
              draft_layers, "; supported: 0 to the ", layer_count, " of ModelSpec::layers");
  check_kinds("layers", layers);
  check_kinds("mtp_layers", mtp_layers);
  check_dim("head_dim", head_dim, kHeadDim);
  check_dim("rope_dim", rope_dim, kRopeDim);
  check_dim("indexer_dim", indexer_dim, kIndexerDim);
  check_dim("window_tokens", window_tokens, kWindowTokens);
  QUIRE_CHECK(index_topk >= 1 && index_topk <= kTopkMax, "ModelSpec::index_topk is ", index_topk,
              "; supported: 1 to ", kTopkMax);
  QUIRE_CHECK(positions_max >= 1, "ModelSpec::positions_max is ", positions_max,
              "; supported: 1 and more");
  QUIRE_CHECK(norm_eps > 0 && norm_eps < 1, "ModelSpec::norm_eps is ", norm_eps,
              "; supported: above 0, below 1");
  sliding_rope.check("ModelSpec::sliding_rope");
  compressing_rope.check("ModelSpec::compressing_rope");
}

}  // namespace quire
