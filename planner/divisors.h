// Division by what a cache fixes, in two forms with the same results: as the processor divides, and
// by a factor that the host prepares, which on a device takes two multiplications instead of some
// twenty instructions. For numbers from 0 on.
#pragma once

#include <cstdint>

#include <quire/runtime/base/host_device.h>

namespace quire {

struct Division {
  std::int32_t quotient, remainder;
};

struct PlainDivisor {
  std::int32_t value;

  QUIRE_HOST_DEVICE constexpr Division divide(std::int32_t number) const {
    return {number / value, number % value};
  }
};

// Exact for every number from 0 to 2^31 - 1 and every divisor from 1 to 2^31 - 1. The factor is at
// most 1 below 2^32 / divisor, so number * factor / 2^32 is less than 1 below the quotient: rounded
// down it is the quotient or one too small, which the remainder tells.
struct PreparedDivisor {
  std::uint32_t value, factor;

  QUIRE_HOST_DEVICE constexpr Division divide(std::int32_t number) const {
    const auto n = static_cast<std::uint32_t>(number);
    auto quotient = static_cast<std::uint32_t>((std::uint64_t{n} * factor) >> 32);
    std::uint32_t remainder = n - quotient * value;
    if (remainder >= value) {
      ++quotient;
      remainder -= value;
    }
    return {static_cast<std::int32_t>(quotient), static_cast<std::int32_t>(remainder)};
  }
};

constexpr PreparedDivisor prepared_divisor(std::int32_t value) {
  const auto divisor = static_cast<std::uint32_t>(value);
  return {divisor, 0xFFFFFFFFu / divisor};
}

}  // namespace quire
