// What the model demands of the cache: its layers in order and their kinds, and the dims.
// The schedule is data; nothing is derived from a layer's number.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <quire/runtime/base/ids.h>

namespace quire {

enum class LayerKind : std::uint8_t {
  kSliding,  // window only
  kCsa,      // window, and one entry per 4 tokens with overlap, and the indexer's keys
  kHca,      // window, and one entry per 128 tokens
};

const char* name_of(LayerKind kind);

// Layers whose sequences have lengths of their own in every seat: those of the target model, and
// those that draft for it (MTP), which may be behind, never ahead.
enum class LayerGroup : std::int32_t { kTarget, kDraft };

const char* name_of(LayerGroup group);

// How a compressing layer pools: W = ratio tokens per entry, twice that with overlap (SPEC 0.1).
struct CompressionRule {
  std::int32_t ratio;
  bool overlap;
};

inline constexpr CompressionRule kCsaRule{4, true};
inline constexpr CompressionRule kHcaRule{128, false};

// Rotary embedding of one group of layers (SPEC 3.2): angle = frequency_i x position, pairs i of
// 32, frequency_i = theta^(-2i/64); YaRN divides the slow frequencies by `yarn_factor`.
struct RopeParameters {
  double theta = 10000.0;
  double yarn_factor = 1.0;                 // 1: plain, the rest is not used
  std::int64_t original_positions = 65536;  // context before the extension
  double beta_fast = 32.0;                  // turns in that context: above them unchanged
  double beta_slow = 1.0;                   // below them divided by the factor

  // Throws UsageError that names `what`, the field, its value and what is supported.
  void check(const char* what) const;

  friend bool operator==(const RopeParameters&, const RopeParameters&) = default;
};

struct ModelSpec {
  std::vector<LayerKind> layers;
  // Layers that predict further tokens (MTP). They are not among `layers` and get no memory unless
  // `with_mtp_layers` appends them.
  std::vector<LayerKind> mtp_layers = {};
  std::int64_t draft_layers = 0;  // the last so many of `layers` are the draft group
  std::int32_t head_dim = 512;    // of window and compressed entries; the last 64 carry RoPE
  std::int32_t rope_dim = 64;
  std::int32_t indexer_dim = 128;  // of the indexer's keys; the last 64 carry RoPE
  std::int32_t window_tokens = 128;

  // For the engine and the tools; no byte of the cache follows from these. The epsilon that the
  // kernels use is DeviceCacheOptions::norm_eps.
  std::int32_t index_topk = 512;           // CSA entries that a query reads at most
  std::int64_t positions_max = 1'048'576;  // longest context of the model
  double norm_eps = 1e-6;
  RopeParameters sliding_rope = {};                    // of sliding layers
  RopeParameters compressing_rope = {160000.0, 16.0};  // of csa and hca layers

  // The schedules of SPEC 5: 43 layers (2 sliding, 21 csa, 20 hca) and 61 (30 csa, 31 hca); one MTP
  // layer each, sliding.
  static ModelSpec deepseek_v4_flash();
  static ModelSpec deepseek_v4_pro();

  // Reads a Hugging Face config.json in either spelling: `compress_ratios` (0, 4 or 128 a layer,
  // those of the MTP layers behind), or `layer_types` with `compress_rates`. Blocks; allocates
  // nothing that outlives a failure. UsageError that names file, field and value: missing or
  // unreadable file, more than 16 MiB, no JSON object, another model_type, a missing field, a
  // wrong type, an unknown ratio or layer type, lengths or spellings that contradict each other,
  // a dim without a kernel.
  static ModelSpec from_hf_config(const std::string& path);
  // The same from text in memory; `name` stands in the errors where the path would.
  static ModelSpec from_hf_json(std::string_view json, const std::string& name);

  std::int64_t count(LayerKind kind) const;

  std::int32_t groups() const { return draft_layers > 0 ? 2 : 1; }
  LayerGroup group_of(LayerId layer) const {
    const auto target_layers = static_cast<std::int64_t>(layers.size()) - draft_layers;
    return layer.value < target_layers ? LayerGroup::kTarget : LayerGroup::kDraft;
  }

  // Layers [first, first + count) as a spec of their own, for one stage of a pipeline: its layer i
  // is layer first + i here. The MTP layers stay with the stage that has the last layer.
  // UsageError: an empty range, or one that leaves the layers.
  ModelSpec slice(std::int64_t first, std::int64_t count) const;

  // The MTP layers behind the others, as layers of the draft group (and no MTP layers any more),
  // for engines that draft with them from the same seats and pages.
  ModelSpec with_mtp_layers() const;

  // Throws UsageError that names the field, its value and what is supported.
  void check() const;

  friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
};

}  // namespace quire
