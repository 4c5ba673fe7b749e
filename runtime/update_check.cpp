// Whether an update may touch this device's memory. It may come from a ledger with other limits, or
// from another process: every index in it is checked before a kernel uses it.
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache_state.h>

#include <cstdint>

namespace quire {
namespace {

void check_shape(StepShape shape, const Limits& limits) {
  QUIRE_CHECK(shape.rows >= 1 && shape.rows <= limits.rows_max, "update: the shape has ",
              shape.rows, " batch rows; supported: 1 to Limits::rows_max ", limits.rows_max);
  QUIRE_CHECK(shape.tokens >= 1 && shape.tokens <= limits.tokens_max, "update: the shape has ",
              shape.tokens, " tokens; supported: 1 to Limits::tokens_max ", limits.tokens_max);
  QUIRE_CHECK(
      shape.tokens_per_row >= 0 && shape.tokens_per_row <= limits.draft_max + 1,
      "update: the shape has ", shape.tokens_per_row,
      " tokens per batch row; supported: 0 (ragged) to draft_max + 1 = ", limits.draft_max + 1);
  QUIRE_CHECK(!shape.is_decode() || std::int64_t{shape.rows} * shape.tokens_per_row == shape.tokens,
              "update: a decode shape of ", shape.rows, " batch rows of ", shape.tokens_per_row,
              " tokens has ", shape.tokens, " tokens");
}

void check_seat(const char* what, std::int32_t seat, const Limits& limits) {
  QUIRE_CHECK(seat >= 0 && seat < limits.seats_max, "update: ", what, " names seat ", seat,
              "; seats are 0 to ", limits.seats_max - 1);
}

// The kernel carries the changes of one update out in any order: each seat has one.
void check_named_once(const char* what, std::int32_t seat, SeatStamps& named_seats) {
  QUIRE_CHECK(named_seats.name(seat), "update: ", what, " names seat ", seat,
              ", which the update names already; supported: one batch row or one lowered limit of "
              "each seat");
}

void check_limit(std::int32_t seat, std::int32_t limit, const Limits& limits) {
  QUIRE_CHECK(limit >= 0 && limit <= limits.context_max, "update: the limit of seat ", seat, " is ",
              limit, "; supported: 0 to Limits::context_max ", limits.context_max);
}

void check_batch_rows(const StepUpdate& update, const Limits& limits, SeatStamps& named_seats) {
  const StepShape shape = update.shape();
  const std::int32_t repeat = update.header().repeat;
  std::int64_t tokens = 0;
  bool long_before = false;
  for (const BatchRowUpdate& row : update.batch_rows()) {
    check_seat("a batch row", row.seat, limits);
    check_named_once("a batch row", row.seat, named_seats);
    check_limit(row.seat, row.limit, limits);
    const std::int32_t most = shape.is_decode() ? shape.tokens_per_row : shape.tokens;
    QUIRE_CHECK(row.tokens >= 0 && row.tokens <= most, "update: the batch row of seat ", row.seat,
                " has ", row.tokens, " tokens; supported by the shape: 0 to ", most);
    const bool is_long = row.tokens > limits.draft_max + 1;
    QUIRE_CHECK(is_long || !long_before, "update: the batch row of seat ", row.seat, " has ",
                row.tokens, " tokens and follows a longer one; rows of at most draft_max + 1 = ",
                limits.draft_max + 1, " tokens come first");
    QUIRE_CHECK(!is_long || repeat == 1, "update: the batch row of seat ", row.seat, " has ",
                row.tokens, " tokens and repeat is ", repeat,
                "; rows of more than draft_max + 1 = ", limits.draft_max + 1,
                " tokens run once");
    long_before = long_before || is_long;
    tokens += row.tokens;
  }
  QUIRE_CHECK(tokens <= shape.tokens, "update: its batch rows have ", tokens,
              " tokens, but the shape has ", shape.tokens);
}

}  // namespace

void check_update(const StepUpdate& update, const Limits& limits, SeatStamps& named_seats) {
  const StepUpdateHeader& header = update.header();
  QUIRE_CHECK(header.plan_buffer >= 0 && header.plan_buffer < limits.plan_buffers,
              "update: plan buffer ", header.plan_buffer, " does not exist; plan buffers are 0 to ",
              limits.plan_buffers - 1);
  QUIRE_CHECK(header.repeat >= 1 && header.repeat <= limits.repeat_max, "update: repeat is ",
              header.repeat, "; supported: 1 to Limits::repeat_max ", limits.repeat_max);
  check_shape(header.shape, limits);
  QUIRE_CHECK(header.batch_rows <= header.shape.rows, "update: ", header.batch_rows,
              " batch rows, but the shape has ", header.shape.rows);
  QUIRE_CHECK(header.id != kPaddingStep ||
                  (header.batch_rows == 0 && header.cells == 0 && header.lowered_limits == 0),
              "update: a padding step carries ", header.batch_rows, " batch rows, ", header.cells,
              " cells and ", header.lowered_limits, " limits; it may change nothing");
  named_seats.start();
  check_batch_rows(update, limits, named_seats);
  for (const CellUpdate& cell : update.cells()) {
    check_seat("a page table cell", cell.seat, limits);
    QUIRE_CHECK(cell.cell >= 0 && cell.cell < limits.cells_max(), "update: cell ", cell.cell,
                " of seat ", cell.seat, " does not exist; cells are 0 to ", limits.cells_max() - 1);
    QUIRE_CHECK(cell.page >= 0 && cell.page < limits.pages, "update: page ", cell.page,
                " does not exist; pages are 0 to ", limits.pages - 1);
  }
  for (const LimitUpdate& lowered : update.lowered_limits()) {
    check_seat("a lowered limit", lowered.seat, limits);
    check_named_once("a lowered limit", lowered.seat, named_seats);
    check_limit(lowered.seat, lowered.limit, limits);
  }
}

}  // namespace quire
