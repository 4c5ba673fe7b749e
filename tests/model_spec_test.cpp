// Model specs: the schedules of SPEC 5 layer by layer, and config.json in both spellings, with
// every kind of bad input refused by field and value. Slices and layer groups are
// model_spec_groups_test's.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <quire/cache/model_spec.h>
#include <quire/runtime/base/errors.h>
#include <nlohmann/json.hpp>

namespace quire {
namespace {

using nlohmann::json;

std::vector<int> layers_of(const ModelSpec& spec, LayerKind kind) {
  std::vector<int> found;
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    if (spec.layers[i] == kind) found.push_back(static_cast<int>(i));
  }
  return found;
}

std::vector<int> every_second(int first, int last) {
  std::vector<int> numbers;
  for (int i = first; i <= last; i += 2) numbers.push_back(i);
  return numbers;
}

// As the checkpoint of V4-Flash or V4-Pro spells it.
json checkpoint_config(bool pro) {
  json ratios = json::array();
  for (int i = 0; i < 2; ++i) ratios.push_back(pro ? 128 : 0);
  for (int i = 0; i < (pro ? 29 : 20); ++i) {
    ratios.push_back(4);
    ratios.push_back(128);
  }
  ratios.push_back(4);
  ratios.push_back(0);
  return {{"model_type", "deepseek_v4"},
          {"hidden_size", pro ? 7168 : 4096},
          {"num_hidden_layers", pro ? 61 : 43},
          {"num_nextn_predict_layers", 1},
          {"head_dim", 512},
          {"qk_rope_head_dim", 64},
          {"index_head_dim", 128},
          {"index_n_heads", 64},
          {"index_topk", pro ? 1024 : 512},
          {"sliding_window", 128},
          {"rms_norm_eps", 1e-6},
          {"max_position_embeddings", 1048576},
          {"rope_theta", 10000},
          {"compress_rope_theta", 160000},
          {"rope_scaling",
           {{"type", "yarn"},
            {"factor", 16},
            {"original_max_position_embeddings", 65536},
            {"beta_fast", 32},
            {"beta_slow", 1}}},
          {"compress_ratios", ratios}};
}

// The same model as transformers writes it.
json transformers_config(bool pro) {
  json config = checkpoint_config(pro);
  json types = json::array();
  for (std::size_t i = 0; i + 1 < config["compress_ratios"].size(); ++i) {
    const int ratio = config["compress_ratios"][i];
    types.push_back(ratio == 0   ? "sliding_attention"
                    : ratio == 4 ? "compressed_sparse_attention"
                                 : "heavily_compressed_attention");
  }
  for (const char* field : {"compress_ratios", "qk_rope_head_dim", "rope_theta",
                            "compress_rope_theta", "rope_scaling"}) {
    config.erase(field);
  }
  config["layer_types"] = types;
  config["compress_rates"] = {{"compressed_sparse_attention", 4},
                              {"heavily_compressed_attention", 128}};
  config["rope_parameters"] = {
      {"main",
       {{"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 0.125}}},
      {"compress",
       {{"rope_type", "yarn"},
        {"rope_theta", 160000.0},
        {"factor", 16.0},
        {"original_max_position_embeddings", 65536},
        {"beta_fast", 32},
        {"beta_slow", 1},
        {"attention_factor", 1.0},
        {"partial_rotary_factor", 0.125}}}};
  return config;
}

ModelSpec read(const json& config) { return ModelSpec::from_hf_json(config.dump(), "config.json"); }

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// Reads the config after `change` and expects an error with all `words`.
void check_refused(json config, const std::function<void(json&)>& change,
                   std::initializer_list<const char*> words) {
  change(config);
  const std::string text = refusal([&] { read(config); });
  CAPTURE(text);
  for (const char* word : words) {
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

TEST_CASE("V4-Flash has the schedule of SPEC 5") {
  const ModelSpec spec = ModelSpec::deepseek_v4_flash();
  CHECK_NOTHROW(spec.check());
  CHECK(spec.layers.size() == 43);
  CHECK(layers_of(spec, LayerKind::kSliding) == std::vector<int>{0, 1});
  CHECK(layers_of(spec, LayerKind::kCsa) == every_second(2, 42));
  CHECK(layers_of(spec, LayerKind::kHca) == every_second(3, 41));
  CHECK(spec.mtp_layers == std::vector{LayerKind::kSliding});
  CHECK(spec.index_topk == 512);
}

TEST_CASE("V4-Pro has the schedule of SPEC 5") {
  const ModelSpec spec = ModelSpec::deepseek_v4_pro();
  CHECK_NOTHROW(spec.check());
  CHECK(spec.layers.size() == 61);
  CHECK(layers_of(spec, LayerKind::kSliding).empty());
  CHECK(layers_of(spec, LayerKind::kCsa) == every_second(2, 60));
  std::vector<int> hca = every_second(1, 59);
  hca.insert(hca.begin(), 0);
  CHECK(layers_of(spec, LayerKind::kHca) == hca);
  CHECK(spec.mtp_layers == std::vector{LayerKind::kSliding});
  CHECK(spec.index_topk == 1024);
}

TEST_CASE("presets share the dims, RoPE and limits of SPEC 5") {
  for (const ModelSpec& spec : {ModelSpec::deepseek_v4_flash(), ModelSpec::deepseek_v4_pro()}) {
    CHECK(spec.head_dim == 512);
    CHECK(spec.rope_dim == 64);
    CHECK(spec.indexer_dim == 128);
    CHECK(spec.window_tokens == 128);
    CHECK(spec.positions_max == 1'048'576);
    CHECK(spec.norm_eps == 1e-6);
    CHECK(spec.sliding_rope == RopeParameters{10000.0, 1.0});
    CHECK(spec.compressing_rope == RopeParameters{160000.0, 16.0, 65536, 32.0, 1.0});
  }
}

// S6
TEST_CASE("the kind of a draft layer is what the config says, however many layers stand before") {
  const std::pair<int, LayerKind> kinds[] = {
      {0, LayerKind::kSliding}, {4, LayerKind::kCsa}, {128, LayerKind::kHca}};
  for (const bool pro : {false, true}) {
    CAPTURE(pro);
    const json config = checkpoint_config(pro);
    const auto layers = config["num_hidden_layers"].get<std::size_t>();
    for (const auto& [ratio, kind] : kinds) {
      for (const auto& [last_ratio, last_kind] : kinds) {
        json changed = config;
        changed["compress_ratios"][layers - 1] = last_ratio;
        changed["compress_ratios"][layers] = ratio;
        const ModelSpec spec = read(changed);
        CHECK(spec.layers.size() == layers);
        CHECK(spec.layers.back() == last_kind);
        CHECK(spec.mtp_layers == std::vector<LayerKind>{kind});
        CHECK(spec.with_mtp_layers().layers.back() == kind);
        CHECK(spec.slice(static_cast<std::int64_t>(layers) - 2, 2).mtp_layers == spec.mtp_layers);
      }
    }
  }
}

TEST_CASE("both spellings of both models read as the presets") {
  for (const bool pro : {false, true}) {
    const ModelSpec preset = pro ? ModelSpec::deepseek_v4_pro() : ModelSpec::deepseek_v4_flash();
    CHECK(read(checkpoint_config(pro)) == preset);
    CHECK(read(transformers_config(pro)) == preset);
  }
}

TEST_CASE("a config is read from its file") {
  const std::string path =
      (std::filesystem::temp_directory_path() /
       ("quire_model_spec_" + std::to_string(std::random_device{}()) + ".json"))
          .string();
  std::ofstream(path) << checkpoint_config(false).dump(2);
  CHECK(ModelSpec::from_hf_config(path) == ModelSpec::deepseek_v4_flash());
  std::ofstream(path) << std::string((16 << 20) + 1, ' ');
  std::string text = refusal([&] { ModelSpec::from_hf_config(path); });
  CHECK(text.find(path) != std::string::npos);
  CHECK(text.find("16777216") != std::string::npos);
  std::filesystem::remove(path);
  text = refusal([&] { ModelSpec::from_hf_config(path); });
  CHECK(text.find(path + ": no such file") != std::string::npos);
  // Endless files end at the limit.
  CHECK(refusal([] { ModelSpec::from_hf_config("/dev/zero"); }).find("16777216") !=
        std::string::npos);
  const std::string folder = std::filesystem::temp_directory_path().string();
  CHECK(refusal([&] { ModelSpec::from_hf_config(folder); }).find(folder) == 0);
}

TEST_CASE("variants of the spellings are understood") {
  json config = checkpoint_config(false);
  // Transformers' older names: flat parameters, and a factor instead of a dim.
  config["rope_parameters"] = config["rope_scaling"];
  config["rope_parameters"]["rope_type"] = "yarn";
  config["rope_scaling"] = nullptr;
  config["qk_rope_head_dim"] = nullptr;
  config["partial_rotary_factor"] = 0.125;
  config["layer_types"] = transformers_config(false)["layer_types"];
  config["compress_rates"] = transformers_config(false)["compress_rates"];
  CHECK(read(config) == ModelSpec::deepseek_v4_flash());

  config = checkpoint_config(false);
  config.erase("num_nextn_predict_layers");
  config.erase("model_type");
  CHECK(read(config).mtp_layers.size() == 1);
  config["compress_ratios"].erase(43);
  CHECK(read(config).mtp_layers.empty());

  config = transformers_config(true);
  config["num_nextn_predict_layers"] = 0;
  CHECK(read(config).mtp_layers.empty());

  config = checkpoint_config(false);
  config["rope_theta"] = 20000.5;
  config["rope_scaling"]["factor"] = 4;
  CHECK(read(config).sliding_rope.theta == 20000.5);
  CHECK(read(config).compressing_rope.yarn_factor == 4);
}

TEST_CASE("sliding-only schedules need nothing of the indexer or the rates") {
  json config = transformers_config(false);
  config["num_hidden_layers"] = 2;
  config["layer_types"] = {"sliding_attention", "sliding_attention"};
  for (const char* field : {"compress_rates", "index_topk", "index_head_dim"}) config.erase(field);
  CHECK(read(config).layers == std::vector{LayerKind::kSliding, LayerKind::kSliding});
}

TEST_CASE("a missing field is named") {
  for (const bool pro : {false, true}) {
    const json spelled[] = {checkpoint_config(pro), transformers_config(pro)};
    for (const json& config : spelled) {
      for (const auto& [field, value] : config.items()) {
        const std::string name = field;
        if (name == "hidden_size" || name == "index_n_heads" || name == "model_type" ||
            name == "num_nextn_predict_layers") {
          CHECK_NOTHROW(read([&, without = config]() mutable {
            without.erase(name);
            return without;
          }()));
          continue;
        }
        // Where either of two would do, the text names one as missing and the other beside it.
        check_refused(config, [&](json& c) { c.erase(name); }, {"is missing", name.c_str()});
        check_refused(config, [&](json& c) { c[name] = nullptr; }, {"is missing", name.c_str()});
      }
    }
    for (const char* field :
         {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "type"}) {
      check_refused(spelled[0], [&](json& c) { c["rope_scaling"].erase(field); },
                    {"config.json: rope_scaling.", field, "is missing"});
    }
    check_refused(spelled[1], [](json& c) { c["rope_parameters"]["main"].erase("rope_theta"); },
                  {"rope_parameters.main.rope_theta is missing"});
    check_refused(spelled[1], [](json& c) { c["rope_parameters"].erase("compress"); },
                  {"rope_parameters.compress is missing"});
  }
}

TEST_CASE("a wrong type is named with what stands there") {
  const json config = checkpoint_config(false);
  for (const char* field :
       {"num_hidden_layers", "head_dim", "qk_rope_head_dim", "index_head_dim", "index_topk",
        "sliding_window", "max_position_embeddings", "num_nextn_predict_layers"}) {
    check_refused(config, [&](json& c) { c[field] = "many"; }, {field, "is \"many\"", "integer"});
    check_refused(config, [&](json& c) { c[field] = 512.5; }, {field, "is 512.5", "integer"});
    check_refused(config,
                  [&](json& c) {
                    c[field] = json::array({1, 2});
                  },
                  {field, "an array of 2 elements"});
    check_refused(config, [&](json& c) { c[field] = -1; }, {field, "is -1", "supported"});
    check_refused(config, [&](json& c) { c[field] = UINT64_MAX; },
                  {field, "is 18446744073709551615", "supported"});
  }
  for (const char* field : {"rms_norm_eps", "rope_theta", "compress_rope_theta"}) {
    check_refused(config, [&](json& c) { c[field] = "1e-6"; }, {field, "is \"1e-6\"", "a number"});
    check_refused(config, [&](json& c) { c[field] = -1.0; }, {field, "is -1.0", "supported"});
    check_refused(config, [&](json& c) { c[field] = true; }, {field, "is true", "a number"});
  }
  check_refused(config, [](json& c) { c["compress_ratios"] = 4; },
                {"compress_ratios is 4", "expected an array"});
  check_refused(config, [](json& c) { c["compress_ratios"][5] = "4"; },
                {"compress_ratios[5] is \"4\"", "expected an integer"});
  check_refused(config, [](json& c) { c["rope_scaling"] = 3; },
                {"rope_scaling is 3", "expected an object"});
  check_refused(config, [](json& c) { c["rope_scaling"]["type"] = "linear"; },
                {"rope_scaling.type is \"linear\"", "yarn"});
  check_refused(transformers_config(false), [](json& c) { c["layer_types"][0] = 0; },
                {"layer_types[0] is 0", "expected a string"});
  check_refused(transformers_config(false), [](json& c) { c["compress_rates"] = 4; },
                {"compress_rates is 4", "expected an object"});
  const std::string endless(10'000, 'x');
  check_refused(config, [&](json& c) { c["head_dim"] = endless; }, {"head_dim is \"xxx", "..."});
}

TEST_CASE("an unknown ratio, layer type or rate is named with those that exist") {
  check_refused(checkpoint_config(false), [](json& c) { c["compress_ratios"][7] = 8; },
                {"compress_ratios[7] is 8", "0 (sliding), 4 (csa), 128 (hca)"});
  check_refused(checkpoint_config(false), [](json& c) { c["compress_ratios"][43] = 1; },
                {"compress_ratios[43] is 1"});
  check_refused(transformers_config(true), [](json& c) { c["layer_types"][3] = "full_attention"; },
                {"layer_types[3] is \"full_attention\"", "sliding_attention",
                 "compressed_sparse_attention", "heavily_compressed_attention"});
  check_refused(transformers_config(true),
                [](json& c) { c["compress_rates"]["heavily_compressed_attention"] = 64; },
                {"compress_rates.heavily_compressed_attention is 64", "128"});
  check_refused(transformers_config(true),
                [](json& c) { c["compress_rates"].erase("compressed_sparse_attention"); },
                {"compress_rates.compressed_sparse_attention is missing"});
}

TEST_CASE("lengths and spellings that contradict each other are named") {
  check_refused(
      checkpoint_config(false), [](json& c) { c["compress_ratios"].erase(10); },
      {"compress_ratios has 43", "num_hidden_layers is 43", "num_nextn_predict_layers is 1"});
  check_refused(checkpoint_config(false), [](json& c) { c["num_hidden_layers"] = 61; },
                {"compress_ratios has 44", "num_hidden_layers is 61"});
  check_refused(checkpoint_config(false), [](json& c) { c["compress_ratios"] = json::array(); },
                {"compress_ratios has 0"});
  check_refused(checkpoint_config(false),
                [](json& c) {
                  c.erase("num_nextn_predict_layers");
                  c["num_hidden_layers"] = 45;
                },
                {"compress_ratios has 44", "num_hidden_layers is 45"});
  check_refused(transformers_config(false), [](json& c) { c["layer_types"].erase(1); },
                {"layer_types has 42", "num_hidden_layers is 43"});
  check_refused(transformers_config(false),
                [](json& c) {
                  c.erase("num_nextn_predict_layers");
                  c["layer_types"].push_back("sliding_attention");
                },
                {"layer_types has 44", "num_hidden_layers is 43"});
  check_refused(checkpoint_config(false),
                [](json& c) {
                  c["layer_types"] = transformers_config(false)["layer_types"];
                  c["compress_rates"] = transformers_config(false)["compress_rates"];
                  c["compress_ratios"][4] = 128;
                },
                {"compress_ratios[4] says hca", "layer_types[4] says csa"});
}

TEST_CASE("a dim without a kernel is named with those that exist") {
  const json config = checkpoint_config(false);
  check_refused(config, [](json& c) { c["head_dim"] = 576; },
                {"head_dim is 576", "supported: 512"});
  check_refused(config, [](json& c) { c["qk_rope_head_dim"] = 32; },
                {"qk_rope_head_dim is 32", "supported: 64"});
  check_refused(config, [](json& c) { c["index_head_dim"] = 64; },
                {"index_head_dim is 64", "supported: 128"});
  check_refused(config, [](json& c) { c["sliding_window"] = 4096; },
                {"sliding_window is 4096", "supported: 128"});
  check_refused(transformers_config(false),
                [](json& c) { c["rope_parameters"]["main"]["partial_rotary_factor"] = 0.25; },
                {"rope_parameters.main.partial_rotary_factor is 0.25", "supported: 64"});
}

TEST_CASE("truncated and foreign files are refused at every length") {
  const std::string whole = checkpoint_config(false).dump();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const std::string text = refusal(
        [&] { ModelSpec::from_hf_json(std::string_view(whole).substr(0, length), "cut.json"); });
    REQUIRE(text.find("cut.json: not readable as JSON") == 0);
  }
  const auto text_of = [](std::string_view file) {
    return refusal([&] { ModelSpec::from_hf_json(file, "config.json"); });
  };
  CHECK(text_of("[1, 2]").find("an array of 2 elements; expected a JSON object") !=
        std::string::npos);
  CHECK(text_of("null").find("expected a JSON object") != std::string::npos);
  CHECK(text_of("\x1f\x8b\x08").find("not readable as JSON") != std::string::npos);
  CHECK(text_of("{\"model_type\": \"\xff\"}").find("not readable as JSON") != std::string::npos);
  CHECK(text_of("{\"rms_norm_eps\": 1e999}").find("not readable as JSON") != std::string::npos);
  CHECK(text_of("{}").find("compress_ratios is missing") != std::string::npos);
  CHECK(text_of("{\"model_type\": \"llama\", \"head_dim\": 128}")
            .find("model_type is \"llama\"; supported: \"deepseek_v4\"") != std::string::npos);
  const std::string deep = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  CHECK(text_of(deep).find("nested deeper than 64 levels") != std::string::npos);
  CHECK(text_of(std::string((16 << 20) + 1, ' ')).find("16777217 bytes") != std::string::npos);
}

TEST_CASE("a spec that was filled by hand is checked by field") {
  const auto text_after = [](const std::function<void(ModelSpec&)>& change) {
    ModelSpec spec = ModelSpec::deepseek_v4_flash();
    change(spec);
    return refusal([&] { spec.check(); });
  };
  CHECK(text_after([](ModelSpec& s) { s.index_topk = 0; }).find("index_topk is 0") !=
        std::string::npos);
  CHECK(text_after([](ModelSpec& s) { s.norm_eps = 0; }).find("norm_eps is 0") !=
        std::string::npos);
  CHECK(text_after([](ModelSpec& s) { s.positions_max = 0; }).find("positions_max") !=
        std::string::npos);
  CHECK(text_after([](ModelSpec& s) {
          s.mtp_layers[0] = static_cast<LayerKind>(9);
        }).find("mtp_layers[0] is kind 9") != std::string::npos);
  CHECK(text_after([](ModelSpec& s) {
          s.compressing_rope.theta = 0;
        }).find("compressing_rope.theta is 0") != std::string::npos);
  CHECK(text_after([](ModelSpec& s) {
          s.compressing_rope.beta_fast = 0.5;
        }).find("compressing_rope.beta_slow is 1") != std::string::npos);
}

}  // namespace
}  // namespace quire
