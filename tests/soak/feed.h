// The engine's own part of a step of the soak, on the device: input rows from the banks, and a
// sampler that says how many of a batch row's tokens are kept and whether it stops. Both are a
// function of the visit, the run and where the batch row starts, so that the model on the host can
// foretell them; the host form and the kernels share it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/cache/step_update.h>
#include <quire/planner/plan.h>
#include <quire/runtime/base/host_device.h>
#include <quire/runtime/base/stream_view.h>

namespace quire::soak {

inline constexpr std::int64_t kSeatsMost = 16;

// What one visit tells its steps, passed by value.
struct VisitInput {
  std::uint32_t salt = 0;
  std::int32_t refuse_percent = 0;  // of the batch rows, some of whose tokens are refused
  std::int32_t wrong_percent = 0;   // whose count of kept tokens no batch row can have
  std::int32_t stop_percent = 0;
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

struct FeedInput {
  const std::byte* bank;   // [contents, bank_tokens] rows
  std::byte* rows;         // [tokens] what append reads
  std::int64_t row_bytes;  // a multiple of 16
};

struct FeedParams {
  static constexpr std::int32_t kInputsMost = 8;
  StepShape shape;
  PlanViews views;
  const PlanHeader* header = nullptr;
  const VisitInput* visit = nullptr;
  std::int32_t* kept = nullptr;  // [rows]
  std::uint8_t* stop = nullptr;  // [rows]
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

// Where the input row of a token comes from. Null: NaN in every element. Tokens that will be
// refused have other rows than those that come to stand at their positions later.
QUIRE_HOST_DEVICE inline const std::byte* source_of(const FeedParams& params,
                                                    const FeedInput& input, std::int32_t token) {
  const std::int32_t batch_row = params.views.token_batch_row[token];
  if (batch_row < 0) return nullptr;
  const std::int32_t position = params.views.positions[token];
  const std::int32_t index = token - params.views.cu_extend[batch_row];
  std::int64_t content = params.visit->content[params.views.row_seat[batch_row]];
  if (index >= sample_row(params, batch_row).kept) {
    if (params.visit->refused_are_nan != 0) return nullptr;
    content = (content + 1) % params.contents;
  }
  return input.bank + (content * params.bank_tokens + position) * input.row_bytes;
}

// Both do not block. The second may be captured.
void enqueue_visit(const VisitInput& visit, VisitInput* to, StreamView stream);
void enqueue_feed(const FeedParams& params, StreamView stream);

// Of a library without CUDA: they throw.
void visit_on_cuda(const VisitInput& visit, VisitInput* to, StreamView stream);
void feed_on_cuda(const FeedParams& params, StreamView stream);

}  // namespace quire::soak
