// The single c4 operations against the original kernels' outputs: two ragged prefill chunks, then
// seven decode steps of five requests, in ring and page-aligned state. Each call also carries
// padding, which must leave no trace.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <quire/kernels/params.h>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/test_backend.h"

using namespace quire;
using quire::test::DeviceArray;

namespace {

using Bytes = std::vector<std::byte>;
using Json = nlohmann::json;

ElementType type_of(const Json& name) {
  return name == "bf16" ? ElementType::kBfloat16 : ElementType::kFloat32;
}

template <class T>
Bytes bytes_of_values(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

Bytes load(const std::filesystem::path& file, ElementType type) {
  return type == ElementType::kFloat32
             ? bytes_of_values(test::read_npy<float>(file).values)
             : bytes_of_values(test::read_npy<std::uint16_t>(file).values);
}

// `rows` rows of d elements, each -7.
Bytes poison_output(std::int64_t rows, std::int64_t d, ElementType type) {
  const auto count = static_cast<std::size_t>(rows * d);
  return type == ElementType::kFloat32
             ? bytes_of_values(std::vector<float>(count, -7.0f))
             : bytes_of_values(std::vector<std::uint16_t>(count, 0xC0E0));
}

std::vector<PlanRecord> records_of(const Json& plan) {
  std::vector<PlanRecord> records;
  for (const Json& r : plan) records.push_back({r[0], r[1], r[2], r[3]});
  records.insert(records.end(), 3, kPaddingRecord);
  return records;
}

std::vector<C4PageBundle> bundles_of(const Json& step) {
  std::vector<C4PageBundle> bundles;
  for (const Json& b : step.value("extra", Json::array())) {
    bundles.push_back({b[0], b[1], b[2], b[3]});
  }
  return bundles;
}

// fp32 within 1e-6 and bf16 within one step; rows that close nothing keep their -7 to the bit.
void check_output(const Bytes& got, const Bytes& expected, const Bytes& poison, std::int64_t d,
                  ElementType type) {
  REQUIRE(got.size() >= expected.size());
  const std::size_t size = type == ElementType::kFloat32 ? 4 : 2;
  const std::size_t row_bytes = static_cast<std::size_t>(d) * size;
  int far = 0;
  int most_steps = 0;
  for (std::size_t at = 0; at < expected.size(); at += row_bytes) {
    if (std::memcmp(&expected[at], &poison[at], row_bytes) == 0) {
      CHECK(std::memcmp(&got[at], &poison[at], row_bytes) == 0);
      continue;
    }
    for (std::size_t i = at; i < at + row_bytes; i += size) {
      if (type == ElementType::kFloat32) {
        float a = 0.0f;
        float b = 0.0f;
        std::memcpy(&a, &got[i], 4);
        std::memcpy(&b, &expected[i], 4);
        const float distance = std::abs(a - b);
        far += distance <= 1e-6f ? 0 : 1;  // a NaN is far
      } else {
        std::int16_t a = 0;
        std::int16_t b = 0;
        std::memcpy(&a, &got[i], 2);
        std::memcpy(&b, &expected[i], 2);
        const bool same_sign = (a < 0) == (b < 0);
        const int steps = same_sign ? std::abs(a - b) : 1000;
        most_steps = steps > most_steps ? steps : most_steps;
      }
    }
  }
  CHECK(far == 0);
  CHECK(most_steps <= 1);
  // Behind the golden rows: the output rows of padding.
  CHECK(std::memcmp(got.data() + expected.size(), poison.data() + expected.size(),
                    got.size() - expected.size()) == 0);
}

class C4Case {
 public:
  explicit C4Case(const std::string& folder)
      : directory_(test::goldens() / folder),
        meta_(test::read_json(directory_ / "meta.json")),
        stream_(backend_),
        mode_(meta_["mode"] == "ring" ? C4StateMode::kRing : C4StateMode::kPageAligned),
        type_(type_of(meta_["input_dtype"])),
        output_type_(type_of(meta_["output_dtype"])),
        d_(meta_["head_dim"]),
        state_(backend_, stream_, load(directory_ / "buffer_initial.npy", type_)),
        bias_(backend_, stream_, load(directory_ / "score_bias.npy", type_)) {}

  void run() {
    const Json& steps = meta_["steps"];
    REQUIRE(steps.size() == 9);
    for (std::size_t k = 0; k < steps.size(); ++k) {
      CAPTURE(k);
      const std::string name = "step" + std::to_string(k);
      const Bytes input = load(directory_ / (name + "_input.npy"), type_);
      const Bytes expected = load(directory_ / (name + "_output.npy"), output_type_);
      steps[k]["kind"] == "prefill" ? prefill(steps[k], input, expected)
                                    : decode(steps[k], input, expected);
    }
    CHECK(state_.download() == load(directory_ / "buffer_final.npy", type_));
  }

 private:
  template <class Params>
  void fill_common(Params& params) {
    params.mode = mode_;
    params.type = type_;
    params.output_type = output_type_;
    params.head_dim = d_;
    params.state = state_.data();
    params.bias = bias_.data();
  }

  void prefill(const Json& step, const Bytes& input, const Bytes& expected) {
    const std::int64_t tokens =
        static_cast<std::int64_t>(input.size()) / (4 * d_ * bytes_of(type_));
    const Bytes poison = poison_output(tokens, d_, output_type_);
    DeviceArray<std::byte> rows(backend_, stream_, input);
    DeviceArray<std::byte> output(backend_, stream_, poison);
    const std::vector<PlanRecord> compress_records = records_of(step["compress_plan"]);
    const std::vector<PlanRecord> write_records = records_of(step["write_plan"]);
    DeviceArray<PlanRecord> compress(backend_, stream_, compress_records);
    DeviceArray<PlanRecord> write(backend_, stream_, write_records);
    DeviceArray<std::int32_t> indices(backend_, stream_,
                                      step["indices"].get<std::vector<std::int32_t>>());
    DeviceArray<C4PageBundle> bundles(backend_, stream_, bundles_of(step));
    CompressC4PrefillParams params;
    fill_common(params);
    params.input = rows.data();
    params.output = output.data();
    params.compress = compress.data();
    params.write = write.data();
    params.compress_capacity = static_cast<std::int64_t>(compress.size());
    params.write_capacity = static_cast<std::int64_t>(write.size());
    params.indices = indices.data();
    params.bundles = mode_ == C4StateMode::kPageAligned ? bundles.data() : nullptr;
    backend_.compress_c4_prefill(params, Pdl::kOff, stream_);
    stream_.wait();
    check_output(output.download(), expected, poison, d_, output_type_);
  }

  // One padding row of length 0 follows the batch, its input NaN, its index out of reach.
  void decode(const Json& step, const Bytes& input, const Bytes& expected) {
    Bytes padded = input;
    padded.resize(input.size() + static_cast<std::size_t>(4 * d_ * bytes_of(type_)),
                  std::byte{0xFF});
    auto lengths = step["seq_len"].get<std::vector<std::int32_t>>();
    auto current = step["indices"].get<std::vector<std::int32_t>>();
    auto before = step.value("extra", std::vector<std::int32_t>(lengths.size()));
    lengths.push_back(0);
    current.push_back(-1);
    before.push_back(-1);
    const auto batch = static_cast<std::int32_t>(lengths.size());
    const Bytes poison = poison_output(batch, d_, output_type_);
    DeviceArray<std::byte> rows(backend_, stream_, padded);
    DeviceArray<std::byte> output(backend_, stream_, poison);
    DeviceArray<std::int32_t> seq_lens(backend_, stream_, lengths);
    DeviceArray<std::int32_t> indices(backend_, stream_, current);
    DeviceArray<std::int32_t> previous(backend_, stream_, before);
    CompressC4DecodeParams params;
    fill_common(params);
    params.batch = batch;
    params.input = rows.data();
    params.output = output.data();
    params.seq_lens = seq_lens.data();
    params.indices = indices.data();
    params.previous_pages = mode_ == C4StateMode::kPageAligned ? previous.data() : nullptr;
    backend_.compress_c4_decode(params, Pdl::kOff, stream_);
    stream_.wait();
    check_output(output.download(), expected, poison, d_, output_type_);
  }

  std::filesystem::path directory_;
  Json meta_;
  Backend& backend_ = test::test_backend();
  Stream stream_;
  C4StateMode mode_;
  ElementType type_;
  ElementType output_type_;
  std::int32_t d_;
  DeviceArray<std::byte> state_;
  DeviceArray<std::byte> bias_;
};

}  // namespace

TEST_CASE("ring state of d 128, fp32 to bf16, matches the original kernel") {
  C4Case("c4_ring_d128_f32_bf16").run();
}

TEST_CASE("ring state of d 512, fp32 to bf16, matches the original kernel") {
  C4Case("c4_ring_d512_f32_bf16").run();
}

TEST_CASE("page-aligned state of d 128, fp32 to fp32, matches the original kernel") {
  C4Case("c4_page4_d128_f32_f32").run();
}

TEST_CASE("page-aligned state of d 128, bf16 to bf16, matches the original kernel") {
  C4Case("c4_page4_d128_bf16_bf16").run();
}
