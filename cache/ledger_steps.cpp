// Steps: what is prepared, what became of it, and what is undone. A refused call changes nothing:
// every check of `prepare` comes before its first change, and none of them depends on whether the
// outcomes that this prepare counts are counted yet (secured - upper stays what it was).
#include <algorithm>

#include <quire/cache/ledger.h>
#include <quire/cache/ledger_state.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

}  // namespace

std::span<Ledger::State::StepRow> Ledger::State::rows_of(StepId id) {
  return {step_rows.data() + ring_of(id) * size(limits.rows_max), size(step_of(id).rows)};
}

std::span<Outcome> Ledger::State::outcomes_of(StepId id) {
  return {step_outcomes.data() + ring_of(id) * size(limits.rows_max), size(step_of(id).rows)};
}

std::span<std::int32_t> Ledger::State::lowered_of(StepId id) {
  return {step_lowered.data() + ring_of(id) * size(limits.seats_max), size(step_of(id).lowered)};
}

void Ledger::State::check_shape(StepShape shape, PlanBufferId buffer, std::int32_t repeat) const {
  QUIRE_CHECK(buffer.value >= 0 && buffer.value < limits.plan_buffers, "plan buffer ", buffer.value,
              " does not exist; supported: 0 to ", limits.plan_buffers - 1);
  QUIRE_CHECK(shape.rows >= 1 && shape.rows <= limits.rows_max, "a shape of ", shape.rows,
              " batch rows; supported: 1 to rows_max ", limits.rows_max);
  QUIRE_CHECK(shape.tokens >= 1 && shape.tokens <= limits.tokens_max, "a shape of ", shape.tokens,
              " tokens; supported: 1 to tokens_max ", limits.tokens_max);
  QUIRE_CHECK(shape.tokens_per_row >= 0 && shape.tokens_per_row <= limits.draft_max + 1,
              "a shape of ", shape.tokens_per_row,
              " tokens per batch row; supported: 1 to draft_max + 1 = ", limits.draft_max + 1,
              ", or 0 for a ragged step");
  const std::int64_t room = std::int64_t{shape.rows} * shape.tokens_per_row;
  QUIRE_CHECK(!shape.is_decode() || shape.tokens == room, "a decode shape of ", shape.rows, " x ",
              shape.tokens_per_row, " has ", room, " tokens, not ", shape.tokens);
  QUIRE_CHECK(repeat >= 1 && repeat <= limits.repeat_max, "a repeat count of ", repeat,
              "; supported: 1 to repeat_max ", limits.repeat_max);
}

void Ledger::State::check_ragged_order(std::span<const BatchRow> rows, std::int32_t repeat) const {
  std::int64_t longer = -1;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].tokens > limits.draft_max + 1) {
      longer = static_cast<std::int64_t>(i);
      QUIRE_CHECK(repeat == 1, "batch row ", i, " has ", rows[i].tokens,
                  " tokens: a step with rows longer than draft_max + 1 = ", limits.draft_max + 1,
                  " runs once, not ", repeat, " times");
    } else if (rows[i].tokens > 0) {
      QUIRE_CHECK(longer < 0, "batch row ", i, " with ", rows[i].tokens,
                  " tokens stands behind row ", longer,
                  ", which is longer than draft_max + 1 = ", limits.draft_max + 1,
                  ": short rows come first");
    }
  }
}

void Ledger::State::check_rows(std::span<const BatchRow> rows, StepShape shape,
                               std::int32_t repeat) {
  QUIRE_CHECK(rows.size() <= size(shape.rows), rows.size(), " batch rows in a shape of ",
              shape.rows);
  ++call;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const BatchRow& row = rows[i];
    QUIRE_CHECK(is_live(row.request), "batch row ", i, ": ", why_not_live(row.request));
    Seat& seat = seats[size(row.request.index)];
    QUIRE_CHECK(seat.named_in != call, "batch row ", i, ": the request of seat ", row.request.index,
                " is in the batch twice");
    seat.named_in = call;
    QUIRE_CHECK(row.tokens >= 0, "batch row ", i, " has ", row.tokens, " tokens");
    QUIRE_CHECK(!shape.is_decode() || row.tokens <= shape.tokens_per_row, "batch row ", i, " has ",
                row.tokens, " tokens; the shape has room for ", shape.tokens_per_row);
    QUIRE_CHECK(row.lookahead_tokens >= 0 && row.lookahead_tokens <= limits.draft_max + 1,
                "batch row ", i, " looks ", row.lookahead_tokens,
                " tokens ahead; supported: 0 to draft_max + 1 = ", limits.draft_max + 1);
    const std::int64_t asked = std::int64_t{row.tokens} * repeat + row.lookahead_tokens;
    QUIRE_CHECK(asked <= seat.secured - seat.upper, "batch row ", i, " (seat ", row.request.index,
                "): ", asked, " tokens asked, ", seat.secured - seat.upper,
                " secured beyond the upper length; reserve() more first");
    tokens += row.tokens;
  }
  QUIRE_CHECK(tokens <= shape.tokens, tokens, " tokens in a shape of ", shape.tokens);
  if (!shape.is_decode()) check_ragged_order(rows, repeat);
}

void Ledger::State::count_step(StepId id) {
  const std::span<const Outcome> outcomes = outcomes_of(id);
  const std::span<const StepRow> rows = rows_of(id);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!is_live(rows[i].request)) continue;
    const std::int32_t index = rows[i].request.index;
    Seat& seat = seats[size(index)];
    const std::int64_t not_kept = rows[i].tokens - outcomes[i].kept_tokens;
    seat.settled += outcomes[i].kept_tokens;
    seat.upper -= not_kept;
    seat.secured -= not_kept;
    seat.stopped = outcomes[i].stopped;
    give_back_tail(index);
    if (not_kept > 0) mark_dirty(index);
  }
  first_uncounted = id + 1;
}

// Rows first, then their cells, as the format wants it.
void Ledger::State::pack_rows(std::span<const BatchRow> rows, std::int32_t repeat) {
  const std::span<StepRow> records = rows_of(next_step);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int32_t index = rows[i].request.index;
    Seat& seat = seats[size(index)];
    const std::uint32_t flags = (seat.new_owner ? BatchRowUpdate::kNewOwner : 0U) |
                                (seat.resume_pending ? BatchRowUpdate::kResume : 0U);
    records[i] = {rows[i].request, rows[i].tokens * repeat,
                  rows[i].tokens > limits.draft_max + 1, seat.cells_sent, seat.lookahead, flags};
    seat.new_owner = seat.resume_pending = false;
    seat.upper += records[i].tokens;
    seat.lookahead = rows[i].lookahead_tokens;
    seat.limit_sent = wanted_limit(index);
    update.add(BatchRowUpdate{index, rows[i].tokens, static_cast<std::int32_t>(seat.limit_sent),
                              flags});
  }
  for (const StepRow& record : records) {
    const std::int32_t index = record.request.index;
    Seat& seat = seats[size(index)];
    const auto needed = static_cast<std::int32_t>(ceil_div(seat.limit_sent, kPageTokens));
    const std::span<const PageId> pages_now = pages_of(index);
    for (; seat.cells_sent < needed; ++seat.cells_sent) {
      update.add(CellUpdate{index, seat.cells_sent, pages_now[size(seat.cells_sent)].value});
    }
  }
}

// What a release, a shortfall of kept tokens or an abandoned step left behind. Seats named by a
// batch row of this update have what they want by now.
void Ledger::State::pack_lowered_limits() {
  Step& step = step_of(next_step);
  for (const std::int32_t index : dirty_seats) {
    Seat& seat = seats[size(index)];
    seat.listed = false;
    const std::int64_t wanted = wanted_limit(index);
    if (seat.limit_sent == wanted) continue;
    seat.limit_sent = wanted;
    update.add(LimitUpdate{index, static_cast<std::int32_t>(wanted)});
    ++step.lowered;
    lowered_of(next_step).back() = index;
  }
  dirty_seats.clear();
}

const StepUpdate& Ledger::prepare(std::span<const BatchRow> rows, StepShape shape,
                                  PlanBufferId buffer, std::int32_t repeat) {
  State& s = *state_;
  s.check_alive();
  const StepId counted = s.next_step - 1 - s.limits.run_ahead_max;
  const bool counts = counted >= s.first_uncounted;
  QUIRE_CHECK(!counts || s.step_of(counted).settled, "prepare: step ", counted,
              " is not settled; step ", s.next_step, " may be prepared after settle(", counted,
              "), with run_ahead_max ", s.limits.run_ahead_max);
  s.check_shape(shape, buffer, repeat);
  s.check_rows(rows, shape, repeat);

  if (counts) s.count_step(counted);
  s.step_of(s.next_step) = {s.next_step, false, static_cast<std::int32_t>(rows.size()), 0};
  try {
    s.update.start(s.next_step, buffer, shape, repeat);
    s.pack_rows(rows, repeat);
    s.pack_lowered_limits();
    s.update.seal();
  } catch (const BrokenInvariant& error) {
    s.fail(error.what());
  }
  ++s.next_step;
  s.publish();
  return s.update;
}

const StepUpdate& Ledger::padding_update(StepShape shape, PlanBufferId buffer) {
  State& s = *state_;
  s.check_alive();
  s.check_shape(shape, buffer, 1);
  s.update.start(kPaddingStep, buffer, shape, 1);
  s.update.seal();
  return s.update;
}

void Ledger::settle(StepId id, std::span<const Outcome> outcomes) {
  State& s = *state_;
  s.check_alive();
  QUIRE_CHECK(id >= 0 && id < s.next_step, "settle: step ", id,
              " is unknown; prepared so far: ", s.next_step, " steps, from 0");
  QUIRE_CHECK(id >= s.first_uncounted && !s.step_of(id).settled, "settle: step ", id,
              " was settled before");
  const std::span<const State::StepRow> rows = s.rows_of(id);
  QUIRE_CHECK(outcomes.size() == rows.size(), "settle: ", outcomes.size(), " outcomes for the ",
              rows.size(), " batch rows of step ", id);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    // Checked for released requests too: what is refused must not depend on when a rank hears.
    const std::int32_t kept = outcomes[i].kept_tokens;
    QUIRE_CHECK(kept >= 0 && kept <= rows[i].tokens, "settle: step ", id, ", batch row ", i,
                " kept ", kept, " tokens; supported: 0 to ", rows[i].tokens);
    QUIRE_CHECK(!rows[i].runs_once || kept == 0 || kept == rows[i].tokens, "settle: step ", id,
                ", batch row ", i, " kept ", kept, " of ", rows[i].tokens, " tokens; a row longer ",
                "than draft_max + 1 = ", s.limits.draft_max + 1, " keeps all, or none where it was ",
                "inert");
  }
  std::copy(outcomes.begin(), outcomes.end(), s.outcomes_of(id).begin());
  s.step_of(id).settled = true;
}

void Ledger::abandon(StepId id) {
  State& s = *state_;
  s.check_alive();
  QUIRE_CHECK(id >= 0 && id == s.next_step - 1, "abandon: step ", id,
              " is not the newest prepared one, ", s.next_step - 1);
  QUIRE_CHECK(id >= s.first_uncounted && !s.step_of(id).settled, "abandon: step ", id,
              " was settled");
  for (const State::StepRow& row : s.rows_of(id)) {
    State::Seat& seat = s.seats[size(row.request.index)];
    if (s.is_live(row.request)) {
      seat.upper -= row.tokens;
      seat.lookahead = row.lookahead_before;
      seat.cells_sent = std::min(seat.cells_sent, row.cells_sent_before);
      seat.new_owner |= (row.flags & BatchRowUpdate::kNewOwner) != 0;
      seat.resume_pending |= (row.flags & BatchRowUpdate::kResume) != 0;
    }
    seat.limit_sent = State::kUnknown;
    s.mark_dirty(row.request.index);
  }
  for (const std::int32_t index : s.lowered_of(id)) {
    s.seats[size(index)].limit_sent = State::kUnknown;
    s.mark_dirty(index);
  }
  --s.next_step;
}

}  // namespace quire
