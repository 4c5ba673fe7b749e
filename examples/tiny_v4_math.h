// The small rules of tiny_v4 that host loops and kernels share: which token stands in an input row,
// where the entries that it may read are, how they are decoded, and how scores are ordered.
#pragma once

#include <cstdint>

#include <quire/kernels/fp8.h>
#include <quire/planner/plan_rule.h>

#include "examples/stand_in_math.h"
#include "examples/tiny_v4.h"

namespace quire::serving {

inline constexpr float kAttentionScale = 0x1.6a09e6p-5f;  // 512^-0.5
// What a query norm's weight would do: random weights alone give a softmax so flat that the next
// token hardly depends on what was read.
inline constexpr float kQueryGain = 3.0f;

// The token at a position of a seat: from the prompt's seed, or generated.
QUIRE_HOST_DEVICE inline std::int32_t token_at(const TinyV4Step& step, std::int32_t seat,
                                               std::int32_t position) {
  if (position < step.arrays.seat_prompt_tokens[seat]) {
    return static_cast<std::int32_t>(prompt_token(step.arrays.seat_seed[seat], position) %
                                     static_cast<std::uint32_t>(step.config.vocabulary));
  }
  return step.arrays.history[seat * (step.context_max + 1) + position];
}

// What one token attends to: `window` positions up to its own, then `compressed` entries.
struct Attended {
  bool from_scratch;            // the window lies in the scratch, else in the ring
  std::int64_t window_base;     // scratch: location of position 0; ring: first location of the seat
  std::int32_t first_position;  // of the window
  std::int32_t window;
  std::int32_t compressed;
  const std::int32_t* cells;  // page table of the batch row
  const std::int32_t* picks;  // null: all entries, in order
};

// The rule of DESIGN 4: batch rows of at most draft_max + 1 tokens read the ring, longer ones the
// scratch of their plan buffer.
QUIRE_HOST_DEVICE inline Attended attended_by(const TinyV4Step& step, std::int64_t t) {
  Attended list{false, 0, 0, 0, 0, nullptr, nullptr};
  const std::int32_t batch_row = step.views.token_batch_row[t];
  if (batch_row < 0) return list;
  const std::int32_t position = step.views.positions[t];
  list.window = step.views.token_window_length[t];
  list.first_position = position + 1 - list.window;
  list.cells = step.views.page_table + batch_row * step.views.page_table_stride;
  const std::int32_t first = step.views.cu_extend[batch_row];
  const std::int32_t tokens = step.views.cu_extend[batch_row + 1] - first;
  list.from_scratch = !step.shape.is_decode() && tokens > step.draft_max + 1;
  if (list.from_scratch) {
    const std::int32_t start = step.views.row_length[batch_row] - tokens;
    list.window_base = scratch_location(first, batch_row, -start);
  } else {
    list.window_base = step.views.row_seat[batch_row] * step.window_ring_tokens;
  }
  if (step.layer.kind == LayerKind::kCsa) {
    list.compressed = min_of(step.views.token_csa_length[t], step.config.index_topk);
    list.picks = step.arrays.picks + t * step.config.index_topk;
  } else if (step.layer.kind == LayerKind::kHca) {
    list.compressed = step.views.token_hca_length[t];
  }
  return list;
}

// A stored entry: where its 576 data bytes and its scales are.
struct StoredEntry {
  const std::byte* data;
  const std::byte* scales;
};

// Entry i of the list, window first, both parts in ascending order of position.
QUIRE_HOST_DEVICE inline StoredEntry entry_of(const TinyV4Step& step, const Attended& list,
                                              std::int32_t i) {
  if (i < list.window) {
    const std::int64_t p = list.first_position + i;
    const EntryPool& pool = list.from_scratch ? step.window_scratch : step.window_ring;
    const std::int64_t at =
        list.window_base + (list.from_scratch ? p : p % step.window_ring_tokens);
    return {pool.main_data(at), pool.main_scales(at)};
  }
  const std::int32_t k = i - list.window;
  const std::int64_t at = entry_location(list.cells, step.compressed.entries_per_page,
                                         list.picks == nullptr ? k : list.picks[k]);
  return {step.compressed.main_data(at), step.compressed.main_scales(at)};
}

// 2^(byte - 127); 255 stands for a tile of infinities, which reads as NaN.
QUIRE_HOST_DEVICE inline float tile_scale(std::byte scale) {
  const auto byte = static_cast<std::uint32_t>(scale);
  if (byte == exact::kInfiniteScale) return exact::from_bits(exact::kNanBits);
  return byte == 0 ? 0x1p-127f : exact::from_bits(byte << 23);
}

// Keys that order entries: the higher score first, ties to the lower entry. Larger keys win.
QUIRE_HOST_DEVICE inline std::uint64_t rank_key(float score, std::int32_t entry) {
  // -0 and +0 are one score.
  const std::uint32_t u = exact::bits(score == 0.0f ? 0.0f : score);
  const std::uint32_t ordered = (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
  return (static_cast<std::uint64_t>(ordered) << 32) | ~static_cast<std::uint32_t>(entry);
}
QUIRE_HOST_DEVICE inline std::int32_t entry_of_key(std::uint64_t key) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(key));
}

}  // namespace quire::serving
