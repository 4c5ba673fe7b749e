// Admission, reservation, release and the questions: everything about one request that no step is
// needed for.
#include <quire/cache/ledger.h>

#include <algorithm>

#include <quire/cache/ledger_state.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

}  // namespace

Ledger::Ledger(const Limits& limits) : state_(std::make_unique<State>(limits)) {}
Ledger::~Ledger() = default;
Ledger::Ledger(Ledger&&) noexcept = default;
Ledger& Ledger::operator=(Ledger&&) noexcept = default;

OrShortfall<RequestId> Ledger::admit(std::int64_t context_max_tokens,
                                     std::int64_t promised_tokens) {
  State& s = *state_;
  s.check_alive();
  QUIRE_CHECK(context_max_tokens > 0 && context_max_tokens <= s.limits.context_max,
              "admit: context_max_tokens is ", context_max_tokens, "; supported: 1 to ",
              s.limits.context_max);
  QUIRE_CHECK(promised_tokens >= 0 && promised_tokens <= context_max_tokens,
              "admit: promised_tokens is ", promised_tokens, "; supported: 0 to ",
              context_max_tokens);
  const std::int64_t context_pages = ceil_div(context_max_tokens, kPageTokens);
  QUIRE_CHECK(context_pages <= s.usable_pages(), "admit: a context of ", context_max_tokens,
              " tokens needs ", context_pages, " pages and can never fit: the cache has ",
              s.usable_pages(), " usable pages of ", kPageTokens, " tokens");
  if (s.free_seats.empty()) return Shortfall{Resource::kSeats, 1, 0, s.held_seats};
  const std::int64_t promised_pages = ceil_div(promised_tokens, kPageTokens);
  if (promised_pages > s.unpromised()) {
    return Shortfall{Resource::kPages, promised_pages, s.unpromised(), s.held_pages};
  }
  const std::int32_t seat = s.free_seats.back();
  s.free_seats.pop_back();
  State::Seat& record = s.seats[size(seat)];
  record.owned = true;
  record.new_owner = true;
  record.context_max = context_max_tokens;
  record.promised_pages = promised_pages;
  s.outstanding_sum += promised_pages;
  s.publish();
  return RequestId{seat, record.generation};
}

OrShortfall<std::int64_t> Ledger::reserve(RequestId request, std::int64_t tokens) {
  State& s = *state_;
  s.check_alive();
  const std::int32_t seat = s.find(request);
  State::Seat& record = s.seats[size(seat)];
  QUIRE_CHECK(tokens > 0, "reserve: ", tokens, " tokens asked; at least 1 is supported");
  QUIRE_CHECK(tokens <= record.context_max - record.upper, "reserve: ", tokens,
              " tokens beyond an upper length of ", record.upper,
              " can never fit: the request was admitted with context_max_tokens ",
              record.context_max);
  const std::int64_t target = std::max(record.secured, record.upper + tokens);
  const std::int64_t covered = ceil_div(target, kPageTokens);
  QUIRE_CHECK(covered <= s.usable_pages(), "reserve: ", target, " tokens need ", covered,
              " pages and can never fit: the cache has ", s.usable_pages(), " usable pages");
  const std::int64_t needed = std::max<std::int64_t>(0, covered - record.pages);
  const std::int64_t available = s.outstanding(record) + s.unpromised();
  if (needed > available) {
    return Shortfall{Resource::kPages, needed, available, s.held_pages};
  }
  record.secured = target;
  if (needed > 0) {
    s.draw_pages(seat, needed);
    s.publish();
  }
  return needed;
}

std::int64_t Ledger::tokens_that_fit(RequestId request) const {
  const State& s = *state_;
  s.check_alive();
  const State::Seat& record = s.seats[size(s.find(request))];
  const std::int64_t reach = record.pages + s.outstanding(record) + s.unpromised();
  return std::min(record.context_max, reach * kPageTokens) - record.upper;
}

void Ledger::release(RequestId request) {
  State& s = *state_;
  s.check_alive();
  const std::int32_t seat = s.find(request);
  State::Seat& record = s.seats[size(seat)];
  s.outstanding_sum -= s.outstanding(record);
  // From the tail: the first page is then the first to be given out again.
  while (record.pages > 0) {
    s.release_page(s.pages_of(seat).back());
    --record.pages;
  }
  State::Seat vacant;
  vacant.generation = record.generation + 1;
  vacant.holds = record.holds;
  vacant.listed = record.listed;
  vacant.limit_sent = record.limit_sent;
  vacant.named_in = record.named_in;
  record = vacant;
  if (record.holds > 0) {
    ++s.held_seats;
  } else {
    s.free_seats.push_back(seat);
  }
  if (record.limit_sent != 0) s.mark_dirty(seat);
  s.publish();
}

void Ledger::resume(RequestId request) {
  State& s = *state_;
  s.check_alive();
  s.seats[size(s.find(request))].resume_pending = true;
}

Headroom Ledger::headroom() const {
  const State& s = *state_;
  s.check_alive();
  return {static_cast<std::int64_t>(s.free_seats.size()), s.unpromised()};
}

Usage Ledger::usage() const {
  const State& s = *state_;
  s.check_alive();
  std::array<std::int64_t, 10> f;
  for (std::size_t i = 0; i < f.size(); ++i) {
    f[i] = s.published[i].load(std::memory_order_relaxed);
  }
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9]};
}

RequestInfo Ledger::info(RequestId request) const {
  const State& s = *state_;
  s.check_alive();
  const std::int32_t seat = s.find(request);
  const State::Seat& record = s.seats[size(seat)];
  return {SeatId(seat),       record.settled, record.upper,          record.secured,
          record.context_max, record.pages,   s.outstanding(record), record.stopped};
}

std::span<const PageId> Ledger::pages_of(RequestId request) const {
  State& s = *state_;
  s.check_alive();
  return s.pages_of(s.find(request));
}

std::string Ledger::describe() const {
  state_->check_alive();
  return state_->describe();
}

std::uint64_t Ledger::digest() const {
  state_->check_alive();
  return state_->digest();
}

void Ledger::reset() {
  state_->check_alive();
  state_->clear();
}

const Limits& Ledger::limits() const { return state_->limits; }

}  // namespace quire
