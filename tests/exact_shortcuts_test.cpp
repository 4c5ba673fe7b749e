// Where exact arithmetic takes a shorter way than SPEC 3.7 writes it, the bits are those of the
// long one: the scale byte without its division, folds that leave NaN to the end or begin with
// nothing, and the quotient of a fold without a divide.
#include <doctest/doctest.h>

#include <bit>
#include <cfloat>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>

using namespace quire;
using exact::bits;
using exact::from_bits;

namespace {

constexpr std::uint32_t kMantissas = 1u << 23;

// SPEC 3.4 by the letter: the exponent byte of the least power of two at or above amax / 448.
std::uint32_t scale_byte_by_division(float amax) {
  const std::uint32_t quotient = bits(exact::div(amax, 448.0f));
  if (quotient == exact::kInfBits) return 255;
  return (quotient >> 23) + ((quotient & (kMantissas - 1)) != 0 ? 1u : 0u);
}

std::int64_t count_different_scales(std::uint32_t first, std::uint32_t last) {
  std::int64_t different = 0;
  for (std::uint32_t u = first; u <= last; ++u) {
    different += exact::scale_byte(from_bits(u)) != scale_byte_by_division(from_bits(u));
  }
  return different;
}

// The bits of div where a plain quotient may stand for it; how often it may is counted.
struct Quotients {
  std::int64_t plain = 0, different = 0;

  void check(float a, float z) {
    if (!exact::is_plain_quotient(a, z)) return;
    ++plain;
    different += bits(exact::plain_quotient(a, z)) != bits(exact::div(a, z)) ? 1 : 0;
  }
};

QUIRE_HOST_FMA_CLONES int count_different_reciprocals() {
  int different = 0;
  for (std::uint32_t mantissa = 0; mantissa < kMantissas; ++mantissa) {
    const float z = from_bits((127u << 23) | mantissa);
    different += bits(exact::plain_reciprocal(z)) != bits(exact::div(1.0f, z)) ? 1 : 0;
  }
  return different;
}

// 2^-shift modulo an odd number.
std::uint64_t inverse_power_of_two(int shift, std::uint64_t modulus) {
  std::uint64_t inverse = 1;
  for (int i = 0; i < shift; ++i) {
    inverse = (inverse & 1) != 0 ? (inverse + modulus) >> 1 : inverse >> 1;
  }
  return inverse;
}

// NaN may carry any payload.
bool same(float a, float b) { return exact::is_nan(a) ? exact::is_nan(b) : bits(a) == bits(b); }

// Scores or values: ordinary numbers, and one special in `seldom` of them (0: none).
class Draws {
 public:
  Draws(std::mt19937& random, std::uint32_t seldom, float spread)
      : random_(random), seldom_(seldom), normal_(0.0f, spread) {}

  float next() {
    constexpr std::uint32_t kSpecial[] = {
        0x7F800000u, 0xFF800000u,               // infinities
        0x7FC00000u, 0xFFC12345u, 0x7F800001u,  // NaN, the last a signalling one
        0x80000000u, 0x00000000u, 0x00000001u, 0x807FFFFFu, 0x7F7FFFFFu, 0xFF7FFFFFu};
    const auto draw = static_cast<std::uint32_t>(random_());
    const float number = normal_(random_);
    if (seldom_ == 0 || draw % seldom_ != 0) return number;
    return from_bits(kSpecial[draw / seldom_ % std::size(kSpecial)]);
  }

 private:
  std::mt19937& random_;
  std::uint32_t seldom_;
  std::normal_distribution<float> normal_;
};

}  // namespace

TEST_CASE("the scale byte without a division is that of the division for every mantissa") {
  const std::uint32_t least = bits(448.0f * 0x1p-126f);
  REQUIRE((least >> 23) == 9);
  // All mantissas of the lowest two exponents, of those around 448 and the floor, and the highest.
  CHECK(count_different_scales(least, (11u << 23) - 1) == 0);
  for (const std::uint32_t exponent : {113u, 134u, 135u, 136u, 253u, 254u}) {
    CAPTURE(exponent);
    CHECK(count_different_scales(exponent << 23, (exponent << 23) + kMantissas - 1) == 0);
  }
  CHECK(scale_byte_by_division(FLT_MAX) == 247);
  CHECK(exact::scale_byte(FLT_MAX) == 247);
  CHECK(exact::scale_byte(std::numeric_limits<float>::infinity()) == 255);
}

TEST_CASE("the scale byte is that of the division around every power of two and 1.75 times it") {
  for (std::uint32_t exponent = 10; exponent < 255; ++exponent) {
    CAPTURE(exponent);
    for (const std::uint32_t mantissa : {1u, 0x5FFFF0u, kMantissas - 17}) {
      const std::uint32_t first = (exponent << 23) + mantissa - 1;
      CHECK(count_different_scales(
                first, first + 32 < exact::kInfBits ? first + 32 : exact::kInfBits) == 0);
    }
  }
}

TEST_CASE("folds that leave NaN to the end give the entries of folds that carry it") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  int nan_entries = 0;
  int entries = 0;
  for (int rows = 2; rows <= 128; ++rows) {
    for (int trial = 0; trial < 160; ++trial) {
      constexpr std::uint32_t kSeldom[] = {0, 1000, 150, 20, 2};
      constexpr float kSpread[] = {1.0f, 30.0f, 200.0f, 0.0f};
      const std::uint32_t seldom = kSeldom[trial % 5];
      const float spread = kSpread[trial / 5 % 4];
      Draws scores(random, seldom, spread);
      Draws values(random, trial % 3 == 0 ? 0 : seldom, 1.0f);
      // The first rows may be another step's, whose fold was kept as a bank keeps it.
      const int kept = static_cast<int>(random() % static_cast<unsigned>(rows));
      const float score = scores.next();
      const float value = values.next();
      exact::Fold carried = exact::fold_first(score, value);
      exact::Fold left = carried;
      for (int i = 1; i < rows; ++i) {
        if (i == kept) {
          left = {exact::canonical(carried.m), exact::canonical(carried.z),
                  exact::canonical(carried.a)};
        }
        const float s = scores.next();
        const float v = values.next();
        carried = exact::fold_next(carried, s, v);
        left = exact::fold_next<false>(left, s, v);
      }
      const float expected = exact::fold_entry(carried);
      const float got = exact::fold_entry_without_nan(left);
      CAPTURE(rows);
      CAPTURE(trial);
      REQUIRE(same(got, expected));
      REQUIRE(same(left.m, carried.m));
      nan_entries += exact::is_nan(expected) ? 1 : 0;
      ++entries;
    }
  }
  // Both kinds, or it would show little.
  CHECK(nan_entries > entries / 20);
  CHECK(nan_entries < entries / 2);
}

TEST_CASE("a fold that begins with nothing gives the bits of one that begins with its first row") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  Draws scores(random, 3, 30.0f), values(random, 3, 1.0f);
  int numbers = 0;
  for (int trial = 0; trial < 200000; ++trial) {
    const float score = scores.next(), value = values.next();
    const exact::Fold first = exact::fold_first(score, value);
    const exact::Fold begun = exact::fold_next<false>(exact::fold_none(), score, value);
    CAPTURE(bits(score));
    CAPTURE(bits(value));
    REQUIRE(same(begun.m, first.m));
    if (exact::is_nan(score)) continue;  // z and a are undefined
    REQUIRE(same(begun.z, first.z));
    REQUIRE(same(begun.a, first.a));
    ++numbers;
  }
  CHECK(numbers > 100000);
}

// The reciprocal is that of division for all mantissas but one (is_plain_quotient). Then, in units
// of the quotient's last place, the quotient in front of its last rounding is off by at most 3 x
// 2^-24; so it is rounded wrongly only where the exact one is as near to the middle of two numbers.
// For 24-bit integers A and B, that is A 2^s = B M + c with M odd, s = 24 for A >= B, else 25, and
// |c| <= 6: all of those are tried.
TEST_CASE("the quotient of a fold without a divide is that of division where it is hardest") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  constexpr int kFarthest = 6;
  constexpr std::uint64_t kLeast = kMantissas, kEnd = 2 * kLeast;
  constexpr std::uint64_t kStep = 5;  // 1 tries all: 4 s
  Quotients hard;
  for (std::uint64_t b = kLeast + seed % kStep; b < kEnd; b += kStep) {
    const int even = std::countr_zero(b);
    if ((1 << even) > kFarthest) continue;  // c has this factor
    const auto odd = static_cast<std::int64_t>(b >> even);
    const float z = from_bits((127u << 23) | static_cast<std::uint32_t>(b - kLeast));
    for (const int s : {24, 25}) {
      const auto inverse = static_cast<std::int64_t>(
          inverse_power_of_two(s - even, static_cast<std::uint64_t>(odd)));
      const auto least = static_cast<std::int64_t>(s == 24 ? b : kLeast);
      const auto end = static_cast<std::int64_t>(s == 24 ? kEnd : b);
      for (int c = -kFarthest; c <= kFarthest; ++c) {
        if (c == 0 || c % (1 << even) != 0) continue;
        const std::int64_t residue = ((c >> even) + odd) % odd * inverse % odd;
        for (std::int64_t a = least + ((residue - least) % odd + odd) % odd; a < end; a += odd) {
          hard.check(static_cast<float>(a), z);
        }
      }
    }
  }
  CHECK(hard.plain > 8'000'000);
  CHECK(hard.different == 0);
}

TEST_CASE(
    "the reciprocal in the quotient of a fold is that of division for every mantissa but one") {
  CHECK(count_different_reciprocals() == 1);
  CHECK_FALSE(exact::is_plain_quotient(1.0f, from_bits((128u << 23) - 1)));
}

TEST_CASE(
    "the quotient of a fold without a divide is that of division for all that it is taken for") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  Quotients any;
  for (int trial = 0; trial < 4'000'000; ++trial) {
    const float z =
        from_bits((127u << 23) + static_cast<std::uint32_t>(random()) % (7 * kMantissas));
    any.check(from_bits(static_cast<std::uint32_t>(random())), z);  // a of any size and sign
    any.check(from_bits(0x0D800000u + static_cast<std::uint32_t>(random()) % 64), z);
  }
  CHECK(any.plain > 4'000'000);
  CHECK(any.different == 0);
  for (const float a : {0.0f, -0.0f, 0x1p-101f, std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()}) {
    CHECK_FALSE(exact::is_plain_quotient(a, 3.0f));
  }
}
