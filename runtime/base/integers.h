// Integer helpers that host and device share. Arguments are non-negative, divisors positive.
#pragma once

#include <quire/runtime/base/host_device.h>

namespace quire {

template <class Integer>
QUIRE_HOST_DEVICE constexpr Integer ceil_div(Integer value, Integer divisor) {
  return (value + divisor - 1) / divisor;
}

template <class Integer>
QUIRE_HOST_DEVICE constexpr Integer round_up(Integer value, Integer multiple) {
  return ceil_div(value, multiple) * multiple;
}

template <class Integer>
QUIRE_HOST_DEVICE constexpr Integer round_down(Integer value, Integer multiple) {
  return value / multiple * multiple;
}

// Not std::min: that has no device form, and these are integers, where no order question arises.
template <class Integer>
QUIRE_HOST_DEVICE constexpr Integer min_of(Integer a, Integer b) {
  return b < a ? b : a;
}

template <class Integer>
QUIRE_HOST_DEVICE constexpr Integer max_of(Integer a, Integer b) {
  return a < b ? b : a;
}

template <class Integer>
QUIRE_HOST_DEVICE constexpr bool is_power_of_two(Integer value) {
  return value > 0 && (value & (value - 1)) == 0;
}

}  // namespace quire
