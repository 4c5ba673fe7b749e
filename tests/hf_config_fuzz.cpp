// Feeds mutated config.json files to the reader, a fixed number of runs from a printed seed, built
// with AddressSanitizer and UBSan: whatever the bytes are, the reader returns a spec that holds or
// throws UsageError with a text; nothing else escapes.
//   hf_config_fuzz [runs] [seed]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <quire/cache/model_spec.h>
#include <quire/runtime/base/errors.h>
#include <nlohmann/json.hpp>

namespace {

using nlohmann::json;
using quire::ModelSpec;

const char* const kCheckpoint = R"({
  "model_type": "deepseek_v4", "num_hidden_layers": 6, "num_nextn_predict_layers": 1,
  "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 512,
  "sliding_window": 128, "rms_norm_eps": 1e-06, "max_position_embeddings": 1048576,
  "rope_theta": 10000, "compress_rope_theta": 160000,
  "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                   "beta_fast": 32, "beta_slow": 1},
  "compress_ratios": [0, 128, 4, 128, 4, 128, 0]})";

const char* const kTransformers = R"({
  "model_type": "deepseek_v4", "num_hidden_layers": 3, "head_dim": 512, "index_head_dim": 128,
  "index_topk": 1024, "sliding_window": 128, "rms_norm_eps": 1e-06,
  "max_position_embeddings": 1048576,
  "rope_parameters": {
    "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
    "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0,
                 "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
                 "partial_rotary_factor": 0.125}},
  "layer_types": ["sliding_attention", "compressed_sparse_attention",
                  "heavily_compressed_attention"],
  "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}})";

// What JSON writers and attackers put where a number, name or list belongs.
const char* const kFragments[] = {"-1",
                                  "0",
                                  "1",
                                  "4",
                                  "128",
                                  "511",
                                  "512.0",
                                  "2147483648",
                                  "-9223372036854775808",
                                  "18446744073709551615",
                                  "18446744073709551616",
                                  "1e308",
                                  "1e999",
                                  "-0.0",
                                  "NaN",
                                  "Infinity",
                                  "null",
                                  "true",
                                  "\"\"",
                                  "\"yarn\"",
                                  "\"\\ud800\"",
                                  "\"\\u0000\"",
                                  "[]",
                                  "{}",
                                  "[[[[",
                                  "\"type\": \"type\",",
                                  "\"head_dim\": 512, \"head_dim\":",
                                  ",",
                                  ":",
                                  "\\",
                                  "\xff",
                                  "\xef\xbb\xbf"};

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::string next() {
    std::string text = below(2) == 0 ? kCheckpoint : kTransformers;
    if (below(2) == 0) text = change_tree(text);
    const std::uint64_t changes = below(4);
    for (std::uint64_t i = 0; i < changes; ++i) change_bytes(text);
    return text;
  }

 private:
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  std::size_t place(const std::string& text) { return below(text.size() + 1); }

  const char* fragment() { return kFragments[below(std::size(kFragments))]; }

  json value() {
    const json parsed = json::parse(fragment(), nullptr, /*allow_exceptions=*/false);
    if (!parsed.is_discarded()) return parsed;
    // Many, or deep.
    if (below(2) == 0) return json(std::vector<int>(below(below(100) == 0 ? 20'000 : 100), 4));
    json nested = 1;
    for (std::uint64_t i = below(100); i > 0; --i) nested = json::array({std::move(nested)});
    return nested;
  }

  // Keeps it JSON: replaces, removes or copies a field or element somewhere.
  std::string change_tree(const std::string& text) {
    json root = json::parse(text);
    for (std::uint64_t changes = 1 + below(3); changes > 0; --changes) {
      json* at = &root;
      while (at->is_structured() && !at->empty() && (at == &root || below(3) != 0)) {
        at = &*std::next(at->begin(), static_cast<std::ptrdiff_t>(below(at->size())));
      }
      *at = below(8) == 0 ? json(root) : value();
      if (!root.is_object()) break;
    }
    return root.dump();
  }

  void change_bytes(std::string& text) {
    const std::size_t at = place(text);
    switch (below(6)) {
      case 0:
        text = text.substr(0, at);
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, below(16));
        break;
      case 3:
        text.insert(at, text.substr(place(text), below(64)));
        break;
      case 4:
        text.insert(at, fragment());
        break;
      default:
        replace_number(text, at);
    }
  }

  void replace_number(std::string& text, std::size_t from) {
    const std::size_t first = text.find_first_of("0123456789", from);
    if (first == std::string::npos) return;
    const std::size_t last = text.find_first_not_of("0123456789.e-", first);
    text.replace(first, last == std::string::npos ? last : last - first, fragment());
  }

  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t runs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20'000;
  const std::uint64_t seed =
      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  std::printf("hf_config_fuzz: %llu runs, seed %llu\n", static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
  Mutator mutator(seed);
  std::uint64_t accepted = 0;
  std::uint64_t refused = 0;
  for (std::uint64_t run = 0; run < runs; ++run) {
    const std::string text = mutator.next();
    try {
      ModelSpec::from_hf_json(text, "fuzz.json").check();
      ++accepted;
    } catch (const quire::UsageError& error) {
      // The text names the file and stays readable.
      const std::string why = error.what();
      if (why.rfind("fuzz.json", 0) != 0 || why.size() > 1000) {
        std::printf("FAILED at run %llu: unhelpful text: %s\n%s\n",
                    static_cast<unsigned long long>(run), why.c_str(), text.c_str());
        return EXIT_FAILURE;
      }
      ++refused;
    } catch (const std::exception& error) {
      std::printf("FAILED at run %llu: not a UsageError: %s\n%s\n",
                  static_cast<unsigned long long>(run), error.what(), text.c_str());
      return EXIT_FAILURE;
    }
  }
  std::printf("%llu accepted, %llu refused\n", static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(refused));
  // A fuzzer that sees only one side has lost its way.
  return runs < 1000 || (accepted > 0 && refused > 0) ? EXIT_SUCCESS : EXIT_FAILURE;
}
