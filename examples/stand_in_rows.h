// One element of the stand-in model's work, for host loops and kernels alike.
#pragma once

#include "examples/stand_in_math.h"
#include "examples/stand_in_model.h"

namespace quire::serving {

struct RowToken {
  bool live;
  std::uint32_t token;
  std::int32_t position;
};

// Token `place` of a decode row whose first one is given, where the first `right` of the drafts
// behind it are what will come.
QUIRE_HOST_DEVICE inline std::uint32_t token_in_row(std::uint32_t first, std::int32_t start,
                                                    std::int32_t place, std::int32_t right) {
  std::uint32_t token = first;
  for (std::int32_t i = 0; i < place; ++i) token = next_token(token, start + i);
  return place <= right ? token : wrong_token(token);
}

// Of the `drafts` behind position `start`, how many are right: those in front of the first that is
// not.
QUIRE_HOST_DEVICE inline std::int32_t right_drafts(const StandInParams& params, std::int32_t seat,
                                                   std::int32_t start, std::int32_t drafts) {
  std::int32_t right = 0;
  while (right < drafts &&
         draft_is_right(params.seat_seed[seat], start + right + 1, params.draft_acceptance)) {
    ++right;
  }
  return right;
}

QUIRE_HOST_DEVICE inline RowToken token_of_row(const StandInParams& params,
                                               std::int32_t input_row) {
  const std::int32_t batch_row = params.views.token_batch_row[input_row];
  if (batch_row < 0) return {false, 0, 0};
  const std::int32_t seat = params.views.row_seat[batch_row];
  const std::int32_t position = params.views.positions[input_row];
  const std::uint32_t prompted = prompt_token(params.seat_seed[seat], position);
  if (params.stage == StandInStage::kPass) return {true, wrong_token(prompted), position};
  if (position < params.seat_prompt_tokens[seat]) return {true, prompted, position};
  const bool extends = params.stage == StandInStage::kExtend;
  const std::int32_t place = params.shape.is_decode() ? input_row % params.shape.tokens_per_row : 0;
  const std::int32_t start = position - place;
  const std::uint32_t first = (extends ? params.seat_first_token : params.seat_next_token)[seat];
  const std::int32_t right = extends ? place : right_drafts(params, seat, start, place);
  return {true, token_in_row(first, start, place, right), position};
}

// Padding rows carry NaN, so that a padding row that is used shows.
QUIRE_HOST_DEVICE inline float row_element(const RowToken& row, std::uint32_t key,
                                           std::int32_t channel) {
  return row.live ? row_value(key, channel) : __builtin_nanf("");
}

QUIRE_HOST_DEVICE inline std::uint16_t row_element_bf16(const RowToken& row, std::uint32_t key,
                                                        std::int32_t channel) {
  return row.live ? row_value_bf16(key, channel) : std::uint16_t{0x7FC0};
}

// What a batch row keeps of what it tried, and its next token. `stop_rows` cuts what leads beyond
// the request's last token; then there is no next one.
QUIRE_HOST_DEVICE inline void sample_row(const StandInParams& params, std::int32_t batch_row) {
  const std::int32_t length = params.views.row_length[batch_row];
  if (params.shape.is_decode()) params.kept[batch_row] = 0;
  if (length == 0) return;
  const std::int32_t seat = params.views.row_seat[batch_row];
  if (length < params.seat_prompt_tokens[seat]) return;
  std::int32_t start = length - 1;
  std::int32_t right = 0;
  if (params.shape.is_decode()) {
    start = params.views.positions[batch_row * params.shape.tokens_per_row];
    right = right_drafts(params, seat, start, length - 1 - start);
    params.kept[batch_row] = 1 + right;
  }
  const std::uint32_t first = start < params.seat_prompt_tokens[seat]
                                  ? prompt_token(params.seat_seed[seat], start)
                                  : params.seat_next_token[seat];
  params.seat_first_token[seat] = first;
  params.seat_next_token[seat] = token_in_row(first, start, right + 1, right + 1);
}

// The views are those of the extension: behind what was kept.
QUIRE_HOST_DEVICE inline void place_passes(const StandInParams& params, std::int32_t batch_row) {
  for (std::int32_t pass = 0; pass < params.draft_max; ++pass) {
    params.pass_positions[pass * params.rows_max + batch_row] =
        params.views.row_length[batch_row] + pass;
  }
}

// What an operation does for one batch row.
QUIRE_HOST_DEVICE inline void run_for_row(StandInOp op, const StandInParams& params,
                                          std::int32_t batch_row) {
  op == StandInOp::kSample ? sample_row(params, batch_row) : place_passes(params, batch_row);
}

QUIRE_HOST_DEVICE inline void begin_seat(const StandInParams& params, std::int32_t seat,
                                         std::uint32_t seed, std::int32_t prompt_tokens,
                                         std::int32_t tokens_max) {
  params.seat_seed[seat] = seed;
  params.seat_prompt_tokens[seat] = prompt_tokens;
  params.seat_tokens_max[seat] = tokens_max;
}

}  // namespace quire::serving
