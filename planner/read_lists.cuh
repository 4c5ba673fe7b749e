// Writes the read lists of a plan on the device: whole warps and blocks a list, so that a store of
// the warp is one line of memory. A list is written to its end every time: it may have been longer
// in the plan before. The rule is planner/read_rule.h, the same as the host's.
#pragma once

#include <cstdint>

#include <quire/planner/read_rule.h>
#include <quire/planner/planner.cuh>

namespace quire::cuda {

// Locations of an HCA list that one block writes.
inline constexpr int kListPiece = 2048;

__host__ __device__ inline std::int64_t hca_list_pieces(const ReadLists& read) {
  return read.hca_locations == nullptr ? 0 : ceil_div(read.hca_width, std::int64_t{kListPiece});
}

struct ListPiece {
  std::int32_t list, piece;
};

// What block `block` of those that write lists works on. A grid has less than 2^31 blocks: 32-bit
// division, which is short.
__device__ inline ListPiece list_and_piece(std::int64_t block, std::int64_t pieces) {
  const auto at = static_cast<std::uint32_t>(block);
  const auto per_list = static_cast<std::uint32_t>(pieces);
  return {static_cast<std::int32_t>(at / per_list), static_cast<std::int32_t>(at % per_list)};
}

// Piece `piece` of list `list`; all threads of the block take part.
__device__ inline void write_hca_list(const PlanParams& params, std::int64_t list,
                                      std::int64_t piece, const BatchRowRecord& row,
                                      std::int32_t entries) {
  const ReadLists& read = params.plan.read;
  std::int32_t* to = read.hca_locations + list * read.hca_width;
  const std::int64_t end = min_of((piece + 1) * kListPiece, read.hca_width);
  for (std::int64_t e = piece * kListPiece + threadIdx.x; e < end; e += blockDim.x) {
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
