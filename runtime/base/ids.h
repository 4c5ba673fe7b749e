// Strong ids: a page cannot be passed where a seat is meant, and none of them can be added up.
#pragma once

#include <compare>
#include <cstdint>

namespace quire {

template <class Tag>
struct Id {
  std::int32_t value = -1;  // -1: none

  constexpr Id() = default;
  constexpr explicit Id(std::int32_t v) : value(v) {}
  constexpr explicit operator bool() const { return value >= 0; }
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using PageId = Id<struct PageTag>;              // [0, pages): one page of 256 tokens in every layer
using SeatId = Id<struct SeatTag>;              // [0, seats_max)
using LayerId = Id<struct LayerTag>;            // [0, layers)
using PlanBufferId = Id<struct PlanBufferTag>;  // [0, plan_buffers)

// A handle carries the generation of what it names: after a release it is stale, for ever.
template <class Tag>
struct Handle {
  std::int32_t index = -1;
  std::uint32_t generation = 0;

  friend constexpr auto operator<=>(const Handle&, const Handle&) = default;
};

using RequestId = Handle<struct RequestTag>;
using HoldId = Handle<struct HoldTag>;

// Prepared steps are numbered from 0 in the order of `prepare`; -1 is a padding step.
using StepId = std::int64_t;
inline constexpr StepId kPaddingStep = -1;

}  // namespace quire
