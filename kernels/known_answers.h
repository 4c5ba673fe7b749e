// Known answers of the one arithmetic (SPEC 3.7): about a thousand values, one function for host
// and device, inputs from an integer hash. Both sides compute them when a cache is opened; a difference
// means a compiler, a flag or a machine that does not keep the rules, and nothing is opened.
// Internal, not installed.
#pragma once

#include <cstdint>
#include <vector>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>
#include <quire/kernels/rope_angle.h>

namespace quire {

inline constexpr int kKnownAnswers = 1024;

// Of the whole list, by `known_answers_digest`, from a build whose arithmetic passed every golden
// known answer.
inline constexpr std::uint64_t kKnownAnswersDigest = 0xBBC5D01CC91A81B7ull;

namespace known {

// Drawn into names, never inside an argument list: the order of draws must be the same everywhere.
struct Inputs {
  std::uint32_t state;

  // A permutation of the counter: multiply and xor-shift rounds.
  QUIRE_HOST_DEVICE std::uint32_t word() {
    std::uint32_t h = state += 0x9E3779B9u;
    h = (h ^ (h >> 16)) * 0x21F0AAADu;
    h = (h ^ (h >> 15)) * 0x735A2D97u;
    return h ^ (h >> 15);
  }

  // [1, 2), then a sign and an exponent in [-range, range].
  QUIRE_HOST_DEVICE float number(std::uint32_t range) {
    const std::uint32_t w = word();
    const std::uint32_t exponent = 127u - range + (w >> 24) % (2u * range + 1u);
    return exact::from_bits((w & 0x007FFFFFu) | exponent << 23 | (w << 8 & 0x80000000u));
  }

  // Now and then one of the values that optimisers and machines treat apart.
  QUIRE_HOST_DEVICE float any(std::uint32_t range) {
    constexpr std::uint32_t kSpecial[] = {
        0x00000000u, 0x80000000u, 0x00000001u, 0x807FFFFFu, 0x00400000u, 0x00800000u,
        0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFC12345u, 0x7F800001u, 0x7F7FFFFFu};
    const std::uint32_t w = word();
    const float plain = number(range);
    return w % 6u == 0 ? exact::from_bits(kSpecial[(w >> 8) % 12u]) : plain;
  }
};

// Which payload a NaN carries on is the machine's choice; that it is one is not.
QUIRE_HOST_DEVICE inline std::uint32_t answer(float x) {
  return exact::is_nan(x) ? exact::kNanBits : exact::bits(x);
}

QUIRE_HOST_DEVICE inline std::uint32_t mix(std::uint32_t a, std::uint32_t b) {
  return (a << 7 | a >> 25) ^ b;
}

QUIRE_HOST_DEVICE inline std::uint32_t fold8(Inputs in, bool entry_only, bool special) {
  exact::Fold fold{};
  for (int i = 0; i < 8; ++i) {
    const float score = special ? in.any(3) : in.number(3);
    const float value = special ? in.any(6) : in.number(6);
    fold = i == 0 ? exact::fold_first(score, value) : exact::fold_next(fold, score, value);
  }
  if (entry_only) return answer(exact::fold_entry(fold));
  return mix(mix(answer(fold.m), answer(fold.z)), answer(fold.a));
}

// Tree of eight squares, scale, one normed channel.
QUIRE_HOST_DEVICE inline std::uint32_t norm8(Inputs in, std::uint32_t range) {
  float sums[8];
  for (int i = 0; i < 8; ++i) {
    const float c = in.number(range);
    sums[i] = exact::mul(c, c);
  }
  for (int half = 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] = exact::add(sums[2 * i], sums[2 * i + 1]);
  }
  const float scale = exact::rms_scale(sums[0], 0.125f, 1e-6f);
  const float channel = in.any(4);
  const float weight = in.number(1);
  return mix(answer(scale), answer(exact::mul(exact::mul(channel, scale), weight)));
}

QUIRE_HOST_DEVICE inline std::uint32_t hadamard8(Inputs in, int lane) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = in.any(8);
  for (int bit = 1; bit < 8; bit *= 2) {
    for (int i = 0; i < 8; ++i) {
      if ((i & bit) != 0) continue;
      const float a = x[i];
      const float b = x[i + bit];
      x[i] = exact::add(a, b);
      x[i + bit] = exact::sub(a, b);
    }
  }
  return answer(exact::mul(x[lane], exact::kHadamardScale));
}

// Tile maximum of four, its scale byte, one quantised value.
QUIRE_HOST_DEVICE inline std::uint32_t main_tile(Inputs in, bool indexer) {
  float amax = 1e-4f;
  float x = 0.0f;
  for (int i = 0; i < 4; ++i) {
    x = indexer ? in.any(20) : exact::round_to_bf16(in.any(20));
    amax = exact::max_num(amax, exact::magnitude(x));
  }
  if (indexer) {
    const float scale = exact::indexer_scale(amax);
    return mix(answer(scale), exact::quantise_indexer(x, scale, exact::div(1.0f, scale)));
  }
  const std::uint8_t scale = exact::scale_byte(amax);
  return static_cast<std::uint32_t>(scale) << 8 | exact::quantise_main(x, scale);
}

QUIRE_HOST_DEVICE inline std::uint32_t rope(Inputs in) {
  const float frequency = exact::magnitude(exact::mul(in.number(10), 0x1p-11f));
  const auto position = static_cast<float>(in.word() >> 12);
  const exact::CosSin turn = exact::cos_sin(exact::mul(frequency, position));
  return mix(answer(turn.cos), answer(turn.sin));
}

QUIRE_HOST_DEVICE inline std::uint32_t rotated(Inputs in) {
  const float x = in.any(8);
  const float y = in.any(8);
  const exact::Pair v{x, y};
  const float cos = in.number(3);
  const float sin = in.number(3);
  const exact::Pair turned = exact::rotate(v, cos, sin);
  return mix(answer(turned.x), answer(turned.y));
}

// Single operations, down into the subnormals.
QUIRE_HOST_DEVICE inline std::uint32_t operation(Inputs in, int which) {
  const float a = in.any(120);
  const float b = in.any(120);
  switch (which) {
    case 0: return answer(exact::add(a, b));
    case 1: return answer(exact::sub(a, b));
    case 2: return answer(exact::mul(a, b));
    case 3: return answer(exact::div(a, b));
    case 4: return answer(exact::sqrt(exact::magnitude(a)));
    case 5: return answer(exact::fma(a, b, in.any(120)));
    case 6: return answer(exact::max(a, b));
    default: return answer(exact::max_num(exact::magnitude(a), exact::magnitude(b)));
  }
}

}  // namespace known

// Answer `index` of [0, kKnownAnswers).
QUIRE_HOST_DEVICE inline std::uint32_t known_answer(int index) {
  constexpr int kKinds = 16;
  const int sample = index / kKinds;
  known::Inputs in{static_cast<std::uint32_t>(index) * 0x01000193u + 1u};
  switch (index % kKinds) {
    case 0: return known::answer(exact::exp0(exact::negate(exact::magnitude(in.any(6)))));
    case 1: return known::answer(exact::exp0(exact::mul(-0x1.6p+6f, exact::magnitude(
                                                 exact::mul(in.number(1), 0.25f)))));
    case 2: return known::fold8(in, true, false);
    case 3: return known::fold8(in, false, false);
    case 4: return known::fold8(in, sample % 2 == 0, true);
    case 5: return known::norm8(in, 4);
    case 6: return known::norm8(in, sample % 2 == 0 ? 12 : 70);
    case 7: return known::rotated(in);
    case 8: return known::hadamard8(in, sample % 8);
    case 9: return exact::to_bf16(in.any(126));
    case 10: return exact::to_e4m3(in.any(12));
    case 11: return known::answer(exact::from_e4m3(static_cast<std::uint8_t>(in.word())));
    case 12: return known::main_tile(in, false);
    case 13: return known::main_tile(in, true);
    case 14: return known::rope(in);
    default: return known::operation(in, sample % 8);
  }
}

// FNV-1a over the words, lowest byte first.
constexpr std::uint64_t known_answers_digest(const std::uint32_t* words, int count) {
  std::uint64_t digest = 0xCBF29CE484222325ull;
  for (int i = 0; i < count; ++i) {
    for (int byte = 0; byte < 4; ++byte) {
      digest = (digest ^ ((words[i] >> (8 * byte)) & 0xFFu)) * 0x100000001B3ull;
    }
  }
  return digest;
}

namespace host {

// All of them, in order, in the floating-point environment of the host operations.
std::vector<std::uint32_t> known_answers();

}  // namespace host
}  // namespace quire
