// The store operations against the original Triton store: the whole cache, byte for byte. The
// eighth scale byte is ours: the original leaves it unwritten, here it is 0.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <quire/kernels/params.h>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/test_backend.h"

using namespace quire;
using quire::test::DeviceArray;
using quire::test::Npy;

namespace {

constexpr std::uint8_t kPoison = 0xA5;

struct StoreCase {
  bool indexer;
  std::int32_t entries;
  std::int64_t page_bytes;
  Npy<std::uint16_t> input;
  Npy<std::int32_t> indices;
  Npy<std::uint8_t> cache;

  explicit StoreCase(const std::string& folder) {
    const auto directory = test::goldens() / folder;
    const nlohmann::json meta = test::read_json(directory / "meta.json");
    indexer = meta["type"] == "indexer";
    entries = meta["page_size"];
    page_bytes = meta["bytes_per_page"];
    input = test::read_npy<std::uint16_t>(directory / "input.npy");
    indices = test::read_npy<std::int32_t>(directory / "indices.npy");
    cache = test::read_npy<std::uint8_t>(directory / "cache.npy");
    CHECK(page_bytes == (indexer ? indexer_page_bytes(entries) : main_page_bytes(entries)));
  }

  // The golden cache spread to pages `stride` bytes apart behind a poisoned guard, byte 7 set to 0.
  std::vector<std::uint8_t> expected(std::int64_t stride, std::int64_t guard) const {
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(2 * guard + 3 * stride), kPoison);
    for (std::size_t page = 0; page < 3; ++page) {
      std::memcpy(memory.data() + guard + static_cast<std::int64_t>(page) * stride,
                  cache.row(page), static_cast<std::size_t>(page_bytes));
    }
    if (indexer) return memory;
    const EntryPool pool =
        make_entry_pool(reinterpret_cast<std::byte*>(memory.data()) + guard, stride, entries);
    for (const std::int32_t location : indices.values) {
      pool.main_scales(location)[7] = std::byte{0};
    }
    return memory;
  }
};

// Every second row is one that goes nowhere, and holds what would be noticed.
template <class Location>
std::vector<std::uint8_t> stored(const StoreCase& golden, std::int64_t stride, std::int64_t guard) {
  Backend& backend = test::test_backend();
  Stream stream(backend);
  const std::size_t d = golden.input.dim(1);
  std::vector<std::uint16_t> rows;
  std::vector<Location> locations;
  for (std::size_t k = 0; k < golden.input.dim(0); ++k) {
    rows.insert(rows.end(), golden.input.row(k), golden.input.row(k) + d);
    locations.push_back(golden.indices.values[k]);
    rows.insert(rows.end(), d, std::uint16_t{0x4049});
    locations.push_back(k % 2 == 0 ? -1 : -static_cast<Location>(golden.entries) - 1);
  }
  DeviceArray<std::uint16_t> input(backend, stream, rows);
  DeviceArray<Location> where(backend, stream, locations);
  DeviceArray<std::uint8_t> memory(backend, stream,
                                   static_cast<std::size_t>(2 * guard + 3 * stride), kPoison);
  StoreParams params;
  params.input = input.data();
  params.rows = static_cast<std::int64_t>(locations.size());
  params.locations = where.data();
  params.wide_locations = sizeof(Location) == 8;
  params.pool = make_entry_pool(reinterpret_cast<std::byte*>(memory.data()) + guard, stride,
                                golden.entries);
  params.scale_floor = 1e-8f;
  golden.indexer ? backend.store_indexer(params, Pdl::kOff, stream)
                 : backend.store_flashmla(params, Pdl::kOff, stream);
  stream.wait();
  return memory.download();
}

void check_store(const std::string& folder) {
  CAPTURE(folder);
  const StoreCase golden(folder);
  REQUIRE(golden.input.dim(0) == 64);
  const std::int64_t guard = round_up<std::int64_t>(golden.page_bytes, 256);
  for (const std::int64_t gap : {std::int64_t{0}, std::int64_t{4096}}) {
    CAPTURE(gap);
    const std::int64_t stride = golden.page_bytes + gap;
    const std::vector<std::uint8_t> expected = golden.expected(stride, guard);
    CHECK(stored<std::int32_t>(golden, stride, guard) == expected);
    CHECK(stored<std::int64_t>(golden, stride, guard) == expected);
  }
}

}  // namespace

// W1
TEST_CASE("the FlashMLA store writes the original's bytes, and nothing else") {
  check_store("store_flashmla_p64");
  check_store("store_flashmla_p256");
}

// W1, W2
TEST_CASE("the indexer store writes the original's bytes, and nothing else") {
  check_store("store_indexer_p64");
  check_store("store_indexer_p256");
}
