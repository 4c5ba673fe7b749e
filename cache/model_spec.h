// What the model demands of the cache: its layers in order and their kinds, and the dims.
// The schedule is data; nothing is derived from a layer's number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <quire/runtime/base/ids.h>

namespace quire {

enum class LayerKind : std::uint8_t {
  kSliding,  // window only
  kCsa,      // window, and one entry per 4 tokens with overlap, and the indexer's keys
  kHca,      // window, and one entry per 128 tokens
};

const char* name_of(LayerKind kind);

// How a compressing layer pools: W = ratio tokens per entry, twice that with overlap (SPEC 0.1).
struct CompressionRule {
  std::int32_t ratio;
  bool overlap;
};

inline constexpr CompressionRule kCsaRule{4, true};
inline constexpr CompressionRule kHcaRule{128, false};

struct ModelSpec {
  std::vector<LayerKind> layers;
  std::int32_t head_dim = 512;     // of window and compressed entries; the last 64 carry RoPE
  std::int32_t rope_dim = 64;
  std::int32_t indexer_dim = 128;  // of the indexer's keys; the last 64 carry RoPE
  std::int32_t window_tokens = 128;

  std::int64_t count(LayerKind kind) const;

  // Throws UsageError that names the field, its value and what is supported.
  void check() const;
};

}  // namespace quire
