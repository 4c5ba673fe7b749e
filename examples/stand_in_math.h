// The arithmetic of the stand-in model, for host and device: tokens and input rows as integer
// hashes of request, position and layer. It costs nothing, so that a run shows the cache, and any
// row can be made again for verification.
#pragma once

#include <bit>
#include <cstdint>

#include <quire/runtime/base/host_device.h>

namespace quire::serving {

QUIRE_HOST_DEVICE constexpr std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

QUIRE_HOST_DEVICE constexpr std::uint32_t prompt_token(std::uint32_t seed, std::int32_t position) {
  return mix(seed ^ mix(static_cast<std::uint32_t>(position)));
}

// "Sampling": the next token follows from the last one and its position.
QUIRE_HOST_DEVICE constexpr std::uint32_t next_token(std::uint32_t token, std::int32_t position) {
  return mix(token + 0x9E3779B9u * static_cast<std::uint32_t>(position + 1));
}

// Of the token at a position: what is drafted there if the draft is refused.
QUIRE_HOST_DEVICE constexpr std::uint32_t wrong_token(std::uint32_t token) {
  return mix(token ^ 0x517CC1B7u);
}

// In [0, 1): what a hash decides with a probability.
QUIRE_HOST_DEVICE constexpr float share_of(std::uint32_t hash) {
  return static_cast<float>(hash >> 8) * 0x1p-24f;
}

// Whether a draft at a position would be right; so it is for a share of `acceptance` of them.
QUIRE_HOST_DEVICE constexpr bool draft_is_right(std::uint32_t seed, std::int32_t position,
                                                float acceptance) {
  const std::uint32_t hash =
      mix(mix(seed ^ 0x2545F491u) ^ mix(static_cast<std::uint32_t>(position)));
  return share_of(hash) < acceptance;
}

enum class RowPart : std::uint32_t { kWindow, kCsa, kIndexer, kHca };

// Of one input row: everything but the channel.
QUIRE_HOST_DEVICE constexpr std::uint32_t row_key(std::uint32_t token, std::int32_t position,
                                                  std::int32_t layer, RowPart part) {
  return mix(token ^
             mix(static_cast<std::uint32_t>(position) +
                 mix(static_cast<std::uint32_t>(layer) * 4 + static_cast<std::uint32_t>(part))));
}

// In [-4, 4): an integer times a power of two, the same bits everywhere.
QUIRE_HOST_DEVICE constexpr float row_value(std::uint32_t key, std::int32_t channel) {
  const std::uint32_t hash = mix(key + 0x9E3779B9u * static_cast<std::uint32_t>(channel));
  return static_cast<float>(static_cast<std::int32_t>(hash)) * 0x1p-29f;
}

// The same, cut to bf16.
QUIRE_HOST_DEVICE inline std::uint16_t row_value_bf16(std::uint32_t key, std::int32_t channel) {
  const float value = row_value(key, channel);
#ifdef __CUDA_ARCH__
  return static_cast<std::uint16_t>(__float_as_uint(value) >> 16);
#else
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
#endif
}

}  // namespace quire::serving
