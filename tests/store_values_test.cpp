// The store operations where rounding, scales and addresses have their corners, against exact
// expectations: failures that users of other systems met (W1, W3, W4).
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <quire/kernels/params.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using quire::test::DeviceArray;

constexpr std::int32_t kEntries = 64;
constexpr std::uint8_t kUntouched = 0xA5;

// The high half of a float that bf16 holds, or cut to it.
std::uint16_t bf16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// A pool of three pages behind a guard, as a store leaves it.
class Stored {
 public:
  Stored(bool indexer, const std::vector<std::uint16_t>& rows,
         const std::vector<std::int64_t>& locations, bool wide, float floor = 1e-4f)
      : page_bytes_(indexer ? indexer_page_bytes(kEntries) : main_page_bytes(kEntries)) {
    Backend& backend = test::test_backend();
    Stream stream(backend);
    const DeviceArray<std::uint16_t> input(backend, stream, rows);
    const DeviceArray<std::int64_t> wide_locations(backend, stream, locations);
    const DeviceArray<std::int32_t> narrow_locations(
        backend, stream, std::vector<std::int32_t>(locations.begin(), locations.end()));
    DeviceArray<std::uint8_t> memory(backend, stream, static_cast<std::size_t>(5 * page_bytes_),
                                     kUntouched);
    StoreParams params;
    params.input = input.data();
    params.rows = static_cast<std::int64_t>(locations.size());
    params.wide_locations = wide;
    params.locations = wide ? static_cast<const void*>(wide_locations.data())
                            : static_cast<const void*>(narrow_locations.data());
    params.scale_floor = floor;
    params.pool = make_entry_pool(reinterpret_cast<std::byte*>(memory.data()) + page_bytes_,
                                  page_bytes_, kEntries);
    indexer ? backend.store_indexer(params, Pdl::kOff, stream)
            : backend.store_flashmla(params, Pdl::kOff, stream);
    bytes_ = memory.download();
  }

  std::vector<std::uint8_t> data(std::int64_t location, std::int64_t bytes) const {
    return part(location / kEntries * page_bytes_ + location % kEntries * bytes, bytes);
  }
  std::vector<std::uint8_t> main_scales(std::int64_t location) const {
    return part(location / kEntries * page_bytes_ + kEntries * 576 + location % kEntries * 8, 8);
  }
  float indexer_scale(std::int64_t location) const {
    const auto bytes =
        part(location / kEntries * page_bytes_ + kEntries * 128 + location % kEntries * 4, 4);
    float scale = 0.0f;
    std::memcpy(&scale, bytes.data(), 4);
    return scale;
  }
  std::int64_t changed() const {
    std::int64_t count = 0;
    for (const std::uint8_t byte : bytes_) count += byte == kUntouched ? 0 : 1;
    return count;
  }

 private:
  std::vector<std::uint8_t> part(std::int64_t at, std::int64_t bytes) const {
    const auto begin = bytes_.begin() + page_bytes_ + at;
    return {begin, begin + bytes};
  }

  std::int64_t page_bytes_;
  std::vector<std::uint8_t> bytes_;
};

// `count` rows of width d, each of one value, signs in turn.
std::vector<std::uint16_t> alternating(const std::vector<std::uint16_t>& values, std::size_t d) {
  std::vector<std::uint16_t> rows;
  for (const std::uint16_t value : values) {
    for (std::size_t c = 0; c < d; ++c) {
      rows.push_back(static_cast<std::uint16_t>(c % 2 == 0 ? value : value | 0x8000u));
    }
  }
  return rows;
}

std::vector<std::uint8_t> signs_in_turn(std::uint8_t code, std::size_t count) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t c = 0; c < count; ++c) {
    bytes.push_back(static_cast<std::uint8_t>(c % 2 == 0 ? code : code | 0x80u));
  }
  return bytes;
}

std::vector<std::int64_t> first_locations(std::size_t count) {
  std::vector<std::int64_t> locations;
  for (std::size_t i = 0; i < count; ++i) locations.push_back(static_cast<std::int64_t>(i));
  return locations;
}

struct Expected {
  std::uint16_t value;
  std::uint8_t code;   // of its e4m3, positive
  std::uint8_t scale;  // of its tile
};

void check_main(const std::vector<Expected>& rows, float floor) {
  std::vector<std::uint16_t> values;
  for (const Expected& row : rows) values.push_back(row.value);
  const Stored stored(false, alternating(values, 512), first_locations(rows.size()), true, floor);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(i);
    const auto at = static_cast<std::int64_t>(i);
    auto data = signs_in_turn(rows[i].code, 448);
    for (std::size_t c = 0; c < 64; ++c) {  // the tail, little-endian
      data.push_back(static_cast<std::uint8_t>(rows[i].value & 0xFFu));
      data.push_back(static_cast<std::uint8_t>(rows[i].value >> 8 | (c % 2 == 0 ? 0 : 0x80)));
    }
    CHECK(stored.data(at, 576) == data);
    std::vector<std::uint8_t> scales(8, rows[i].scale);
    scales[7] = 0;
    CHECK(stored.main_scales(at) == scales);
  }
}

// W1
TEST_CASE("location -1 writes nothing and location 0 is an ordinary one, in both stores") {
  for (const bool indexer : {false, true}) {
    for (const bool wide : {false, true}) {
      CAPTURE(indexer);
      CAPTURE(wide);
      const std::size_t d = indexer ? 128 : 512;
      const auto rows = alternating({bf16(1.0f), bf16(2.0f), bf16(3.0f), bf16(1.5f)}, d);
      const Stored nothing(indexer, rows, {-1, -64, -1, INT32_MIN}, wide);
      CHECK(nothing.changed() == 0);
      const Stored stored(indexer, rows, {-1, 0, -1, -65}, wide);
      CHECK(stored.changed() > 0);
      CHECK(stored.changed() <= (indexer ? 132 : 584));
      // 2 is the tile's maximum: 2 / 448 rounds up to 2^-7, and 2 x 2^7 is 256, code 0x78.
      if (!indexer) CHECK(stored.data(0, 576)[0] == 0x78);
      if (indexer) CHECK(stored.data(0, 128) == signs_in_turn(0x7E, 128));
    }
  }
}

// W4
TEST_CASE("the FlashMLA store of rows of 0, 1e-9, 3.3e38 and every 448 x 2^k has the exact bytes") {
  const std::uint16_t tiny = bf16(1e-9f);   // 0x3089: 1.0703125 x 2^-30
  const std::uint16_t huge = bf16(3.3e38f);  // 0x7F78: 1.9375 x 2^127
  REQUIRE(tiny == 0x3089);
  REQUIRE(huge == 0x7F78);
  std::vector<Expected> rows{
      {0, 0, 105},
      {tiny, 0x02, 105},  // x 2^22 is 2.14 x 2^-9: the second subnormal
      {huge, 0x78, 247},  // / 448 is 1.107 x 2^119; x 2^-120 is 248, half way: the even 256
  };
  for (int k = -22; k <= 119; ++k) {  // from the floor to the largest that is finite
    rows.push_back({bf16(std::ldexp(448.0f, k)), 0x7E, static_cast<std::uint8_t>(127 + k)});
  }
  check_main(rows, 1e-4f);
  // With the floor of the original Triton store: 1e-8 / 448 rounds up to 2^-35, x 2^35 is 34.25,
  // nearest 36.
  check_main({{0, 0, 92}, {tiny, 0x61, 92}}, 1e-8f);
}

// W4
TEST_CASE("the indexer store of rows of 0, 1e-9, 3.3e38 and every 448 x 2^k has the exact bytes") {
  std::vector<std::uint16_t> values{0, bf16(1e-9f), bf16(3.3e38f)};
  std::vector<std::uint8_t> codes{0, 0x02, 0x7E};  // 1e-9 x 448 / 1e-4 is 2.29 x 2^-9
  std::vector<float> largest{1e-4f, 1e-4f, 0x1.fp127f};
  for (int k = -22; k <= 119; ++k) {
    values.push_back(bf16(std::ldexp(448.0f, k)));
    codes.push_back(0x7E);
    largest.push_back(std::ldexp(448.0f, k));
  }
  const Stored stored(true, alternating(values, 128), first_locations(values.size()), false);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i);
    const auto at = static_cast<std::int64_t>(i);
    CHECK(stored.data(at, 128) == signs_in_turn(codes[i], 128));
    CHECK(stored.indexer_scale(at) == largest[i] * 0x1.24924ap-9f);
  }
}

// W3
TEST_CASE("a NaN stays NaN and an infinite tile decodes to NaN, in both stores") {
  std::vector<std::uint16_t> row(512, bf16(1.0f));
  row[3] = 0xFFC1;        // NaN in tile 0: its neighbours are as if it were not there
  row[64 + 5] = 0x7F80;   // +inf in tile 1
  row[128 + 9] = 0xFF80;  // -inf in tile 2
  row[128 + 10] = 0x7F81;
  row[500] = 0x7F81;      // signalling, in the tail
  row[501] = 0xFF80;
  const Stored main(false, row, {5}, true);
  const auto data = main.data(5, 576);
  const auto scales = main.main_scales(5);
  for (std::size_t c = 0; c < 448; ++c) {
    CAPTURE(c);
    const bool is_nan = c == 3 || (c >= 64 && c < 192);
    // 1 / 448 rounds up to 2^-8, and 256 has code 0x78.
    REQUIRE(data[c] == (is_nan ? 0x7F : 0x78));
  }
  CHECK(scales == std::vector<std::uint8_t>{119, 255, 255, 119, 119, 119, 119, 0});
  const auto tail = [&](std::size_t c) {
    return static_cast<int>(data[448 + 2 * (c - 448)]) | data[449 + 2 * (c - 448)] << 8;
  };
  CHECK(tail(499) == 0x3F80);
  CHECK(tail(500) == 0x7FFF);
  CHECK(tail(501) == 0xFF80);

  std::vector<std::uint16_t> keys(2 * 128, bf16(1.0f));
  keys[7] = 0x7FC0;
  keys[128 + 7] = 0xFF80;
  const Stored indexer(true, keys, {2, 64}, false);
  auto first = std::vector<std::uint8_t>(128, 0x7E);
  first[7] = 0x7F;
  CHECK(indexer.data(2, 128) == first);
  CHECK(indexer.indexer_scale(2) == 0x1.24924ap-9f);
  CHECK(indexer.data(64, 128) == std::vector<std::uint8_t>(128, 0x7F));
  CHECK(std::isinf(indexer.indexer_scale(64)));
}

}  // namespace
