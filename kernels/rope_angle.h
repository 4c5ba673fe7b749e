// Angles of the rotary embedding (SPEC 3.2): the frequencies, and the correctly rounded cos and sin
// of a binary32 angle. All in binary64 with explicit fma, so that host and device agree to the bit;
// no libm function is called, for those differ. Internal, not installed.
//
// An angle is reduced by multiples of pi/2 kept in three parts, then a Taylor series of the
// remainder is summed with its leading rounding errors carried along. For every position below
// 2^20 and all frequencies of both groups the result is the nearest binary32 (compared one by one
// with extended precision); elsewhere it is so but for cases within about 2^-56 of a tie.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include <quire/cache/model_spec.h>
#include <quire/kernels/exact_math.h>

namespace quire::exact {

// Frequency of pair i of 32 (SPEC 3.2), in binary64 and rounded once. YaRN leaves pairs alone that
// turn often in the original context, divides those that turn seldom, and blends between. Host
// only.
inline float rope_frequency(const RopeParameters& rope, int i) {
  constexpr double kDims = 64.0;
  const double plain = std::pow(rope.theta, -2.0 * i / kDims);
  if (rope.yarn_factor == 1.0) return static_cast<float>(plain);
  // The pair, not a whole number, that makes `turns` turns in the original context.
  const auto pair_of = [&rope](double turns) {
    constexpr double kTwoPi = 0x1.921fb54442d18p+2;
    const double positions = static_cast<double>(rope.original_positions);
    return kDims * std::log(positions / (turns * kTwoPi)) / (2.0 * std::log(rope.theta));
  };
  const double low = std::fmax(std::floor(pair_of(rope.beta_fast)), 0.0);
  const double high = std::fmin(std::ceil(pair_of(rope.beta_slow)), kDims - 1.0);
  // No blend where both ends meet: a step, as the reference's small difference has it.
  const double width = high > low ? high - low : 0.001;
  const double ramp = std::fmin(std::fmax((i - low) / width, 0.0), 1.0);
  return static_cast<float>(plain / rope.yarn_factor * ramp + plain * (1.0 - ramp));
}

namespace wide {  // binary64, each a single rounding

#ifdef __CUDA_ARCH__
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double sub(double a, double b) { return __dsub_rn(a, b); }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ inline double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ inline std::uint64_t bits(double x) {
  return static_cast<std::uint64_t>(__double_as_longlong(x));
}
__device__ inline double from_bits(std::uint64_t u) {
  return __longlong_as_double(static_cast<long long>(u));
}
__device__ inline float to_float(double x) { return __double2float_rn(x); }
#else
QUIRE_HOST_DEVICE inline double add(double a, double b) { return a + b; }
QUIRE_HOST_DEVICE inline double sub(double a, double b) { return a - b; }
QUIRE_HOST_DEVICE inline double mul(double a, double b) { return a * b; }
QUIRE_HOST_DEVICE inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
QUIRE_HOST_DEVICE inline std::uint64_t bits(double x) { return std::bit_cast<std::uint64_t>(x); }
QUIRE_HOST_DEVICE inline double from_bits(std::uint64_t u) { return std::bit_cast<double>(u); }
QUIRE_HOST_DEVICE inline float to_float(double x) { return static_cast<float>(x); }
#endif

struct Sum {
  double high, low;  // high = rounded sum, low = what the rounding lost
};

QUIRE_HOST_DEVICE inline Sum exact_sum(double a, double b) {
  const double s = add(a, b);
  const double of_b = sub(s, a);
  return {s, add(sub(a, sub(s, of_b)), sub(b, of_b))};
}

// high + low to binary32 in one rounding: `high` is first moved to the odd neighbour on the side of
// `low`, so that the second rounding sees that something lay there.
QUIRE_HOST_DEVICE inline float round_once(Sum x) {
  const std::uint64_t u = bits(x.high);
  if (x.low == 0.0 || (u & 1u) != 0) return to_float(x.high);
  const bool outward = (x.low > 0.0) == (x.high > 0.0);
  return to_float(from_bits(outward ? u + 1 : u - 1));
}

}  // namespace wide

struct CosSin {
  float cos, sin;
};

// 0 <= angle < 2^31.
QUIRE_HOST_DEVICE inline CosSin cos_sin(float angle) {
  using wide::exact_sum;
  using wide::Sum;
  constexpr double kHalfPi1 = 0x1.921fb54442d18p+0;
  constexpr double kHalfPi2 = 0x1.1a62633145c07p-54;
  constexpr double kHalfPi3 = -0x1.f1976b7ed8fbcp-110;
  const double x = angle;

  // n = nearest multiple of pi/2; x - n * kHalfPi1 is exact.
  const double shifted = wide::fma(x, 0x1.45f306dc9c883p-1, 0x1.8p+52);
  const double n = wide::sub(shifted, 0x1.8p+52);
  const auto quadrant = static_cast<unsigned>(wide::bits(shifted) & 3u);
  const double near = wide::fma(-n, kHalfPi1, x);
  const double product = wide::mul(n, kHalfPi2);
  const double product_low = wide::fma(n, kHalfPi2, -product);
  const Sum r = exact_sum(near, -product);
  const double r_low = wide::sub(r.low, wide::fma(n, kHalfPi3, product_low));

  const double h = wide::mul(r.high, r.high);
  const double h_low = wide::fma(r.high, r.high, -h);

  // sin r = r + r^3 S(r^2)
  double s = 1.0 / 355687428096000.0;
  s = wide::fma(s, h, -1.0 / 1307674368000.0);
  s = wide::fma(s, h, 1.0 / 6227020800.0);
  s = wide::fma(s, h, -1.0 / 39916800.0);
  s = wide::fma(s, h, 1.0 / 362880.0);
  s = wide::fma(s, h, -1.0 / 5040.0);
  s = wide::fma(s, h, 1.0 / 120.0);
  s = wide::fma(s, h, -1.0 / 6.0);
  const double cube = wide::mul(r.high, h);
  // d(sin r) = cos r dr, and 1 - r^2 / 2 is cosine enough for the low part.
  const double low_turned = wide::fma(wide::mul(r_low, h), -0.5, r_low);
  const Sum sine = exact_sum(r.high, wide::fma(cube, s, low_turned));

  // cos r = 1 - r^2 / 2 + r^4 C(r^2)
  double c = -1.0 / 6402373705728000.0;
  c = wide::fma(c, h, 1.0 / 20922789888000.0);
  c = wide::fma(c, h, -1.0 / 87178291200.0);
  c = wide::fma(c, h, 1.0 / 479001600.0);
  c = wide::fma(c, h, -1.0 / 3628800.0);
  c = wide::fma(c, h, 1.0 / 40320.0);
  c = wide::fma(c, h, -1.0 / 720.0);
  c = wide::fma(c, h, 1.0 / 24.0);
  const double square_low = wide::fma(wide::mul(r.high, r_low), 2.0, h_low);
  const Sum leading = exact_sum(1.0, wide::mul(h, -0.5));
  const double rest = wide::fma(square_low, -0.5, wide::fma(wide::mul(h, h), c, leading.low));
  const Sum cosine = exact_sum(leading.high, rest);

  const float sin_r = wide::round_once(sine);
  const float cos_r = wide::round_once(cosine);
  const float swapped_sin = (quadrant & 1u) != 0 ? cos_r : sin_r;
  const float swapped_cos = (quadrant & 1u) != 0 ? sin_r : cos_r;
  return {((quadrant + 1u) & 2u) != 0 ? negate(swapped_cos) : swapped_cos,
          (quadrant & 2u) != 0 ? negate(swapped_sin) : swapped_sin};
}

}  // namespace quire::exact
