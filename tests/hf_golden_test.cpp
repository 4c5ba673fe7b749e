// CSA and indexer entries against Transformers' DeepSeek-V4 compressors: pooled and final within
// 1e-5. What the backend appends must then be the quantised final entry, byte for byte.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/planner/plan_rule.h>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/plan_fixture.h"
#include "tests/support/test_backend.h"

using namespace quire;
using quire::test::DeviceArray;
using quire::test::Npy;

namespace {

constexpr std::int32_t kPageEntries = 16;

struct Golden {
  std::filesystem::path directory;
  nlohmann::json meta = test::read_json(directory / "meta.json");
  std::int32_t d = meta["head_dim"];
  std::int32_t tokens = meta["tokens"];
  std::int32_t entries = meta["entries"];
  Npy<float> rows = test::read_npy<float>(directory / "kv_score_input.npy");
  Npy<float> bias = test::read_npy<float>(directory / "score_bias.npy");
  Npy<float> weight = test::read_npy<float>(directory / "norm_weight.npy");
  Npy<float> pooled = test::read_npy<float>(directory / "pooled.npy");
  Npy<float> compressed = test::read_npy<float>(directory / "compressed.npy");
  Npy<float> cos = test::read_npy<float>(directory / "cos.npy");
  Npy<float> sin = test::read_npy<float>(directory / "sin.npy");

  explicit Golden(const std::string& folder) : directory(test::goldens() / folder) {}

  // The table with what is known of it: positions of entries; the rest would ruin a result.
  std::vector<float> rope(RopeLayout layout) const {
    std::vector<float> table(static_cast<std::size_t>(tokens * kRopeDim), 1e30f);
    for (std::int32_t e = 0; e < entries; ++e) {
      float* row = table.data() + 4 * e * kRopeDim;
      for (std::int32_t i = 0; i < 32; ++i) {
        const bool interleaved = layout == RopeLayout::kInterleaved;
        row[interleaved ? 2 * i : i] = cos.row(static_cast<std::size_t>(e))[i];
        row[interleaved ? 2 * i + 1 : 32 + i] = sin.row(static_cast<std::size_t>(e))[i];
      }
    }
    return table;
  }

  // Kernel order is [2][4][d], the checkpoint's [4][2][d].
  std::vector<float> bias_in(BiasOrder order) const {
    if (order == BiasOrder::kKernel) return bias.values;
    std::vector<float> ape;
    for (std::size_t i = 0; i < 4; ++i) {
      ape.insert(ape.end(), bias.row(i), bias.row(i) + d);
      ape.insert(ape.end(), bias.row(4 + i), bias.row(4 + i) + d);
    }
    return ape;
  }
};

int count_far(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  int far = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    far += std::abs(got[i] - expected[i]) <= 1e-5f ? 0 : 1;  // a NaN is far
  }
  return far;
}

// One prefill of the whole sequence through the single operation; compact, [entries, d].
std::vector<float> pool_on_backend(const Golden& golden) {
  Backend& backend = test::test_backend();
  Stream stream(backend);
  const auto width = static_cast<std::size_t>(4 * golden.d);
  std::vector<PlanRecord> plan;
  for (std::int32_t e = 0; e < golden.entries; ++e) {
    plan.push_back(plan_record(kCsaRule, 4 * e + 3, 0, 0, 4 * e + 3));
  }
  DeviceArray<PlanRecord> compress(backend, stream, plan);
  DeviceArray<float> rows(backend, stream, golden.rows.values);
  DeviceArray<float> bias(backend, stream, golden.bias.values);
  DeviceArray<float> state(backend, stream, 8 * width, 0xFF);
  DeviceArray<float> output(backend, stream, golden.rows.dim(0) * width / 4, 0xFF);
  const std::vector<std::int32_t> ring{0};
  DeviceArray<std::int32_t> indices(backend, stream, ring);
  CompressC4PrefillParams params;
  params.head_dim = golden.d;
  params.state = state.data();
  params.input = rows.data();
  params.bias = bias.data();
  params.output = output.data();
  params.compress = compress.data();
  params.compress_capacity = golden.entries;
  params.indices = indices.data();
  backend.compress_c4_prefill(params, Pdl::kOff, stream);
  stream.wait();
  const std::vector<float> all = output.download();
  std::vector<float> entries;
  for (std::int32_t e = 0; e < golden.entries; ++e) {
    const auto from = all.begin() + (4 * e + 3) * golden.d;
    entries.insert(entries.end(), from, from + golden.d);
  }
  return entries;
}

std::vector<float> finish_on_host(const Golden& golden, std::vector<float> entries) {
  const host::FloatEnvironment environment;
  const std::vector<float> table = golden.rope(RopeLayout::kInterleaved);
  const RopeTable rope{table.data(), golden.tokens, RopeLayout::kInterleaved};
  for (std::int32_t e = 0; e < golden.entries; ++e) {
    float* entry = entries.data() + e * golden.d;
    host::normalise(entry, golden.d, golden.weight.values.data(), 1e-6f);
    host::rotate_tail(entry, golden.d, rope, 4 * e);
  }
  return entries;
}

std::int64_t page_bytes(const Golden& golden) {
  return golden.d == kHeadDim ? main_page_bytes(kPageEntries) : indexer_page_bytes(kPageEntries);
}

// Entries as the store rules of SPEC 3.4 and 3.5 lay them out, without Hadamard.
std::vector<std::uint8_t> store_on_host(const Golden& golden, const std::vector<float>& entries) {
  const host::FloatEnvironment environment;
  std::vector<std::uint8_t> page(static_cast<std::size_t>(page_bytes(golden)), 0xA5);
  const EntryPool pool = make_entry_pool(reinterpret_cast<std::byte*>(page.data()),
                                         page_bytes(golden), kPageEntries);
  for (std::int32_t e = 0; e < golden.entries; ++e) {
    const float* entry = entries.data() + e * golden.d;
    golden.d == kHeadDim ? host::store_main_entry(entry, pool, e, 1e-4f)
                         : host::store_indexer_entry(entry, pool, e, 1e-4f);
  }
  return page;
}

// The sequence as one ragged step with an inert token behind it.
std::vector<std::uint8_t> append_on_backend(const Golden& golden, BiasOrder order,
                                            RopeLayout layout) {
  Backend& backend = test::test_backend();
  Stream stream(backend);
  std::int32_t length = 0;
  std::int32_t limit = golden.tokens;
  std::int32_t cell = 0;
  std::int32_t stopped = 0;
  std::int32_t owner = 0;
  const StepTable table{&length, &limit, &stopped, &owner, &cell, 1};
  const PlanGeometry geometry{128, 0, kPageEntries, 2, -1, -1, -1, -1};
  const BatchRowRecord row{0, 0, golden.tokens, 0};
  std::vector<TokenRecord> tokens;
  std::vector<PlanRecord> plan;
  for (std::int32_t j = 0; j < golden.tokens; ++j) {
    tokens.push_back(plan_token(geometry, table, row, 0, j));
    if (closes_entry(kCsaRule, j)) plan.push_back(plan_record(kCsaRule, j, 0, 0, j));
  }
  tokens.push_back(plan_token(geometry, table, row, 0, golden.tokens));
  plan.insert(plan.end(), 2, kPaddingRecord);

  std::vector<float> input = golden.rows.values;
  input.insert(input.end(), static_cast<std::size_t>(4 * golden.d), NAN);
  const std::vector<BatchRowRecord> rows{row};
  const std::vector<PlanHeader> headers{
      test::planned_header(StepShape::ragged(1, golden.tokens + 1),
                           static_cast<std::size_t>(golden.entries))};
  DeviceArray<PlanHeader> header(backend, stream, headers);
  DeviceArray<BatchRowRecord> row_records(backend, stream, rows);
  DeviceArray<TokenRecord> token_records(backend, stream, tokens);
  DeviceArray<PlanRecord> entry_records(backend, stream, plan);
  DeviceArray<float> data(backend, stream, input);
  DeviceArray<float> bias(backend, stream, golden.bias_in(order));
  DeviceArray<float> weight(backend, stream, golden.weight.values);
  DeviceArray<float> rope(backend, stream, golden.rope(layout));
  DeviceArray<float> state(backend, stream, static_cast<std::size_t>(8 * 4 * golden.d), 0xFF);
  DeviceArray<std::uint8_t> page(backend, stream, static_cast<std::size_t>(page_bytes(golden)),
                                 0xA5);
  AppendParams params;
  params.shape = StepShape::ragged(1, golden.tokens + 1);
  params.geometry = geometry;
  params.header = header.data();
  params.rows = row_records.data();
  params.tokens = token_records.data();
  params.csa_entries = entry_records.data();
  params.csa_entry_capacity = static_cast<std::int32_t>(plan.size());
  params.rope = {rope.data(), golden.tokens, layout};
  params.hadamard = false;
  CsaPart& part = golden.d == kHeadDim ? params.csa : params.indexer;
  part.rows = {data.data(), 4 * golden.d, ElementType::kFloat32};
  part.bias = bias.data();
  part.bias_order = order;
  part.norm_weight = weight.data();
  part.state = state.data();
  part.ring_tokens = 8;
  part.pages = make_entry_pool(reinterpret_cast<std::byte*>(page.data()), page_bytes(golden),
                               kPageEntries);
  backend.append(params, Pdl::kOff, stream);
  stream.wait();
  return page.download();
}

void check_golden(const std::string& folder) {
  const Golden golden(folder);
  REQUIRE(golden.entries == 10);
  const std::vector<float> pooled = pool_on_backend(golden);
  CHECK(count_far(pooled, golden.pooled.values) == 0);
  const std::vector<float> finished = finish_on_host(golden, pooled);
  CHECK(count_far(finished, golden.compressed.values) == 0);

  const std::vector<std::uint8_t> expected = store_on_host(golden, finished);
  CHECK(append_on_backend(golden, BiasOrder::kKernel, RopeLayout::kInterleaved) == expected);
  CHECK(append_on_backend(golden, BiasOrder::kCheckpoint, RopeLayout::kHalves) == expected);
}

}  // namespace

TEST_CASE("CSA entries agree with the Transformers compressor") {
  check_golden("hf_csa_compressor");
}

TEST_CASE("indexer entries agree with the Transformers indexer") {
  check_golden("hf_csa_indexer");
}
