// The corners of SPEC 3.7 that the golden known answers leave open, and that the host operations
// keep their results whatever floating-point environment the calling thread has.
#include <doctest/doctest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>
#include <quire/kernels/host/operations.h>
#include <quire/kernels/known_answers.h>

using namespace quire;
using exact::bits;
using exact::from_bits;

namespace {

const float kQuietNan = from_bits(0xFFC12345u);
const float kSignallingNan = from_bits(0x7F800001u);
const float kInfinity = std::numeric_limits<float>::infinity();

// The nearest of all finite codes, the even one of two; counts instead of arithmetic tricks.
std::uint8_t nearest_e4m3(float x) {
  const double magnitude = std::abs(static_cast<double>(x));
  std::uint8_t best = 0;
  for (std::uint8_t code = 1; code < 0x7F; ++code) {
    const double distance = std::abs(exact::from_e4m3(code) - magnitude);
    const double shortest = std::abs(exact::from_e4m3(best) - magnitude);
    if (distance < shortest || (distance == shortest && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

// A thread as another library may leave it: subnormals flushed, and rounding upwards.
class ForeignEnvironment {
 public:
  ForeignEnvironment() {
    std::fegetenv(&saved_);
    std::fesetround(FE_UPWARD);
#ifdef __SSE__
    _mm_setcsr(_mm_getcsr() | 0x8040u);  // flush to zero, subnormals are zero
#endif
  }
  ~ForeignEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

// Rounding upwards shows in a sum that rounds to 1 otherwise.
bool is_foreign() {
  volatile float one = 1.0f;
  volatile float tiny = 0x1p-60f;
  return one + tiny > 1.0f;
}

// One decode step of two requests that closes an entry, all values subnormal or small.
std::vector<float> compress_outputs() {
  constexpr std::int32_t kDim = 128;
  std::vector<float> state(2 * 8 * 4 * kDim);
  std::vector<float> input(2 * 4 * kDim);
  std::vector<float> bias(8 * kDim, 0x1p-149f);
  for (std::size_t i = 0; i < state.size(); ++i) {
    state[i] = from_bits(static_cast<std::uint32_t>(i * 2654435761u) & 0x807FFFFFu);
  }
  for (std::size_t i = 0; i < input.size(); ++i) {
    input[i] = from_bits(static_cast<std::uint32_t>(i * 40503u) & 0x007FFFFFu);
  }
  std::vector<float> output(2 * kDim, -7.0f);
  const std::int32_t lengths[] = {4, 12};
  const std::int32_t rings[] = {0, 1};
  CompressC4DecodeParams params;
  params.head_dim = kDim;
  params.batch = 2;
  params.state = state.data();
  params.input = input.data();
  params.bias = bias.data();
  params.output = output.data();
  params.seq_lens = lengths;
  params.indices = rings;
  host::compress_c4_decode(params);
  return output;
}

std::vector<std::byte> stored_bytes() {
  std::vector<std::uint16_t> rows(4 * kHeadDim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<std::uint16_t>(i * 40503u >> 3);  // subnormals, NaN, infinities as well
  }
  std::vector<std::byte> page(static_cast<std::size_t>(main_page_bytes(4)), std::byte{0xA5});
  const std::int32_t locations[] = {0, 1, 2, 3};
  StoreParams params;
  params.input = rows.data();
  params.rows = 4;
  params.locations = locations;
  params.pool = make_entry_pool(page.data(), main_page_bytes(4), 4);
  host::store_flashmla(params);
  return page;
}

// SPEC 3.7 as it is written, with an exponential for either operand.
exact::Fold fold_by_the_letter(const exact::Fold& old, float s, float v) {
  const float m = exact::max(old.m, s);
  const float x = old.m == m ? 1.0f : exact::exp0(exact::sub(old.m, m));
  const float y = s == m ? 1.0f : exact::exp0(exact::sub(s, m));
  return {m, exact::fma(old.z, x, y), exact::fma(y, v, exact::mul(old.a, x))};
}

}  // namespace

TEST_CASE("the maximum is NaN if either is, and +0 above -0") {
  for (const float nan : {kQuietNan, kSignallingNan}) {
    CHECK(exact::is_nan(exact::max(nan, 1.0f)));
    CHECK(exact::is_nan(exact::max(1.0f, nan)));
    CHECK(exact::is_nan(exact::max(-kInfinity, nan)));
    CHECK(exact::max_num(nan, 2.0f) == 2.0f);
    CHECK(exact::max_num(2.0f, nan) == 2.0f);
    CHECK(exact::is_nan(exact::max_num(nan, kQuietNan)));
  }
  CHECK(bits(exact::max(0.0f, -0.0f)) == 0);
  CHECK(bits(exact::max(-0.0f, 0.0f)) == 0);
  CHECK(bits(exact::max(-0.0f, -0.0f)) == 0x80000000u);
  CHECK(exact::max(-kInfinity, -1.0f) == -1.0f);
  CHECK(exact::max(from_bits(2), from_bits(1)) == from_bits(2));
}

TEST_CASE("the exponential keeps its bounds") {
  CHECK(bits(exact::exp0(0.0f)) == bits(1.0f));
  CHECK(bits(exact::exp0(-0.0f)) == bits(1.0f));
  CHECK(bits(exact::exp0(-kInfinity)) == 0);
  CHECK(bits(exact::exp0(std::nextafter(-87.0f, -88.0f))) == 0);
  CHECK(exact::exp0(-87.0f) > 0.0f);
  CHECK(exact::is_nan(exact::exp0(kSignallingNan)));
  double worst = 0.0;
  for (int i = 0; i <= 87 * 4096; ++i) {
    const float x = static_cast<float>(-i) / 4096.0f;
    const double expected = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(exact::exp0(x) / expected - 1.0));
  }
  CHECK(worst < 1.0e-7);
}

TEST_CASE("a fold with one exponential has the bits of SPEC 3.7's two") {
  std::vector<float> operands{0.0f,       -0.0f,          kInfinity,      -kInfinity,
                              kQuietNan,  kSignallingNan, from_bits(1),   from_bits(0x80000001u),
                              3.0e38f,    -3.0e38f,       1.0f,           -86.9f,
                              -87.0f,     -87.1f,         from_bits(0x3F800001u)};
  std::mt19937 engine(37);
  for (int i = 0; i < 24; ++i) operands.push_back(from_bits(static_cast<std::uint32_t>(engine())));
  int different = 0;
  // NaN may carry any payload: which operand's is left open by SPEC 3.7.
  const auto differ = [](float a, float b) {
    return !(exact::is_nan(a) && exact::is_nan(b)) && bits(a) != bits(b);
  };
  for (const float m : operands) {
    for (const float s : operands) {
      for (const float z : operands) {
        for (const float a : operands) {
          const exact::Fold old{m, z, a};
          const float v = operands[(bits(s) ^ bits(a)) % operands.size()];
          const exact::Fold got = exact::fold_next(old, s, v);
          const exact::Fold expected = fold_by_the_letter(old, s, v);
          different += differ(got.m, expected.m) || differ(got.z, expected.z) ||
                       differ(got.a, expected.a);
        }
      }
    }
  }
  CHECK(different == 0);
}

TEST_CASE("every e4m3 code and every bf16 comes back from fp32") {
  for (std::uint32_t code = 0; code < 256; ++code) {
    CAPTURE(code);
    const auto byte = static_cast<std::uint8_t>(code);
    const bool nan = (code & 0x7F) == 0x7F;
    CHECK(exact::to_e4m3(exact::from_e4m3(byte)) == (nan ? 0x7F : byte));
  }
  int different = 0;
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const bool nan = (h & 0x7FFF) > 0x7F80;
    different += exact::to_bf16(exact::from_bf16(half)) != (nan ? 0x7FFF : half);
    different += bits(exact::from_bf16(half)) != h << 16;  // widening keeps signalling NaN too
  }
  CHECK(different == 0);
}

TEST_CASE("e4m3 is the nearest code, ties to even, saturating") {
  const std::uint32_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 engine(seed);
  const auto random = [&] { return static_cast<std::uint32_t>(engine()); };
  for (int i = 0; i < 20000; ++i) {
    // Exponents from far below the least code to above the largest.
    const std::uint32_t exponent = 127 - 14 + random() % 26;
    const std::uint32_t mantissa = i % 2 == 0 ? random() & 0x7FFFFF : (random() & 15) << 19;
    const float x = from_bits((random() & 1) << 31 | exponent << 23 | mantissa);
    CAPTURE(x);
    REQUIRE(exact::to_e4m3(x) == nearest_e4m3(x));
  }
  CHECK(exact::to_e4m3(1e30f) == 0x7E);
  CHECK(exact::to_e4m3(-kInfinity) == 0xFE);
  CHECK(exact::to_e4m3(-0.0f) == 0x80);
  CHECK(exact::to_e4m3(from_bits(1)) == 0);
}

// W3
TEST_CASE("a tile with an infinity gets scale 255 and NaN bytes, one of NaN alone the floor's") {
  CHECK(exact::scale_byte(kInfinity) == 255);
  CHECK(exact::quantise_main(1.0f, 255) == 0x7F);
  CHECK(exact::scale_byte(exact::max_num(1e-4f, kQuietNan)) == 105);
  CHECK(exact::quantise_main(kQuietNan, 105) == 0x7F);
  CHECK(exact::scale_byte(448.0f) == 127);
  CHECK(exact::scale_byte(std::nextafter(448.0f, 449.0f)) == 128);
  CHECK(bits(exact::inverse_scale(127)) == bits(1.0f));
  CHECK(exact::quantise_indexer(1.0f, kInfinity, 0.0f) == 0x7F);
}

// G8
TEST_CASE("host operations give the same bytes whatever environment the thread has") {
  REQUIRE_FALSE(is_foreign());
  const std::vector<float> outputs = compress_outputs();
  const std::vector<std::byte> page = stored_bytes();
  const std::vector<std::uint32_t> answers = host::known_answers();
  int subnormal = 0;
  for (const float x : outputs) subnormal += x != 0.0f && std::abs(x) < 0x1p-126f ? 1 : 0;
  REQUIRE(subnormal > 100);  // or flushing would not show

  const ForeignEnvironment environment;
  REQUIRE(is_foreign());
  const std::vector<float> foreign_outputs = compress_outputs();
  const bool same = std::memcmp(foreign_outputs.data(), outputs.data(), outputs.size() * 4) == 0;
  CHECK(same);
  CHECK(stored_bytes() == page);
  CHECK(host::known_answers() == answers);
  CHECK(is_foreign());  // the thread has its own environment back
}
