// The one arithmetic of host and device (SPEC 3.7). binary32, round to nearest even, subnormals
// kept; every function is a single correctly rounded operation or a fixed sequence of them.
//
// Exact code calls these by name and never writes a bare float `*` or `+`, expf, fmaxf or std::max:
// compilers contract the former, and the latter differ between glibc and PTX on signalling NaN and
// signed zero. Flags that keep it true are in cmake/QuireTargets.cmake. Internal, not installed.
#pragma once

#include <bit>
#include <cstdint>

#include <quire/runtime/base/host_device.h>

#ifdef __FAST_MATH__
#error "Quire's exact arithmetic cannot be compiled with -ffast-math"
#endif

// Host loops that call fma are built for old and for new x86, picked at load time: a libm call of
// fmaf costs fifteen times an inlined one. ThreadSanitizer cannot run the resolver.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(__SANITIZE_THREAD__)
#define QUIRE_HOST_FMA_CLONES __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define QUIRE_HOST_FMA_CLONES
#endif

namespace quire::exact {

QUIRE_HOST_DEVICE inline std::uint32_t bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return std::bit_cast<std::uint32_t>(x);
#endif
}

QUIRE_HOST_DEVICE inline float from_bits(std::uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  return std::bit_cast<float>(u);
#endif
}

#ifdef __CUDA_ARCH__
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float sqrt(float a) { return __fsqrt_rn(a); }
__device__ inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
QUIRE_HOST_DEVICE inline float add(float a, float b) { return a + b; }
QUIRE_HOST_DEVICE inline float sub(float a, float b) { return a - b; }
QUIRE_HOST_DEVICE inline float mul(float a, float b) { return a * b; }
QUIRE_HOST_DEVICE inline float div(float a, float b) { return a / b; }
QUIRE_HOST_DEVICE inline float sqrt(float a) { return __builtin_sqrtf(a); }
QUIRE_HOST_DEVICE inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

QUIRE_HOST_DEVICE inline float magnitude(float x) { return from_bits(bits(x) & 0x7FFFFFFFu); }
QUIRE_HOST_DEVICE inline float negate(float x) { return from_bits(bits(x) ^ 0x80000000u); }
QUIRE_HOST_DEVICE inline bool is_nan(float x) { return (bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
QUIRE_HOST_DEVICE inline bool is_inf(float x) { return (bits(x) & 0x7FFFFFFFu) == 0x7F800000u; }

inline constexpr std::uint32_t kNanBits = 0x7FFFFFFFu;
inline constexpr std::uint32_t kInfBits = 0x7F800000u;

// What HCA banks store: the payload of a NaN differs between machines.
QUIRE_HOST_DEVICE inline float canonical(float x) { return is_nan(x) ? from_bits(kNanBits) : x; }

// NaN if either is NaN; +0 above -0.
QUIRE_HOST_DEVICE inline float max(float a, float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  // Branch-free: the fold calls this for every channel of every input row.
  const bool nan = (a != a) | (b != b);
  const bool take_b = (b > a) | ((a == b) & (bits(b) == 0));
  const float larger = take_b ? b : a;
  return nan ? from_bits(kNanBits) : larger;
#endif
}

// Larger of two magnitudes (non-negative or NaN); a NaN is ignored, two give NaN.
QUIRE_HOST_DEVICE inline float max_num(float a, float b) {
  if (is_nan(a)) return b;
  return b > a ? b : a;
}

// exp(x) for x <= 0, no NaN; relative error 9.9e-8; 0 below -87; exactly 1 at 0.
QUIRE_HOST_DEVICE inline float exp0_of_number(float x) {
  const float t = fma(x, 0x1.715476p+0f, 0x1.8p+23f);
  const float n = sub(t, 0x1.8p+23f);
  float f = fma(x, 0x1.715476p+0f, -n);  // a plain sign: free, where negate() is an instruction
  f = fma(x, 0x1.4ae0cp-26f, f);
  float p = 0x1.41fbbap-13f;
  p = fma(p, f, 0x1.5f3e4cp-10f);
  p = fma(p, f, 0x1.3b2d4cp-7f);
  p = fma(p, f, 0x1.c6aee6p-5f);
  p = fma(p, f, 0x1.ebfbep-3f);
  p = fma(p, f, 0x1.62e43p-1f);
  p = fma(p, f, 1.0f);
  const float scaled = from_bits(bits(p) + (bits(t) << 23));
  // A selection, no branch: host loops over channels vectorise.
  return x < -87.0f ? 0.0f : scaled;
}

// The same, and NaN for NaN.
QUIRE_HOST_DEVICE inline float exp0(float x) {
  const float e = exp0_of_number(x);
  return x != x ? from_bits(kNanBits) : e;
}

// Softmax pooling of one channel as a fold over its tokens in ascending order.
struct Fold {
  float m;  // running maximum of the scores
  float z;  // sum of exponentials, relative to m
  float a;  // weighted sum of the values, relative to m
};

QUIRE_HOST_DEVICE inline Fold fold_first(float score, float value) { return {score, 1.0f, value}; }

// Before the first token, so that the first need not be told from the others: fold_next<false> then
// gives the bits of fold_first, or NaN alike.
QUIRE_HOST_DEVICE inline Fold fold_none() { return {from_bits(0xFF800000u), 0.0f, -0.0f}; }

// SPEC 3.7 has two exponentials, x and y. At least one of old.m and score equals m, and counts 1;
// or m is NaN, and both exponentials are the same NaN. So one is computed, of the other.
template <bool kWithNan = true>
QUIRE_HOST_DEVICE inline Fold fold_next(const Fold& old, float score, float value) {
  const float m = max(old.m, score);
  const float lower = old.m == m ? score : old.m;
  const float d = sub(lower, m);
  const float e = kWithNan ? exp0(d) : exp0_of_number(d);
  const float x = old.m == m ? 1.0f : e;
  const float y = score == m ? 1.0f : e;
  return {m, fma(old.z, x, y), fma(y, value, mul(old.a, x))};
}

QUIRE_HOST_DEVICE inline float fold_entry(const Fold& fold) { return div(fold.a, fold.z); }

// Behind folds without NaN: once m is NaN it stays so, z and a are undefined, and the entry of any
// number of rows but one is NaN.
QUIRE_HOST_DEVICE inline float fold_entry_without_nan(const Fold& fold) {
  return is_nan(fold.m) ? from_bits(kNanBits) : fold_entry(fold);
}

// The quotient of a fold by products alone, for threads that divide several side by side: each
// divide is a branch. z is in [1, 128]. Its reciprocal is rounded correctly but for a mantissa of
// ones, so what the division leaves corrects the quotient to the nearest, as long as that loses no
// bits to underflow.
QUIRE_HOST_DEVICE inline bool is_plain_quotient(float a, float z) {
  constexpr std::uint32_t kLeast = 0x0D800000u;  // 2^-100
  return (bits(a) & 0x7FFFFFFFu) - kLeast < kInfBits - kLeast && (~bits(z) & 0x7FFFFFu) != 0;
}
QUIRE_HOST_DEVICE inline float plain_reciprocal(float z) {
  float r = from_bits(0x7EF311C7u - bits(z));  // within a tenth, which each step squares
  r = fma(fma(-z, r, 1.0f), r, r);
  r = fma(fma(-z, r, 1.0f), r, r);
  r = fma(fma(-z, r, 1.0f), r, r);
  return fma(fma(-z, r, 1.0f), r, r);
}
QUIRE_HOST_DEVICE inline float plain_quotient(float a, float z) {
  const float r = plain_reciprocal(z);
  const float q = mul(a, r);
  return fma(fma(-z, q, a), r, q);
}

// 1 / rms from the tree sum of squares over 1/d = `inverse_dim`.
QUIRE_HOST_DEVICE inline float rms_scale(float sum, float inverse_dim, float eps) {
  return div(1.0f, sqrt(fma(sum, inverse_dim, eps)));
}

struct Pair {
  float x, y;
};

QUIRE_HOST_DEVICE inline Pair rotate(Pair v, float cos, float sin) {
  return {fma(v.x, cos, negate(mul(v.y, sin))), fma(v.x, sin, mul(v.y, cos))};
}

inline constexpr float kHadamardScale = 0x1.6a09e6p-4f;  // 1 / sqrt(128)

}  // namespace quire::exact
