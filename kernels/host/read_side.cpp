// The read side on the host: picks to locations, and the two gathers, in plain loops.
#include <quire/kernels/host/operations.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <quire/kernels/gather.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/kernels/read_side.cuh>

namespace quire::host {

void translate_picks(const TranslatePicksParams& params) {
  for (std::int32_t token = 0; token < params.tokens; ++token) {
    const std::int32_t r = params.token_batch_row[token];
    const std::int32_t entries = r >= 0 ? params.token_csa_length[token] : 0;
    const std::int32_t* cells = params.page_table + std::max(r, 0) * params.page_table_stride;
    const std::int32_t* picks = params.picks + token * params.picks_stride;
    std::int32_t* locations = params.locations + token * params.locations_stride;
    std::int32_t length = std::max(std::min(params.k, entries), params.length_floor);
    for (std::int32_t i = 0; i < params.k; ++i) {
      const std::int32_t pick = picks[i];
      if (pick >= 0 && pick < entries) length = std::max(length, i + 1);
      locations[i] = csa_location_of_pick(cells, pick, entries, params.padding_location,
                                          params.entries_per_page);
    }
    if (params.lengths != nullptr) params.lengths[token] = length;
  }
}

namespace {

// One channel of the entry at `location`, as a float and as the bits of a bf16.
float dequantised_channel(const EntryPool& pool, std::int64_t location, std::int64_t channel) {
  const std::byte* data = pool.main_data(location);
  if (channel < kNopeDim) {
    return dequantised(static_cast<std::uint8_t>(data[channel]),
                       static_cast<std::uint8_t>(pool.main_scales(location)[channel / kTileDim]));
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data + kNopeDim + (channel - kNopeDim) * 2, sizeof(bits));
  return exact::from_bf16(bits);
}

}  // namespace

void gather_main(const GatherMainParams& params) {
  const FloatEnvironment environment;
  const std::int64_t row_bytes = params.output_stride * bytes_of(params.output_type);
  for (std::int64_t at = 0; at < params.count; ++at) {
    const std::int64_t location = gather_location(params, at);
    auto* row = static_cast<std::byte*>(params.output) + at * row_bytes;
    if (location < 0) {
      std::memset(row, 0, static_cast<std::size_t>(kHeadDim * bytes_of(params.output_type)));
      continue;
    }
    for (std::int64_t c = 0; c < kHeadDim; ++c) {
      const float value = dequantised_channel(params.pool, location, c);
      if (params.output_type == ElementType::kFloat32) {
        std::memcpy(row + c * 4, &value, 4);
        continue;
      }
      // The tail's bits as they are: rounding would give its NaNs other bits.
      const std::uint32_t wide = exact::bits(value);
      const std::uint16_t narrow =
          c < kNopeDim ? exact::to_bf16(value) : static_cast<std::uint16_t>(wide >> 16);
      std::memcpy(row + c * 2, &narrow, 2);
    }
  }
}

void gather_indexer(const GatherIndexerParams& params) {
  std::int64_t before = 0;
  for (std::int32_t r = 0; r < params.rows; ++r) {
    params.cu_entries[r] = gathered_sum(before);
    const std::int64_t entries = gathered_entries(params, r);
    for (std::int64_t e = 0; e < entries && before + e < params.capacity; ++e) {
      const std::int64_t location = gather_key_location(params, r, e);
      std::memcpy(params.keys + (before + e) * kIndexerDim, params.pool.indexer_values(location),
                  static_cast<std::size_t>(kIndexerDim));
      std::memcpy(params.scales + before + e, params.pool.indexer_scale(location),
                  static_cast<std::size_t>(kIndexerScaleBytes));
    }
    before += entries;
  }
  params.cu_entries[params.rows] = gathered_sum(before);
  if (params.k_start == nullptr) return;
  for (std::int32_t token = 0; token < params.tokens; ++token) write_key_range(params, token);
}

}  // namespace quire::host
