// An engine with clear_on_reuse whose every update is watched: the image of all memory behind it
// must be the one before it, zeroed where the update names new owners; and whatever a step can
// reach must have been zeroed for the request that reaches it.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tests/support/device_array.h"
#include "tests/support/field_stories.h"
#include "tests/support/owned_ranges.h"

namespace quire::test {

// What `after` must be, had this update zeroed what it gives to new owners, and nothing else.
inline bool zeroed_and_no_more(const DeviceCache& device, const StepUpdate& update, Snapshot before,
                               const Snapshot& after) {
  for (const BatchRowUpdate& row : update.batch_rows()) {
    if ((row.flags & BatchRowUpdate::kNewOwner) == 0) continue;
    zero(before.seats, seat_ranges(device, SeatId(row.seat)));
  }
  for (const CellUpdate& cell : update.cells()) {
    zero(before.pages, page_ranges(device, PageId(cell.page)));
  }
  return before.pages == after.pages && before.seats == after.seats;
}

class WatchedEngine {
 public:
  explicit WatchedEngine(const TestEngineOptions& options) : engine(test_backend(), options) {
    engine.poison();
  }

  // Up to behind the update; the image of the memory around it is compared.
  StepId begin(const std::vector<AheadRow>& rows, StepShape shape) {
    const std::vector<BatchRow> batch = batch_of(engine, rows);
    const StepUpdate& update = engine.cache().ledger().prepare(batch, shape, PlanBufferId(0));
    Snapshot before = engine.snapshot();
    engine.cache().device().apply(update, engine.stream());
    const bool right =
        zeroed_and_no_more(engine.cache().device(), update, std::move(before), engine.snapshot());
    CHECK(right);
    note(rows, update);
    return update.id();
  }

  void step(const std::vector<AheadRow>& rows, StepShape shape) {
    const StepId id = begin(rows, shape);
    std::vector<std::int32_t> kept;
    for (const AheadRow& row : rows) {
      kept.push_back(row.row.kept < 0 ? row.row.tokens : row.row.kept);
    }
    const DeviceArray<std::int32_t> on_device(test_backend(), engine.stream(), kept);
    copy_rows(engine, rows, shape);
    engine.enqueue_body(shape, engine.stream());
    engine.cache().device().enqueue_commit(PlanBufferId(0), on_device.data(), nullptr,
                                           engine.stream());
    engine.stream().wait();
    engine.finish(id, step_rows_of(rows));
  }

  std::int64_t seats_zeroed = 0, pages_zeroed = 0;
  TestEngine engine;

 private:
  // Whatever a step can reach was zeroed for the request that reaches it.
  void note(const std::vector<AheadRow>& rows, const StepUpdate& update) {
    const Ledger& ledger = engine.cache().ledger();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const RequestId request = rows[i].row.request;
      if (update.batch_rows()[i].flags & BatchRowUpdate::kNewOwner) {
        seat_of_[request.index] = request;
        ++seats_zeroed;
      }
      for (const CellUpdate& cell : update.cells()) {
        if (cell.seat != request.index) continue;
        page_of_[cell.page] = request;
        ++pages_zeroed;
        // Nothing that is read again lies in it.
        CHECK(cell.cell * kPageTokens >= engine.length(request));
      }
      CHECK(seat_of_[request.index] == request);
      const auto reached =
          static_cast<std::size_t>(ceil_div(ledger.info(request).upper_tokens, kPageTokens));
      for (std::size_t cell = 0; cell < reached; ++cell) {
        CHECK(page_of_[ledger.pages_of(request)[cell].value] == request);
      }
    }
  }

  std::map<std::int32_t, RequestId> seat_of_, page_of_;  // whom they were zeroed for
};

}  // namespace quire::test
