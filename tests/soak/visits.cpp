// The engine's steps: who takes part, what is launched, and what the device says afterwards.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <quire/runtime/base/errors.h>

#include "tests/soak/engine.h"

namespace quire::soak {

using test::expect;
using test::size;

bool Engine::is_live(RequestId request) const {
  return std::ranges::any_of(live_, [&](const Live& live) { return live.id == request; });
}

// Reserves, and takes pages from others where there are none. False: not in this batch.
bool Engine::secure(Batch& batch, RequestId request, std::int64_t tokens) {
  if (tokens == 0) return true;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const bool fits = tokens <= ledger().tokens_that_fit(request);
    const auto answer = ledger().reserve(request, tokens);
    expect(bool(answer) == fits, "tokens_that_fit and reserve differ");
    if (answer) return true;
    ++counts_["shortfalls of reserve"];
    if (attempt == 0 && chance(60)) preempt_for(batch, request);
  }
  return false;
}

// Where rules change, more often than elsewhere.
std::int64_t Engine::chunk(std::int64_t most) {
  constexpr std::array<std::int64_t, 12> kEdges{1, 2, 3, 4, 5, 8, 127, 128, 129, 255, 256, 257};
  const std::int64_t edge = kEdges[size(in(0, std::ssize(kEdges) - 1))];
  if (most < 1) return 0;
  if (chance(50) && edge <= most) return edge;
  return chance(15) ? most : in(1, std::min<std::int64_t>(most, chance(50) ? 40 : most));
}

void Engine::fill_decode(Batch& batch) {
  const Limits& limits = world_.limits();
  const auto most = static_cast<std::int32_t>(limits.draft_max + 1);
  const auto per_row = static_cast<std::int32_t>(chance(50) ? most : in(1, most));
  batch.repeat = static_cast<std::int32_t>(chance(40) ? 1 : in(1, limits.repeat_max));
  for (const RequestId id : random_requests()) {
    if (std::ssize(batch.rows) == limits.rows_max || !is_live(id)) continue;
    const RequestInfo info = ledger().info(id);
    if (info.stopped && !chance(15)) continue;
    const std::int64_t left = info.context_max_tokens - info.upper_tokens;
    // Too little makes draft passes inert.
    const std::int64_t wanted = limits.draft_max == 0 ? 0 : chance(70) ? most : in(0, most);
    const std::int64_t ahead = std::clamp<std::int64_t>(left - batch.repeat, 0, wanted);
    const std::int64_t room = (left - ahead) / batch.repeat;
    const std::int64_t tokens = std::min(room, chance(70) ? per_row : in(0, per_row));
    if (!secure(batch, id, tokens * batch.repeat + ahead)) continue;
    batch.rows.push_back({id, static_cast<std::int32_t>(tokens), static_cast<std::int32_t>(ahead)});
  }
  const std::int64_t rows = std::max<std::int64_t>(1, std::ssize(batch.rows));
  batch.captured = chance(70);
  batch.shape = batch.captured ? world_.captured_shape(rows, per_row, PlanBufferId(0))
                               : StepShape::decode(
                                     static_cast<std::int32_t>(in(rows, limits.rows_max)), per_row);
}

void Engine::fill_ragged(Batch& batch) {
  const Limits& limits = world_.limits();
  const std::int64_t short_most = limits.draft_max + 1;
  batch.all_short = chance(20);
  if (batch.all_short) batch.repeat = static_cast<std::int32_t>(in(1, limits.repeat_max));
  std::int64_t sum = 0;
  for (const RequestId id : random_requests()) {
    if (std::ssize(batch.rows) == limits.rows_max || !is_live(id)) continue;
    const RequestInfo info = ledger().info(id);
    if (info.stopped && !chance(15)) continue;
    const std::int64_t room = (info.context_max_tokens - info.upper_tokens) / batch.repeat;
    const std::int64_t most = std::min(room, limits.tokens_max - sum);
    const std::int64_t tokens = batch.all_short ? std::min(most, in(0, short_most))
                                : chance(5)     ? 0
                                                : chunk(most);
    if (!secure(batch, id, tokens * batch.repeat)) continue;
    batch.rows.push_back({id, static_cast<std::int32_t>(tokens)});
    sum += tokens;
  }
  std::ranges::stable_partition(batch.rows,
                                [&](const BatchRow& row) { return row.tokens <= short_most; });
  const std::int64_t rows = std::max<std::int64_t>(1, std::ssize(batch.rows));
  const std::int64_t tokens = std::max<std::int64_t>(1, sum);
  batch.shape = StepShape::ragged(
      static_cast<std::int32_t>(chance(50) ? rows : in(rows, limits.rows_max)),
      static_cast<std::int32_t>(chance(50) ? tokens : in(tokens, limits.tokens_max)));
}

// Some of those that live, in any order: batch rows change places from step to step.
std::vector<RequestId> Engine::random_requests() {
  std::vector<RequestId> ids;
  for (const Live& live : live_) ids.push_back(live.id);
  for (std::size_t i = ids.size(); i > 1; --i) {
    std::swap(ids[i - 1], ids[size(in(0, static_cast<std::int64_t>(i) - 1))]);
  }
  if (!ids.empty() && chance(40)) ids.resize(size(in(1, std::ssize(ids))));
  return ids;
}

Batch Engine::choose_batch() {
  Batch batch;
  if (chance(65)) {
    fill_decode(batch);
  } else {
    fill_ragged(batch);
  }
  return batch;
}

VisitInput Engine::make_input() {
  VisitInput input;
  input.salt = static_cast<std::uint32_t>(in(0, 0x7FFFFFFF));
  input.refuse_percent = static_cast<std::int32_t>(chance(20) ? 0 : in(10, 90));
  input.wrong_percent = chance(90) ? 0 : 10;
  input.stop_percent = static_cast<std::int32_t>(chance(60) ? 0 : in(1, 10));
  input.lag_percent = static_cast<std::int32_t>(chance(60) ? 0 : in(5, 60));
  input.refused_are_nan = chance(30) ? 1 : 0;
  for (const Live& live : live_) {
    input.content[live.id.index] = live.job.content;
    input.goal[live.id.index] = static_cast<std::int32_t>(live.job.goal);
  }
  return input;
}

void Engine::prepare_and_abandon() {
  const Batch batch = choose_batch();
  settle_due();
  const StepUpdate& update =
      ledger().prepare(batch.rows, batch.shape, PlanBufferId(0), batch.repeat);
  expect(update.id() == next_, "another step id than the next");
  if (chance(30) && !live_.empty()) release(any_live(), "cancels");
  ledger().abandon(next_);
  ledger().check_invariants();
  ++counts_["abandoned steps"];
}

void Engine::padding_visit() {
  const auto shapes = world_.captured_shapes();
  const StepShape shape = shapes[size(in(0, std::ssize(shapes) - 1))];
  const PlanBufferId buffer(static_cast<std::int32_t>(in(0, world_.limits().plan_buffers - 1)));
  world_.cache().begin_padding_step(shape, buffer, world_.stream());
  const std::int32_t part = any_captured_part();
  if (chance(50)) {
    world_.replay(buffer, shape, part);
  } else {
    world_.run(buffer, shape, captured_part(part, shape, world_.limits().draft_max), {});
  }
  ++counts_["padding steps"];
}

void Engine::visit() {
  const Batch batch = choose_batch();
  settle_due();
  const PlanBufferId buffer(static_cast<std::int32_t>(in(0, world_.limits().plan_buffers - 1)));
  const StepUpdate& update = ledger().prepare(batch.rows, batch.shape, buffer, batch.repeat);
  expect(update.id() == next_, "another step id than the next");
  world_.cache().device().apply(update, world_.stream());
  model_.apply(update);
  Visit visit{.id = next_, .rows = {}, .foretold = {}};
  for (const BatchRow& row : batch.rows) {
    const std::int32_t seat = row.request.index;
    visit.rows.push_back({row.request, seat, row.tokens, model_.lengths(seat).target});
    std::ranges::find(live_, row.request, &Live::id)->lookahead = row.lookahead_tokens;
  }
  run(update, batch, buffer, make_input());
  world_.keep_result(next_, buffer);
  visit.foretold = model_.foretold();
  count_foretold(visit.foretold);
  visits_.push_back(std::move(visit));
  ++next_;
  ++counts_[batch.shape.is_decode() ? "decode visits" : "ragged visits"];
  if (batch.rows.size() < size(batch.shape.rows)) ++counts_["visits with padding rows"];
  if (!batch.rows.empty() && chance(30)) {
    Visit& early = visits_[size(in(0, std::ssize(visits_) - 1))];
    if (!early.settled) settle(early);
  }
}

// Extensions in step with the target, most of the time.
std::int32_t Engine::any_captured_part() {
  const std::int64_t dice = in(1, 100);
  return dice <= 55 ? 1 : dice <= 75 ? 2 : dice <= 90 ? 3 : 0;
}

// Of an eager run. A long row of a ragged step extends once, and as a whole; so does one that
// overwrites its oldest window entry.
DraftPart Engine::any_part(const Batch& batch) {
  const std::int64_t draft_max = world_.limits().draft_max;
  if (chance(12)) return {};
  const bool decode = batch.shape.is_decode();
  DraftPart part{.extensions = 1, .counted = decode && chance(75)};
  const bool may_repeat = part.counted || (draft_max > 0 && batch.all_short);
  if (may_repeat && chance(30)) part.extensions = 2;
  if (decode && draft_max > 0) part.passes = static_cast<std::int32_t>(in(0, draft_max + 1));
  return part;
}

Chosen Engine::choose_run(const Batch& batch) {
  Chosen chosen;
  Enqueued& enqueued = chosen.enqueued;
  if (batch.captured && !chance(10)) {
    chosen.replays = true;
    chosen.captured_part = any_captured_part();
    enqueued.draft = captured_part(chosen.captured_part, batch.shape, world_.limits().draft_max);
    return chosen;
  }
  enqueued.draft = any_part(batch);
  if (chance(15) && batch.all_short) {
    enqueued.plans = 2;
  } else if (chance(15)) {
    enqueued.commits = 2;
  }
  return chosen;
}

void Engine::run_wrong_graph(const StepUpdate& update, PlanBufferId buffer) {
  const auto shapes = world_.captured_shapes();
  const StepShape other = shapes[size(in(0, std::ssize(shapes) - 1))];
  if (other == update.shape()) return;
  const std::int32_t part = any_captured_part();
  world_.replay_wrong(buffer, other, part);
  model_.run_wrong_shape(update, other, captured_part(part, other, world_.limits().draft_max));
  ++counts_["graphs of the wrong shape"];
}

void Engine::run(const StepUpdate& update, const Batch& batch, PlanBufferId buffer,
                 const VisitInput& input) {
  world_.start_visit(buffer, input);
  std::int64_t runs = batch.repeat;
  if (chance(5)) runs = in(0, batch.repeat);  // fewer than prepared
  if (chance(5)) ++runs;                      // one too many
  const std::int64_t wrong = chance(4) ? in(0, batch.repeat) : -1;
  for (std::int64_t i = 0; i < runs; ++i) {
    if (i == wrong) run_wrong_graph(update, buffer);
    const Chosen chosen = choose_run(batch);
    const Enqueued& enqueued = chosen.enqueued;
    if (chosen.replays) {
      world_.replay(buffer, batch.shape, chosen.captured_part);
    } else {
      world_.run(buffer, batch.shape, enqueued.draft, {enqueued.plans, enqueued.commits});
    }
    model_.run(update, input, enqueued);
    ++counts_[chosen.replays ? "replays" : "eager runs"];
    count_part(enqueued.draft);
  }
  counts_["runs beyond the first of a visit"] += std::max<std::int64_t>(0, runs - 1);
  if (runs > batch.repeat) ++counts_["runs too many"];
}

void Engine::count_part(const DraftPart& part) {
  counts_["draft plans"] += part.extensions + part.passes;
  counts_["draft extensions"] += part.extensions;
  counts_["draft passes"] += part.passes;
  if (part.extensions + part.passes == 0) ++counts_["steps without a draft plan"];
}

void Engine::count_foretold(const Foretold& foretold) {
  counts_["rows live"] += foretold.rows_live;
  counts_["rows with refused drafts"] += foretold.rows_refused;
  counts_["tokens refused"] += foretold.tokens_refused;
  counts_["rows with wrong counts"] += foretold.report.rows_kept_wrong;
  counts_["rows stopped, inert"] += foretold.report.rows_stopped;
  counts_["draft rows extended"] += foretold.rows_extended;
  counts_["draft tokens kept"] += foretold.tokens_extended;
  counts_["draft rows kept from getting ahead"] += foretold.rows_ahead;
  counts_["draft rows passed"] += foretold.rows_passed;
  counts_["draft rows behind"] += foretold.rows_behind;
  counts_["draft rows at a limit"] += foretold.report.rows_at_limit;
  counts_["draft rows with wrong counts"] += foretold.report.rows_wrong_tokens;
  counts_["draft rows with wrong positions"] += foretold.report.rows_wrong_positions;
  std::int64_t& most = counts_["draft tokens behind, at most"];
  most = std::max(most, foretold.tokens_behind_most);
}

// What the device says must be what was foretold; the ledger hears the device's word.
void Engine::settle(Visit& visit) {
  const VisitResult result = world_.wait_for_result(visit.id);
  const Foretold& foretold = visit.foretold;
  for (std::size_t seat = 0; seat < foretold.length.size(); ++seat) {
    if (result.length[seat] == foretold.length[seat] &&
        result.draft_length[seat] == foretold.draft_length[seat] &&
        result.stopped[seat] == foretold.stopped[seat]) {
      continue;
    }
    throw BrokenInvariant(concat("step ", visit.id, " of this life, seat ", seat, ": length ",
                                 result.length[seat], ", of drafts ", result.draft_length[seat],
                                 ", stopped ", result.stopped[seat], "; foretold ",
                                 foretold.length[seat], ", ", foretold.draft_length[seat], ", ",
                                 foretold.stopped[seat]));
  }
  DeviceReport report = result.report;
  expect((report.nonfinite_tiles > 0) == foretold.nonfinite, "the report's non-finite tiles");
  report.nonfinite_tiles = 0;
  if (std::memcmp(&report, &foretold.report, sizeof report) != 0) {
    const auto text = [](const DeviceReport& r) {
      return concat("at limit ", r.rows_at_limit, ", stopped ", r.rows_stopped, ", out of steps ",
                    r.rows_out_of_steps, ", wrong shape ", r.rows_wrong_shape, ", kept wrong ",
                    r.rows_kept_wrong, ", seat ", r.first_failing_seat, ", unplanned ",
                    r.appends_unplanned, ", wrong positions ", r.rows_wrong_positions,
                    ", wrong tokens ", r.rows_wrong_tokens, ", padding kept ", r.padding_rows_kept,
                    ", former owners ", r.rows_of_former_owners, ", commits unplanned ",
                    r.commits_unplanned);
    };
    throw BrokenInvariant(concat("step ", visit.id, " of this life, report: ", text(report),
                                 "; foretold: ", text(foretold.report)));
  }
  std::vector<Outcome> outcomes;
  for (const VisitRow& row : visit.rows) {
    const std::int64_t kept = result.length[row.seat] - row.length_before;
    outcomes.push_back({static_cast<std::int32_t>(kept), result.stopped[row.seat] != 0});
  }
  ledger().settle(visit.id, outcomes);
  visit.settled = true;
}

// What the next prepare counts.
void Engine::settle_due() {
  const StepId due = next_ - 1 - world_.limits().run_ahead_max;
  while (!visits_.empty() && visits_.front().id <= due) {
    if (!visits_.front().settled) settle(visits_.front());
    visits_.pop_front();
  }
}

}  // namespace quire::soak
