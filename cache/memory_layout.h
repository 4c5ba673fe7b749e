// Where everything lies in the one arena of a device cache. The same function measures and places:
// its total is what a pool is asked for, its offsets are what the kernels address.
//
//   pages       of a CSA layer its CSA pages, then its indexer pages; of an HCA layer its HCA
//               pages; layer-major, or page-major: of each page all layers, before the next page
//   seats       per layer: window ring; then state rings of both CSA compressors, or HCA banks
//   scratch     per plan buffer: one layer's worth of window entries, shared by its layers
//   step table  lengths of each layer group, limit, stopped, owner, page table
//   plan buffers  the headers of all, then of each the rest
//
// Every part starts on a multiple of 256 bytes. Offsets are from the start of the arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <quire/cache/limits.h>
#include <quire/cache/model_spec.h>
#include <quire/runtime/device_cache.h>

namespace quire {

inline constexpr std::int64_t kPartAlignment = 256;
inline constexpr std::int32_t kWindowPageEntries = 64;  // FlashMLA's page of the window pool
inline constexpr std::int32_t kCsaPageEntries = 64;     // entries of 256 tokens
inline constexpr std::int32_t kHcaPageEntries = 2;

struct MemoryPart {
  std::int64_t offset = -1;  // -1: the layer's kind has no such part
  std::int64_t bytes = 0;
  std::int64_t end() const { return offset + bytes; }
};

// Of parts of pages, `offset` is where page 0 begins and `bytes` counts all pages, also where
// page-major order lets those of other layers lie between them.
struct LayerLayout {
  MemoryPart csa_pages;      // [pages], csa_page_stride apart
  MemoryPart indexer_pages;  // [pages], indexer_page_stride apart
  MemoryPart window_ring;    // [seats x ring / 64, page of 64 window entries]
  MemoryPart csa_state;      // [seats, csa ring, 2048] fp32
  MemoryPart indexer_state;  // [seats, csa ring, 512] fp32
  MemoryPart hca_pages;      // [pages], hca_page_stride apart
  MemoryPart hca_state;      // [seats, banks, 3, 512] fp32
};

struct StepTableLayout {
  MemoryPart length, limit, stopped, owner, page_table;
};

struct PlanBufferLayout {
  MemoryPart scratch;  // [scratch tokens / 64, page of 64 window entries], in region scratch
  MemoryPart header, report, row_seats, row_tokens, row_owners, row_lives, results;
  MemoryPart rows, tokens, csa_entries, hca_entries;
  // Views.
  MemoryPart positions, token_batch_row, token_window_length, token_csa_length, token_hca_length;
  MemoryPart ring_locations, scratch_locations, csa_locations, hca_locations;
  MemoryPart cu_extend, row_seat, row_length, row_window_length, row_csa_length, row_hca_length;
  MemoryPart page_table;
};

struct MemoryLayout {
  MemoryPart pages, seats, scratch, step_table, plan_buffers;  // adjoining, in this order
  // With the headers, at the front of the plan buffers: what a clear must zero to make every plan
  // made before it void, in one piece.
  MemoryPart step_table_and_headers;
  std::vector<LayerLayout> layers;
  StepTableLayout table;
  std::vector<PlanBufferLayout> buffers;

  std::int64_t window_ring_tokens = 0;
  std::int64_t csa_ring_tokens = 0;
  std::int64_t window_page_bytes = 0;
  // From one page of a layer to its next: what a page takes, or in page-major order the bytes of
  // all layers together.
  std::int64_t csa_page_stride = 0;
  std::int64_t indexer_page_stride = 0;
  std::int64_t hca_page_stride = 0;
  std::int64_t view_page_table_stride = 0;  // cells of one batch row in the view

  CacheBytes bytes() const {
    return {pages.bytes, seats.bytes, scratch.bytes, step_table.bytes, plan_buffers.bytes};
  }
};

// Throws UsageError that names the limit or option, its value and what is supported.
MemoryLayout make_memory_layout(const ModelSpec& spec, const Limits& limits,
                                const DeviceCacheOptions& options);

// The tables with their addresses, for an arena that starts at `base`.
StepTable place_step_table(const MemoryLayout& layout, const ModelSpec& spec, const Limits& limits,
                           std::byte* base);
PlanBuffer place_plan_buffer(const MemoryLayout& layout, std::size_t buffer, std::byte* base);

}  // namespace quire
