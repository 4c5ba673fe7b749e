// The bytes of one entry and of one page, for host and device.
//
// Main and window entries are FlashMLA's MODEL1 format (SPEC 3.4): 448 e4m3, 64 bf16, 8 scale bytes;
// a page keeps all data first and all scales behind. Indexer entries are DeepGEMM's (SPEC 3.5):
// 128 e4m3 and one fp32 scale, planar as well. Every offset is 64-bit before any multiplication.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/runtime/base/host_device.h>
#include <quire/runtime/base/integers.h>

namespace quire {

inline constexpr std::int64_t kHeadDim = 512;
inline constexpr std::int64_t kRopeDim = 64;
inline constexpr std::int64_t kNopeDim = kHeadDim - kRopeDim;
inline constexpr std::int64_t kTileDim = 64;  // channels that share a UE8M0 scale
inline constexpr std::int64_t kIndexerDim = 128;

inline constexpr std::int64_t kMainDataBytes = kNopeDim + 2 * kRopeDim;  // 576
inline constexpr std::int64_t kMainScaleBytes = 8;  // 7 tiles; the eighth is written as 0
inline constexpr std::int64_t kIndexerScaleBytes = 4;

// FlashMLA's page: padded to a multiple of 576, which its SM100 kernel needs.
QUIRE_HOST_DEVICE constexpr std::int64_t main_page_bytes(std::int64_t entries) {
  return round_up((kMainDataBytes + kMainScaleBytes) * entries, kMainDataBytes);
}

QUIRE_HOST_DEVICE constexpr std::int64_t indexer_page_bytes(std::int64_t entries) {
  return (kIndexerDim + kIndexerScaleBytes) * entries;
}

// Pages of entries, anywhere in memory: entry (page, offset) is found from three numbers. The pages
// of one layer need not be adjacent to each other.
struct EntryPool {
  std::byte* base = nullptr;              // of page 0, 16-byte aligned
  std::int64_t page_stride_bytes = 0;     // a multiple of 16
  std::int32_t entries_per_page = 0;      // a power of two
  std::int32_t entries_per_page_log2 = 0;

  QUIRE_HOST_DEVICE std::byte* page_of(std::int64_t location) const {
    return base + (location >> entries_per_page_log2) * page_stride_bytes;
  }
  QUIRE_HOST_DEVICE std::int64_t offset_of(std::int64_t location) const {
    return location & (entries_per_page - 1);
  }

  // The 576 data bytes and the 8 scale bytes of a main or window entry.
  QUIRE_HOST_DEVICE std::byte* main_data(std::int64_t location) const {
    return page_of(location) + offset_of(location) * kMainDataBytes;
  }
  QUIRE_HOST_DEVICE std::byte* main_scales(std::int64_t location) const {
    return page_of(location) + entries_per_page * kMainDataBytes +
           offset_of(location) * kMainScaleBytes;
  }

  // The 128 value bytes and the fp32 scale of an indexer entry.
  QUIRE_HOST_DEVICE std::byte* indexer_values(std::int64_t location) const {
    return page_of(location) + offset_of(location) * kIndexerDim;
  }
  QUIRE_HOST_DEVICE std::byte* indexer_scale(std::int64_t location) const {
    return page_of(location) + entries_per_page * kIndexerDim +
           offset_of(location) * kIndexerScaleBytes;
  }
};

constexpr EntryPool make_entry_pool(std::byte* base, std::int64_t page_stride_bytes,
                                    std::int32_t entries_per_page) {
  EntryPool pool{base, page_stride_bytes, entries_per_page, 0};
  while ((1 << pool.entries_per_page_log2) < entries_per_page) ++pool.entries_per_page_log2;
  return pool;
}

}  // namespace quire
