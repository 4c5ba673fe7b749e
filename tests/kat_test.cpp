// The arithmetic of SPEC 3.7 against the golden known answers, bit for bit. They were written from
// SPEC's text by somebody else. Here are the single steps; kat_entry_test has whole entries.
#include <doctest/doctest.h>

#include <memory>
#include <string>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>
#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>

#include "tests/support/npy.h"

using namespace quire;
using quire::test::Npy;
using quire::test::read_npy;

namespace {

template <class T>
Npy<T> kat(const std::string& name) {
  return read_npy<T>(test::goldens() / "kat" / (name + ".npy"));
}

// Which payload a NaN carries on is left open; the goldens hold one.
std::uint32_t canonical(float x) { return exact::is_nan(x) ? exact::kNanBits : exact::bits(x); }

// How many values differ; the first one is shown.
std::size_t differences(const float* got, const float* expected, std::size_t count) {
  std::size_t different = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (canonical(got[i]) == canonical(expected[i])) continue;
    if (different++ == 0) MESSAGE("first difference at ", i, ": ", got[i], " for ", expected[i]);
  }
  return different;
}

// m, z, a, entry of each case, by the scalar fold.
std::vector<float> scalar_folds(const Npy<float>& score, const Npy<float>& value) {
  std::vector<float> results;
  for (std::size_t k = 0; k < score.dim(0); ++k) {
    exact::Fold fold = exact::fold_first(score.row(k)[0], value.row(k)[0]);
    for (std::size_t i = 1; i < score.dim(1); ++i) {
      fold = exact::fold_next(fold, score.row(k)[i], value.row(k)[i]);
    }
    results.insert(results.end(), {fold.m, fold.z, fold.a, exact::fold_entry(fold)});
  }
  return results;
}

// The same by the loops of the host operations: each case is a channel.
std::vector<float> channel_folds(const Npy<float>& score, const Npy<float>& value) {
  const std::size_t channels = score.dim(0);
  const auto count = static_cast<std::int64_t>(channels);
  const std::vector<float> no_bias(channels, -0.0f);  // x + -0 is x for every x
  auto folds = std::make_unique<host::ChannelFolds>();
  std::vector<float> s(channels), v(channels), entry(channels), results;
  for (std::size_t i = 0; i < score.dim(1); ++i) {
    for (std::size_t k = 0; k < channels; ++k) {
      s[k] = score.row(k)[i];
      v[k] = value.row(k)[i];
    }
    (i == 0 ? host::fold_first_row : host::fold_next_row)(*folds, count, s.data(), no_bias.data(),
                                                          v.data());
  }
  host::fold_entries(*folds, count, entry.data());
  for (std::size_t k = 0; k < channels; ++k) {
    results.insert(results.end(), {folds->m[k], folds->z[k], folds->a[k], entry[k]});
  }
  return results;
}

void check_norm(const std::string& name) {
  const host::FloatEnvironment environment;
  const Npy<float> in = kat<float>(name + "_in");
  const Npy<float> weight = kat<float>(name + "_weight");
  const Npy<float> out = kat<float>(name + "_out");
  std::vector<float> got = in.values;
  for (std::size_t k = 0; k < in.dim(0); ++k) {
    host::normalise(got.data() + k * in.dim(1), static_cast<std::int64_t>(in.dim(1)),
                    weight.row(k), 1e-6f);
  }
  REQUIRE(out.values.size() == got.size());
  CHECK(differences(got.data(), out.values.data(), got.size()) == 0);
}

void check_scale_bytes(const std::string& name, float floor) {
  const Npy<std::uint8_t> expected = kat<std::uint8_t>(name);
  REQUIRE(expected.values.size() == 32768);
  int different = 0;
  for (std::uint16_t h = 0; h <= 0x7F80; ++h) {  // the NaN patterns above are unused
    const float amax = exact::max_num(exact::from_bf16(h), floor);
    different += exact::scale_byte(amax) != expected.values[h];
  }
  CHECK(different == 0);
}

}  // namespace

TEST_CASE("exp0 gives the known bits") {
  const Npy<float> in = kat<float>("exp0_in");
  const Npy<float> out = kat<float>("exp0_out");
  std::vector<float> got;
  for (const float x : in.values) got.push_back(exact::exp0(x));
  REQUIRE(got.size() == 4096);
  CHECK(differences(got.data(), out.values.data(), got.size()) == 0);
}

TEST_CASE("the fold gives the known bits for 4, 8 and 128 rows") {
  for (const std::string rows : {"4", "8", "128"}) {
    CAPTURE(rows);
    const Npy<float> score = kat<float>("fold" + rows + "_score");
    const Npy<float> value = kat<float>("fold" + rows + "_value");
    const Npy<float> expected = kat<float>("fold" + rows + "_m_z_a_entry");
    const std::vector<float> scalar = scalar_folds(score, value);
    REQUIRE(scalar.size() == expected.values.size());
    CHECK(differences(scalar.data(), expected.values.data(), scalar.size()) == 0);
    const std::vector<float> channels = channel_folds(score, value);
    CHECK(differences(channels.data(), expected.values.data(), channels.size()) == 0);
  }
}

TEST_CASE("the norm over its binary tree gives the known bits") {
  check_norm("rms128");
  check_norm("rms512");
}

TEST_CASE("rotations give the known bits") {
  const Npy<float> in = kat<float>("rope_xycs");
  const Npy<float> out = kat<float>("rope_out");
  std::vector<float> got;
  for (std::size_t k = 0; k < in.dim(0); ++k) {
    const float* v = in.row(k);
    const exact::Pair turned = exact::rotate({v[0], v[1]}, v[2], v[3]);
    got.insert(got.end(), {turned.x, turned.y});
  }
  REQUIRE(got.size() == 2048);
  CHECK(differences(got.data(), out.values.data(), got.size()) == 0);
}

TEST_CASE("the Hadamard transform gives the known bits") {
  const Npy<float> in = kat<float>("hadamard_in");
  const Npy<float> out = kat<float>("hadamard_out");
  std::vector<float> got = in.values;
  for (std::size_t k = 0; k < in.dim(0); ++k) host::hadamard(got.data() + k * in.dim(1));
  REQUIRE(got.size() == 16 * 128);
  CHECK(differences(got.data(), out.values.data(), got.size()) == 0);
}

TEST_CASE("fp32 rounds to the known bf16") {
  const Npy<float> in = kat<float>("bf16_in");
  const Npy<std::uint16_t> out = kat<std::uint16_t>("bf16_out");
  int different = 0;
  for (std::size_t i = 0; i < in.values.size(); ++i) {
    different += exact::to_bf16(in.values[i]) != out.values[i];
  }
  REQUIRE(in.values.size() == 4096);
  CHECK(different == 0);
}

TEST_CASE("every bf16 rounds to the known e4m3") {
  const Npy<std::uint8_t> expected = kat<std::uint8_t>("e4m3_of_every_bf16");
  REQUIRE(expected.values.size() == 65536);
  int different = 0;
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const std::uint8_t code = exact::to_e4m3(exact::from_bf16(static_cast<std::uint16_t>(h)));
    different += code != expected.values[h];
  }
  CHECK(different == 0);
}

TEST_CASE("every positive bf16 has the known scale byte, for both floors") {
  check_scale_bytes("ue8m0_floor_1e-4_of_every_positive_bf16", 1e-4f);
  check_scale_bytes("ue8m0_floor_1e-8_of_every_positive_bf16", 1e-8f);
}
