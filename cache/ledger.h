// The host's truth about who owns which page and seat. It decides and touches no device; what it
// decides travels as a StepUpdate.
//
// Lengths are intervals: `settled` is what counted outcomes have confirmed, `upper` adds what is
// prepared and in flight. Pages cover `secured`, which `reserve` raises beyond `upper`:
//   settled <= upper <= secured <= 256 * pages owned.
// Decisions are a function of the calls alone: no clock, no device, no address, no hash order. Two
// ledgers fed the same calls hand out the same ids and have equal digests, also when one of them
// hears outcomes later than the other.
//
// One owner thread; `usage()` from any thread. Nothing blocks. Nothing is allocated after
// construction but the text of errors and of `describe()`.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <quire/cache/limits.h>
#include <quire/cache/shortfall.h>
#include <quire/cache/step_update.h>
#include <quire/runtime/base/ids.h>

namespace quire {

// One batch row of a step to be prepared: `tokens` of `request` in each run of the step.
// In a decode shape at most its tokens_per_row; zero is legal and plans nothing.
struct BatchRow {
  RequestId request;
  std::int32_t tokens = 1;
  // Beyond the last of them, for draft passes to write to (0..draft_max + 1): secured as well and
  // within the seat's limit on the device, but no part of any length.
  std::int32_t lookahead_tokens = 0;
};

// What became of one batch row, over all runs of its step: how many tokens its length grew by
// (0..tokens * repeat; a row longer than draft_max + 1 keeps all, or 0 where it was inert), and
// whether it has stopped itself.
struct Outcome {
  std::int32_t kept_tokens = 0;
  bool stopped = false;
};

struct Headroom {
  std::int64_t seats;  // free
  std::int64_t pages;  // free and promised to nobody
};

struct Usage {
  std::int64_t pages_total, pages_free, pages_owned, pages_held, pages_promised, pages_sink;
  std::int64_t seats_total, seats_free, seats_owned, seats_held;
};

struct RequestInfo {
  SeatId seat;
  std::int64_t settled_tokens;
  std::int64_t upper_tokens;
  std::int64_t secured_tokens;
  std::int64_t context_max_tokens;
  std::int64_t pages_owned;
  std::int64_t pages_promised;  // still set aside, not yet drawn
  bool stopped;                 // as the last counted outcome said
};

class Ledger {
 public:
  // Throws UsageError where the limits are out of range or cannot hold one request.
  explicit Ledger(const Limits& limits);
  ~Ledger();
  Ledger(Ledger&&) noexcept;
  Ledger& operator=(Ledger&&) noexcept;

  // Takes a seat, and sets pages for `promised_tokens` aside, by count: no other request can take
  // them. `context_max_tokens` is the most tokens that may ever be secured for the request.
  // Shortfall of seats or pages. UsageError: 0 < context_max_tokens <= context_max and
  // 0 <= promised_tokens <= context_max_tokens do not hold, or the request could never fit.
  OrShortfall<RequestId> admit(std::int64_t context_max_tokens, std::int64_t promised_tokens);

  // Makes sure that `tokens` (> 0) beyond the upper length have pages, drawing on the own promise
  // first: all or none. Idempotent. Returns the number of pages added, 0 included.
  // UsageError: stale request, tokens out of range, beyond the request's context_max_tokens.
  OrShortfall<std::int64_t> reserve(RequestId request, std::int64_t tokens);

  // The most tokens that `reserve` would grant now.
  std::int64_t tokens_that_fit(RequestId request) const;

  // Packs a step into the given plan buffer. First counts the outcomes of step
  // (this id - 1 - run_ahead_max), giving back what no prepared step can reach any more; every batch
  // row must then have `tokens * repeat + lookahead_tokens` secured. Batch rows beyond `rows` are
  // padding.
  // In a ragged shape rows of at most draft_max + 1 tokens come before longer ones.
  // The update stays valid until the next `prepare` or `padding_update`.
  // UsageError: that outcome was not settled, stale or repeated request, tokens not secured (named
  // with row and number), more rows or tokens than the shape, a lookahead out of range, shape beyond
  // the limits, repeat outside [1, repeat_max] or of a ragged step with a row longer than
  // draft_max + 1.
  const StepUpdate& prepare(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
                            std::int32_t repeat = 1);

  // A step of padding only, for warm-up, capture and idle ranks: no id, outside the order, touches
  // nothing but its plan buffer. Valid until the next `prepare` or `padding_update`.
  const StepUpdate& padding_update(StepShape shape, PlanBufferId buffer);

  // Tells what became of a prepared step, one outcome per batch row in the order of `prepare`. It
  // counts from prepare(id + 1 + run_ahead_max) on, never earlier, however early it is told.
  // Outcomes of requests released meanwhile are ignored. Steps settle in any order.
  // UsageError: step unknown, settled before, counts out of range.
  void settle(StepId id, std::span<const Outcome> outcomes);

  // Undoes the newest prepared step, of which nothing was applied or launched; its id is given
  // again. What its update would have changed travels in the next one. A release made meanwhile
  // stays. UsageError: not the newest step, or settled.
  void abandon(StepId id);

  // Gives seat and pages back; they may go to any step prepared later, for the stream orders reuse.
  // What is held becomes free when its last hold is dropped. UsageError: stale request.
  void release(RequestId request);

  // The next update that names the request clears its stopped flag on the device.
  void resume(RequestId request);

  // For readers that the stream does not order. Keeps seat and pages that the request owns now
  // (or just these pages) from other owners until dropped, also beyond its release.
  OrShortfall<HoldId> hold(RequestId request);
  OrShortfall<HoldId> hold(std::span<const PageId> pages);  // each owned or held; at most cells_max
  void drop(HoldId hold);

  // Takes one page out of the pool for padding to be written to; once. Its entries are in nobody's
  // visible range.
  OrShortfall<PageId> reserve_sink();

  Headroom headroom() const;
  Usage usage() const;  // any thread; each figure is exact for some moment
  RequestInfo info(RequestId request) const;
  std::span<const PageId> pages_of(RequestId request) const;  // valid until the next call
  std::string describe() const;
  // Of everything that later decisions depend on; outcomes that do not count yet are not in it.
  std::uint64_t digest() const;

  // Proves conservation, promises and bounds from the records alone. Throws BrokenInvariant, after
  // which every later call does.
  void check_invariants() const;

  // Back to the state after construction, but that the sink stays. Handles given before are stale.
  // Step ids start over, so the device caches must be cleared with it (`DeviceCache::clear`).
  void reset();

  const Limits& limits() const;

 private:
  friend struct LedgerTestAccess;  // tests damage the state to see check_invariants() find it
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace quire
