// Rounding to storage (SPEC 3.4, 3.5, 3.7): bf16, e4m3, and the two scale rules. Host and device.
// Internal, not installed.
#pragma once

#include <cstdint>

#include <quire/kernels/exact_math.h>

namespace quire::exact {

// Nearest even; NaN to 0x7FFF.
QUIRE_HOST_DEVICE inline std::uint16_t to_bf16(float x) {
  const std::uint32_t u = bits(x);
  const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(is_nan(x) ? 0x7FFFu : rounded);
}

QUIRE_HOST_DEVICE inline float from_bf16(std::uint16_t h) {
  return from_bits(static_cast<std::uint32_t>(h) << 16);
}

QUIRE_HOST_DEVICE inline float round_to_bf16(float x) { return from_bf16(to_bf16(x)); }

// Nearest even, saturating at 448; NaN to 0x7F.
QUIRE_HOST_DEVICE inline std::uint8_t to_e4m3(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(0.0f), "f"(x));
  return static_cast<std::uint8_t>(packed);
#else
  const std::uint32_t u = bits(x);
  const std::uint32_t sign = (u >> 24) & 0x80u;
  const std::uint32_t a = u & 0x7FFFFFFFu;
  // Normal numbers: round the mantissa to 3 bits, move the exponent's bias from 127 to 7.
  const std::uint32_t normal = ((a + 0x7FFFFu + ((a >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them.
  const std::uint32_t subnormal = bits(add(from_bits(a), 16384.0f)) - bits(16384.0f);
  std::uint32_t code = a < bits(0x1p-6f) ? subnormal : normal;
  if (a >= bits(448.0f)) code = 0x7Eu;
  if (a > kInfBits) return 0x7Fu;
  return static_cast<std::uint8_t>(code | sign);
#endif
}

QUIRE_HOST_DEVICE inline float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t a = code & 0x7Fu;
  if (a == 0x7Fu) return from_bits(kNanBits);
  if (a < 8u) return from_bits(bits(mul(static_cast<float>(a), 0x1p-9f)) | sign);
  return from_bits(((a << 20) + (120u << 23)) | sign);
}

// --- Main and window entries: one UE8M0 scale per tile of 64 ---

inline constexpr std::uint8_t kInfiniteScale = 255;

// Exponent byte of the smallest power of two that is at least amax / 448, that quotient rounded to
// fp32 first. `amax` is the tile's max_num of magnitudes and the floor, at least 448 x 2^-126; an
// infinite one gives 255. No division: 448 is 1.75 x 2^8, and what is one bit above or below 1.75
// stays on its side of 1 when divided by it.
QUIRE_HOST_DEVICE inline std::uint8_t scale_byte(float amax) {
  constexpr std::uint32_t kSevenQuarters = 0x600000u;  // mantissa of 1.75
  const std::uint32_t u = bits(amax);
  const std::uint32_t byte = (u >> 23) - 8u + ((u & 0x7FFFFFu) > kSevenQuarters ? 1u : 0u);
  return u == kInfBits ? kInfiniteScale : static_cast<std::uint8_t>(byte);
}

// 2^(127 - byte): multiplying by it is exact.
QUIRE_HOST_DEVICE inline float inverse_scale(std::uint8_t byte) {
  return from_bits((254u - byte) << 23);
}

// `x` is rounded to bf16 already.
QUIRE_HOST_DEVICE inline std::uint8_t quantise_main(float x, std::uint8_t scale) {
  return scale == kInfiniteScale ? std::uint8_t{0x7F} : to_e4m3(mul(x, inverse_scale(scale)));
}

// --- Indexer entries: one fp32 scale per entry ---

QUIRE_HOST_DEVICE inline float indexer_scale(float amax) { return mul(amax, 0x1.24924ap-9f); }

// `inverse` is div(1, scale), taken once per entry.
QUIRE_HOST_DEVICE inline std::uint8_t quantise_indexer(float x, float scale, float inverse) {
  return is_inf(scale) ? std::uint8_t{0x7F} : to_e4m3(mul(x, inverse));
}

}  // namespace quire::exact
