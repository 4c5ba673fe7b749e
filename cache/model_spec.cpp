// Which models the byte layouts and kernels can serve: the schedule of layers is free, the dims are
// those of SPEC 5.
#include <quire/cache/model_spec.h>

#include <algorithm>

#include <quire/cache/entry_layout.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

constexpr std::int64_t kLayersMax = 4096;
constexpr std::int64_t kWindowTokens = 128;

void check_dim(const char* name, std::int64_t value, std::int64_t supported) {
  QUIRE_CHECK(value == supported, "ModelSpec::", name, " is ", value, "; supported: ", supported);
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

std::int64_t ModelSpec::count(LayerKind kind) const {
  return std::count(layers.begin(), layers.end(), kind);
}

void ModelSpec::check() const {
  const auto layer_count = static_cast<std::int64_t>(layers.size());
  QUIRE_CHECK(layer_count >= 1 && layer_count <= kLayersMax, "ModelSpec::layers has ", layer_count,
              " layers; supported: 1 to ", kLayersMax);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    QUIRE_CHECK(layers[i] <= LayerKind::kHca, "ModelSpec::layers[", i, "] is kind ",
                static_cast<int>(layers[i]), "; supported: 0 (sliding), 1 (csa), 2 (hca)");
  }
  check_dim("head_dim", head_dim, kHeadDim);
  check_dim("rope_dim", rope_dim, kRopeDim);
  check_dim("indexer_dim", indexer_dim, kIndexerDim);
  check_dim("window_tokens", window_tokens, kWindowTokens);
}

}  // namespace quire
