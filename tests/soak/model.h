// What a device must hold and say after a visit: lengths and flags by seat, moved by the same words
// as the sampler's, of batch rows taken one after the other. Failures throw std::logic_error.
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
  std::vector<std::int64_t> length;
  std::vector<int> stopped;
  std::int64_t rows_refused = 0;  // that kept fewer tokens than they had
  std::int64_t tokens_refused = 0;
  std::int64_t rows_live = 0;
};

class DeviceModel {
 public:
  DeviceModel(const Limits& limits, std::int32_t layers)
      : limits_(limits), layers_(layers), device_(limits) {}

  const test::Device& device() const { return device_; }
  std::int64_t length(std::int32_t seat) const { return device_.length[test::size(seat)]; }

  void apply(const StepUpdate& update) {
    device_.apply(update);
    now_ = Foretold{};
    now_.report.first_failing_seat = DeviceReport::kNoSeat;
    steps_left_ = update.header().repeat;
  }

  // Plans the applied update `plans` times and commits it `commits` times.
  void run(const StepUpdate& update, const VisitInput& visit, std::int32_t plans,
           std::int32_t commits) {
    for (std::int32_t plan = 0; plan < plans; ++plan) {
      report_inert(update);
      // One run too many: to an append there is no plan.
      if (steps_left_ == 0) now_.report.appends_unplanned += layers_;
    }
    if (steps_left_ == 0) return;
    for (const BatchRowUpdate& row : update.batch_rows()) commit(row, visit, commits);
    const auto named = static_cast<std::int32_t>(update.batch_rows().size());
    now_.report.padding_rows_kept += commits * (update.shape().rows - named);
    --steps_left_;
  }

  // The graph of another shape: nothing lives, and no append finds its plan.
  void run_wrong_shape(const StepUpdate& update, StepShape graph) {
    const auto rows = std::min<std::size_t>(update.batch_rows().size(), test::size(graph.rows));
    for (const BatchRowUpdate& row : update.batch_rows().first(rows)) {
      count(now_.report.rows_wrong_shape, row.seat);
    }
    now_.report.appends_unplanned += layers_;
  }

  Foretold foretold() const {
    Foretold result = now_;
    result.length = device_.length;
    result.stopped = device_.stopped;
    return result;
  }

 private:
  void count(std::int32_t& counter, std::int32_t seat) {
    ++counter;
    now_.report.first_failing_seat = std::min(now_.report.first_failing_seat, seat);
  }
  bool stopped(const BatchRowUpdate& row) const { return device_.stopped[test::size(row.seat)]; }

  void report_inert(const StepUpdate& update) {
    for (const BatchRowUpdate& row : update.batch_rows()) {
      if (row.tokens == 0) continue;
      if (steps_left_ == 0) {
        count(now_.report.rows_out_of_steps, row.seat);
      } else if (stopped(row)) {
        count(now_.report.rows_stopped, row.seat);
      } else {
        // What was prepared can always run.
        test::expect(length(row.seat) + row.tokens <= device_.limit[test::size(row.seat)],
                     "a batch row would pass the limit that its update set");
      }
    }
  }

  void commit(const BatchRowUpdate& row, const VisitInput& visit, std::int32_t commits) {
    if (row.tokens == 0 || stopped(row)) return;
    const auto start = static_cast<std::int32_t>(length(row.seat));
    const Sampled sampled =
        sample(visit, steps_left_, row.seat, start, row.tokens, limits_.draft_max);
    ++now_.rows_live;
    if (sampled.kept < row.tokens && visit.refused_are_nan != 0) {
      now_.nonfinite = true;
      now_.report.first_failing_seat = std::min(now_.report.first_failing_seat, row.seat);
    }
    if (sampled.kept < 0 || sampled.kept > row.tokens) {  // left alone, and reported
      for (std::int32_t i = 0; i < commits; ++i) count(now_.report.rows_kept_wrong, row.seat);
      return;
    }
    device_.length[test::size(row.seat)] += sampled.kept;
    if (sampled.stop) device_.stopped[test::size(row.seat)] = 1;
    now_.rows_refused += sampled.kept < row.tokens;
    now_.tokens_refused += row.tokens - sampled.kept;
  }

  Limits limits_;
  std::int32_t layers_;
  test::Device device_;
  Foretold now_;
  std::int32_t steps_left_ = 0;
};

}  // namespace quire::soak
