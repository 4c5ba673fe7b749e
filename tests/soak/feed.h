// The engine's own part of a step of the soak, on the device: input rows from the banks, a sampler
// that says how many of a batch row's tokens are kept and whether it stops, and how far the draft
// layers follow: counts of their extensions, positions of their passes. All are a function of the
// visit, the run and the lengths of the batch row, so that the model on the host can foretell them;
// the host form and the kernels share it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/cache/step_update.h>
#include <quire/planner/plan.h>
#include <quire/runtime/base/host_device.h>
#include <quire/runtime/base/stream_view.h>

namespace quire::soak {

inline constexpr std::int64_t kSeatsMost = 16;

// What a step does for the draft layers behind the target's commit: extensions, which last, then
// passes, which do not.
struct DraftPart {
  std::int32_t extensions = 0;
  bool counted = true;      // extensions have counts in their plan; else in their commit
  std::int32_t passes = 0;  // decode steps only, as are counts in a plan
};

// What one visit tells its steps, passed by value.
struct VisitInput {
  std::uint32_t salt = 0;
  std::int32_t refuse_percent = 0;  // of the batch rows, some of whose tokens are refused
  std::int32_t wrong_percent = 0;   // whose count or position no batch row can have
  std::int32_t stop_percent = 0;
  std::int32_t lag_percent = 0;           // whose draft layers do not follow as far as they could
  std::int32_t refused_are_nan = 0;       // else rows of another content
  std::int32_t content[kSeatsMost] = {};  // by seat
  std::int32_t goal[kSeatsMost] = {};     // a request stops itself once it has so many tokens
};

struct Sampled {
  std::int32_t kept;
  bool stop;
};

QUIRE_HOST_DEVICE inline std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// For `live` tokens from position `start`; `steps_left` tells the runs of a visit apart. Without
// drafts all is kept: a token taken back would have overwritten the oldest of 128 window entries.
QUIRE_HOST_DEVICE inline Sampled sample(const VisitInput& visit, std::int32_t steps_left,
                                        std::int32_t seat, std::int32_t start, std::int32_t live,
                                        std::int64_t draft_max) {
  const auto u = [](std::int32_t value) { return static_cast<std::uint32_t>(value); };
  const std::uint32_t h = mix(visit.salt + mix(u(steps_left) * 64 + u(seat) + mix(u(start))));
  const bool has_drafts = draft_max > 0 && live <= draft_max + 1;
  if (has_drafts && (h >> 4) % 100 < u(visit.wrong_percent)) {
    return {(h & 1) != 0 ? live + 1 : -1, true};
  }
  const bool refuses = has_drafts && h % 100 < u(visit.refuse_percent);
  const std::int32_t kept = refuses ? static_cast<std::int32_t>((h >> 8) % (u(live) + 1)) : live;
  const bool stop = start + kept >= visit.goal[seat] || (h >> 16) % 100 < u(visit.stop_percent);
  return {kept, stop};
}

// What an extension takes on of a batch row, or a count that it cannot.
struct Extended {
  std::int32_t tokens;
  std::int32_t lasting;  // 0: all of it will be refused
};

// The lengths of a seat, of both layer groups.
struct Lengths {
  std::int32_t target = 0;
  std::int32_t draft = 0;
};

QUIRE_HOST_DEVICE inline std::uint32_t mix_draft(const VisitInput& visit, std::int32_t steps_left,
                                                 std::int32_t number, std::int32_t seat,
                                                 std::int32_t draft_length) {
  const auto u = [](std::int32_t value) { return static_cast<std::uint32_t>(value); };
  return mix(~visit.salt +
             mix(u(steps_left) * 1024 + u(number) * 64 + u(seat) + mix(u(draft_length))));
}

// Extension `number` of a step whose batch row had `live` tokens in the target's plan. Long rows
// extend as a whole. In a ring without room for drafts nothing may be taken back, as in `sample`.
QUIRE_HOST_DEVICE inline Extended extend(const VisitInput& visit, std::int32_t steps_left,
                                         std::int32_t number, bool counted, std::int32_t seat,
                                         const Lengths& length, std::int32_t live,
                                         std::int64_t draft_max) {
  if (live > draft_max + 1) return {live, live};
  const std::int32_t behind = length.target - length.draft;
  const std::int32_t most = behind < live ? behind : live;
  const std::uint32_t h = mix_draft(visit, steps_left, number, seat, length.draft);
  if (draft_max > 0 && (h >> 4) % 100 < static_cast<std::uint32_t>(visit.wrong_percent)) {
    if ((h & 3) == 0) return {-1, 0};
    return {most < live && (h & 3) != 1 ? most + 1 : live + 1, 0};  // ahead of the target
  }
  const bool may_lag = draft_max > 0 || counted;
  if (!may_lag || (h >> 8) % 100 >= static_cast<std::uint32_t>(visit.lag_percent)) {
    return {most, most};
  }
  const auto tokens = static_cast<std::int32_t>((h >> 16) % (static_cast<std::uint32_t>(most) + 1));
  return {tokens, tokens};
}

// Where draft pass `number` of a step stands: one token further than the one before. Behind a pass
// that stood wrong and was inert all do: another would read what none has written.
QUIRE_HOST_DEVICE inline std::int32_t pass_position(const VisitInput& visit,
                                                    std::int32_t steps_left, std::int32_t number,
                                                    std::int32_t seat, std::int32_t draft_length,
                                                    std::int64_t draft_max) {
  for (std::int32_t pass = 0; pass <= number; ++pass) {
    const std::uint32_t h = mix_draft(visit, steps_left, 8 + pass, seat, draft_length);
    if ((h >> 4) % 100 < static_cast<std::uint32_t>(visit.wrong_percent)) {
      return draft_length + ((h & 1) != 0 ? -1 : static_cast<std::int32_t>(draft_max) + 1);
    }
  }
  return draft_length + number;
}

// What the target's plan had of a batch row.
struct RowSeen {
  std::int32_t seat;
  std::int32_t live;  // 0: inert
};

struct FeedInput {
  const std::byte* bank;   // [contents, bank_tokens] rows
  std::byte* rows;         // [tokens] what append reads
  std::int64_t row_bytes;  // a multiple of 16
};

// Which plan of a step it feeds.
enum class FeedPart : std::int32_t { kTarget, kExtension, kPass };

struct FeedParams {
  static constexpr std::int32_t kInputsMost = 8;
  FeedPart part = FeedPart::kTarget;
  std::int32_t number = 0;  // of extensions, and of passes
  bool counted = true;      // DraftPart
  StepShape shape;
  PlanViews views;
  const PlanHeader* header = nullptr;
  const VisitInput* visit = nullptr;
  StepTable table;
  std::int32_t* kept = nullptr;      // [rows]
  std::uint8_t* stop = nullptr;      // [rows]
  RowSeen* seen = nullptr;           // [rows] written with the target's plan, read by the others
  std::int32_t* supplied = nullptr;  // [rows] counts of the extension or positions of the pass
  std::int32_t* lasting = nullptr;   // [rows] of the tokens of the extension or pass
  std::int64_t draft_max = 0;
  std::int64_t bank_tokens = 0;
  std::int32_t contents = 0;
  std::int32_t inputs = 0;
  FeedInput input[kInputsMost];
};

// Says something wrong for rows that are inert: nobody may take notice.
QUIRE_HOST_DEVICE inline Sampled sample_row(const FeedParams& params, std::int32_t batch_row) {
  const std::int32_t length = params.views.row_length[batch_row];
  if (length == 0) return {12345, true};
  const std::int32_t start = params.views.positions[params.views.cu_extend[batch_row]];
  return sample(*params.visit, params.header->steps_at_plan, params.views.row_seat[batch_row],
                start, length - start, params.draft_max);
}

// In front of the plan of an extension or pass, behind the commit before it. Rows that are inert
// get something wrong, as above.
QUIRE_HOST_DEVICE inline void supply_row(const FeedParams& params, std::int32_t batch_row) {
  std::int32_t& supplied = params.supplied[batch_row];
  supplied = 12345;
  params.lasting[batch_row] = 0;
  const RowSeen& row = params.seen[batch_row];
  if (row.live == 0) return;
  const Lengths length{params.table.length_of(LayerGroup::kTarget)[row.seat],
                       params.table.length_of(LayerGroup::kDraft)[row.seat]};
  const std::int32_t steps_left = params.header->steps_at_plan;
  if (params.part == FeedPart::kPass) {
    supplied = pass_position(*params.visit, steps_left, params.number, row.seat, length.draft,
                             params.draft_max);
    return;
  }
  const Extended extended = extend(*params.visit, steps_left, params.number, params.counted,
                                   row.seat, length, row.live, params.draft_max);
  supplied = extended.tokens;
  params.lasting[batch_row] = extended.lasting;
}

QUIRE_HOST_DEVICE inline void sample_into(const FeedParams& params, std::int32_t batch_row) {
  const Sampled sampled = sample_row(params, batch_row);
  params.kept[batch_row] = sampled.kept;
  params.stop[batch_row] = sampled.stop ? 1 : 0;
  const std::int32_t length = params.views.row_length[batch_row];
  RowSeen& seen = params.seen[batch_row];
  seen = {params.views.row_seat[batch_row], 0};
  if (length == 0) return;
  seen.live = length - params.views.positions[params.views.cu_extend[batch_row]];
}

// Where the input row of a token comes from. Null: NaN in every element. Tokens that will be
// refused have other rows than those that come to stand at their positions later.
QUIRE_HOST_DEVICE inline const std::byte* source_of(const FeedParams& params,
                                                    const FeedInput& input, std::int32_t token) {
  const std::int32_t batch_row = params.views.token_batch_row[token];
  if (batch_row < 0) return nullptr;
  const std::int32_t position = params.views.positions[token];
  const std::int32_t index = token - params.views.cu_extend[batch_row];
  std::int64_t content = params.visit->content[params.views.row_seat[batch_row]];
  const std::int32_t lasting = params.part == FeedPart::kTarget ? sample_row(params, batch_row).kept
                                                                : params.lasting[batch_row];
  if (index >= lasting) {
    if (params.visit->refused_are_nan != 0) return nullptr;
    content = (content + 1) % params.contents;
  }
  return input.bank + (content * params.bank_tokens + position) * input.row_bytes;
}

// None blocks. The second, in front of the plan of an extension or pass, and the third, behind any
// plan, may be captured.
void enqueue_visit(const VisitInput& visit, VisitInput* to, StreamView stream);
void enqueue_supply(const FeedParams& params, StreamView stream);
void enqueue_feed(const FeedParams& params, StreamView stream);

// Of a library without CUDA: they throw.
void visit_on_cuda(const VisitInput& visit, VisitInput* to, StreamView stream);
void supply_on_cuda(const FeedParams& params, StreamView stream);
void feed_on_cuda(const FeedParams& params, StreamView stream);

}  // namespace quire::soak
