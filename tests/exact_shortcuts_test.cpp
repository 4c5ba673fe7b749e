// Where exact arithmetic takes a shorter way than SPEC 3.7 writes it, the bits are those of the
// long one: the scale byte without its division, and folds that leave NaN to the end.
#include <doctest/doctest.h>

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
