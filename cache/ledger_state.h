// The records behind a Ledger. Internal: included by the ledger's own sources and by its test only.
//
// Pages and seats are records in flat arrays of fixed size; whoever is free is on a stack, so that
// what is handed out depends on the calls alone. A request is the record of its seat. A promise
// still outstanding is derived, promised - owned, so pages given back fall under it again.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/runtime/base/integers.h>

namespace quire {

struct Ledger::State {
  static constexpr std::int32_t kNobody = -1;   // owner of a page that is free or held
  static constexpr std::int32_t kSink = -2;     // owner of the page for padding
  static constexpr std::int64_t kUnknown = -1;  // limit_sent: an update that may not have arrived

  // A seat, and the request that owns it.
  struct Seat {
    std::uint32_t generation = 1;  // so that a zeroed handle is never valid
    bool owned = false;
    bool new_owner = false;  // no update has named this owner yet
    bool resume_pending = false;
    bool stopped = false;
    bool listed = false;  // in `dirty_seats`
    std::int32_t holds = 0;
    std::int32_t pages = 0;       // owned, the first so many cells of its page list
    std::int32_t cells_sent = 0;  // page table cells that the device has, up to the limit at least
    std::int64_t promised_pages = 0;
    std::int64_t settled = 0, upper = 0, secured = 0, context_max = 0;  // tokens
    std::int32_t lookahead = 0;   // of the newest step; secured beyond `upper`
    std::int64_t limit_sent = 0;  // what the device has, by seat: it survives the owner
    std::uint64_t named_in = 0;   // last call that saw it in a batch; no decision depends on it
  };

  struct Page {
    std::int32_t owner = kNobody;
    std::int32_t holds = 0;
    std::uint64_t named_in = 0;  // as in Seat
  };

  struct Hold {
    std::uint32_t generation = 1;
    bool active = false;
    std::int32_t seat = -1;  // -1: pages only
    std::int32_t pages = 0;
  };

  // One batch row of an uncounted step, with what abandoning it must restore.
  struct StepRow {
    RequestId request;
    std::int32_t tokens = 0;  // over all runs
    bool runs_once = false;   // longer than draft_max + 1: it keeps all of its tokens
    std::int32_t cells_sent_before = 0;
    std::int32_t lookahead_before = 0;
    std::uint32_t flags = 0;
  };

  struct Step {
    StepId id = -1;
    bool settled = false;
    std::int32_t rows = 0;
    std::int32_t lowered = 0;
  };

  explicit State(const Limits& limits);
  void clear();  // to the state after construction, generations aside

  bool is_live(RequestId request) const {
    if (request.index < 0 || request.index >= limits.seats_max) return false;
    const Seat& seat = seats[static_cast<std::size_t>(request.index)];
    return seat.owned && seat.generation == request.generation;
  }
  std::int64_t outstanding(const Seat& seat) const {
    return max_of<std::int64_t>(0, seat.promised_pages - seat.pages);
  }

  // ledger_state.cpp: records and stacks.
  std::string why_not_live(RequestId request) const;
  std::int32_t find(RequestId request) const;  // its seat; UsageError where stale
  std::span<PageId> pages_of(std::int32_t seat);
  std::span<PageId> pages_of_hold(std::int32_t hold);
  std::int64_t unpromised() const;    // free pages that no request is promised
  std::int64_t usable_pages() const;  // all but the sink
  std::int64_t wanted_limit(std::int32_t seat) const;
  void mark_dirty(std::int32_t seat);
  void draw_pages(std::int32_t seat, std::int64_t count);
  void give_back_tail(std::int32_t seat);
  void release_page(PageId page);  // becomes held or free
  void publish();
  void check_alive() const;  // throws the latched reason
  [[noreturn]] void fail(const std::string& reason);

  // ledger_steps.cpp
  Step& step_of(StepId id) { return steps[ring_of(id)]; }
  std::size_t ring_of(StepId id) const { return static_cast<std::size_t>(id) % steps.size(); }
  std::span<StepRow> rows_of(StepId id);
  std::span<Outcome> outcomes_of(StepId id);
  std::span<std::int32_t> lowered_of(StepId id);
  void check_shape(StepShape shape, PlanBufferId buffer, std::int32_t repeat) const;
  void check_rows(std::span<const BatchRow> rows, StepShape shape, std::int32_t repeat);
  void check_ragged_order(std::span<const BatchRow> rows, std::int32_t repeat) const;
  void count_step(StepId id);
  void pack_rows(std::span<const BatchRow> rows, std::int32_t repeat);
  void pack_lowered_limits();

  // ledger_holds.cpp. Seat -1: pages only. A Shortfall where all holds are in use.
  OrShortfall<HoldId> take_hold(std::int32_t seat, std::span<const PageId> held);

  // ledger_checks.cpp
  void check_pages();
  void check_seats();
  void check_steps();
  void check_holds();
  void require(bool condition, const char* what, std::int64_t index = -1);
  std::string describe() const;
  std::uint64_t digest() const;

  const Limits limits;
  std::vector<Seat> seats;                 // [seats_max]
  std::vector<PageId> page_lists;          // [seats_max, cells_max]
  std::vector<Page> pages;                 // [pages]
  std::vector<Hold> holds;                 // [holds_max]
  std::vector<PageId> hold_lists;          // [holds_max, cells_max]
  std::vector<Step> steps;                 // [run_ahead_max + 1], by id modulo
  std::vector<StepRow> step_rows;          // [run_ahead_max + 1, rows_max]
  std::vector<Outcome> step_outcomes;      // [run_ahead_max + 1, rows_max]
  std::vector<std::int32_t> step_lowered;  // [run_ahead_max + 1, seats_max]

  // Stacks with room for everything, the last one goes first.
  std::vector<std::int32_t> free_seats, free_pages, free_holds;
  // Seats whose limit on the device may differ from the wanted one, in the order of the causes.
  std::vector<std::int32_t> dirty_seats;

  // Sums over the records, kept so that asking costs no walk; check_invariants() proves them.
  std::int64_t outstanding_sum = 0;
  std::int64_t held_pages = 0;  // without an owner
  std::int64_t held_seats = 0;
  std::int32_t sink = -1;

  StepId next_step = 0;  // what the next prepare is called
  StepId first_uncounted = 0;
  std::uint64_t call = 0;  // for `named_in`
  StepUpdate update;
  std::vector<std::int32_t> scratch;  // [max(pages, seats_max)] for check_invariants()

  std::array<std::atomic<std::int64_t>, 10> published{};  // Usage, in its order
  std::atomic<bool> broken{false};
  std::string broken_reason;  // written before `broken`
};

}  // namespace quire
