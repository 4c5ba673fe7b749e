// What one prepared step changes on a device, as one flat span of bytes: header, batch rows, page
// table cells, lowered limits. It may be copied to other processes as it is: one ledger can drive
// several device caches. Little-endian, naturally aligned, capacity fixed by the limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <quire/cache/limits.h>
#include <quire/runtime/base/ids.h>

namespace quire {

// The fixed shape that a step is padded to and a captured graph is keyed by.
//   decode:  every batch row has room for `tokens_per_row` tokens; the input row of token j of batch
//            row r is r * tokens_per_row + j.
//   ragged:  tokens_per_row is 0 and `tokens` is the room for all tokens together; the input rows of
//            the batch rows follow each other without gaps.
struct StepShape {
  std::int32_t rows = 0;
  std::int32_t tokens_per_row = 0;
  std::int32_t tokens = 0;

  static constexpr StepShape decode(std::int32_t rows, std::int32_t tokens_per_row = 1) {
    return {rows, tokens_per_row, rows * tokens_per_row};
  }
  static constexpr StepShape ragged(std::int32_t rows, std::int32_t tokens) {
    return {rows, 0, tokens};
  }
  constexpr bool is_decode() const { return tokens_per_row > 0; }
  friend constexpr bool operator==(const StepShape&, const StepShape&) = default;
};

struct StepUpdateHeader {
  std::uint64_t digest;  // over all bytes behind this field
  StepId id;             // kPaddingStep: outside the order, no request, no cell
  std::int32_t plan_buffer;
  std::int32_t repeat;  // times that the step may run
  StepShape shape;
  std::int32_t batch_rows;      // BatchRowUpdates that follow; the rest of the shape is padding
  std::int32_t cells;           // CellUpdates behind them
  std::int32_t lowered_limits;  // LimitUpdates behind those
  std::int32_t reserved[4];
};
static_assert(sizeof(StepUpdateHeader) == 64);

struct BatchRowUpdate {
  static constexpr std::uint32_t kNewOwner = 1;  // the seat starts over: length 0, not stopped
  static constexpr std::uint32_t kResume = 2;    // not stopped any more

  std::int32_t seat;
  std::int32_t tokens;  // of each run of the step
  std::int32_t limit;   // the seat's upper length once the step is done, and its lookahead
  std::uint32_t flags;
};
static_assert(sizeof(BatchRowUpdate) == 16);

// Of the request's entries that a length counts, none is in the page yet: the cell lies behind the
// upper length before the step, and what an abandoned update carried was never applied. So the page
// may be zeroed with it (DeviceCacheOptions::clear_on_reuse).
struct CellUpdate {
  std::int32_t seat;
  std::int32_t cell;
  std::int32_t page;
};
static_assert(sizeof(CellUpdate) == 12);

// Only for seats that no batch row of the same update names, each at most once: so the changes of
// one update may be carried out in any order.
struct LimitUpdate {
  std::int32_t seat;
  std::int32_t limit;
};
static_assert(sizeof(LimitUpdate) == 8);

class StepUpdate {
 public:
  // An empty update with room for all that `limits` allow.
  explicit StepUpdate(const Limits& limits);

  // Takes a copy of what `bytes()` gave elsewhere. Throws UsageError where the bytes are truncated,
  // do not add up or do not match their digest.
  static StepUpdate from_bytes(std::span<const std::byte> bytes);

  const StepUpdateHeader& header() const;
  std::span<const BatchRowUpdate> batch_rows() const;
  std::span<const CellUpdate> cells() const;
  std::span<const LimitUpdate> lowered_limits() const;
  std::span<const std::byte> bytes() const { return {bytes_.data(), used_}; }

  StepId id() const { return header().id; }
  StepShape shape() const { return header().shape; }
  PlanBufferId plan_buffer() const { return PlanBufferId(header().plan_buffer); }

  // For the ledger: start over, add in the order rows, cells, limits, then seal with the digest.
  // Nothing is allocated; a count beyond the capacity throws BrokenInvariant. Items come in registers:
  // built in memory and copied from there, the copy would wait for the stores.
  void start(StepId id, PlanBufferId buffer, StepShape shape, std::int32_t repeat);
  void add(BatchRowUpdate row);
  void add(CellUpdate cell);
  void add(LimitUpdate limit);
  void seal();

 private:
  StepUpdate() = default;
  StepUpdateHeader& mutable_header();
  template <class Item>
  void append(const Item& item);

  std::vector<std::byte> bytes_;  // its size is the capacity
  std::size_t used_ = 0;
};

}  // namespace quire
