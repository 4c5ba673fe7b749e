// Whole CSA and indexer entries, from raw rows to stored bytes, against the golden known answers:
// through `append` of the backend under test, one entry at a time.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include <quire/planner/plan_rule.h>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/plan_fixture.h"
#include "tests/support/test_backend.h"

using namespace quire;
using quire::test::DeviceArray;
using quire::test::Npy;

namespace {

constexpr std::int32_t kDraftMax = 7;  // so that a decode row may hold the eight tokens
constexpr std::int32_t kRingTokens = 8 + kDraftMax + 1;
constexpr std::int64_t kLocation = 5;  // in a page of 8

struct Entry {
  std::vector<float> rows;     // [tokens, 4d]: eight, or four in a first window
  std::vector<float> cos_sin;  // [32, 2]
};

// Appends the entry as the last token of a decode row that starts at length 0, with state and page
// poisoned, and returns the page.
std::vector<std::uint8_t> append_entry(const Entry& entry, std::int64_t d,
                                       const std::vector<float>& bias,
                                       const std::vector<float>& weight) {
  Backend& backend = test::test_backend();
  Stream stream(backend);
  const auto tokens =
      static_cast<std::int32_t>(static_cast<std::int64_t>(entry.rows.size()) / (4 * d));
  const std::int64_t page_bytes = d == kHeadDim ? main_page_bytes(8) : indexer_page_bytes(8);
  DeviceArray<float> rows(backend, stream, entry.rows);
  DeviceArray<float> biases(backend, stream, bias);
  DeviceArray<float> weights(backend, stream, weight);
  DeviceArray<float> state(backend, stream, static_cast<std::size_t>(kRingTokens * 4 * d), 0xFF);
  DeviceArray<std::uint8_t> page(backend, stream, static_cast<std::size_t>(page_bytes), 0xA5);

  // The window of position 3 turns by position 0, that of position 7 by position 4.
  std::vector<float> table(8 * kRopeDim, 1e30f);
  const std::int32_t rope_position = tokens - 4;
  std::memcpy(table.data() + rope_position * kRopeDim, entry.cos_sin.data(), 4 * kRopeDim);
  DeviceArray<float> rope(backend, stream, table);

  const std::vector<BatchRowRecord> row{{0, 0, tokens, 0}};
  std::vector<TokenRecord> records;
  for (std::int32_t j = 0; j < tokens; ++j) {
    records.push_back({0, j, 0, j, -1, -1, j + 1 == tokens ? kLocation : -1, -1});
  }
  DeviceArray<BatchRowRecord> row_records(backend, stream, row);
  DeviceArray<TokenRecord> token_records(backend, stream, records);
  const std::vector<PlanHeader> headers{test::planned_header(StepShape::decode(1, tokens))};
  DeviceArray<PlanHeader> header(backend, stream, headers);
  DeviceArray<DeviceReport> report(backend, stream, 1, 0);

  AppendParams params;
  params.shape = StepShape::decode(1, tokens);
  params.planned_form = plan_form(tokens, LayerGroup::kTarget);
  params.geometry = {192, kDraftMax, 8, 2, -1, -1, -1, -1};
  params.header = header.data();
  params.rows = row_records.data();
  params.tokens = token_records.data();
  params.rope = {rope.data(), 8, RopeLayout::kInterleaved};
  params.report = report.data();
  CsaPart& part = d == kHeadDim ? params.csa : params.indexer;
  part.rows = {rows.data(), 4 * d, ElementType::kFloat32};
  part.bias = biases.data();
  part.norm_weight = weights.data();
  part.state = state.data();
  part.ring_tokens = kRingTokens;
  part.pages = make_entry_pool(reinterpret_cast<std::byte*>(page.data()), page_bytes, 8);
  backend.append(params, Pdl::kOff, stream);
  stream.wait();
  return page.download();
}

Entry entry_of(const std::string& name, std::size_t index) {
  const auto directory = test::goldens() / "kat";
  static_assert(sizeof(float) == 4);
  const Npy<float> rows = test::read_npy<float>(directory / (name + "_rows.npy"));
  const Npy<float> cos_sin = test::read_npy<float>(directory / (name + "_cos_sin.npy"));
  const Npy<std::uint8_t> first =
      test::read_npy<std::uint8_t>(directory / (name + "_first_window.npy"));
  const std::size_t width = rows.dim(2);
  const std::size_t skipped = first.values.at(index) != 0 ? 4 : 0;
  return {{rows.row(index) + skipped * width, rows.row(index) + 8 * width},
          {cos_sin.row(index), cos_sin.row(index) + kRopeDim}};
}

// The page must be poison but for the bytes and the scale at the location.
void check_entries(const std::string& name, std::int64_t d, const std::uint8_t* bytes,
                   std::int64_t data_bytes, const std::uint8_t* scales, std::int64_t scale_bytes) {
  const auto directory = test::goldens() / "kat";
  const Npy<float> bias = test::read_npy<float>(directory / (name + "_bias.npy"));
  const Npy<float> weight = test::read_npy<float>(directory / (name + "_weight.npy"));
  for (std::size_t k = 0; k < 24; ++k) {
    CAPTURE(k);
    const auto at = static_cast<std::int64_t>(k);
    const std::vector<std::uint8_t> page =
        append_entry(entry_of(name, k), d, bias.values, weight.values);
    std::vector<std::uint8_t> expected(page.size(), 0xA5);
    std::memcpy(expected.data() + kLocation * data_bytes, bytes + at * data_bytes,
                static_cast<std::size_t>(data_bytes));
    std::memcpy(expected.data() + 8 * data_bytes + kLocation * scale_bytes,
                scales + at * scale_bytes, static_cast<std::size_t>(scale_bytes));
    CHECK(page == expected);
  }
}

}  // namespace

TEST_CASE("CSA entries are stored with the known bytes") {
  const auto directory = test::goldens() / "kat";
  const auto bytes = test::read_npy<std::uint8_t>(directory / "entry_csa_bytes.npy");
  const auto scales = test::read_npy<std::uint8_t>(directory / "entry_csa_scales.npy");
  check_entries("entry_csa", kHeadDim, bytes.values.data(), kMainDataBytes, scales.values.data(),
                kMainScaleBytes);
}

TEST_CASE("indexer entries are stored with the known bytes") {
  const auto directory = test::goldens() / "kat";
  const auto bytes = test::read_npy<std::uint8_t>(directory / "entry_indexer_bytes.npy");
  const auto scales = test::read_npy<float>(directory / "entry_indexer_scale.npy");
  std::vector<std::uint8_t> scale_bytes(scales.values.size() * 4);
  std::memcpy(scale_bytes.data(), scales.values.data(), scale_bytes.size());
  check_entries("entry_indexer", kIndexerDim, bytes.values.data(), kIndexerDim,
                scale_bytes.data(), kIndexerScaleBytes);
}
