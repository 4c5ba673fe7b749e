// Reads a Hugging Face config.json (SPEC 5, 9). Two spellings of the schedule exist: checkpoints
// carry `compress_ratios`, transformers writes `layer_types` with `compress_rates`; where both
// stand they must agree. Nothing is guessed: what the caches depend on is named in the file, or
// refused with the field and its value. The file is not trusted: its size and depth are bounded.
#include <quire/cache/model_spec.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <quire/cache/entry_layout.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

using nlohmann::json;

constexpr std::size_t kFileBytesMax = std::size_t{16} << 20;
constexpr int kDepthMax = 64;  // a real one has three levels
constexpr std::int64_t kLayersMax = 4096;
constexpr std::int64_t kIntMax = std::numeric_limits<std::int32_t>::max();

constexpr const char* kModelType = "deepseek_v4";

struct LayerType {
  LayerKind kind;
  const char* name;    // in `layer_types` and `compress_rates`
  std::int64_t ratio;  // in `compress_ratios`
};

constexpr std::array<LayerType, 3> kLayerTypes{{
    {LayerKind::kSliding, "sliding_attention", 0},
    {LayerKind::kCsa, "compressed_sparse_attention", kCsaRule.ratio},
    {LayerKind::kHca, "heavily_compressed_attention", kHcaRule.ratio},
}};

// A value for an error text: short, whatever the file holds.
std::string shown(const json& value) {
  constexpr std::size_t kCharsMax = 60;
  if (value.is_array()) return concat("an array of ", value.size(), " elements");
  if (value.is_object()) return concat("an object of ", value.size(), " fields");
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kCharsMax) text = text.substr(0, kCharsMax) + "...";
  return text;
}

// One JSON object of the file, with the path to it for errors: "config.json: rope_scaling.".
class Object {
 public:
  Object(const json& value, std::string prefix) : value_(&value), prefix_(std::move(prefix)) {}

  std::string path(std::string_view field) const { return concat(prefix_, field); }

  // Null counts as absent: Python writes it for None.
  const json* find(const char* field) const {
    const auto at = value_->find(field);
    return at == value_->end() || at->is_null() ? nullptr : &*at;
  }

  const json& get(const char* field, const char* because = "") const {
    const json* found = find(field);
    QUIRE_CHECK(found != nullptr, path(field), " is missing", because);
    return *found;
  }

  std::int64_t integer(const char* field, std::int64_t least, std::int64_t most,
                       const char* because = "") const {
    return integer_in(get(field, because), path(field), least, most);
  }

  double number(const char* field, double least, double most, const char* because = "") const {
    const json& value = get(field, because);
    QUIRE_CHECK(value.is_number(), path(field), " is ", shown(value), "; expected a number");
    const double result = value.get<double>();
    QUIRE_CHECK(result >= least && result <= most, path(field), " is ", shown(value),
                "; supported: ", least, " to ", most);
    return result;
  }

  const json& array(const char* field) const {
    const json& value = get(field);
    QUIRE_CHECK(value.is_array(), path(field), " is ", shown(value), "; expected an array");
    return value;
  }

  Object object(const char* field, const char* because = "") const {
    const json& value = get(field, because);
    QUIRE_CHECK(value.is_object(), path(field), " is ", shown(value), "; expected an object");
    return Object(value, concat(prefix_, field, "."));
  }

  static std::int64_t integer_in(const json& value, const std::string& path, std::int64_t least,
                                 std::int64_t most) {
    QUIRE_CHECK(value.is_number_integer(), path, " is ", shown(value), "; expected an integer");
    // What lies above 2^63 turns negative here, and `least` never is.
    const auto result = value.get<std::int64_t>();
    QUIRE_CHECK(result >= least && result <= most, path, " is ", shown(value),
                "; supported: ", least, " to ", most);
    return result;
  }

 private:
  const json* value_;
  std::string prefix_;
};

// A number that the kernels and byte layouts fix.
std::int32_t fixed_dim(const Object& config, const char* field, std::int64_t supported) {
  const std::int64_t value = config.integer(field, 1, kIntMax);
  QUIRE_CHECK(value == supported, config.path(field), " is ", value,
              "; there is no kernel for it, supported: ", supported);
  return static_cast<std::int32_t>(value);
}

LayerKind kind_of_ratio(const json& value, const std::string& path) {
  const std::int64_t ratio = Object::integer_in(value, path, 0, kIntMax);
  for (const LayerType& type : kLayerTypes) {
    if (type.ratio == ratio) return type.kind;
  }
  throw UsageError(concat(path, " is ", ratio, "; supported: 0 (sliding), 4 (csa), 128 (hca)"));
}

LayerKind kind_of_name(const json& value, const std::string& path) {
  QUIRE_CHECK(value.is_string(), path, " is ", shown(value), "; expected a string");
  for (const LayerType& type : kLayerTypes) {
    if (value.get_ref<const std::string&>() == type.name) return type.kind;
  }
  throw UsageError(concat(path, " is ", shown(value), "; supported: \"", kLayerTypes[0].name,
                          "\", \"", kLayerTypes[1].name, "\", \"", kLayerTypes[2].name, "\""));
}

template <class KindOf>
std::vector<LayerKind> read_kinds(const Object& config, const char* field, KindOf kind_of) {
  const json& list = config.array(field);
  std::vector<LayerKind> kinds;
  QUIRE_CHECK(list.size() <= 2 * kLayersMax, config.path(field), " has ", list.size(),
              " elements; supported: at most ", 2 * kLayersMax);
  for (std::size_t i = 0; i < list.size(); ++i) {
    kinds.push_back(kind_of(list[i], concat(config.path(field), "[", i, "]")));
  }
  return kinds;
}

void check_rates(const Object& config, const std::vector<LayerKind>& kinds) {
  for (const LayerType& type : kLayerTypes) {
    if (type.kind == LayerKind::kSliding) continue;
    if (std::find(kinds.begin(), kinds.end(), type.kind) == kinds.end()) continue;
    const Object rates = config.object("compress_rates", ", which layer_types needs");
    const std::int64_t rate = rates.integer(type.name, 1, kIntMax);
    QUIRE_CHECK(rate == type.ratio, rates.path(type.name), " is ", rate,
                "; supported: ", type.ratio);
  }
}

// Layers and MTP layers from one list. `compress_ratios` has the MTP layers behind the others,
// however many it says there are; `layer_types` need not have them.
void split_schedule(ModelSpec& spec, const Object& config, const char* field,
                    const std::vector<LayerKind>& kinds, bool names) {
  const std::int64_t layers = config.integer("num_hidden_layers", 1, kLayersMax);
  const auto given = static_cast<std::int64_t>(kinds.size());
  std::optional<std::int64_t> mtp;
  if (config.find("num_nextn_predict_layers") != nullptr) {
    mtp = config.integer("num_nextn_predict_layers", 0, kLayersMax);
  }
  const bool whole = mtp ? given == layers + *mtp : given >= layers && !names;
  QUIRE_CHECK(whole || (names && given == layers), config.path(field), " has ", given,
              " elements, but num_hidden_layers is ", layers,
              mtp ? concat(" and num_nextn_predict_layers is ", *mtp) : std::string());
  spec.layers.assign(kinds.begin(), kinds.begin() + layers);
  spec.mtp_layers.assign(kinds.begin() + layers, kinds.end());
  // SPEC 3.2: MTP layers are window only.
  if (given == layers) {
    spec.mtp_layers.assign(static_cast<std::size_t>(mtp.value_or(0)), LayerKind::kSliding);
  }
}

void read_schedule(ModelSpec& spec, const Object& config) {
  const bool ratios = config.find("compress_ratios") != nullptr;
  const bool types = config.find("layer_types") != nullptr;
  QUIRE_CHECK(ratios || types, config.path("compress_ratios"),
              " is missing, and so is layer_types: one of them must give the kind of every layer");
  ModelSpec from_types;
  if (types) {
    const auto kinds = read_kinds(config, "layer_types", kind_of_name);
    check_rates(config, kinds);
    split_schedule(from_types, config, "layer_types", kinds, /*names=*/true);
    spec.layers = from_types.layers;
    spec.mtp_layers = from_types.mtp_layers;
  }
  if (!ratios) return;
  const auto kinds = read_kinds(config, "compress_ratios", kind_of_ratio);
  split_schedule(spec, config, "compress_ratios", kinds, /*names=*/false);
  if (!types) return;
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    QUIRE_CHECK(spec.layers[i] == from_types.layers[i], config.path("compress_ratios"), "[", i,
                "] says ", name_of(spec.layers[i]), ", but layer_types[", i, "] says ",
                name_of(from_types.layers[i]));
  }
}

// `qk_rope_head_dim`, or `partial_rotary_factor` of head_dim: at the top or with the parameters of
// a group.
void read_rope_dim(ModelSpec& spec, const Object& config, const std::vector<Object>& holders) {
  bool found = false;
  if (config.find("qk_rope_head_dim") != nullptr) {
    spec.rope_dim = fixed_dim(config, "qk_rope_head_dim", kRopeDim);
    found = true;
  }
  for (const Object& holder : holders) {
    if (holder.find("partial_rotary_factor") == nullptr) continue;
    const double factor = holder.number("partial_rotary_factor", 0.0, 1.0);
    const double dim = factor * static_cast<double>(spec.head_dim);
    QUIRE_CHECK(dim == static_cast<double>(kRopeDim), holder.path("partial_rotary_factor"), " is ",
                factor, ", that is ", dim, " of head_dim ", spec.head_dim,
                "; there is no kernel for it, supported: ", kRopeDim);
    found = true;
  }
  QUIRE_CHECK(found, config.path("qk_rope_head_dim"), " is missing, and so is ",
              "partial_rotary_factor");
}

// The group's theta aside: plain, or YaRN with all its parameters.
void read_scaling(RopeParameters& rope, const Object& from) {
  const char* field = from.find("rope_type") != nullptr ? "rope_type" : "type";
  const json& type = from.get(field);
  if (type == "default") {
    rope.yarn_factor = 1.0;
    return;
  }
  QUIRE_CHECK(type == "yarn", from.path(field), " is ", shown(type),
              "; supported: \"yarn\", \"default\"");
  rope.yarn_factor = from.number("factor", 1.0, 1e6);
  rope.original_positions = from.integer("original_max_position_embeddings", 1, 1 << 24);
  rope.beta_fast = from.number("beta_fast", 1e-6, 1e6);
  rope.beta_slow = from.number("beta_slow", 1e-6, rope.beta_fast);
}

// Thetas at the top with `rope_scaling` (or the same as a flat `rope_parameters`) for the
// compressing layers, or one object per group, `rope_parameters.main` and `.compress`.
void read_rope(ModelSpec& spec, const Object& config) {
  constexpr double kThetaMin = 2.0;
  constexpr double kThetaMax = 1e12;
  spec.sliding_rope = {};
  spec.compressing_rope = {};
  std::vector<Object> holders{config};
  const char* scaling =
      config.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  const Object rope = config.object(scaling, ", and so is rope_parameters");
  if (rope.find("main") != nullptr || rope.find("compress") != nullptr) {
    const Object main = rope.object("main");
    const Object compress = rope.object("compress");
    spec.sliding_rope.theta = main.number("rope_theta", kThetaMin, kThetaMax);
    spec.compressing_rope.theta = compress.number("rope_theta", kThetaMin, kThetaMax);
    read_scaling(spec.sliding_rope, main);
    read_scaling(spec.compressing_rope, compress);
    holders.push_back(main);
    holders.push_back(compress);
  } else {
    spec.sliding_rope.theta = config.number("rope_theta", kThetaMin, kThetaMax);
    spec.compressing_rope.theta = config.number("compress_rope_theta", kThetaMin, kThetaMax);
    read_scaling(spec.compressing_rope, rope);
    holders.push_back(rope);
  }
  read_rope_dim(spec, config, holders);
}

json parse(std::string_view text, const std::string& name) {
  const auto bounded = [&name](int depth, json::parse_event_t, json&) {
    QUIRE_CHECK(depth <= kDepthMax, name, ": nested deeper than ", kDepthMax, " levels");
    return true;
  };
  try {
    json root = json::parse(text, bounded);
    QUIRE_CHECK(root.is_object(), name, ": the file holds ", shown(root),
                "; expected a JSON object");
    return root;
  } catch (const json::exception& error) {
    // The parser repeats what it last read, which may be most of the file.
    constexpr std::size_t kReasonMost = 160;
    std::string reason = error.what();
    if (reason.size() > kReasonMost) reason = reason.substr(0, kReasonMost) + "...";
    throw UsageError(concat(name, ": not readable as JSON (", text.size(), " bytes): ", reason));
  }
}

}  // namespace

ModelSpec ModelSpec::from_hf_json(std::string_view text, const std::string& name) {
  QUIRE_CHECK(text.size() <= kFileBytesMax, name, " has ", text.size(),
              " bytes; supported: at most ", kFileBytesMax);
  const json root = parse(text, name);
  const Object config(root, name + ": ");
  if (const json* type = config.find("model_type"); type != nullptr) {
    QUIRE_CHECK(*type == kModelType, config.path("model_type"), " is ", shown(*type),
                "; supported: \"", kModelType, "\"");
  }
  ModelSpec spec;
  read_schedule(spec, config);
  spec.head_dim = fixed_dim(config, "head_dim", kHeadDim);
  spec.window_tokens = fixed_dim(config, "sliding_window", spec.window_tokens);
  if (spec.count(LayerKind::kCsa) > 0) {
    spec.indexer_dim = fixed_dim(config, "index_head_dim", kIndexerDim);
    spec.index_topk = static_cast<std::int32_t>(config.integer("index_topk", 1, 1 << 20));
  }
  spec.norm_eps = config.number("rms_norm_eps", 1e-30, 0.5);
  spec.positions_max = config.integer("max_position_embeddings", 1, kIntMax);
  read_rope(spec, config);
  spec.check();
  return spec;
}

ModelSpec ModelSpec::from_hf_config(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  QUIRE_CHECK(file.is_open(), path, ": no such file, or it cannot be opened");
  // Read, not asked for its size: a pipe has none.
  std::string text;
  std::vector<char> chunk(64 * 1024);
  while (text.size() <= kFileBytesMax && file) {
    file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    text.append(chunk.data(), static_cast<std::size_t>(file.gcount()));
  }
  QUIRE_CHECK(!file.bad(), path, ": reading it failed after ", text.size(), " bytes");
  QUIRE_CHECK(text.size() <= kFileBytesMax, path, " has more than ", kFileBytesMax,
              " bytes, the most that is supported");
  return from_hf_json(text, path);
}

}  // namespace quire
