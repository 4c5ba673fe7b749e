// RoPE tables against extended precision: frequencies of SPEC 3.2, and cos and sin correctly
// rounded from the binary32 angle.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <quire/cache/model_spec.h>
#include <quire/kernels/exact_math.h>
#include <quire/kernels/rope_angle.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache.h>

using namespace quire;

namespace {

// A double cannot stand in for the reference where long double is no wider.
constexpr bool kHasExtended = sizeof(long double) > sizeof(double) && __LDBL_MANT_DIG__ >= 64;

// Wrong when `got` is not the binary32 nearest to `exact`; values too close to a tie for extended
// precision to tell count as right (none is known).
bool is_nearest(float got, long double exact) {
  if (got == static_cast<float>(exact)) return true;
  const long double error = fabsl(static_cast<long double>(got) - exact);
  const long double other = fabsl(static_cast<long double>(static_cast<float>(exact)) - exact);
  return error - other < fabsl(exact) * 0x1p-58L;
}

float frequency(RopeGroup group, int i) {
  const bool compressing = group == RopeGroup::kCompressing;
  const ModelSpec spec = ModelSpec::deepseek_v4_flash();
  return exact::rope_frequency(compressing ? spec.compressing_rope : spec.sliding_rope, i);
}

}  // namespace

TEST_CASE("frequencies have the values that the specification lists") {
  const struct {
    int i;
    double value;
  } listed[] = {{0, 1.0},           {15, 3.635538584e-3},  {16, 2.265625000e-3},
                {20, 2.969777783e-4}, {25, 5.372312671e-6}, {31, 5.680529037e-7}};
  for (const auto& [i, value] : listed) {
    CAPTURE(i);
    // Ten printed digits of the binary64 value: within half a binary32 step and that digit.
    const double got = frequency(RopeGroup::kCompressing, i);
    CHECK(std::abs(got / value - 1.0) < 0x1p-24 + 1e-9);
  }
}

TEST_CASE("frequencies are the binary32 nearest to the formula in extended precision") {
  for (int i = 0; i < 32; ++i) {
    CAPTURE(i);
    const long double ramp = std::min(std::max((i - 15) / 10.0L, 0.0L), 1.0L);
    const long double plain = powl(160000.0L, -2.0L * i / 64.0L);
    CHECK(is_nearest(frequency(RopeGroup::kCompressing, i),
                     plain / 16.0L * ramp + plain * (1.0L - ramp)));
    CHECK(is_nearest(frequency(RopeGroup::kSliding, i), powl(10000.0L, -2.0L * i / 64.0L)));
  }
}

TEST_CASE("cos and sin are correctly rounded for positions up to a million") {
  if (!kHasExtended) {
    MESSAGE("long double is no wider than double here: nothing to compare with");
    return;
  }
  std::int64_t wrong = 0;
  std::int64_t compared = 0;
  const auto compare = [&](float f, std::int64_t p) {
    const float angle = exact::mul(f, static_cast<float>(p));
    const exact::CosSin got = exact::cos_sin(angle);
    const auto wide = static_cast<long double>(angle);
    wrong += is_nearest(got.cos, cosl(wide)) ? 0 : 1;
    wrong += is_nearest(got.sin, sinl(wide)) ? 0 : 1;
    ++compared;
  };
  constexpr std::int64_t kPositions = 1 << 20;
  constexpr std::int64_t kStep = 31;
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  const std::int64_t offset = static_cast<std::int64_t>(seed % kStep);
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    for (int i = 0; i < 32; ++i) {
      const float f = frequency(group, i);
      for (std::int64_t p = offset; p < kPositions; p += kStep) compare(f, p);
      for (std::int64_t p = 0; p < 256; ++p) compare(f, p);
      for (std::int64_t p = kPositions - 256; p < kPositions; ++p) compare(f, p);
    }
  }
  CHECK(compared >= 2'000'000);
  CHECK(wrong == 0);
}

TEST_CASE("a table holds cos and sin of each position in either layout") {
  constexpr std::int64_t kPositions = 300;
  std::vector<float> pairs(kPositions * 64, NAN);
  std::vector<float> halves(kPositions * 64, NAN);
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    make_rope_table(group, kPositions, RopeLayout::kInterleaved, pairs);
    make_rope_table(group, kPositions, RopeLayout::kHalves, halves);
    for (std::size_t p = 0; p < kPositions; ++p) {
      for (int i = 0; i < 32; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const exact::CosSin turn =
            exact::cos_sin(exact::mul(frequency(group, i), static_cast<float>(p)));
        REQUIRE(pairs[p * 64 + 2 * at] == turn.cos);
        REQUIRE(pairs[p * 64 + 2 * at + 1] == turn.sin);
        REQUIRE(halves[p * 64 + at] == turn.cos);
        REQUIRE(halves[p * 64 + 32 + at] == turn.sin);
      }
    }
  }
}

TEST_CASE("a table of other parameters follows them") {
  // Plain: angles of position 1 are the frequencies; half the pairs of theta 4 are powers of 1/2.
  std::vector<float> values(64 * 2);
  make_rope_table({4.0}, 2, RopeLayout::kHalves, values);
  for (int k = 0; k < 2; ++k) {
    CHECK(values[64 + static_cast<std::size_t>(16 * k)] == exact::cos_sin(std::ldexp(1.0f, -k)).cos);
  }
  // A factor of 1 is plain; a larger one slows the slow pairs only.
  const RopeParameters yarn{160000.0, 4.0};
  CHECK(exact::rope_frequency(yarn, 15) == exact::rope_frequency({160000.0}, 15));
  CHECK(exact::rope_frequency(yarn, 25) == exact::rope_frequency({160000.0}, 25) / 4.0f);
  CHECK(exact::rope_frequency({160000.0, 16.0}, 25) == exact::rope_frequency(yarn, 25) / 4.0f);
  // Where one end lies below the first pair, every pair from the other end on is divided.
  const RopeParameters brief{160000.0, 4.0, 6, 32.0, 1.0};
  CHECK(exact::rope_frequency(brief, 0) == 1.0f);
  CHECK(exact::rope_frequency(brief, 1) == exact::rope_frequency({160000.0}, 1) / 4.0f);
  CHECK_THROWS_WITH_AS(make_rope_table({0.0}, 2, RopeLayout::kHalves, values),
                       "RoPE table.theta is 0; supported: 2 to 1e+12", UsageError);
}

TEST_CASE("a table of the wrong size is refused") {
  std::vector<float> values(64 * 4);
  CHECK_THROWS_AS(make_rope_table(RopeGroup::kSliding, 5, RopeLayout::kHalves, values), UsageError);
  CHECK_THROWS_AS(make_rope_table(RopeGroup::kSliding, 0, RopeLayout::kHalves, {}), UsageError);
}
