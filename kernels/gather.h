// What dequantising an entry and laying keys out for non-paged logits means, once for host and
// device. Internal, not installed.
#pragma once

#include <cstdint>

#include <quire/kernels/fp8.h>
#include <quire/kernels/params.h>

namespace quire {

// 2^(byte - 127); byte 0 is a subnormal.
QUIRE_HOST_DEVICE inline float scale_of(std::uint8_t byte) {
  return exact::from_bits(byte == 0 ? 0x00400000u : static_cast<std::uint32_t>(byte) << 23);
}

// One product of a short significand and a power of two. NaN has the same bits everywhere.
QUIRE_HOST_DEVICE inline float dequantised(std::uint8_t code, std::uint8_t scale) {
  if (scale == exact::kInfiniteScale || (code & 0x7Fu) == 0x7Fu) {
    return exact::from_bits(exact::kNanBits);
  }
  return exact::mul(exact::from_e4m3(code), scale_of(scale));
}

QUIRE_HOST_DEVICE inline std::int64_t gather_location(const GatherMainParams& params,
                                                      std::int64_t at) {
  return params.wide_locations ? static_cast<const std::int64_t*>(params.locations)[at]
                               : static_cast<const std::int32_t*>(params.locations)[at];
}

// Entries of batch row r; none where the engine says less than none.
QUIRE_HOST_DEVICE inline std::int64_t gathered_entries(const GatherIndexerParams& params,
                                                       std::int32_t r) {
  return max_of(params.row_entries[r], 0);
}

QUIRE_HOST_DEVICE inline std::int32_t gathered_sum(std::int64_t entries) {
  return static_cast<std::int32_t>(min_of(entries, std::int64_t{INT32_MAX}));
}

// Location of entry e of batch row r.
QUIRE_HOST_DEVICE inline std::int64_t gather_key_location(const GatherIndexerParams& params,
                                                          std::int32_t r, std::int64_t e) {
  const std::int32_t per_page = params.pool.entries_per_page;
  const std::int32_t* cells = params.page_table + r * params.page_table_stride;
  return std::int64_t{cells[e / per_page]} * per_page + e % per_page;
}

// The range of keys that one query token scores; after cu_entries.
QUIRE_HOST_DEVICE inline void write_key_range(const GatherIndexerParams& params,
                                              std::int32_t token) {
  const std::int32_t r = params.token_batch_row[token];
  std::int64_t start = 0;
  std::int64_t end = 0;
  if (r >= 0) {
    start = min_of(std::int64_t{params.cu_entries[r]}, params.capacity);
    const std::int64_t seen = std::int64_t{params.cu_entries[r]} + params.token_entries[token];
    end = min_of(min_of(seen, std::int64_t{params.cu_entries[r + 1]}), params.capacity);
  }
  params.k_start[token] = static_cast<std::int32_t>(start);
  params.k_end[token] = static_cast<std::int32_t>(max_of(start, end));
}

}  // namespace quire
