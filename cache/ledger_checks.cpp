// What proves, prints and digests a ledger: everything here is worked out from the records alone.
#include <algorithm>
#include <sstream>

#include <quire/cache/ledger.h>
#include <quire/cache/ledger_state.h>
#include <quire/runtime/base/digest.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

}  // namespace

void Ledger::State::require(bool condition, const char* what, std::int64_t index) {
  if (!condition) fail(index < 0 ? std::string(what) : concat(what, " (", index, ")"));
}

// Every page is free, owned, held or the sink, once; and is held as often as holds name it.
void Ledger::State::check_pages() {
  const std::span<std::int32_t> places(scratch.data(), pages.size());
  const auto visit = [&](std::int32_t page, const char* place) {
    require(page >= 0 && page < limits.pages, place, page);
    ++places[size(page)];
  };
  std::fill(places.begin(), places.end(), 0);
  for (const std::int32_t page : free_pages) {
    visit(page, "a page on the free list does not exist");
    const Page& record = pages[size(page)];
    require(record.owner == kNobody && record.holds == 0, "a free page is owned or held", page);
  }
  for (std::int32_t seat = 0; seat < limits.seats_max; ++seat) {
    require(seats[size(seat)].pages >= 0 && seats[size(seat)].pages <= limits.cells_max(),
            "a request has more pages than cells", seat);
    for (const PageId page : pages_of(seat)) {
      visit(page.value, "an owned page does not exist");
      require(pages[size(page.value)].owner == seat, "a page is owned by another", page.value);
    }
  }
  if (sink >= 0) {
    visit(sink, "the sink does not exist");
    require(pages[size(sink)].owner == kSink && pages[size(sink)].holds == 0,
            "the sink is owned or held", sink);
  }
  std::int64_t held = 0;
  for (std::size_t page = 0; page < pages.size(); ++page) {
    const bool is_held = pages[page].owner == kNobody && pages[page].holds > 0;
    held += is_held ? 1 : 0;
    places[page] += is_held ? 1 : 0;
    require(places[page] == 1, "a page is not in one place: free, owned, held or the sink",
            static_cast<std::int64_t>(page));
  }
  require(held == held_pages, "the number of held pages is wrong", held_pages);
  require(free_pages.size() + size(held) <= pages.size(), "more pages than there are");
}

void Ledger::State::check_holds() {
  const std::span<std::int32_t> counts(scratch.data(), pages.size());
  std::fill(counts.begin(), counts.end(), 0);
  std::size_t active = 0;
  for (std::int32_t hold = 0; hold < limits.holds_max; ++hold) {
    if (!holds[size(hold)].active) continue;
    ++active;
    for (const PageId page : pages_of_hold(hold)) ++counts[size(page.value)];
  }
  require(active + free_holds.size() == holds.size(), "holds are lost");
  for (std::size_t page = 0; page < pages.size(); ++page) {
    require(pages[page].holds == counts[page], "a page is held more or less often than counted",
            static_cast<std::int64_t>(page));
  }
  const std::span<std::int32_t> seat_counts(scratch.data(), seats.size());
  std::fill(seat_counts.begin(), seat_counts.end(), 0);
  for (const Hold& hold : holds) {
    if (hold.active && hold.seat >= 0) ++seat_counts[size(hold.seat)];
  }
  for (std::size_t seat = 0; seat < seats.size(); ++seat) {
    require(seats[seat].holds == seat_counts[seat],
            "a seat is held more or less often than counted", static_cast<std::int64_t>(seat));
  }
}

void Ledger::State::check_seats() {
  const std::span<std::int32_t> places(scratch.data(), seats.size());
  std::fill(places.begin(), places.end(), 0);
  for (const std::int32_t seat : free_seats) {
    require(seat >= 0 && seat < limits.seats_max, "a free seat does not exist", seat);
    require(!seats[size(seat)].owned && seats[size(seat)].holds == 0, "a free seat is in use",
            seat);
    ++places[size(seat)];
  }
  std::int64_t held = 0;
  std::int64_t promised = 0;
  for (std::int32_t index = 0; index < limits.seats_max; ++index) {
    const Seat& seat = seats[size(index)];
    const bool is_held = !seat.owned && seat.holds > 0;
    held += is_held ? 1 : 0;
    promised += outstanding(seat);
    require(places[size(index)] + (seat.owned ? 1 : 0) + (is_held ? 1 : 0) == 1,
            "a seat is not in one place: free, owned or held", index);
    require(seat.owned || (seat.pages == 0 && seat.promised_pages == 0 && seat.secured == 0),
            "a seat without an owner has pages or promises", index);
    require(0 <= seat.settled && seat.settled <= seat.upper && seat.lookahead >= 0 &&
                seat.upper + seat.lookahead <= seat.secured && seat.secured <= seat.context_max &&
                seat.secured <= seat.pages * kPageTokens,
            "settled <= upper <= upper + lookahead <= secured <= pages does not hold", index);
    require(ceil_div(seat.upper + seat.lookahead, kPageTokens) <= seat.cells_sent &&
                seat.cells_sent <= seat.pages,
            "the device would lack cells below the limit", index);
    require(seat.limit_sent == wanted_limit(index) || seat.listed,
            "a limit differs on the device and no update would tell it", index);
    const auto listings = std::count(dirty_seats.begin(), dirty_seats.end(), index);
    require(listings == (seat.listed ? 1 : 0), "the list of changed limits is wrong", index);
  }
  require(held == held_seats, "the number of held seats is wrong", held_seats);
  require(promised == outstanding_sum, "the sum of promises is wrong", outstanding_sum);
  require(promised <= static_cast<std::int64_t>(free_pages.size()),
          "more pages are promised than free", promised);
}

// upper - settled is what uncounted steps hold, for each live request.
void Ledger::State::check_steps() {
  require(first_uncounted <= next_step && next_step - first_uncounted <= limits.run_ahead_max + 1,
          "too many steps are uncounted", next_step - first_uncounted);
  std::vector<std::int32_t>& in_flight = scratch;
  std::fill(in_flight.begin(), in_flight.end(), 0);
  for (StepId id = first_uncounted; id < next_step; ++id) {
    require(step_of(id).id == id, "the record of a step was overwritten", id);
    for (const StepRow& row : rows_of(id)) {
      if (is_live(row.request)) in_flight[size(row.request.index)] += row.tokens;
    }
  }
  for (std::int32_t seat = 0; seat < limits.seats_max; ++seat) {
    require(seats[size(seat)].upper - seats[size(seat)].settled == in_flight[size(seat)],
            "upper - settled is not what the steps in flight hold", seat);
  }
}

void Ledger::check_invariants() const {
  State& s = *state_;
  s.check_alive();
  s.check_pages();
  s.check_holds();
  s.check_seats();
  s.check_steps();
}

std::string Ledger::State::describe() const {
  std::ostringstream text;
  text << "pages: " << free_pages.size() << " free of " << limits.pages << ", " << outstanding_sum
       << " of them promised, " << held_pages << " held without an owner, sink " << sink << "\n"
       << "seats: " << free_seats.size() << " free of " << limits.seats_max << ", " << held_seats
       << " held without an owner; holds: " << holds.size() - free_holds.size() << " of "
       << limits.holds_max << "\n"
       << "steps: next " << next_step << ", outcomes counted before " << first_uncounted << "\n";
  for (std::size_t i = 0; i < seats.size(); ++i) {
    const Seat& seat = seats[i];
    if (!seat.owned) continue;
    text << "seat " << i << ", generation " << seat.generation << ": settled " << seat.settled
         << ", upper " << seat.upper << ", secured " << seat.secured << " of " << seat.context_max
         << " tokens; " << seat.pages << " pages, " << outstanding(seat) << " more promised"
         << (seat.stopped ? "; stopped" : "") << "\n";
  }
  return text.str();
}

// Left out on purpose: outcomes heard but not yet counted, that they were heard, and the stamps.
std::uint64_t Ledger::State::digest() const {
  Digest d;
  const auto add_all = [&d](const auto& ids) {
    for (const auto id : ids) d.add(id);
    d.add(ids.size());
  };
  const std::int64_t cells = limits.cells_max();
  const auto add_pages = [&](const std::vector<PageId>& lists, std::int64_t list,
                             std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) d.add(lists[size(list * cells + i)].value);
    d.add(count);
  };
  d.add(next_step);
  d.add(first_uncounted);
  d.add(sink);
  add_all(free_seats);
  add_all(free_pages);
  add_all(free_holds);
  add_all(dirty_seats);
  for (std::int64_t i = 0; i < limits.seats_max; ++i) {
    const Seat& s = seats[size(i)];
    d.add(s.generation);
    d.add((s.owned ? 1 : 0) | (s.new_owner ? 2 : 0) | (s.resume_pending ? 4 : 0) |
          (s.stopped ? 8 : 0));
    for (const std::int64_t figure :
         {s.promised_pages, s.settled, s.upper, s.secured, s.context_max, s.limit_sent}) {
      d.add(figure);
    }
    d.add(s.holds);
    d.add(s.cells_sent);
    d.add(s.lookahead);
    add_pages(page_lists, i, s.pages);
  }
  for (std::int64_t i = 0; i < limits.holds_max; ++i) {
    const Hold& hold = holds[size(i)];
    d.add(hold.generation);
    if (!hold.active) continue;
    d.add(hold.seat);
    add_pages(hold_lists, i, hold.pages);
  }
  for (StepId id = first_uncounted; id < next_step; ++id) {
    const std::size_t at = ring_of(id);
    for (std::int64_t i = 0; i < steps[at].rows; ++i) {
      const StepRow& row = step_rows[at * size(limits.rows_max) + size(i)];
      d.add(row.request.index);
      d.add(row.request.generation);
      d.add(row.tokens);
      d.add(row.cells_sent_before);
      d.add(row.flags);
    }
    d.add(steps[at].rows);
    for (std::int64_t i = 0; i < steps[at].lowered; ++i) {
      d.add(step_lowered[at * size(limits.seats_max) + size(i)]);
    }
    d.add(steps[at].lowered);
  }
  return d.value();
}

}  // namespace quire
