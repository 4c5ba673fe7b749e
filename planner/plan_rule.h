// The planning rule in closed form, written once for host and device (SPEC 1.4 to 1.9 and 2.1).
// p: absolute position; P0: length before the step; E: tokens of the step; L = P0 + E; j = p - P0.
#pragma once

#include <cstdint>

#include <quire/cache/limits.h>
#include <quire/cache/model_spec.h>
#include <quire/planner/divisors.h>
#include <quire/planner/plan.h>
#include <quire/runtime/base/host_device.h>
#include <quire/runtime/base/integers.h>

namespace quire {

// W of SPEC 0.1.
QUIRE_HOST_DEVICE constexpr std::int32_t pooled_tokens(CompressionRule rule) {
  return rule.overlap ? 2 * rule.ratio : rule.ratio;
}

QUIRE_HOST_DEVICE constexpr bool closes_entry(CompressionRule rule, std::int32_t p) {
  return (p + 1) % rule.ratio == 0;
}

// Complete entries of a sequence of `length` tokens.
QUIRE_HOST_DEVICE constexpr std::int32_t entries_of(CompressionRule rule, std::int32_t length) {
  return length / rule.ratio;
}

// Leading tokens of the pooling window of token j that precede the step (SPEC 1.5).
QUIRE_HOST_DEVICE constexpr std::int32_t window_len(CompressionRule rule, std::int32_t j) {
  return pooled_tokens(rule) - min_of(j + 1, pooled_tokens(rule));
}

QUIRE_HOST_DEVICE constexpr PlanRecord plan_record(CompressionRule rule, std::int32_t ragged_id,
                                                   std::int32_t batch_id, std::int32_t P0,
                                                   std::int32_t j) {
  return {static_cast<std::uint32_t>(ragged_id), static_cast<std::uint32_t>(batch_id),
          static_cast<std::uint32_t>(P0 + j), static_cast<std::uint32_t>(window_len(rule, j))};
}

// Entries that the step closes.
QUIRE_HOST_DEVICE constexpr std::int32_t compress_count(CompressionRule rule, std::int32_t P0,
                                                        std::int32_t E) {
  return (P0 + E) / rule.ratio - P0 / rule.ratio;
}

// Index of the entry that p closes among those of its batch row.
QUIRE_HOST_DEVICE constexpr std::int32_t compress_index(CompressionRule rule, std::int32_t P0,
                                                        std::int32_t p) {
  return (p + 1) / rule.ratio - P0 / rule.ratio - 1;
}

// First position whose raw tokens must be kept after length L (SPEC 1.5, 2.1).
QUIRE_HOST_DEVICE constexpr std::int32_t first_state_position(CompressionRule rule,
                                                              std::int32_t L) {
  const std::int32_t tail = round_down(L, rule.ratio);
  return rule.overlap ? max_of(0, tail - rule.ratio) : tail;
}

// Tokens of the step that are written to state: the last ones, in order.
QUIRE_HOST_DEVICE constexpr std::int32_t write_count(CompressionRule rule, std::int32_t P0,
                                                     std::int32_t E) {
  return min_of(E, P0 + E - first_state_position(rule, P0 + E));
}

QUIRE_HOST_DEVICE constexpr std::int32_t write_index(CompressionRule rule, std::int32_t P0,
                                                     std::int32_t E, std::int32_t p) {
  return p - (P0 + E - write_count(rule, P0, E));
}

// The inverses: position of the k-th entry that the step closes, and of its k-th state write.
QUIRE_HOST_DEVICE constexpr std::int32_t compress_position(CompressionRule rule, std::int32_t P0,
                                                           std::int32_t k) {
  return (P0 / rule.ratio + 1 + k) * rule.ratio - 1;
}
QUIRE_HOST_DEVICE constexpr std::int32_t write_position(CompressionRule rule, std::int32_t P0,
                                                        std::int32_t E, std::int32_t k) {
  return P0 + E - write_count(rule, P0, E) + k;
}

// Most records of a step of `tokens` tokens in `rows` batch rows: the capacities of SPEC 1.8.
QUIRE_HOST_DEVICE constexpr std::int64_t compress_capacity(CompressionRule rule, std::int64_t rows,
                                                           std::int64_t tokens) {
  return min_of(tokens, tokens / rule.ratio + rows);
}
QUIRE_HOST_DEVICE constexpr std::int64_t write_capacity(CompressionRule rule, std::int64_t rows,
                                                        std::int64_t tokens) {
  const std::int64_t most = rule.overlap ? 2 * rule.ratio - 1 : rule.ratio - 1;
  return min_of(tokens, rows * most);
}

// --- The original kernels' state addressing, for the single operations (SPEC 1.7, 1.9). ---

inline constexpr std::int32_t kC4RingTokens = 8;
inline constexpr std::int32_t kC4PageTokens = 4;

// Logical pages (position div 4) of a page-mode prefill; the caller maps them to physical ones.
struct C4LogicalPages {
  C4PageBundle bundle;
  std::int32_t index_page;  // what `indices[b]` names: the last window that the step touches
};

QUIRE_HOST_DEVICE constexpr C4LogicalPages c4_logical_pages(std::int32_t P0, std::int32_t E) {
  const std::int32_t lp = round_down(max_of(P0 - 1, 0), kC4PageTokens);
  const std::int32_t wp = round_down(max_of(P0 + E - 1, 0), kC4PageTokens);
  return {{max_of(lp - kC4PageTokens, 0) / kC4PageTokens, lp / kC4PageTokens,
           max_of(wp - kC4PageTokens, 0) / kC4PageTokens, wp},
          wp / kC4PageTokens};
}

// --- The plan of a step over a step table. ---

// What the rule needs to know of the cache; the same for every step.
struct PlanGeometry {
  std::int32_t window_ring_tokens;  // a multiple of 64
  std::int32_t draft_max;
  std::int32_t csa_entries_per_page;
  std::int32_t hca_entries_per_page;
  std::int64_t padding_ring_location;     // what views show where nothing is written
  std::int64_t padding_scratch_location;
  std::int64_t padding_csa_location;
  std::int64_t padding_hca_location;
};

enum class Inert : std::int32_t {
  kNo,
  kPadding,
  kEmpty,
  kStopped,
  kAtLimit,
  kOutOfSteps,
  kWrongShape,
  kWrongPositions,
  kWrongTokens,
  kFormerOwner,
  kTargetInert
};

struct ResolvedRow {
  BatchRowRecord record;
  Inert why;
};

// What an update said of a batch row, and the newest plan of the target group.
struct AppliedRow {
  std::int32_t seat;
  std::int32_t tokens;
  std::int32_t owner;  // StepTable::owner then
  std::int32_t lives;  // 0: the target plan of this step made it inert; other than 0 for itself
};

// What the step table says of a seat; nothing for padding.
struct SeatState {
  std::int32_t length, limit, stopped, owner;
};

// For padding the first seat's is loaded, and not used: no load waits for a branch. The draft group
// follows the target's plan, also of the step that stopped the seat.
QUIRE_HOST_DEVICE inline SeatState seat_state(const StepTable& table, LayerGroup group,
                                              std::int32_t seat) {
  const std::int32_t at = max_of(seat, 0);
  const SeatState state{table.length_of(group)[at], table.limit[at],
                        group == LayerGroup::kTarget ? table.stopped[at] : 0, table.owner[at]};
  return seat < 0 ? SeatState{0, 0, 0, 0} : state;
}

// What an engine supplied on the device for a batch row; by default nothing, which is right.
struct SuppliedRow {
  bool positions_fit = true;
  bool tokens_fit = true;
};

// A batch row lives as a whole or not at all. `steps_left` is the plan buffer's. Each reason goes
// before those above it; none is a branch, so that a thread's loads need not wait for each other.
QUIRE_HOST_DEVICE inline ResolvedRow resolve_batch_row(std::int32_t steps_left, bool same_shape,
                                                       const SeatState& state,
                                                       const AppliedRow& row, std::int32_t tokens,
                                                       std::int32_t first_token,
                                                       const SuppliedRow& supplied = {}) {
  Inert why = Inert::kNo;
  if (static_cast<std::int64_t>(state.length) + tokens > state.limit) why = Inert::kAtLimit;
  if (!supplied.positions_fit) why = Inert::kWrongPositions;
  if (!supplied.tokens_fit) why = Inert::kWrongTokens;
  if (state.stopped != 0) why = Inert::kStopped;
  if (steps_left <= 0) why = Inert::kOutOfSteps;
  if (tokens == 0) why = Inert::kEmpty;
  if (row.lives == 0) why = Inert::kTargetInert;
  if (row.owner != state.owner) why = Inert::kFormerOwner;
  if (!same_shape) why = Inert::kWrongShape;
  if (row.seat < 0) why = Inert::kPadding;
  return {{row.seat, why == Inert::kFormerOwner ? 0 : state.length,
           why == Inert::kNo ? tokens : 0, first_token},
          why};
}

// Rows up to this length read the window ring and may run again before their commit; longer ones
// read the scratch (DESIGN 4).
QUIRE_HOST_DEVICE constexpr bool is_short(const PlanGeometry& geometry, std::int32_t tokens) {
  return tokens <= geometry.draft_max + 1;
}

// Scratch location of token j of a batch row; j from -127: the window before the chunk.
QUIRE_HOST_DEVICE constexpr std::int64_t scratch_location(std::int32_t first_token,
                                                          std::int32_t batch_row, std::int32_t j) {
  return static_cast<std::int64_t>(first_token) +
         127 * (static_cast<std::int64_t>(batch_row) + 1) + j;
}

// Whether token j of a live batch row goes to the CSA state ring. A short row may keep any prefix of
// its tokens, and each prefix needs another tail: all its tokens go there, the ring has the room.
QUIRE_HOST_DEVICE constexpr bool writes_csa_state(const PlanGeometry& geometry,
                                                  const BatchRowRecord& row, std::int32_t j) {
  return is_short(geometry, row.live_tokens) ||
         write_index(kCsaRule, row.start, row.live_tokens, row.start + j) >= 0;
}

// --- What a live batch row does to the fold of an HCA layer (DESIGN 4). Its seat's bank of the
// row's start is read where its first folded token stands inside a pooling window. ---

// A long row leaves one fold behind, of the tokens that no entry has taken.
QUIRE_HOST_DEVICE constexpr std::int32_t first_folded_position(const PlanGeometry& geometry,
                                                               const BatchRowRecord& row) {
  if (is_short(geometry, row.live_tokens)) return row.start;
  return max_of(row.start, round_down(row.start + row.live_tokens, kHcaRule.ratio));
}

// Whether the fold of the tokens up to p is kept, for position p + 1 to read. Of a short row any
// prefix may be kept; behind the end of a window there is nothing to keep.
QUIRE_HOST_DEVICE constexpr bool keeps_fold(const PlanGeometry& geometry,
                                            const BatchRowRecord& row, std::int32_t p) {
  if (closes_entry(kHcaRule, p)) return false;
  return is_short(geometry, row.live_tokens) || p + 1 == row.start + row.live_tokens;
}

QUIRE_HOST_DEVICE constexpr std::int64_t ring_location(const PlanGeometry& geometry,
                                                       std::int32_t seat, std::int32_t p) {
  return static_cast<std::int64_t>(seat) * geometry.window_ring_tokens +
         p % geometry.window_ring_tokens;
}

QUIRE_HOST_DEVICE constexpr std::int64_t location_in_page(std::int32_t page,
                                                          std::int32_t entries_per_page,
                                                          std::int32_t in_page) {
  return static_cast<std::int64_t>(page) * entries_per_page + in_page;
}

// Location of entry e of a request, through its page table.
QUIRE_HOST_DEVICE inline std::int64_t entry_location(const std::int32_t* cells,
                                                     std::int32_t entries_per_page,
                                                     std::int32_t e) {
  return location_in_page(cells[e / entries_per_page], entries_per_page, e % entries_per_page);
}

// What stands where no batch row has a token, or its row is inert.
QUIRE_HOST_DEVICE constexpr TokenRecord inert_token() { return {-1, 0, -1, 0, -1, -1, -1, -1}; }

// What the rule divides by; `Divisor` is one of planner/divisors.h.
template <class Divisor>
struct GeometryDivisors {
  Divisor window_ring_tokens, csa_entries_per_page, hca_entries_per_page;
};

// Where an entry goes that a token closes: in the page that cell `cell` names. -1: it closes none.
struct EntryPlace {
  std::int32_t cell, in_page;
};

// A token as far as no page table cell is needed: its record, without the locations of entries.
struct PlacedToken {
  TokenRecord record;
  EntryPlace csa, hca;
};

template <class Divisor>
QUIRE_HOST_DEVICE EntryPlace entry_place(CompressionRule rule, const Divisor& entries_per_page,
                                         std::int32_t p) {
  if (!closes_entry(rule, p)) return {-1, 0};
  const Division entry = entries_per_page.divide(p / rule.ratio);
  return {entry.quotient, entry.remainder};
}

template <class Divisor>
QUIRE_HOST_DEVICE PlacedToken place_token(const PlanGeometry& geometry,
                                          const GeometryDivisors<Divisor>& divisors,
                                          const BatchRowRecord& row, std::int32_t batch_row,
                                          std::int32_t j) {
  if (j >= row.live_tokens) return {inert_token(), {-1, 0}, {-1, 0}};
  const std::int32_t p = row.start + j;
  const std::int32_t length = row.start + row.live_tokens;
  const bool reads_ring = is_short(geometry, row.live_tokens);
  const bool in_ring = reads_ring || p >= length - 128;
  const std::int64_t ring = static_cast<std::int64_t>(row.seat) * geometry.window_ring_tokens +
                            divisors.window_ring_tokens.divide(p).remainder;
  return {{row.seat, p, batch_row, j, in_ring ? ring : -1,
           reads_ring ? -1 : scratch_location(row.first_token, batch_row, j), -1, -1},
          entry_place(kCsaRule, divisors.csa_entries_per_page, p),
          entry_place(kHcaRule, divisors.hca_entries_per_page, p)};
}

QUIRE_HOST_DEVICE inline TokenRecord plan_token(const PlanGeometry& geometry,
                                                const StepTable& table, const BatchRowRecord& row,
                                                std::int32_t batch_row, std::int32_t j) {
  const GeometryDivisors<PlainDivisor> divisors{{geometry.window_ring_tokens},
                                                {geometry.csa_entries_per_page},
                                                {geometry.hca_entries_per_page}};
  const PlacedToken placed = place_token(geometry, divisors, row, batch_row, j);
  const std::int32_t* cells = table.page_table + row.seat * table.cells;
  const auto location = [&](const EntryPlace& place, std::int32_t entries_per_page) {
    return place.cell < 0 ? -1
                          : location_in_page(cells[place.cell], entries_per_page, place.in_page);
  };
  TokenRecord record = placed.record;
  record.csa_location = location(placed.csa, geometry.csa_entries_per_page);
  record.hca_location = location(placed.hca, geometry.hca_entries_per_page);
  return record;
}

// What a view shows where nothing is written.
QUIRE_HOST_DEVICE constexpr std::int64_t shown_location(std::int64_t location,
                                                        std::int64_t padding) {
  return location >= 0 ? location : padding;
}

// Views of a token that need no page table cell; the rest follows.
QUIRE_HOST_DEVICE inline void write_place_views(const PlanViews& views,
                                                const PlanGeometry& geometry, std::int32_t token,
                                                const TokenRecord& record) {
  const bool live = record.seat >= 0;
  const std::int32_t seen = live ? record.position + 1 : 0;
  views.positions[token] = record.position;
  views.token_batch_row[token] = record.batch_row;
  views.token_window_length[token] = min_of(seen, 128);
  views.token_csa_length[token] = entries_of(kCsaRule, seen);
  views.token_hca_length[token] = entries_of(kHcaRule, seen);
  views.ring_locations[token] =
      shown_location(record.ring_location, geometry.padding_ring_location);
  views.scratch_locations[token] =
      shown_location(record.scratch_location, geometry.padding_scratch_location);
}

QUIRE_HOST_DEVICE inline void write_entry_views(const PlanViews& views,
                                                const PlanGeometry& geometry, std::int32_t token,
                                                const TokenRecord& record) {
  views.csa_locations[token] = shown_location(record.csa_location, geometry.padding_csa_location);
  views.hca_locations[token] = shown_location(record.hca_location, geometry.padding_hca_location);
}

QUIRE_HOST_DEVICE inline void write_row_views(const PlanViews& views, std::int32_t batch_row,
                                              const BatchRowRecord& row) {
  const std::int32_t length = row.live_tokens > 0 ? row.start + row.live_tokens : 0;
  views.cu_extend[batch_row] = row.first_token;
  views.row_seat[batch_row] = row.seat;
  views.row_length[batch_row] = length;
  views.row_window_length[batch_row] = min_of(length, 128);
  views.row_csa_length[batch_row] = entries_of(kCsaRule, length);
  views.row_hca_length[batch_row] = entries_of(kHcaRule, length);
}

}  // namespace quire
