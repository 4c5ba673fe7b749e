// The golden known answers of SPEC 3.7 on the GPU, bit for bit: the device forms of the arithmetic,
// norm and Hadamard as the kernels use them.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>
#include <quire/runtime/cuda/check.h>
#include <quire/kernels/entry.cuh>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using quire::test::DeviceArray;
using quire::test::Npy;
using quire::test::read_npy;

template <class T>
Npy<T> kat(const std::string& name) {
  return read_npy<T>(test::goldens() / "kat" / (name + ".npy"));
}

std::uint32_t canonical(float x) { return exact::is_nan(x) ? exact::kNanBits : exact::bits(x); }

// Calls `function(i)` for i in [0, count), one thread each.
template <class Function>
__global__ void for_each_kernel(int count, Function function) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) function(i);
}

template <class Function>
void for_each(Stream& stream, std::size_t count, const Function& function) {
  const auto n = static_cast<int>(count);
  for_each_kernel<<<static_cast<unsigned>((n + 127) / 128), 128, 0, stream.view().cuda()>>>(
      n, function);
  QUIRE_CUDA_CHECK(cudaGetLastError());
  stream.wait();
}

struct Fixture {
  Backend& backend = test::test_backend();
  Stream stream{backend};

  template <class T>
  DeviceArray<T> array(const std::vector<T>& values) {
    return DeviceArray<T>(backend, stream, values);
  }
  template <class T>
  DeviceArray<T> empty(std::size_t count) {
    return DeviceArray<T>(backend, stream, count, 0xA5);
  }
};

void check_floats(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  int different = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    different += canonical(got[i]) != canonical(expected[i]);
  }
  CHECK(different == 0);
}

struct Exp0 {
  const float* in;
  float* out;
  __device__ void operator()(int i) const { out[i] = exact::exp0(in[i]); }
};

TEST_CASE("exp0 gives the known bits on the GPU") {
  Fixture f;
  const auto in = f.array(kat<float>("exp0_in").values);
  auto out = f.empty<float>(in.size());
  for_each(f.stream, in.size(), Exp0{in.data(), out.data()});
  check_floats(out.download(), kat<float>("exp0_out").values);
}

struct FoldRows {
  const float* score;
  const float* value;
  float* out;
  int rows;
  __device__ void operator()(int k) const {
    exact::Fold fold = exact::fold_first(score[k * rows], value[k * rows]);
    for (int i = 1; i < rows; ++i) {
      fold = exact::fold_next(fold, score[k * rows + i], value[k * rows + i]);
    }
    out[4 * k] = fold.m;
    out[4 * k + 1] = fold.z;
    out[4 * k + 2] = fold.a;
    out[4 * k + 3] = exact::fold_entry(fold);
  }
};

TEST_CASE("the fold gives the known bits for 4, 8 and 128 rows on the GPU") {
  for (const int rows : {4, 8, 128}) {
    CAPTURE(rows);
    Fixture f;
    const std::string name = "fold" + std::to_string(rows);
    const Npy<float> scores = kat<float>(name + "_score");
    const auto score = f.array(scores.values);
    const auto value = f.array(kat<float>(name + "_value").values);
    auto out = f.empty<float>(4 * scores.dim(0));
    for_each(f.stream, scores.dim(0), FoldRows{score.data(), value.data(), out.data(), rows});
    check_floats(out.download(), kat<float>(name + "_m_z_a_entry").values);
  }
}

template <class P>
__global__ void norm_kernel(const float* in, const float* weight, float* out) {
  __shared__ cuda::Scratch<P> scratch;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * P::kDim + P::channel();
  const auto y = cuda::normalise<P>(cuda::load_fresh<P::kPerThread>(in + at),
                                    cuda::load_fresh<P::kPerThread>(weight + at), 1e-6f, scratch);
  cuda::store_channels(out + at, y);
}

template <class P>
void check_norm(const std::string& name) {
  Fixture f;
  const Npy<float> input = kat<float>(name + "_in");
  auto out = f.empty<float>(input.values.size());
  const auto in = f.array(input.values);
  const auto weight = f.array(kat<float>(name + "_weight").values);
  const auto rows = static_cast<unsigned>(input.dim(0));
  norm_kernel<P>
      <<<rows, P::kThreads, 0, f.stream.view().cuda()>>>(in.data(), weight.data(), out.data());
  QUIRE_CUDA_CHECK(cudaGetLastError());
  f.stream.wait();
  check_floats(out.download(), kat<float>(name + "_out").values);
}

TEST_CASE("the norm over its binary tree gives the known bits on the GPU") {
  check_norm<cuda::KeysPlace<4>>("rms128");
  check_norm<cuda::KeysPlace<2>>("rms128");
  check_norm<cuda::MainPlace<4>>("rms512");
  check_norm<cuda::MainPlace<2>>("rms512");
}

struct Rotate {
  const float* in;
  float* out;
  __device__ void operator()(int k) const {
    const float* v = in + 4 * k;
    const exact::Pair turned = exact::rotate({v[0], v[1]}, v[2], v[3]);
    out[2 * k] = turned.x;
    out[2 * k + 1] = turned.y;
  }
};

TEST_CASE("rotations give the known bits on the GPU") {
  Fixture f;
  const auto in = f.array(kat<float>("rope_xycs").values);
  auto out = f.empty<float>(in.size() / 2);
  for_each(f.stream, out.size() / 2, Rotate{in.data(), out.data()});
  check_floats(out.download(), kat<float>("rope_out").values);
}

template <class P>
__global__ void hadamard_kernel(const float* in, float* out) {
  __shared__ cuda::Scratch<P> scratch;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * P::kDim + P::channel();
  cuda::store_channels(out + at,
                       cuda::hadamard<P>(cuda::load_fresh<P::kPerThread>(in + at), scratch));
}

template <class P>
void check_hadamard() {
  Fixture f;
  const Npy<float> input = kat<float>("hadamard_in");
  const auto in = f.array(input.values);
  auto out = f.empty<float>(in.size());
  const auto rows = static_cast<unsigned>(input.dim(0));
  hadamard_kernel<P><<<rows, P::kThreads, 0, f.stream.view().cuda()>>>(in.data(), out.data());
  QUIRE_CUDA_CHECK(cudaGetLastError());
  f.stream.wait();
  check_floats(out.download(), kat<float>("hadamard_out").values);
}

TEST_CASE("the Hadamard transform gives the known bits on the GPU") {
  check_hadamard<cuda::KeysPlace<4>>();
  check_hadamard<cuda::KeysPlace<2>>();
}

struct ToBf16 {
  const float* in;
  std::uint16_t* out;
  __device__ void operator()(int i) const { out[i] = exact::to_bf16(in[i]); }
};

TEST_CASE("fp32 rounds to the known bf16 on the GPU") {
  Fixture f;
  const auto in = f.array(kat<float>("bf16_in").values);
  auto out = f.empty<std::uint16_t>(in.size());
  for_each(f.stream, in.size(), ToBf16{in.data(), out.data()});
  const bool same = out.download() == kat<std::uint16_t>("bf16_out").values;
  CHECK(same);
}

struct ToE4m3 {
  std::uint8_t* out;
  __device__ void operator()(int h) const {
    out[h] = exact::to_e4m3(exact::from_bf16(static_cast<std::uint16_t>(h)));
  }
};

TEST_CASE("every bf16 rounds to the known e4m3 on the GPU") {
  Fixture f;
  auto out = f.empty<std::uint8_t>(65536);
  for_each(f.stream, out.size(), ToE4m3{out.data()});
  const bool same = out.download() == kat<std::uint8_t>("e4m3_of_every_bf16").values;
  CHECK(same);
}

// The hardware's conversion against the one of the host, far beyond what bf16 can hold.
struct ToE4m3OfBits {
  std::uint8_t* out;
  std::uint32_t first;
  __device__ void operator()(int i) const {
    out[i] = exact::to_e4m3(exact::from_bits((first + static_cast<std::uint32_t>(i)) * 1021u));
  }
};

TEST_CASE("four million fp32 values round to the same e4m3 on host and GPU") {
  Fixture f;
  constexpr std::uint32_t kCount = 1u << 22;
  auto out = f.empty<std::uint8_t>(kCount);
  for_each(f.stream, kCount, ToE4m3OfBits{out.data(), 0});
  const std::vector<std::uint8_t> got = out.download();
  int different = 0;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    different += got[i] != exact::to_e4m3(exact::from_bits(i * 1021u));
  }
  CHECK(different == 0);
}

struct ScaleByte {
  std::uint8_t* out;
  float floor;
  __device__ void operator()(int h) const {
    out[h] =
        exact::scale_byte(exact::max_num(exact::from_bf16(static_cast<std::uint16_t>(h)), floor));
  }
};

TEST_CASE("every positive bf16 has the known scale byte on the GPU, for both floors") {
  for (const auto& [name, floor] : {std::pair("ue8m0_floor_1e-4_of_every_positive_bf16", 1e-4f),
                                    std::pair("ue8m0_floor_1e-8_of_every_positive_bf16", 1e-8f)}) {
    Fixture f;
    auto out = f.empty<std::uint8_t>(0x7F81);  // the NaN patterns above are unused
    for_each(f.stream, out.size(), ScaleByte{out.data(), floor});
    std::vector<std::uint8_t> expected = kat<std::uint8_t>(name).values;
    expected.resize(out.size());
    const bool same = out.download() == expected;
    CHECK(same);
  }
}

}  // namespace
