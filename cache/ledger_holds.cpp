// Holds: what the stream does not order keeps its pages and seats from other owners. And the sink,
// a page that is nobody's for good.
#include <algorithm>

#include <quire/cache/ledger.h>
#include <quire/cache/ledger_state.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

}  // namespace

OrShortfall<HoldId> Ledger::State::take_hold(std::int32_t seat, std::span<const PageId> held) {
  if (free_holds.empty()) return Shortfall{Resource::kHolds, 1, 0, 0};
  const std::int32_t index = free_holds.back();
  free_holds.pop_back();
  Hold& record = holds[size(index)];
  record.active = true;
  record.seat = seat;
  record.pages = static_cast<std::int32_t>(held.size());
  std::copy(held.begin(), held.end(), pages_of_hold(index).begin());
  if (seat >= 0) ++seats[size(seat)].holds;
  for (const PageId page : held) ++pages[size(page.value)].holds;
  return HoldId{index, record.generation};
}

OrShortfall<HoldId> Ledger::hold(RequestId request) {
  State& s = *state_;
  s.check_alive();
  const std::int32_t seat = s.find(request);
  return s.take_hold(seat, s.pages_of(seat));
}

OrShortfall<HoldId> Ledger::hold(std::span<const PageId> pages) {
  State& s = *state_;
  s.check_alive();
  QUIRE_CHECK(pages.size() <= size(s.limits.cells_max()), "hold: ", pages.size(),
              " pages asked; supported: at most ", s.limits.cells_max());
  ++s.call;
  for (const PageId page : pages) {
    QUIRE_CHECK(page.value >= 0 && page.value < s.limits.pages, "hold: page ", page.value,
                " does not exist; supported: 0 to ", s.limits.pages - 1);
    State::Page& record = s.pages[size(page.value)];
    QUIRE_CHECK(record.owner >= 0 || record.holds > 0, "hold: page ", page.value,
                record.owner == State::kSink ? " is the sink" : " is free",
                "; only an owned or held page can be held");
    QUIRE_CHECK(record.named_in != s.call, "hold: page ", page.value, " is named twice");
    record.named_in = s.call;
  }
  return s.take_hold(-1, pages);
}

void Ledger::drop(HoldId hold) {
  State& s = *state_;
  s.check_alive();
  QUIRE_CHECK(hold.index >= 0 && hold.index < s.limits.holds_max, "drop: no hold has index ",
              hold.index, "; supported: 0 to ", s.limits.holds_max - 1);
  State::Hold& record = s.holds[size(hold.index)];
  QUIRE_CHECK(record.active && record.generation == hold.generation, "drop: hold ", hold.index,
              ", generation ", hold.generation, ", is stale: dropped before; now generation ",
              record.generation);
  const std::span<const PageId> held = s.pages_of_hold(hold.index);
  for (std::size_t i = held.size(); i-- > 0;) {  // from the tail, as a release does
    State::Page& page = s.pages[size(held[i].value)];
    if (--page.holds > 0 || page.owner >= 0) continue;
    --s.held_pages;
    s.free_pages.push_back(held[i].value);
  }
  if (record.seat >= 0) {
    State::Seat& seat = s.seats[size(record.seat)];
    if (--seat.holds == 0 && !seat.owned) {
      --s.held_seats;
      s.free_seats.push_back(record.seat);
    }
  }
  record = State::Hold{.generation = record.generation + 1};
  s.free_holds.push_back(hold.index);
  s.publish();
}

OrShortfall<PageId> Ledger::reserve_sink() {
  State& s = *state_;
  s.check_alive();
  QUIRE_CHECK(s.sink < 0, "reserve_sink: page ", s.sink, " was taken before; there is one sink");
  if (s.unpromised() < 1) return Shortfall{Resource::kPages, 1, s.unpromised(), s.held_pages};
  s.sink = s.free_pages.back();
  s.free_pages.pop_back();
  s.pages[size(s.sink)].owner = State::kSink;
  s.publish();
  return PageId(s.sink);
}

}  // namespace quire
