// What attention reads at a token, in closed form (SPEC 6): the rule behind ReadLists, written once
// for host and device. Lists are int32, as FlashMLA takes them; binding refuses caches whose
// locations would not fit.
#pragma once

#include <cstdint>

#include <quire/kernels/params.h>
#include <quire/planner/plan.h>
#include <quire/planner/plan_rule.h>
#include <quire/runtime/base/host_device.h>

namespace quire {

inline constexpr std::int32_t kWindowListWidth = 128;  // that a query sees, its own included

// Of tokens behind the last batch row.
QUIRE_HOST_DEVICE constexpr BatchRowRecord no_batch_row() { return {-1, 0, 0, 0}; }

// Where the entry `i` positions before token j of a batch row is read, i in [0, 128). Tokens of
// short rows read the ring, those of long rows the scratch of this step (DESIGN 4). Inert tokens
// and positions before the first: `padding`.
QUIRE_HOST_DEVICE constexpr std::int32_t window_read_location(const PlanGeometry& geometry,
                                                              const BatchRowRecord& row,
                                                              std::int32_t batch_row,
                                                              std::int32_t j, std::int32_t i,
                                                              std::int32_t padding) {
  if (j >= row.live_tokens || i > row.start + j) return padding;
  return static_cast<std::int32_t>(is_short(geometry, row.live_tokens)
                                       ? ring_location(geometry, row.seat, row.start + j - i)
                                       : scratch_location(row.first_token, batch_row, j - i));
}

// HCA entries that are complete at token j of a batch row; 0 where it is inert.
QUIRE_HOST_DEVICE constexpr std::int32_t hca_entries_at(const BatchRowRecord& row, std::int32_t j) {
  return j < row.live_tokens ? entries_of(kHcaRule, row.start + j + 1) : 0;
}

// HCA entries that are complete after the step: the list of a ragged batch row.
QUIRE_HOST_DEVICE constexpr std::int32_t hca_entries_after(const BatchRowRecord& row) {
  return row.live_tokens > 0 ? entries_of(kHcaRule, row.start + row.live_tokens) : 0;
}

// Place e of a list of `entries` entries of the batch row; behind them stands padding.
QUIRE_HOST_DEVICE inline std::int32_t hca_read_location(const PlanParams& params,
                                                        const BatchRowRecord& row,
                                                        std::int32_t entries, std::int64_t e) {
  if (e >= entries) return params.plan.read.padding_location;
  const std::int32_t* cells = params.table.page_table + row.seat * params.table.cells;
  return static_cast<std::int32_t>(
      entry_location(cells, params.geometry.hca_entries_per_page, static_cast<std::int32_t>(e)));
}

// Lengths of the lists of one token.
QUIRE_HOST_DEVICE inline void write_read_lengths(const ReadLists& read, std::int32_t token,
                                                 const TokenRecord& record) {
  const std::int32_t seen = record.seat >= 0 ? record.position + 1 : 0;
  if (read.window_lengths != nullptr) {
    read.window_lengths[token] = max_of(min_of(seen, kWindowListWidth), read.length_floor);
  }
  if (read.hca_lengths != nullptr) {
    read.hca_lengths[token] = max_of(entries_of(kHcaRule, seen), read.length_floor);
  }
}

}  // namespace quire
