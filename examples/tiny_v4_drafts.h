// The small rules of drafting that host loops and kernels share: how many tokens a batch row tries,
// where the input of the draft layers comes from, what a sampled token means, and what is kept.
#pragma once

#include <cstdint>

#include "examples/tiny_v4_math.h"

namespace quire::serving {

// Places of a seat's rows by position.
QUIRE_HOST_DEVICE inline std::int64_t place_of(const TinyV4Step& step, std::int32_t seat,
                                               std::int32_t position) {
  return seat * (step.context_max + 1) + position;
}

// --- A seat begins ---

struct BegunSeat {
  std::uint32_t seed;
  std::int32_t prompt_tokens, tokens_max;
};

inline BegunSeat begun_of(const SeatRequest& request) {
  return {request.seed, static_cast<std::int32_t>(request.prompt_tokens),
          static_cast<std::int32_t>(request.tokens_max)};
}

QUIRE_HOST_DEVICE inline void begin_seat(const TinyV4Arrays& arrays, std::int32_t seat,
                                         const BegunSeat& begun) {
  arrays.seat_seed[seat] = begun.seed;
  arrays.seat_prompt_tokens[seat] = begun.prompt_tokens;
  arrays.drafts.seat_tokens_max[seat] = begun.tokens_max;
  arrays.drafts.seat_count[seat] = 0;
}

// --- Drafts made from what the request will generate ---

QUIRE_HOST_DEVICE inline std::uint32_t truth_hash(const TinyV4Step& step, std::int32_t seat,
                                                  std::int32_t position, std::uint32_t what) {
  return mix(step.config.drafts_from_truth.seed ^ mix(step.arrays.seat_seed[seat] ^ what) ^
             mix(static_cast<std::uint32_t>(position)));
}

// The token at a position as it is, or another one.
QUIRE_HOST_DEVICE inline std::int32_t draft_from_truth(const TinyV4Step& step, std::int32_t seat,
                                                       std::int32_t position) {
  constexpr std::uint32_t kWrongDraft = 0x517CC1B7u;
  const std::int32_t token = step.arrays.drafts.truth[place_of(step, seat, position)];
  const std::uint32_t hash = truth_hash(step, seat, position, kWrongDraft);
  return share_of(hash) < step.config.drafts_from_truth.wrong ? token ^ 1 : token;
}

// What is tried at a position. The draft layers go on from their own drafts all the same.
QUIRE_HOST_DEVICE inline std::int32_t draft_at(const TinyV4Step& step, std::int32_t seat,
                                               std::int32_t position) {
  return step.config.drafts_from_truth.on
             ? draft_from_truth(step, seat, position)
             : step.arrays.drafts.drafted[place_of(step, seat, position)];
}

// --- The tokens of a step ---

// Token of an input row, or -1 where nothing lives. Behind the sure token of a decode row stand its
// drafts.
QUIRE_HOST_DEVICE inline std::int32_t token_of_row(const TinyV4Step& step, std::int64_t t) {
  if (t >= step.shape.tokens) return -1;
  const std::int32_t batch_row = step.views.token_batch_row[t];
  if (batch_row < 0) return -1;
  const std::int32_t seat = step.views.row_seat[batch_row];
  const std::int32_t position = step.views.positions[t];
  const bool drafted = step.shape.is_decode() && t % step.shape.tokens_per_row > 0;
  return drafted ? draft_at(step, seat, position) : token_at(step, seat, position);
}

// Tokens that batch row r tries: the sure one, and its drafts as far as it was prepared for them.
// Read from what was applied and committed, since the step is not planned yet.
QUIRE_HOST_DEVICE inline std::int32_t tokens_to_try(const TinyV4Step& step, std::int32_t r) {
  constexpr std::uint32_t kDraftCount = 0x2545F491u;
  const std::int32_t seat = step.row_seats[r];
  const std::int32_t applied = step.row_tokens[r];
  if (seat < 0 || applied <= 0) return 0;
  std::int32_t drafts = min_of(step.arrays.drafts.seat_count[seat], applied - 1);
  if (step.config.drafts_from_truth.on) {
    const std::uint32_t hash = truth_hash(step, seat, step.seat_lengths[seat], kDraftCount);
    drafts = min_of(drafts, static_cast<std::int32_t>(hash >> 8) % applied);
  }
  return 1 + drafts;
}

// --- Sampling ---

// The likeliest token of input row t of the target comes after the row's position. In a ragged step
// it is the next input where the prompt is over and the row is the last of its batch row; in a
// decode step that is for accept_row to say.
QUIRE_HOST_DEVICE inline void place_token(const TinyV4Step& step, std::int64_t t,
                                          std::int32_t token) {
  const std::int32_t batch_row = step.views.token_batch_row[t];
  const std::int32_t seat = step.views.row_seat[batch_row];
  const std::int32_t next = step.views.positions[t] + 1;
  step.arrays.predicted[place_of(step, seat, next)] = token;
  if (!step.shape.is_decode() && next == step.views.row_length[batch_row] &&
      next >= step.arrays.seat_prompt_tokens[seat]) {
    step.arrays.history[place_of(step, seat, next)] = token;
  }
}

// The draft layers have seen the token behind their position: what they say comes behind that. The
// last token of a batch row counts.
QUIRE_HOST_DEVICE inline void place_draft(const TinyV4Step& step, std::int64_t t,
                                          std::int32_t token) {
  const std::int32_t batch_row = step.views.token_batch_row[t];
  const std::int32_t seat = step.views.row_seat[batch_row];
  const std::int32_t next = step.views.positions[t] + 1;
  if (next != step.views.row_length[batch_row]) return;
  std::int32_t& count = step.arrays.drafts.seat_count[seat];
  const bool first = step.stage == TinyV4Stage::kExtend;
  count = next < step.context_max ? (first ? 1 : count + 1) : 0;
  if (count == 0) return;
  step.arrays.drafts.drafted[place_of(step, seat, next + 1)] = token;
}

QUIRE_HOST_DEVICE inline void place_sample(const TinyV4Step& step, std::int64_t t,
                                           std::int32_t token) {
  step.stage == TinyV4Stage::kTarget ? place_token(step, t, token) : place_draft(step, t, token);
}

// --- After the target layers ---

// Batch row r of a decode step keeps its sure token and the drafts in front of the first that the
// model would not have generated, and generates the token behind them.
QUIRE_HOST_DEVICE inline std::int32_t keep_tokens(const TinyV4Step& step, std::int32_t seat,
                                                  std::int32_t start, std::int32_t length) {
  const std::int32_t most = min_of(length, step.arrays.drafts.seat_tokens_max[seat]);
  for (std::int32_t kept = 1;; ++kept) {
    const std::int32_t next = start + kept;
    const std::int32_t token = step.arrays.predicted[place_of(step, seat, next)];
    step.arrays.history[place_of(step, seat, next)] = token;
    if (next >= most || token != draft_at(step, seat, next) || token == step.config.end_token) {
      return kept;
    }
  }
}

// What becomes of batch row r. It stops with all the tokens that its request may have, or in front
// of an end token. (Backend::stop_rows would do so in decode steps, but a prompt may be followed by
// an end token, too.)
QUIRE_HOST_DEVICE inline void accept_row(const TinyV4Step& step, std::int32_t r) {
  const TinyV4Drafts& drafts = step.arrays.drafts;
  const std::int32_t seat = step.views.row_seat[r];
  const std::int32_t length = step.views.row_length[r];
  std::int32_t kept = 0;
  std::int32_t behind = 0;
  bool stops = false;
  if (length > 0) {
    const std::int32_t start = step.views.positions[step.views.cu_extend[r]];
    kept = step.shape.is_decode() ? keep_tokens(step, seat, start, length) : length - start;
    behind = start + kept;
    stops = behind >= drafts.seat_tokens_max[seat] ||
            (behind >= step.arrays.seat_prompt_tokens[seat] &&
             step.arrays.history[place_of(step, seat, behind)] == step.config.end_token);
  }
  drafts.kept[r] = kept;
  drafts.stop[r] = stops ? 1 : 0;
  for (std::int32_t pass = 0; pass < step.draft_max; ++pass) {
    drafts.pass_positions[pass * step.rows_max + r] = behind + pass;
  }
}

// --- The input of the draft layers ---

// The row of `x` with the hidden state of input row t of a draft plan. After a verify step it is
// that of the target, or of the draft layers themselves: a draft pass goes on from what the plan
// before it gave.
QUIRE_HOST_DEVICE inline std::int64_t hidden_row(const TinyV4Step& step, std::int64_t t) {
  if (step.extended_tokens_per_row == 0) return t;
  return t * step.extended_tokens_per_row + step.arrays.drafts.kept[t] - 1;
}

// The token behind input row t of a draft plan; -1 where nothing lives.
QUIRE_HOST_DEVICE inline std::int32_t token_behind(const TinyV4Step& step, std::int64_t t) {
  if (t >= step.shape.tokens) return -1;
  const std::int32_t batch_row = step.views.token_batch_row[t];
  if (batch_row < 0) return -1;
  const std::int32_t seat = step.views.row_seat[batch_row];
  const std::int32_t next = step.views.positions[t] + 1;
  return step.stage == TinyV4Stage::kPass ? step.arrays.drafts.drafted[place_of(step, seat, next)]
                                          : token_at(step, seat, next);
}

}  // namespace quire::serving
