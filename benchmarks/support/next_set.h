// Names another set of seats in the plan buffer between two replays, on the device: an update from
// the host would do the same, but the host could not keep up with steps that do nothing else.
#pragma once

#include <cstdint>

#include <quire/planner/plan.h>
#include <quire/runtime/owners.h>

namespace quire::bench {

struct NextSet {
  const std::int32_t* seats;  // [sets, batch]
  std::int32_t* set;          // the next one; counts up and starts over
  std::int32_t batch;
  std::int32_t sets;
  std::int32_t decoded;  // a seat at its limit goes back by so many tokens, to where it began
  PlanBuffer plan;
  StepTable table;
};

// One plain kernel.
void enqueue_next_set(const NextSet& params, const Stream& stream);

}  // namespace quire::bench
