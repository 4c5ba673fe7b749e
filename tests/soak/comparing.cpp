// Bytes: of whole requests against a prefill in one chunk, of the step table against the model.
#include <algorithm>

#include <quire/runtime/base/errors.h>

#include "tests/soak/engine.h"

namespace quire::soak {

using test::expect;
using test::size;

void Engine::compare(const test::Snapshot& snapshot, std::int32_t seat,
                     std::span<const PageId> pages, const Lengths& lengths, std::int32_t content,
                     const char* what) {
  compare_group(snapshot, seat, pages, LayerGroup::kTarget, lengths.target, content, what);
  compare_group(snapshot, seat, pages, LayerGroup::kDraft, lengths.draft, content, what);
  counts_["draft tokens compared"] += lengths.draft;
  if (lengths.draft < lengths.target) ++counts_["comparisons with drafts behind"];
}

void Engine::compare_group(const test::Snapshot& snapshot, std::int32_t seat,
                           std::span<const PageId> pages, LayerGroup group, std::int64_t tokens,
                           std::int32_t content, const char* what) {
  if (tokens == 0) return;
  expect(std::ssize(pages) * kPageTokens >= tokens, "a request is longer than its pages");
  const auto bytes = world_.live_bytes(snapshot, SeatId(seat), pages, group, tokens);
  const auto& expected = oracle_.bytes_of(content, group, tokens);
  const bool draft = group == LayerGroup::kDraft;
  ++counts_[draft ? "draft comparisons" : "comparisons"];
  counts_[draft ? "draft bytes compared" : "bytes compared"] += std::ssize(bytes);
  if (bytes == expected) return;
  const auto differs = std::ranges::mismatch(bytes, expected).in1 - bytes.begin();
  throw BrokenInvariant(concat(what, ", ", name_of(group), " group of ", tokens, " tokens, seat ",
                               seat, ", content ", content, ": byte ", differs, " of ",
                               bytes.size(), " live bytes differs from a prefill in one chunk"));
}

void Engine::compare_some(std::int64_t most) {
  if (live_.empty() || most == 0) return;
  const auto snapshot = world_.wait_for_snapshot();
  for (std::int64_t i = 0, at = in(0, std::ssize(live_) - 1); i < most; ++i) {
    const Live& live = live_[size((at + i) % std::ssize(live_))];
    if (ledger().info(live.id).upper_tokens == 0) continue;  // the seat is its former owner's
    compare(snapshot, live.id.index, ledger().pages_of(live.id), model_.lengths(live.id.index),
            live.job.content, "a request");
  }
}

// Limits of all seats, and page table cells below them.
void Engine::compare_table() {
  const StepTable& table = world_.cache().device().step_table();
  const Limits& limits = world_.limits();
  const auto limit = world_.wait_for_words(table.limit, limits.seats_max);
  const auto cells = world_.wait_for_words(table.page_table, limits.seats_max * table.cells);
  for (std::int64_t seat = 0; seat < limits.seats_max; ++seat) {
    expect(limit[size(seat)] == model_.device().limit[size(seat)],
           "a limit on the device is not what the updates say");
    for (std::int64_t cell = 0; cell * kPageTokens < limit[size(seat)]; ++cell) {
      expect(
          cells[size(seat * table.cells + cell)] == model_.device().table[size(seat)][size(cell)],
          "a page table cell on the device is not what the updates say");
    }
  }
  ++counts_["step tables compared"];
}

}  // namespace quire::soak
