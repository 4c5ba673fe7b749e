// What a device must hold and say after a visit: lengths of both layer groups and flags by seat,
// moved by the same words as the sampler's, of batch rows taken one after the other. Failures throw
// std::logic_error.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <quire/cache/step_update.h>

#include "tests/soak/feed.h"
#include "tests/support/ledger_model.h"

namespace quire::soak {

// What a visit leaves behind.
struct Foretold {
  DeviceReport report;
  bool nonfinite = false;  // tiles of refused tokens were NaN: how many is the device's affair
  std::vector<std::int64_t> length, draft_length;
  std::vector<int> stopped;
  std::int64_t rows_refused = 0;  // that kept fewer tokens than they had
  std::int64_t tokens_refused = 0;
  std::int64_t rows_live = 0;
  std::int64_t rows_extended = 0;  // batch rows of extensions that moved a length
  std::int64_t tokens_extended = 0;
  std::int64_t rows_ahead = 0;   // that would have got ahead of the target
  std::int64_t rows_passed = 0;  // live batch rows of draft passes
  std::int64_t rows_behind = 0;  // whose draft group was behind the target after a step
  std::int64_t tokens_behind_most = 0;
};

// How often the plans and commits of one run were enqueued, and for which layers.
struct Enqueued {
  std::int32_t plans = 1;
  std::int32_t commits = 1;
  DraftPart draft;
};

class DeviceModel {
 public:
  DeviceModel(const Limits& limits, std::int32_t target_layers, std::int32_t draft_layers)
      : limits_(limits),
        target_layers_(target_layers),
        draft_layers_(draft_layers),
        device_(limits),
        draft_length_(test::size(limits.seats_max)) {}

  const test::Device& device() const { return device_; }
  Lengths lengths(std::int32_t seat) const {
    return {static_cast<std::int32_t>(device_.length[test::size(seat)]),
            static_cast<std::int32_t>(draft_length_[test::size(seat)])};
  }

  void apply(const StepUpdate& update) {
    device_.apply(update);
    for (const BatchRowUpdate& row : update.batch_rows()) {
      if (row.flags & BatchRowUpdate::kNewOwner) draft_length_[test::size(row.seat)] = 0;
    }
    now_ = Foretold{};
    now_.report.first_failing_seat = DeviceReport::kNoSeat;
    steps_left_ = update.header().repeat;
  }

  void run(const StepUpdate& update, const VisitInput& visit, const Enqueued& enqueued) {
    for (std::int32_t plan = 0; plan < enqueued.plans; ++plan) report_inert(update);
    if (steps_left_ == 0) return count_unplanned(enqueued);
    std::vector<BatchRowUpdate> live;
    for (const BatchRowUpdate& row : update.batch_rows()) {
      if (row.tokens == 0 || stopped(row)) continue;
      live.push_back(row);
      commit(row, visit, enqueued.commits);
    }
    const DraftPart& draft = enqueued.draft;
    for (std::int32_t i = 0; i < draft.extensions; ++i) {
      for (const BatchRowUpdate& row : live) extend_row(row, visit, i, enqueued);
    }
    for (std::int32_t i = 0; i < draft.passes; ++i) {
      for (const BatchRowUpdate& row : live) pass_row(row, visit, i, enqueued.plans);
    }
    for (const BatchRowUpdate& row : live) check_behind(row);
    const auto named = static_cast<std::int32_t>(update.batch_rows().size());
    const std::int32_t with_counts = 1 + (draft.counted ? 0 : draft.extensions);
    now_.report.padding_rows_kept += with_counts * enqueued.commits * (update.shape().rows - named);
    --steps_left_;
  }

  // The graph of another shape: nothing lives, and neither append nor commit finds its plan. A
  // draft plan of fewer tokens a row than were applied is of the right shape, but its target's was
  // not.
  void run_wrong_shape(const StepUpdate& update, StepShape graph, const DraftPart& draft) {
    const StepShape applied = update.shape();
    const auto rows = std::min<std::size_t>(update.batch_rows().size(), test::size(graph.rows));
    const auto plans_are_wrong = [&](std::int32_t plans) {
      for (const BatchRowUpdate& row : update.batch_rows().first(rows)) {
        for (std::int32_t i = 0; i < plans; ++i) count(now_.report.rows_wrong_shape, row.seat);
      }
    };
    const auto may_be_of_drafts = [&](std::int32_t tokens_per_row) {
      return applied.is_decode() && applied.rows == graph.rows &&
             tokens_per_row <= applied.tokens_per_row;
    };
    plans_are_wrong(1);
    if (!may_be_of_drafts(graph.tokens_per_row)) plans_are_wrong(draft.extensions);
    if (!may_be_of_drafts(1)) plans_are_wrong(draft.passes);
    count_unplanned({1, 1, draft});
  }

  Foretold foretold() const {
    Foretold result = now_;
    result.length = device_.length;
    result.draft_length = draft_length_;
    result.stopped = device_.stopped;
    return result;
  }

 private:
  void count(std::int32_t& counter, std::int32_t seat) {
    ++counter;
    now_.report.first_failing_seat = std::min(now_.report.first_failing_seat, seat);
  }
  void count(std::int32_t& counter, std::int32_t seat, std::int32_t times) {
    for (std::int32_t i = 0; i < times; ++i) count(counter, seat);
  }
  bool stopped(const BatchRowUpdate& row) const { return device_.stopped[test::size(row.seat)]; }
  std::int64_t limit(const BatchRowUpdate& row) const {
    return device_.limit[test::size(row.seat)];
  }

  void report_inert(const StepUpdate& update) {
    for (const BatchRowUpdate& row : update.batch_rows()) {
      if (row.tokens == 0) continue;
      if (steps_left_ == 0) {
        count(now_.report.rows_out_of_steps, row.seat);
      } else if (stopped(row)) {
        count(now_.report.rows_stopped, row.seat);
      } else {
        // What was prepared can always run.
        test::expect(lengths(row.seat).target + row.tokens <= limit(row),
                     "a batch row would pass the limit that its update set");
      }
    }
  }

  // To appends and commits there is no plan.
  void count_unplanned(const Enqueued& enqueued) {
    const DraftPart& draft = enqueued.draft;
    now_.report.appends_unplanned +=
        enqueued.plans * (target_layers_ + (draft.extensions + draft.passes) * draft_layers_);
    now_.report.commits_unplanned += enqueued.commits * (1 + draft.extensions);
  }

  // Rows of NaN were appended.
  void note_refused(std::int32_t seat, const VisitInput& visit) {
    if (visit.refused_are_nan == 0) return;
    now_.nonfinite = true;
    now_.report.first_failing_seat = std::min(now_.report.first_failing_seat, seat);
  }

  void commit(const BatchRowUpdate& row, const VisitInput& visit, std::int32_t commits) {
    const std::int32_t start = lengths(row.seat).target;
    const Sampled sampled =
        sample(visit, steps_left_, row.seat, start, row.tokens, limits_.draft_max);
    ++now_.rows_live;
    if (sampled.kept < row.tokens) note_refused(row.seat, visit);
    if (sampled.kept < 0 || sampled.kept > row.tokens) {  // left alone, and reported
      count(now_.report.rows_kept_wrong, row.seat, commits);
      return;
    }
    device_.length[test::size(row.seat)] += sampled.kept;
    if (sampled.stop) device_.stopped[test::size(row.seat)] = 1;
    now_.rows_refused += sampled.kept < row.tokens;
    now_.tokens_refused += row.tokens - sampled.kept;
  }

  // The draft group of a batch row that the target's plan found alive.
  void extend_row(const BatchRowUpdate& row, const VisitInput& visit, std::int32_t number,
                  const Enqueued& enqueued) {
    const Lengths length = lengths(row.seat);
    const Extended extended = extend(visit, steps_left_, number, enqueued.draft.counted, row.seat,
                                     length, row.tokens, limits_.draft_max);
    std::int32_t planned = row.tokens;
    std::int32_t kept = extended.tokens;
    if (enqueued.draft.counted) {
      if (kept < 0 || kept > row.tokens) {
        count(now_.report.rows_wrong_tokens, row.seat, enqueued.plans);
        return;
      }
      planned = kept;
    }
    if (planned == 0) return;
    if (length.draft + planned > limit(row)) {
      count(now_.report.rows_at_limit, row.seat, enqueued.plans);
      return;
    }
    if (extended.lasting < planned) note_refused(row.seat, visit);
    now_.rows_ahead += kept <= planned && length.draft + kept > length.target;
    if (kept < 0 || kept > planned || length.draft + kept > length.target) {
      count(now_.report.rows_kept_wrong, row.seat, enqueued.commits);
      return;
    }
    draft_length_[test::size(row.seat)] += kept;
    now_.rows_extended += kept > 0;
    now_.tokens_extended += kept;
  }

  void pass_row(const BatchRowUpdate& row, const VisitInput& visit, std::int32_t number,
                std::int32_t plans) {
    const std::int32_t length = lengths(row.seat).draft;
    const std::int32_t position =
        pass_position(visit, steps_left_, number, row.seat, length, limits_.draft_max);
    if (position < length || position > length + limits_.draft_max) {
      count(now_.report.rows_wrong_positions, row.seat, plans);
    } else if (position + 1 > limit(row)) {
      count(now_.report.rows_at_limit, row.seat, plans);
    } else {
      note_refused(row.seat, visit);
      ++now_.rows_passed;
    }
  }

  void check_behind(const BatchRowUpdate& row) {
    const Lengths length = lengths(row.seat);
    test::expect(length.draft <= length.target, "the draft group is ahead of the target");
    now_.rows_behind += length.draft < length.target;
    now_.tokens_behind_most =
        std::max<std::int64_t>(now_.tokens_behind_most, length.target - length.draft);
  }

  Limits limits_;
  std::int32_t target_layers_, draft_layers_;
  test::Device device_;
  std::vector<std::int64_t> draft_length_;  // [seats]
  Foretold now_;
  std::int32_t steps_left_ = 0;
};

}  // namespace quire::soak
