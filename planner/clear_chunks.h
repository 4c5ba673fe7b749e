// Cuts what an update gives to new owners into the launches that zero it: the pages that its cells
// name, the seats of its new owners (cache/step_update.h). Kernel parameters hold less than an
// update may need. Host only, used for both backends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <quire/cache/step_update.h>
#include <quire/kernels/params.h>

namespace quire {

// Leading bytes of the chunk that are set.
inline std::int64_t used_bytes(const ClearParams& chunk) {
  return static_cast<std::int64_t>(offsetof(ClearParams, pieces)) +
         chunk.piece_count * std::int64_t{sizeof(OwnedBytes)};
}

inline std::int32_t seat_to_clear(const BatchRowUpdate& row) {
  return (row.flags & BatchRowUpdate::kNewOwner) != 0 ? row.seat : -1;
}
inline std::int32_t page_to_clear(const CellUpdate& cell) { return cell.page; }

// Calls run(const ClearParams&) for chunks that together hold every piece of every page or seat
// that owned_of(change) gives for one of `changes`; -1: none. Not at all where there is none. The
// chunk lives on the stack and is used again for the next: `run` copies what it keeps. Allocates
// nothing.
template <class Change, class OwnedOf, class F>
void for_each_clear_chunk(std::span<const Change> changes, OwnedOf owned_of,
                          std::span<const OwnedBytes> pieces, F&& run) {
  ClearParams chunk;  // its bytes are set as far as they are used
  chunk.owned_count = 0;
  const auto run_all_pieces = [&] {
    std::span<const OwnedBytes> left = chunk.owned_count > 0 ? pieces : pieces.first(0);
    while (!left.empty()) {
      const std::size_t now = std::min<std::size_t>(left.size(), ClearParams::kPiecesMax);
      std::copy_n(left.begin(), now, chunk.pieces);
      chunk.piece_count = static_cast<std::int32_t>(now);
      run(std::as_const(chunk));
      left = left.subspan(now);
    }
    chunk.owned_count = 0;
  };
  for (const Change& change : changes) {
    const std::int32_t owned = owned_of(change);
    if (owned < 0) continue;
    chunk.owned[chunk.owned_count++] = owned;
    if (chunk.owned_count == ClearParams::kOwnedMax) run_all_pieces();
  }
  run_all_pieces();
}

}  // namespace quire
