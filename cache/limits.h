// Every limit, given once when a cache is opened. All memory follows from these; afterwards nothing
// is allocated and no address changes.
#pragma once

#include <cstdint>

#include <quire/runtime/base/integers.h>

namespace quire {

inline constexpr std::int64_t kPageTokens = 256;

struct Limits {
  std::int64_t seats_max = 0;      // live requests
  std::int64_t pages = 0;          // pages of 256 tokens, one id in every layer
  std::int64_t rows_max = 0;       // batch rows of one step, padding included
  std::int64_t tokens_max = 0;     // tokens of one step, over all batch rows
  std::int64_t context_max = 0;    // tokens of one request
  std::int64_t draft_max = 0;      // draft tokens of one batch row beside its one sure token
  std::int64_t repeat_max = 1;     // times that one prepared step may be replayed
  std::int64_t run_ahead_max = 1;  // steps prepared beyond the newest whose outcome counts
  std::int64_t plan_buffers = 1;
  std::int64_t holds_max = 64;

  // Cells of one seat's page table.
  std::int64_t cells_max() const { return ceil_div(context_max, kPageTokens); }

  // A query at the last drafted position still sees its whole window (SPEC 4), in pages of 64.
  std::int64_t window_ring_tokens() const { return round_up<std::int64_t>(128 + draft_max, 64); }

  // Refused drafts must not have overwritten history (SPEC 1.7, verdict 22).
  std::int64_t csa_ring_tokens() const { return round_up<std::int64_t>(8 + draft_max, 4); }

  // A fold cannot be undone: any accepted prefix of the drafted tokens has a bank of its own.
  std::int64_t hca_banks() const { return draft_max + 2; }

  // The chunk of every batch row and up to 127 tokens before it, in pages of 64.
  std::int64_t scratch_tokens() const {
    return round_up<std::int64_t>(tokens_max + 127 * rows_max, 64);
  }

  // Page table cells that one step can change. A table always covers what was prepared before, so
  // a batch row of n tokens over all its runs, lookahead included, sends at most ceil(n / 256) new
  // cells.
  std::int64_t update_cells_max() const {
    const std::int64_t looked_ahead = rows_max * (draft_max + 1);
    return min_of((tokens_max * repeat_max + looked_ahead) / kPageTokens + 2 * rows_max,
                  seats_max * cells_max());
  }

  // Throws UsageError that names the limit, its value and the range.
  void check() const;
};

}  // namespace quire
