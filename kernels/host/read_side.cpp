// The read side on the host: picks to locations, and the two gathers; and the checks of their
// parameters, which both backends make.
#include <quire/kernels/host/operations.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <quire/kernels/gather.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/kernels/read_side.cuh>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

void check_not_null(const char* what, const void* pointer, bool needed) {
  QUIRE_CHECK(pointer != nullptr || !needed, what, " is null");
}

void check_pool(const char* what, const EntryPool& pool) {
  QUIRE_CHECK(pool.entries_per_page > 0 && (1 << pool.entries_per_page_log2) ==
                                               pool.entries_per_page,
              what, ".entries_per_page is ", pool.entries_per_page, " and its log2 ",
              pool.entries_per_page_log2, "; supported: a power of two and its logarithm");
  QUIRE_CHECK(pool.base != nullptr && aligned(pool.base) && pool.page_stride_bytes % 16 == 0, what,
              ": base ", static_cast<const void*>(pool.base), ", page stride ",
              pool.page_stride_bytes, "; supported: multiples of 16 bytes");
}

}  // namespace

void check(const TranslatePicksParams& params) {
  QUIRE_CHECK(params.tokens >= 0 && params.k >= 0, "TranslatePicksParams: ", params.tokens,
              " tokens of ", params.k, " picks");
  QUIRE_CHECK(params.picks_stride >= params.k && params.locations_stride >= params.k,
              "TranslatePicksParams: strides ", params.picks_stride, " and ",
              params.locations_stride, "; supported: at least k, ", params.k);
  QUIRE_CHECK(params.locations != params.picks || params.locations_stride == params.picks_stride,
              "TranslatePicksParams: in place, but the strides are ", params.picks_stride, " and ",
              params.locations_stride);
  QUIRE_CHECK(params.entries_per_page > 0, "TranslatePicksParams::entries_per_page is ",
              params.entries_per_page);
  QUIRE_CHECK(params.length_floor == 0 || params.length_floor == 1,
              "TranslatePicksParams::length_floor is ", params.length_floor, "; supported: 0, 1");
  const bool any = params.tokens > 0;
  check_not_null("TranslatePicksParams::picks", params.picks, any && params.k > 0);
  check_not_null("TranslatePicksParams::locations", params.locations, any && params.k > 0);
  check_not_null("TranslatePicksParams::token_batch_row", params.token_batch_row, any);
  check_not_null("TranslatePicksParams::token_csa_length", params.token_csa_length, any);
  check_not_null("TranslatePicksParams::page_table", params.page_table, any);
}

void check(const GatherMainParams& params) {
  check_pool("GatherMainParams::pool", params.pool);
  QUIRE_CHECK(params.count >= 0, "GatherMainParams::count is ", params.count);
  check_not_null("GatherMainParams::locations", params.locations, params.count > 0);
  check_not_null("GatherMainParams::output", params.output, params.count > 0);
  QUIRE_CHECK(aligned(params.output), "GatherMainParams::output at ", params.output,
              " is not 16-byte aligned");
  const std::int64_t size = bytes_of(params.output_type);
  QUIRE_CHECK(params.output_stride >= kHeadDim && params.output_stride * size % 16 == 0,
              "GatherMainParams::output_stride is ", params.output_stride, " elements of ", size,
              " bytes; supported: at least ", kHeadDim, " and a multiple of 16 bytes");
}

void check(const GatherIndexerParams& params) {
  check_pool("GatherIndexerParams::pool", params.pool);
  QUIRE_CHECK(params.rows >= 0 && params.tokens >= 0, "GatherIndexerParams: ", params.rows,
              " batch rows, ", params.tokens, " tokens");
  QUIRE_CHECK(params.capacity >= 0 && params.capacity <= INT32_MAX,
              "GatherIndexerParams::capacity is ", params.capacity, "; supported: 0 to ",
              INT32_MAX);
  QUIRE_CHECK((params.k_start == nullptr) == (params.k_end == nullptr),
              "GatherIndexerParams: k_start and k_end are given together or not at all");
  check_not_null("GatherIndexerParams::cu_entries", params.cu_entries, true);
  check_not_null("GatherIndexerParams::row_entries", params.row_entries, params.rows > 0);
  check_not_null("GatherIndexerParams::page_table", params.page_table, params.rows > 0);
  check_not_null("GatherIndexerParams::keys", params.keys, params.capacity > 0);
  check_not_null("GatherIndexerParams::scales", params.scales, params.capacity > 0);
  QUIRE_CHECK(aligned(params.keys), "GatherIndexerParams::keys at ",
              static_cast<const void*>(params.keys), " is not 16-byte aligned");
  const bool ranges = params.tokens > 0 && params.k_start != nullptr;
  check_not_null("GatherIndexerParams::token_batch_row", params.token_batch_row, ranges);
  check_not_null("GatherIndexerParams::token_entries", params.token_entries, ranges);
}

namespace host {

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
      const std::uint16_t narrow = c < kNopeDim ? exact::to_bf16(value)
                                                : static_cast<std::uint16_t>(wide >> 16);
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

}  // namespace host
}  // namespace quire
