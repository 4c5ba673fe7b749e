// What a plan is made of. PlanRecord and C4PageBundle are the original kernels' records (SPEC 1.8,
// 1.9); the rest is the plan of one step over a step table, read by `append`.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include <quire/cache/model_spec.h>
#include <quire/runtime/base/host_device.h>

namespace quire {

// One token of the batch: an entry that it closes, or state that it writes. 16 bytes.
struct PlanRecord {
  std::uint32_t ragged_id;   // input row of the token; kPaddingRaggedId: padding, skip
  std::uint32_t batch_id;    // batch row
  std::uint32_t position;    // absolute
  std::uint32_t window_len;  // leading tokens of its pooling window that come from state
  friend constexpr bool operator==(const PlanRecord&, const PlanRecord&) = default;
};
static_assert(sizeof(PlanRecord) == 16);
inline constexpr std::uint32_t kPaddingRaggedId = 0xFFFFFFFFu;
inline constexpr PlanRecord kPaddingRecord{kPaddingRaggedId, kPaddingRaggedId, kPaddingRaggedId,
                                           kPaddingRaggedId};

// SPEC 1.9, page mode of a prefill; physical state pages, and a position. 16 bytes.
struct C4PageBundle {
  std::int32_t load_first_page;
  std::int32_t load_second_page;
  std::int32_t write_first_page;
  std::int32_t last_position;
  friend constexpr bool operator==(const C4PageBundle&, const C4PageBundle&) = default;
};
static_assert(sizeof(C4PageBundle) == 16);

// Where a step starts for one batch row, and how much of it lives.
struct BatchRowRecord {
  std::int32_t seat;         // -1: padding
  std::int32_t start;        // length before the step
  std::int32_t live_tokens;  // 0: inert
  std::int32_t first_token;  // input row of its first token; inert rows occupy theirs too
};
static_assert(sizeof(BatchRowRecord) == 16);

// One token of a batch row, with all the addresses that every layer needs; indexed by input row.
struct alignas(16) TokenRecord {
  std::int32_t seat;      // -1: inert, nothing else is set
  std::int32_t position;  // absolute
  std::int32_t batch_row;
  std::int32_t index;             // in its batch row
  std::int64_t ring_location;     // window pool, -1: not kept there
  std::int64_t scratch_location;  // window scratch, -1: read from the ring
  std::int64_t csa_location;      // of the entry that it closes; -1: closes none
  std::int64_t hca_location;
};
static_assert(sizeof(TokenRecord) == 48);

// What the device knows of the update of a plan buffer and of its newest plan. All zero: nothing was
// applied, nothing planned.
struct PlanHeader {
  std::int32_t rows;            // of the applied shape
  std::int32_t tokens_per_row;  // 0: ragged
  std::int32_t tokens;
  std::int32_t steps_left;     // runs that the applied update still allows
  // Of the newest plan; in a draft pass batch rows have fewer tokens than were applied. The form is
  // `plan_form`: appends and commits see the group without a further word.
  std::int32_t planned_rows, planned_form, planned_tokens;
  // steps_left when the target group was planned, 0 in a wrong shape: its commit sets steps_left
  // from it, and plans of the draft group live as long as it is above 0.
  std::int32_t steps_at_plan;
  std::int32_t short_rows;     // ragged: leading batch rows that read the ring
  std::int32_t csa_entries;    // live records of the compact list
  std::int32_t hca_entries;    // likewise
  std::int32_t used_tokens;    // input rows up to the end of the last batch row that has any
  std::int32_t used_rows;      // batch rows up to the last that has a seat
  std::int32_t reserved[3];
};
static_assert(sizeof(PlanHeader) == 64);
// Kernels load it in pieces of 16 bytes.
static_assert(offsetof(PlanHeader, planned_rows) == 16 && offsetof(PlanHeader, short_rows) == 32 &&
              offsetof(PlanHeader, used_rows) == 48);

// A plan's tokens per batch row and its layer group in one word: of the draft group the complement.
QUIRE_HOST_DEVICE constexpr std::int32_t plan_form(std::int32_t tokens_per_row, LayerGroup group) {
  return tokens_per_row ^ -static_cast<std::int32_t>(group);
}
static_assert(plan_form(3, LayerGroup::kTarget) == 3 && plan_form(3, LayerGroup::kDraft) == ~3);

// What the device noticed, cleared by `apply`, added to by every plan, append and commit until the
// next. 64 bytes, to be copied with the tokens.
struct alignas(64) DeviceReport {
  static constexpr std::int32_t kNoSeat = INT32_MAX;

  std::int32_t rows_at_limit;       // made inert: the seat's limit would be passed
  std::int32_t rows_stopped;        // made inert: stopped before
  std::int32_t rows_out_of_steps;   // made inert: more runs than prepared
  std::int32_t rows_wrong_shape;    // made inert: the replayed shape is not the applied one
  // Commit left alone: kept is negative, above the live tokens, or a part of a row that runs once;
  // or the plan started beyond the length; or the draft group would get ahead of the target.
  std::int32_t rows_kept_wrong;
  std::int32_t nonfinite_tiles;     // quantised tiles with a NaN or an infinity
  std::int32_t first_failing_seat;  // the lowest of all that is counted here; kNoSeat: none
  // Appended nothing: the newest plan since the update is of another shape or of the other layer
  // group, there is none, or it is of one run too many.
  std::int32_t appends_unplanned;
  std::int32_t rows_wrong_positions;  // made inert: supplied positions (PlanInputs::positions)
  std::int32_t rows_wrong_tokens;     // made inert: supplied counts (PlanInputs::row_tokens)
  // Kept counts and stop flags other than 0 of padding rows: passed over, and no seat is failing.
  std::int32_t padding_rows_kept;
  // Made inert: their seat has gone to another request since the update that named them.
  std::int32_t rows_of_former_owners;
  std::int32_t commits_unplanned;  // moved nothing, as appends_unplanned appended nothing
  std::int32_t reserved[3];
};
static_assert(sizeof(DeviceReport) == 64);

// What has become of a batch row, for the host to read once a visit of many steps is over. Written
// by every commit of the target group, and by `apply` before the first.
struct RowResult {
  std::int32_t length;   // of the seat; padding: 0
  std::int32_t stopped;  // 1: the seat has stopped itself, or has gone to another request
};
static_assert(sizeof(RowResult) == 8);

// Device-resident, indexed by seat: what the ledger said and what steps have committed.
struct StepTable {
  std::int32_t* length = nullptr;      // [groups, seats] tokens committed, by LayerGroup
  std::int32_t* limit = nullptr;       // [seats] upper length of what was prepared
  std::int32_t* stopped = nullptr;     // [seats] sticky
  std::int32_t* owner = nullptr;       // [seats] counts its owners
  std::int32_t* page_table = nullptr;  // [seats, cells]
  std::int64_t cells = 0;
  std::int64_t seats = 0;
  std::int32_t groups = 1;

  QUIRE_HOST_DEVICE std::int32_t* length_of(LayerGroup group) const {
    return length + static_cast<std::int64_t>(group) * seats;
  }
};

// What an engine reads, in batch row order, at fixed addresses. Written by every plan. Where a batch
// row or token is inert, lengths are 0, positions 0, batch rows -1, and locations the padding value.
struct PlanViews {
  std::int32_t* positions = nullptr;        // [tokens] absolute position of each token
  std::int32_t* token_batch_row = nullptr;  // [tokens]
  std::int32_t* token_window_length = nullptr;  // [tokens] window entries visible at the token
  std::int32_t* token_csa_length = nullptr;     // [tokens] CSA entries complete at the token
  std::int32_t* token_hca_length = nullptr;     // [tokens]
  std::int64_t* ring_locations = nullptr;       // [tokens] written by this step, window pool
  std::int64_t* scratch_locations = nullptr;    // [tokens] written by this step, window scratch
  std::int64_t* csa_locations = nullptr;        // [tokens] entry that the token closes, or padding
  std::int64_t* hca_locations = nullptr;        // [tokens]
  std::int32_t* cu_extend = nullptr;    // [rows + 1] first input row of each batch row
  std::int32_t* row_seat = nullptr;     // [rows] -1: padding
  std::int32_t* row_length = nullptr;   // [rows] tokens, this step's included
  std::int32_t* row_window_length = nullptr;  // [rows] after the step
  std::int32_t* row_csa_length = nullptr;     // [rows] entries after the step
  std::int32_t* row_hca_length = nullptr;     // [rows]
  std::int32_t* page_table = nullptr;         // [rows, page_table_stride]; cells below row_length
  std::int64_t page_table_stride = 0;
};

// Lists of locations for attention kernels, in the engine's memory, written by every plan of the plan
// buffer that they are bound to (SPEC 6). Each pointer is 16-byte aligned and nullable: that list is
// not written. int32, as FlashMLA takes them. Beyond what a token or batch row sees stands the
// padding location, in every place of the list and in every plan.
struct ReadLists {
  std::int32_t* window_locations = nullptr;  // [tokens_max, 128] newest first; in the ring, or in
                                             // the scratch for tokens of long batch rows
  std::int32_t* window_lengths = nullptr;    // [tokens_max]
  // One list per token in decode shapes; in ragged shapes one per batch row, of all entries that
  // are complete after the step, of which a token sees the first hca_lengths[token].
  std::int32_t* hca_locations = nullptr;     // [tokens_max or rows_max, the larger, hca_width]
  std::int32_t* hca_lengths = nullptr;       // [tokens_max]
  std::int64_t hca_width = 0;                // at least context_max / 128, rounded up; row stride
  std::int32_t padding_location = -1;        // or a location that exists, for kernels that need one
  std::int32_t length_floor = 0;             // 0, or 1 for kernels that cannot take 0
};

// All device memory of one plan.
struct PlanBuffer {
  PlanHeader* header = nullptr;
  DeviceReport* report = nullptr;
  std::int32_t* row_seats = nullptr;   // [rows] as applied; -1: padding
  std::int32_t* row_tokens = nullptr;  // [rows] as applied
  std::int32_t* row_owners = nullptr;  // [rows] StepTable::owner of the seat when it was applied
  std::int32_t* row_lives = nullptr;   // [rows] 0: inert in the newest plan of the target group
  RowResult* results = nullptr;        // [rows]
  BatchRowRecord* rows = nullptr;      // [rows]
  TokenRecord* tokens = nullptr;       // [tokens]
  PlanRecord* csa_entries = nullptr;   // [csa_entry_capacity] ragged: compact, in order, padded
  PlanRecord* hca_entries = nullptr;   // [hca_entry_capacity] as the CSA list
  PlanViews views;
  ReadLists read;
};

}  // namespace quire
