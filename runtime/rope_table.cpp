// Fills RoPE tables for engines that have none of their own (SPEC 3.2).
#include <quire/kernels/exact_math.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/kernels/rope_angle.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache.h>

#include <cmath>

namespace quire {
namespace {

constexpr std::int64_t kPairs = kRopeDim / 2;

// Flattened: what is called from a clone but not inlined would be the build for old machines.
QUIRE_HOST_FMA_CLONES
[[gnu::flatten]] void fill_position(const float* frequencies, std::int64_t position,
                                    RopeLayout layout, float* row) {
  for (std::int64_t i = 0; i < kPairs; ++i) {
    const float angle = exact::mul(frequencies[i], static_cast<float>(position));
    const exact::CosSin turn = exact::cos_sin(angle);
    const bool interleaved = layout == RopeLayout::kInterleaved;
    row[interleaved ? 2 * i : i] = turn.cos;
    row[interleaved ? 2 * i + 1 : kPairs + i] = turn.sin;
  }
}

}  // namespace

void make_rope_table(const RopeParameters& rope, std::int64_t positions, RopeLayout layout,
                     std::span<float> values) {
  // A position is a binary32 factor of the angle: beyond 2^24 it would not be exact any more.
  constexpr std::int64_t kPositionsMax = std::int64_t{1} << 24;
  QUIRE_CHECK(positions > 0 && positions <= kPositionsMax, "RoPE table of ", positions,
              " positions; supported: 1 to ", kPositionsMax);
  QUIRE_CHECK(static_cast<std::int64_t>(values.size()) == positions * kRopeDim, "RoPE table of ",
              positions, " positions needs ", positions * kRopeDim, " floats, the span has ",
              values.size());
  rope.check("RoPE table");
  const host::FloatEnvironment environment;
  float frequencies[kPairs];
  for (int i = 0; i < kPairs; ++i) frequencies[i] = exact::rope_frequency(rope, i);
  for (std::int64_t p = 0; p < positions; ++p) {
    fill_position(frequencies, p, layout, values.data() + p * kRopeDim);
  }
}

void make_rope_table(RopeGroup group, std::int64_t positions, RopeLayout layout,
                     std::span<float> values) {
  const ModelSpec spec;
  const bool compressing = group == RopeGroup::kCompressing;
  make_rope_table(compressing ? spec.compressing_rope : spec.sliding_rope, positions, layout,
                  values);
}

}  // namespace quire
