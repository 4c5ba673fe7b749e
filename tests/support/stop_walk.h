// When a batch row stops, told by taking its tokens one after the other: what the tests of
// stop_rows hold it to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <quire/planner/plan.h>

namespace quire::test {

struct Stopped {
  std::int32_t kept;
  bool stops;
  friend bool operator==(const Stopped&, const Stopped&) = default;
};

// Takes one token after the other, as a decode without drafts would.
inline Stopped walked(const BatchRowRecord& row, std::int32_t kept, const std::int32_t* tokens,
                      std::int32_t tokens_per_row, const std::vector<std::int32_t>& ends,
                      std::int64_t limit) {
  if (row.seat < 0 || row.live_tokens == 0) return {0, false};
  if (kept < 0 || kept > row.live_tokens || row.live_tokens > tokens_per_row) return {kept, false};
  if (row.start >= limit) return {0, true};
  for (std::int32_t n = 1; n <= kept; ++n) {
    const bool ended = std::find(ends.begin(), ends.end(), tokens[n - 1]) != ends.end();
    if (ended || row.start + n >= limit) return {n, true};
  }
  return {kept, false};
}

}  // namespace quire::test
