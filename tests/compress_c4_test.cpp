// The single c4 operations where the goldens do not reach: every template of modes, types and dims,
// random cuts into prefill chunks and decode steps, NaN in all state that nobody wrote. Each cut
// must give the bits of one prefill, and those the formula of SPEC 1.3 in double.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>
#include <quire/planner/plan_rule.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"

using namespace quire;
using quire::test::DeviceArray;
using Bytes = std::vector<std::byte>;

namespace {

constexpr std::int32_t kTokens = 61;
constexpr std::int32_t kPages = 40;  // of 4 tokens; the request's pages are every second one
constexpr std::int32_t kRings = 3;   // the request has ring 1

struct Kind {
  C4StateMode mode;
  ElementType type;
  ElementType output_type;
  std::int32_t d;
};

Bytes in_type(const std::vector<float>& values, ElementType type) {
  Bytes bytes(values.size() * static_cast<std::size_t>(bytes_of(type)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t half = exact::to_bf16(values[i]);
    type == ElementType::kFloat32 ? std::memcpy(&bytes[4 * i], &values[i], 4)
                                  : std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

// Values that bf16 holds, so that both input types stand for the same numbers.
std::vector<float> random_values(std::mt19937& random, std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = exact::round_to_bf16(normal(random));
  return values;
}

std::int32_t page_of(std::int32_t logical) { return kPages - 1 - 2 * logical; }

class Request {
 public:
  Request(const Kind& kind, const std::vector<float>& rows, const std::vector<float>& bias)
      : kind_(kind),
        row_bytes_(static_cast<std::size_t>(4 * kind.d * bytes_of(kind.type))),
        input_(in_type(rows, kind.type)),
        bias_(backend_, stream_, in_type(bias, kind.type)),
        state_(backend_, stream_, std::max(kPages * 4, kRings * 8) * row_bytes_, 0xFF),
        output_(static_cast<std::size_t>(kTokens * kind.d * bytes_of(kind.output_type))) {}

  void prefill(std::int32_t P0, std::int32_t E) {
    std::vector<PlanRecord> compress, write;
    for (std::int32_t j = 0; j < E; ++j) {
      const PlanRecord record = plan_record(kCsaRule, j, 0, P0, j);
      if (closes_entry(kCsaRule, P0 + j)) compress.push_back(record);
      if (write_index(kCsaRule, P0, E, P0 + j) >= 0) write.push_back(record);
    }
    compress.push_back(kPaddingRecord);
    C4LogicalPages pages = c4_logical_pages(P0, E);
    for (std::int32_t* page : {&pages.bundle.load_first_page, &pages.bundle.load_second_page,
                               &pages.bundle.write_first_page, &pages.index_page}) {
      *page = page_of(*page);
    }
    const bool ring = kind_.mode == C4StateMode::kRing;
    const DeviceArray<PlanRecord> compress_records(backend_, stream_, compress);
    const DeviceArray<PlanRecord> write_records(backend_, stream_, write);
    const DeviceArray<std::int32_t> indices(
        backend_, stream_, std::vector<std::int32_t>{ring ? 1 : pages.index_page});
    const DeviceArray<C4PageBundle> bundles(backend_, stream_,
                                            std::vector<C4PageBundle>{pages.bundle});
    CompressC4PrefillParams params;
    params.compress = compress_records.data();
    params.write = write_records.data();
    params.compress_capacity = static_cast<std::int64_t>(compress.size());
    params.write_capacity = static_cast<std::int64_t>(write.size());
    params.indices = indices.data();
    params.bundles = ring ? nullptr : bundles.data();
    run(params, P0, E, [&] { backend_.compress_c4_prefill(params, Pdl::kOff, stream_); });
  }

  void decode(std::int32_t P0) {
    const bool ring = kind_.mode == C4StateMode::kRing;
    const std::int32_t logical = P0 / 4;
    const DeviceArray<std::int32_t> lengths(backend_, stream_, std::vector<std::int32_t>{P0 + 1});
    const DeviceArray<std::int32_t> indices(
        backend_, stream_, std::vector<std::int32_t>{ring ? 1 : page_of(logical)});
    const DeviceArray<std::int32_t> previous(
        backend_, stream_, std::vector<std::int32_t>{page_of(std::max(logical - 1, 0))});
    CompressC4DecodeParams params;
    params.batch = 1;
    params.seq_lens = lengths.data();
    params.indices = indices.data();
    params.previous_pages = ring ? nullptr : previous.data();
    run(params, P0, 1, [&] { backend_.compress_c4_decode(params, Pdl::kOff, stream_); });
  }

  // [kTokens, d]; zero where no entry closes.
  const Bytes& output() const { return output_; }

 private:
  template <class Params, class Launch>
  void run(Params& params, std::int32_t P0, std::int32_t E, Launch launch) {
    const std::size_t first = static_cast<std::size_t>(P0) * row_bytes_;
    const DeviceArray<std::byte> rows(
        backend_, stream_,
        std::span(input_).subspan(first, static_cast<std::size_t>(E) * row_bytes_));
    const auto out_row = static_cast<std::size_t>(kind_.d * bytes_of(kind_.output_type));
    DeviceArray<std::byte> out(backend_, stream_, static_cast<std::size_t>(E) * out_row, 0);
    params.mode = kind_.mode;
    params.type = kind_.type;
    params.output_type = kind_.output_type;
    params.head_dim = kind_.d;
    params.state = state_.data();
    params.bias = bias_.data();
    params.input = rows.data();
    params.output = out.data();
    launch();
    stream_.wait();
    const Bytes got = out.download();
    std::memcpy(output_.data() + static_cast<std::size_t>(P0) * out_row, got.data(), got.size());
  }

  Kind kind_;
  std::size_t row_bytes_;
  Bytes input_;
  Backend& backend_ = test::test_backend();
  Stream stream_{backend_};
  DeviceArray<std::byte> bias_;
  DeviceArray<std::byte> state_;
  Bytes output_;
};

// SPEC 1.3 in double.
double pooled(const std::vector<float>& rows, const std::vector<float>& bias, std::int32_t d,
              std::int32_t e, std::int32_t c) {
  double m = -INFINITY, z = 0.0, a = 0.0;
  double score[8] = {}, value[8] = {};
  for (std::int32_t i = e == 0 ? 4 : 0; i < 8; ++i) {
    const float* row = rows.data() + (4 * e - 4 + i) * 4 * d + (i < 4 ? 0 : d);
    value[i] = row[c];
    score[i] = static_cast<double>(row[2 * d + c]) + bias[static_cast<std::size_t>(i * d + c)];
    m = std::max(m, score[i]);
  }
  for (std::int32_t i = e == 0 ? 4 : 0; i < 8; ++i) {
    z += std::exp(score[i] - m);
    a += std::exp(score[i] - m) * value[i];
  }
  return a / z;
}

void check_formula(const Bytes& output, const std::vector<float>& rows,
                   const std::vector<float>& bias, std::int32_t d) {
  int far = 0;
  for (std::int32_t e = 0; e < kTokens / 4; ++e) {
    for (std::int32_t c = 0; c < d; ++c) {
      float got = 0.0f;
      std::memcpy(&got, output.data() + ((4 * e + 3) * d + c) * 4, sizeof got);
      far += std::abs(got - pooled(rows, bias, d, e, c)) <= 1e-5 ? 0 : 1;  // a NaN is far
    }
  }
  CHECK(far == 0);
}

// Chunks of 1 to 13 tokens, the short ones often as decode steps.
void run_random_cut(Request& request, std::mt19937& random) {
  for (std::int32_t start = 0; start < kTokens;) {
    const auto drawn = static_cast<std::int32_t>(random() % 13) + 1;
    const std::int32_t chunk = std::min(drawn, kTokens - start);
    if (chunk <= 4 && random() % 2 == 0) {
      for (std::int32_t j = 0; j < chunk; ++j) request.decode(start + j);
    } else {
      request.prefill(start, chunk);
    }
    start += chunk;
  }
}

void check_kind(const Kind& kind, std::uint32_t seed) {
  std::mt19937 random(seed);
  const std::vector<float> rows = random_values(random, kTokens * 4 * kind.d);
  const std::vector<float> bias = random_values(random, 8 * kind.d);
  Request whole(kind, rows, bias);
  whole.prefill(0, kTokens);
  if (kind.output_type == ElementType::kFloat32) {
    check_formula(whole.output(), rows, bias, kind.d);
  }
  Request stepwise(kind, rows, bias);
  for (std::int32_t p = 0; p < kTokens; ++p) stepwise.decode(p);
  CHECK(stepwise.output() == whole.output());
  for (int round = 0; round < 6; ++round) {
    CAPTURE(round);
    Request cut(kind, rows, bias);
    run_random_cut(cut, random);
    CHECK(cut.output() == whole.output());
  }
}

}  // namespace

TEST_CASE("any cut into chunks and steps gives the bits of one prefill, in every kind") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  for (const C4StateMode mode : {C4StateMode::kRing, C4StateMode::kPageAligned}) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kBfloat16}) {
      for (const ElementType output : {ElementType::kFloat32, ElementType::kBfloat16}) {
        for (const std::int32_t d : {128, 512}) {
          CAPTURE(static_cast<int>(mode));
          CAPTURE(static_cast<int>(type));
          CAPTURE(static_cast<int>(output));
          CAPTURE(d);
          check_kind({mode, type, output, d}, seed);
        }
      }
    }
  }
}

TEST_CASE("chunks that start at each phase of a window find their rows in page-aligned state") {
  const Kind kind{C4StateMode::kPageAligned, ElementType::kFloat32, ElementType::kFloat32, 128};
  std::mt19937 random(3);
  const std::vector<float> rows = random_values(random, kTokens * 4 * kind.d);
  const std::vector<float> bias = random_values(random, 8 * kind.d);
  Request whole(kind, rows, bias);
  whole.prefill(0, kTokens);
  for (std::int32_t P0 = 0; P0 < 13; ++P0) {
    for (std::int32_t E = 1; E < 13; ++E) {
      CAPTURE(P0);
      CAPTURE(E);
      Request cut(kind, rows, bias);
      if (P0 > 0) cut.prefill(0, P0);
      cut.prefill(P0, E);
      cut.prefill(P0 + E, kTokens - P0 - E);
      CHECK(cut.output() == whole.output());
    }
  }
}
