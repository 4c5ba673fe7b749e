// Single operations over more than the device holds at once: blocks that stay,
// and warps with several steps, must give the bytes of small calls.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

#include <quire/kernels/params.h>
#include <quire/planner/plan_rule.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using quire::test::DeviceArray;

constexpr std::uint32_t kSeed = 20261130;
constexpr std::int32_t kEntries = 64;

// Mostly numbers; of every 4,096 one is infinite or NaN.
std::vector<std::uint16_t> random_rows(std::int64_t count) {
  std::mt19937 random(kSeed);
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(count));
  for (std::uint16_t &x : rows) {
    const std::uint32_t drawn = static_cast<std::uint32_t>(random());
    x = static_cast<std::uint16_t>(drawn & 0xBFFFu); // magnitudes below 2
    if (drawn >> 20 == 0)
      x = static_cast<std::uint16_t>(x | 0x7F80u);
  }
  return rows;
}

// The bytes of a pool after stores of `rows` rows, `rows_per_call` at a time;
// every 11th location is none.
std::vector<std::uint8_t> stored(bool keys, std::int64_t rows,
                                 std::int64_t rows_per_call) {
  const std::int64_t d = keys ? kIndexerDim : kHeadDim;
  const std::int64_t page_bytes =
      keys ? indexer_page_bytes(kEntries) : main_page_bytes(kEntries);
  std::vector<std::int64_t> locations;
  for (std::int64_t row = 0; row < rows; ++row) {
    locations.push_back(row % 11 == 5 ? -1
                                      : row * 4801 % rows); // 4801 is prime
  }
  Backend &backend = test::test_backend();
  Stream stream(backend);
  const DeviceArray<std::uint16_t> input(backend, stream,
                                         random_rows(rows * d));
  const DeviceArray<std::int64_t> where(backend, stream, locations);
  const auto bytes = static_cast<std::size_t>(
      ceil_div<std::int64_t>(rows, kEntries) * page_bytes);
  DeviceArray<std::uint8_t> memory(backend, stream, bytes, 0xA5);
  for (std::int64_t row = 0; row < rows; row += rows_per_call) {
    StoreParams params;
    params.input = input.data() + row * d;
    params.rows = min_of(rows_per_call, rows - row);
    params.locations = where.data() + row;
    params.wide_locations = true;
    params.pool = make_entry_pool(reinterpret_cast<std::byte *>(memory.data()),
                                  page_bytes, kEntries);
    keys ? backend.store_indexer(params, Pdl::kOff, stream)
         : backend.store_flashmla(params, Pdl::kOff, stream);
  }
  stream.wait();
  return memory.download();
}

// Output of a prefill of eight tokens a request, of `copies` copies of the
// requests' entries: all the copies of one entry write the same row.
std::vector<float> pooled(std::int32_t requests, std::int32_t copies) {
  constexpr std::int32_t kTokens = 8, kDim = 128;
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(
      static_cast<std::size_t>(requests * kTokens * 4 * kDim));
  for (float &x : rows)
    x = normal(random);
  std::vector<float> biases(8 * kDim);
  for (float &x : biases)
    x = normal(random);
  std::vector<PlanRecord> compress;
  // The first request's entries over and over, and among them those of the
  // others once.
  for (std::int32_t r = 0; r < requests; ++r) {
    for (std::int32_t n = 1; r > 0 && n < copies; ++n) {
      compress.push_back(compress[static_cast<std::size_t>(n % 2)]);
    }
    for (std::int32_t j : {3, 7}) {
      compress.push_back(plan_record(kCsaRule, r * kTokens + j, r, 0, j));
    }
  }
  compress.insert(compress.end(), compress.size() / 2, kPaddingRecord);
  Backend &backend = test::test_backend();
  Stream stream(backend);
  const DeviceArray<float> input(backend, stream, rows);
  const DeviceArray<float> bias(backend, stream, biases);
  const DeviceArray<PlanRecord> records(backend, stream, compress);
  const DeviceArray<std::int32_t> indices(
      backend, stream,
      std::vector<std::int32_t>(static_cast<std::size_t>(requests), 0));
  DeviceArray<float> state(backend, stream, 8 * 4 * kDim, 0.0f);
  DeviceArray<float> output(
      backend, stream,
      std::vector<float>(static_cast<std::size_t>(requests * kTokens * kDim),
                         -7.0f));
  CompressC4PrefillParams params;
  params.head_dim = kDim;
  params.state = state.data();
  params.input = input.data();
  params.bias = bias.data();
  params.output = output.data();
  params.compress = records.data();
  params.compress_capacity = static_cast<std::int64_t>(compress.size());
  params.indices = indices.data();
  backend.compress_c4_prefill(params, Pdl::kOff, stream);
  stream.wait();
  return output.download();
}

TEST_CASE("one store of many rows leaves the bytes of many stores of few") {
  CHECK(stored(false, 9000, 9000) == stored(false, 9000, 250));
  CHECK(stored(true, 40000, 40000) == stored(true, 40000, 1000));
}

TEST_CASE("a list of more entries than all blocks take at once is pooled to "
          "its end") {
  // 39 x 2,502 entries: some 46 for each warp of 132 multiprocessors.
  const auto few = pooled(40, 1);
  CHECK(pooled(40, 2501) == few);
  CHECK(few[2 * 128] == -7.0f);
  CHECK(few[3 * 128] != -7.0f);
}

} // namespace
