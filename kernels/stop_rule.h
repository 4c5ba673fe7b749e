// When a batch row stops itself, written once for the kernel and its host form: behind the first
// end token among those that it keeps, or where the length limit of its seat is reached. Internal,
// not installed.
#pragma once

#include <cstdint>
#include <limits>

#include <quire/kernels/params.h>
#include <quire/planner/plan.h>
#include <quire/runtime/base/host_device.h>
#include <quire/runtime/base/integers.h>

namespace quire {

// Behind every place that a batch row can have: no end token.
inline constexpr std::int32_t kNoEndToken = INT32_MAX;

struct StoppedRow {
  std::int32_t kept;
  std::uint8_t stop;
};

// Length beyond which the seat may not grow.
QUIRE_HOST_DEVICE inline std::int64_t length_limit_of(const StopRowsParams& params,
                                                      const BatchRowRecord& record) {
  if (params.length_limit == nullptr || record.live_tokens <= 0) return INT64_MAX;
  return params.length_limit[record.seat];
}

// `end_at`: place of the row's first end token, kept or not. A row that is inert in the plan keeps
// nothing, so that its commit has nothing to report; what cannot be kept is the commit's to report.
QUIRE_HOST_DEVICE inline StoppedRow stopped_row(const BatchRowRecord& record, std::int32_t kept,
                                                std::int32_t tokens_per_row, std::int32_t end_at,
                                                std::int64_t limit) {
  if (record.live_tokens <= 0) return {0, 0};
  if (record.live_tokens > tokens_per_row || kept < 0 || kept > record.live_tokens) {
    return {kept, 0};
  }
  const std::int64_t room = max_of(limit - record.start, std::int64_t{0});
  const std::int64_t behind_end = std::int64_t{end_at} + 1;
  const std::int64_t cut = min_of(std::int64_t{kept}, min_of(behind_end, room));
  const bool stops = cut == behind_end || cut == room;
  return {static_cast<std::int32_t>(cut), static_cast<std::uint8_t>(stops ? 1 : 0)};
}

// Where `kept` is not given, all live tokens are.
QUIRE_HOST_DEVICE inline void write_stopped_row(const StopRowsParams& params,
                                                std::int64_t batch_row, const StoppedRow& row) {
  if (params.kept != nullptr) params.kept[batch_row] = row.kept;
  params.stop[batch_row] = row.stop;
}

}  // namespace quire
