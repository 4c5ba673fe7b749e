// Writes the read lists of a plan on the device: whole warps and blocks a list, so that a store of
// the warp is one line of memory. A list is written to its end every time: it may have been longer
// in the plan before. The rule is planner/read_rule.h, the same as the host's.
#pragma once

#include <cstdint>

#include <quire/planner/read_rule.h>
#include <quire/planner/planner.cuh>

namespace quire::cuda {

// Locations `begin` to `end` of list `list`, by threads 0 to `threads`.
__device__ inline void write_hca_list(const PlanParams& params, std::int64_t list,
                                      std::int64_t begin, std::int64_t end,
                                      const BatchRowRecord& row, std::int32_t entries, int thread,
                                      int threads) {
  const ReadLists& read = params.plan.read;
  std::int32_t* to = read.hca_locations + list * read.hca_width;
  for (std::int64_t e = begin + thread; e < end; e += threads) {
    to[e] = hca_read_location(params, row, entries, e);
  }
}

// The window list of one token, by one warp: four locations a lane.
__device__ inline void write_window_list(const PlanParams& params, std::int32_t token,
                                         const BatchRowRecord& row, std::int32_t batch_row,
                                         std::int32_t j) {
  const ReadLists& read = params.plan.read;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const auto at = [&](std::int32_t i) {
    return window_read_location(params.geometry, row, batch_row, j, 4 * lane + i,
                                read.padding_location);
  };
  static_assert(kWindowListWidth == 4 * 32);
  reinterpret_cast<int4*>(read.window_locations)[std::int64_t{token} * 32 + lane] =
      make_int4(at(0), at(1), at(2), at(3));
}

}  // namespace quire::cuda
