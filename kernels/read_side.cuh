// For an engine's own kernels: from a pick of the indexer's top-k to the location that a sparse
// attention kernel reads (SPEC 6), so that the translation can be the epilogue of the top-k. The
// same on host and device, and nothing of Quire's but this header is needed.
//
//   page_table_row  a row of PlanViews::page_table, of the token's batch row
//   pick            an entry of the request, or negative: none
//   entries         entries complete at the token, PlanViews::token_csa_length: a pick from there
//                   on is none
//   padding         what stands for none: -1, or a location that exists
//
// Locations count in the pool's own numbering: page x entries per page + offset. They are int32, as
// FlashMLA takes them: a cache of 2^31 / 64 pages or more is out of reach.
#pragma once

#include <cstdint>

#include <quire/runtime/base/host_device.h>

namespace quire {

QUIRE_HOST_DEVICE constexpr std::int32_t csa_location_of_pick(const std::int32_t* page_table_row,
                                                              std::int32_t pick,
                                                              std::int32_t entries,
                                                              std::int32_t padding = -1,
                                                              std::int32_t entries_per_page = 64) {
  if (pick < 0 || pick >= entries) return padding;
  return page_table_row[pick / entries_per_page] * entries_per_page + pick % entries_per_page;
}

}  // namespace quire
