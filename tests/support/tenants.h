// Two tenants of one cache, each with two requests at a time: what they do is drawn ahead, by seed,
// so that one of them can be run with the other and without. Lengths and chunks lie around the
// edges of pages, windows and ratios.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "tests/support/test_engine.h"

namespace quire::test {

inline constexpr std::size_t kPlaces = 2;  // requests of a tenant at a time
inline constexpr std::int32_t kDraftMax = 3;
inline constexpr std::int32_t kShortRow = kDraftMax + 1;
inline constexpr std::int32_t kLongRow = 200;
inline constexpr std::int64_t kTenantContext = 560;

// What the request in one place does in one turn.
struct PlaceTurn {
  bool admits = false;       // a new one comes, before the step
  std::int64_t content = 0;  // which of its tenant's two
  std::int32_t tokens = -1;  // of its batch row; -1: it is not in the batch
  std::int32_t kept = 0;
  bool stops = false;     // itself, in this step
  bool releases = false;  // behind the step
};
using TenantTurn = std::array<PlaceTurn, kPlaces>;

struct StoryCounts {
  int admitted = 0, finished = 0, preempted = 0, stopped = 0, refused = 0, long_rows = 0,
      inert_rows = 0;
};

class Tenant {
 public:
  explicit Tenant(std::uint32_t seed) : dice_(seed) {}

  // In a turn that is not ragged no row is longer than draft_max + 1.
  TenantTurn next(bool ragged) {
    TenantTurn turn;
    for (std::size_t i = 0; i < kPlaces; ++i) turn[i] = next_of(places_[i], ragged);
    return turn;
  }

  StoryCounts counts;

 private:
  struct Place {
    bool live = false, stopped = false, comes_back = false;
    std::int64_t content = 0;
    std::int32_t length = 0, target = 0;
  };

  std::int32_t below(std::int64_t n) {
    dice_ = hash32(dice_ + 0x9E3779B9u);
    return static_cast<std::int32_t>(dice_ % static_cast<std::uint32_t>(n));
  }

  PlaceTurn next_of(Place& place, bool ragged) {
    PlaceTurn turn;
    if (!place.live) {
      if (below(3) == 0) return turn;
      admit(place);
      turn.admits = true;
    }
    turn.content = place.content;
    if (below(6) != 0) draw_row(place, turn, ragged);
    const bool preempted = below(25) == 0;
    if (place.length < place.target && !preempted && !(place.stopped && below(2) == 0)) return turn;
    turn.releases = true;
    place.comes_back = preempted && !place.stopped;
    ++(place.comes_back ? counts.preempted : counts.finished);
    place.live = place.stopped = false;
    return turn;
  }

  // Who was preempted starts over.
  void admit(Place& place) {
    constexpr std::int32_t kTargets[] = {3,   4,   5,   127, 128, 129, 255, 256,
                                         257, 259, 383, 384, 385, 511, 512, 520};
    if (!place.comes_back) {
      place.content = below(2);
      place.target = kTargets[below(std::size(kTargets))];
    }
    place.live = true;
    place.length = 0;
    ++counts.admitted;
  }

  void draw_row(Place& place, PlaceTurn& turn, bool ragged) {
    constexpr std::int32_t kChunks[] = {1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 131, kLongRow};
    const std::int32_t left = place.target - place.length;
    turn.tokens = ragged ? kChunks[below(std::size(kChunks))] : 1 + below(kShortRow);
    turn.tokens = std::min(turn.tokens, std::max(left, 0));
    const bool is_short = turn.tokens <= kShortRow;
    if (place.stopped && !is_short) turn.tokens = kShortRow;
    if (place.stopped) {
      ++counts.inert_rows;
      return;  // keeps nothing
    }
    turn.kept = is_short && below(3) == 0 ? below(turn.tokens + 1) : turn.tokens;
    turn.stops = is_short && turn.tokens > 0 && below(15) == 0;
    place.stopped = turn.stops;
    place.length += turn.kept;
    counts.refused += turn.tokens - turn.kept;
    counts.stopped += turn.stops ? 1 : 0;
    counts.long_rows += is_short ? 0 : 1;
  }

  std::array<Place, kPlaces> places_;
  std::uint32_t dice_;
};

}  // namespace quire::test
