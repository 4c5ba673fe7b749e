// Cuts a StepUpdate into the launches that carry it: kernel parameters hold less than an update may
// need. Host only, used for both backends; the reading side is planner/step_rule.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include <quire/cache/step_update.h>
#include <quire/kernels/params.h>

namespace quire {

// Moves what fits of `items` behind the `used` bytes of the chunk; returns how many moved.
template <class Item>
std::int32_t pack_changes(std::span<const Item>& items, ApplyParams& chunk, std::size_t& used) {
  const std::size_t room = (sizeof(chunk.changes) - used) / sizeof(Item);
  const std::size_t moved = items.size() < room ? items.size() : room;
  if (moved > 0) std::memcpy(chunk.changes + used, items.data(), moved * sizeof(Item));
  used += moved * sizeof(Item);
  items = items.subspan(moved);
  return static_cast<std::int32_t>(moved);
}

// Leading bytes of the chunk that are set; what lies behind them is nobody's to read.
inline std::int64_t used_bytes(const ApplyParams& chunk) {
  return static_cast<std::int64_t>(offsetof(ApplyParams, changes)) +
         chunk.batch_rows * std::int64_t{sizeof(BatchRowUpdate)} +
         chunk.cells * std::int64_t{sizeof(CellUpdate)} +
         chunk.lowered_limits * std::int64_t{sizeof(LimitUpdate)};
}

// Calls run(const ApplyParams&) for each chunk, in order, at least once. The chunk lives on the
// stack and is used again for the next: `run` copies what it keeps. Allocates nothing.
template <class F>
void for_each_apply_chunk(const StepUpdate& update, const StepTable& table, const PlanBuffer& plan,
                          F&& run) {
  ApplyParams chunk;  // its bytes are set as far as they are used
  chunk.table = table;
  chunk.plan = plan;
  chunk.header = update.header();
  chunk.first_chunk = true;
  chunk.first_batch_row = 0;
  std::span<const BatchRowUpdate> rows = update.batch_rows();
  std::span<const CellUpdate> cells = update.cells();
  std::span<const LimitUpdate> limits = update.lowered_limits();
  do {
    std::size_t used = 0;
    chunk.batch_rows = pack_changes(rows, chunk, used);
    chunk.cells = rows.empty() ? pack_changes(cells, chunk, used) : 0;
    chunk.lowered_limits = cells.empty() ? pack_changes(limits, chunk, used) : 0;
    run(std::as_const(chunk));
    chunk.first_batch_row += chunk.batch_rows;
    chunk.first_chunk = false;
  } while (!rows.empty() || !cells.empty() || !limits.empty());
}

}  // namespace quire
