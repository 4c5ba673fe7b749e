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

QUIRE_HOST_DEVICE inline RowToken token_of_row(const StandInParams& params,
                                               std::int32_t input_row) {
  const std::int32_t batch_row = params.views.token_batch_row[input_row];
  if (batch_row < 0) return {false, 0, 0};
  const std::int32_t seat = params.views.row_seat[batch_row];
  const std::int32_t position = params.views.positions[input_row];
  return {true,
          position < params.seat_prompt_tokens[seat]
              ? prompt_token(params.seat_seed[seat], position)
              : params.seat_next_token[seat],
          position};
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

QUIRE_HOST_DEVICE inline void sample_row(const StandInParams& params, std::int32_t batch_row) {
  const std::int32_t length = params.views.row_length[batch_row];
  if (length == 0) return;
  const std::int32_t seat = params.views.row_seat[batch_row];
  if (length < params.seat_prompt_tokens[seat]) return;
  const std::int32_t position = length - 1;
  const std::uint32_t token = position < params.seat_prompt_tokens[seat]
                                  ? prompt_token(params.seat_seed[seat], position)
                                  : params.seat_next_token[seat];
  params.seat_next_token[seat] = next_token(token, position);
}

}  // namespace quire::serving
