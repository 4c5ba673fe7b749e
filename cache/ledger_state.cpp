// The ledger's records: who owns a page or a seat, and the stacks of what is free.
#include <quire/cache/ledger_state.h>

#include <algorithm>

#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

const Limits& checked(const Limits& limits) {
  limits.check();
  return limits;
}

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

// So that index 0 is on top.
void fill_descending(std::vector<std::int32_t>& stack, std::int64_t count) {
  stack.clear();
  for (std::int64_t i = count - 1; i >= 0; --i) stack.push_back(static_cast<std::int32_t>(i));
}

}  // namespace

Ledger::State::State(const Limits& given)
    : limits(checked(given)),
      seats(size(limits.seats_max)),
      page_lists(size(limits.seats_max * limits.cells_max())),
      pages(size(limits.pages)),
      holds(size(limits.holds_max)),
      hold_lists(size(limits.holds_max * limits.cells_max())),
      steps(size(limits.run_ahead_max + 1)),
      step_rows(size((limits.run_ahead_max + 1) * limits.rows_max)),
      step_outcomes(size((limits.run_ahead_max + 1) * limits.rows_max)),
      step_lowered(size((limits.run_ahead_max + 1) * limits.seats_max)),
      update(limits),
      scratch(size(std::max(limits.pages, limits.seats_max))) {
  free_seats.reserve(seats.size());
  free_pages.reserve(pages.size());
  free_holds.reserve(holds.size());
  dirty_seats.reserve(seats.size());
  clear();
}

void Ledger::State::clear() {
  for (Seat& seat : seats) {
    const std::uint32_t generation = seat.generation + 1;
    seat = Seat{};
    seat.generation = generation;
  }
  for (Hold& hold : holds) hold = Hold{.generation = hold.generation + 1};
  std::fill(pages.begin(), pages.end(), Page{});
  std::fill(steps.begin(), steps.end(), Step{});
  fill_descending(free_seats, limits.seats_max);
  fill_descending(free_pages, limits.pages);
  fill_descending(free_holds, limits.holds_max);
  dirty_seats.clear();
  outstanding_sum = held_pages = held_seats = 0;
  if (sink >= 0) {  // padding may be written there for ever: captured graphs know its address
    pages[size(sink)].owner = kSink;
    std::erase(free_pages, sink);
  }
  next_step = first_uncounted = 0;
  publish();
}

std::string Ledger::State::why_not_live(RequestId request) const {
  if (request.index < 0 || request.index >= limits.seats_max) {
    return concat("no request has index ", request.index, "; supported: 0 to ",
                  limits.seats_max - 1);
  }
  const Seat& seat = seats[size(request.index)];
  return concat("request of seat ", request.index, ", generation ", request.generation,
                ", is stale: the seat is at generation ", seat.generation,
                seat.owned ? " with an owner" : " without an owner");
}

std::int32_t Ledger::State::find(RequestId request) const {
  QUIRE_CHECK(is_live(request), why_not_live(request));
  return request.index;
}

std::span<PageId> Ledger::State::pages_of(std::int32_t seat) {
  const std::size_t cells = size(limits.cells_max());
  return {page_lists.data() + size(seat) * cells, size(seats[size(seat)].pages)};
}

std::span<PageId> Ledger::State::pages_of_hold(std::int32_t hold) {
  const std::size_t cells = size(limits.cells_max());
  return {hold_lists.data() + size(hold) * cells, size(holds[size(hold)].pages)};
}

std::int64_t Ledger::State::unpromised() const {
  return static_cast<std::int64_t>(free_pages.size()) - outstanding_sum;
}

std::int64_t Ledger::State::usable_pages() const { return limits.pages - (sink >= 0 ? 1 : 0); }

std::int64_t Ledger::State::wanted_limit(std::int32_t seat) const {
  const Seat& record = seats[size(seat)];
  return record.owned ? record.upper + record.lookahead : 0;
}

void Ledger::State::mark_dirty(std::int32_t seat) {
  Seat& record = seats[size(seat)];
  if (record.listed) return;
  record.listed = true;
  dirty_seats.push_back(seat);
}

void Ledger::State::draw_pages(std::int32_t seat, std::int64_t count) {
  Seat& record = seats[size(seat)];
  outstanding_sum -= outstanding(record);
  for (std::int64_t i = 0; i < count; ++i) {
    const PageId page(free_pages.back());
    free_pages.pop_back();
    pages[size(page.value)].owner = seat;
    ++record.pages;
    pages_of(seat).back() = page;
  }
  outstanding_sum += outstanding(record);
}

// Pages behind the secured length, from the tail; a held one stays, and what lies before it.
void Ledger::State::give_back_tail(std::int32_t seat) {
  Seat& record = seats[size(seat)];
  const std::int64_t needed = ceil_div(record.secured, kPageTokens);
  if (record.pages <= needed) return;
  outstanding_sum -= outstanding(record);
  while (record.pages > needed) {
    const PageId page = pages_of(seat).back();
    if (pages[size(page.value)].holds > 0) break;
    --record.pages;
    release_page(page);
  }
  outstanding_sum += outstanding(record);
  record.cells_sent = std::min(record.cells_sent, record.pages);
}

void Ledger::State::release_page(PageId page) {
  Page& record = pages[size(page.value)];
  record.owner = kNobody;
  if (record.holds > 0) {
    ++held_pages;
  } else {
    free_pages.push_back(page.value);
  }
}

void Ledger::State::publish() {
  const std::int64_t free = static_cast<std::int64_t>(free_pages.size());
  const std::int64_t sinks = sink >= 0 ? 1 : 0;
  const std::int64_t seats_free = static_cast<std::int64_t>(free_seats.size());
  const std::array<std::int64_t, 10> figures{limits.pages,
                                             free,
                                             limits.pages - free - held_pages - sinks,
                                             held_pages,
                                             outstanding_sum,
                                             sinks,
                                             limits.seats_max,
                                             seats_free,
                                             limits.seats_max - seats_free - held_seats,
                                             held_seats};
  for (std::size_t i = 0; i < figures.size(); ++i) {
    published[i].store(figures[i], std::memory_order_relaxed);
  }
}

void Ledger::State::check_alive() const {
  if (broken.load(std::memory_order_acquire)) throw BrokenInvariant(broken_reason);
}

void Ledger::State::fail(const std::string& reason) {
  if (!broken.load(std::memory_order_acquire)) {
    broken_reason = "the ledger broke an invariant: " + reason;
    broken.store(true, std::memory_order_release);
  }
  throw BrokenInvariant(broken_reason);
}

}  // namespace quire
