// Entries of main and window pools, dequantised, against double: every code, every kind of scale
// byte.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <quire/kernels/params.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using test::check_refused;
using test::DeviceArray;
using test::Random;
using test::random_values;
using test::run_three_ways;
using test::test_backend;

// From the definition of e4m3: sign, four bits of exponent, three of significand, no infinities.
double e4m3_value(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int significand = code & 7;
  if (exponent == 15 && significand == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(significand, -9) : std::ldexp(8 + significand, exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

struct GatherCase {
  std::int32_t entries_per_page;
  bool wide;  // locations
  ElementType type;
  std::int64_t stride;
};

struct Gather : GatherCase {
  explicit Gather(const GatherCase& of) : GatherCase(of) {}

  static constexpr std::int64_t kPages = 9, kCount = 131;

  std::int64_t page_stride = main_page_bytes(entries_per_page) + 576;
  Stream stream{test_backend()};
  std::vector<std::byte> pages;
  std::vector<std::int64_t> locations;
  DeviceArray<std::byte> on_pages{test_backend(), stream,
                                  static_cast<std::size_t>(kPages* page_stride), 0xFF};
  DeviceArray<std::int64_t> on_wide{test_backend(), stream, kCount, 0xFF};
  DeviceArray<std::int32_t> on_narrow{test_backend(), stream, kCount, 0xFF};
  DeviceArray<std::byte> output{test_backend(), stream,
                                static_cast<std::size_t>(kCount* stride* bytes_of(type)), 0x5A};

  // Random bytes everywhere: all codes, and scale bytes from all of their range.
  void change(std::uint32_t seed) {
    Random random(seed);
    pages = random_values<std::byte>(random, static_cast<std::size_t>(kPages * page_stride), 256);
    const EntryPool pool = make_entry_pool(pages.data(), page_stride, entries_per_page);
    for (std::int64_t at = 0; at < kPages * entries_per_page; ++at) {
      constexpr std::uint8_t kEdges[] = {0, 1, 2, 3, 92, 105, 127, 247, 254, 255};
      pool.main_scales(at)[at % 7] = static_cast<std::byte>(kEdges[at % 10]);
    }
    locations.clear();
    for (std::int64_t i = 0; i < kCount; ++i) {
      locations.push_back(random.below(6) == 0 ? -1 - random.below(3)
                                               : random.below(kPages * entries_per_page));
    }
    on_pages.upload(pages);
    on_wide.upload(locations);
    on_narrow.upload(std::vector<std::int32_t>(locations.begin(), locations.end()));
  }

  GatherMainParams params() {
    GatherMainParams p;
    p.pool = make_entry_pool(on_pages.data(), page_stride, entries_per_page);
    p.locations = wide ? static_cast<const void*>(on_wide.data()) : on_narrow.data();
    p.wide_locations = wide;
    p.count = kCount;
    p.output = output.data();
    p.output_stride = stride;
    p.output_type = type;
    return p;
  }

  // The value that a channel must have; false: it is the bf16 `tail` instead.
  bool expected_value(std::int64_t location, std::int64_t channel, double& value,
                      std::uint16_t& tail) {
    const EntryPool pool = make_entry_pool(pages.data(), page_stride, entries_per_page);
    if (channel >= 448) {
      std::memcpy(&tail, pool.main_data(location) + 448 + 2 * (channel - 448), 2);
      return false;
    }
    const auto scale = static_cast<int>(pool.main_scales(location)[channel / 64]);
    value = std::ldexp(e4m3_value(static_cast<std::uint8_t>(pool.main_data(location)[channel])),
                       scale - 127);
    if (scale == 255) value = std::numeric_limits<double>::quiet_NaN();
    if (std::abs(value) >= 0x1p128) value = std::copysign(HUGE_VAL, value);
    // bf16 has no bits below 2^-133, which only scale bytes below 3 can set.
    if (type == ElementType::kBfloat16 && std::abs(value) < 0x1p-120) {
      value = std::copysign(std::ldexp(std::nearbyint(std::ldexp(value, 133)), -133), value);
    }
    return true;
  }

  std::uint32_t bits_at(const std::vector<std::byte>& found, std::int64_t place) const {
    const std::int64_t size = bytes_of(type);
    std::uint32_t bits = 0;
    std::memcpy(&bits, found.data() + place * size, static_cast<std::size_t>(size));
    return size == 4 ? bits : bits << 16;
  }

  void check(const char* when) {
    CAPTURE(when);
    const std::vector<std::byte> found = output.download();
    for (std::int64_t i = 0; i < kCount; ++i) {
      const std::int64_t location = locations[static_cast<std::size_t>(i)];
      for (std::int64_t c = 0; c < stride; ++c) {
        CAPTURE(i);
        CAPTURE(c);
        const std::uint32_t bits = bits_at(found, i * stride + c);
        double value = 0;
        std::uint16_t tail = 0;
        if (c >= 512) {
          REQUIRE((bits >> 16) == 0x5A5A);
        } else if (location < 0) {
          REQUIRE(bits == 0);
        } else if (!expected_value(location, c, value, tail)) {
          REQUIRE(bits == static_cast<std::uint32_t>(tail) << 16);
        } else if (std::isnan(value)) {
          REQUIRE(bits == (type == ElementType::kFloat32 ? 0x7FFFFFFFu : 0x7FFF0000u));
        } else {
          REQUIRE(double{std::bit_cast<float>(bits)} == value);
          REQUIRE((bits >> 31 != 0) == std::signbit(value));
        }
      }
    }
  }
};

}  // namespace

TEST_CASE("gathered entries are their exact values, in bf16 and fp32, from pages of any size") {
  for (const std::int32_t entries : {64, 2}) {
    for (const bool wide : {false, true}) {
      for (const ElementType type : {ElementType::kBfloat16, ElementType::kFloat32}) {
        Gather gather({entries, wide, type, wide ? 520 : 512});
        run_three_ways(
            gather.stream, [&](std::uint32_t seed) { gather.change(seed); },
            [&] { test_backend().gather_main(gather.params(), Pdl::kPrologue, gather.stream); },
            [&](const char* when) { gather.check(when); });
      }
    }
  }
}

TEST_CASE("a gather out of range is refused by name, before anything is enqueued") {
  Gather gather({64, false, ElementType::kBfloat16, 512});
  const auto refused = [&](auto change, const std::string& why) {
    GatherMainParams params = gather.params();
    change(params);
    check_refused(why, [&] { test_backend().gather_main(params, Pdl::kOff, gather.stream); });
  };
  using P = GatherMainParams;
  refused([](P& p) { p.output_stride = 511; }, "output_stride is 511");
  refused([](P& p) { p.output_stride = 516; }, "output_stride is 516");
  refused([](P& p) { p.output = static_cast<std::byte*>(p.output) + 2; }, "output at");
  refused([](P& p) { p.count = -1; }, "count is -1");
  refused([](P& p) { p.locations = nullptr; }, "locations is null");
  refused([](P& p) { p.pool.entries_per_page = 63; }, "powers of two");
}
