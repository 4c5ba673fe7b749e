// Where the bytes of one page, and of one seat, lie in a cache's memory: worked out from the pools
// that consumers see, layer by layer. And what tests do with them: compare, poison, cut out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <quire/runtime/device_cache.h>

#include "tests/support/test_engine.h"

namespace quire::test {

struct ByteRange {
  std::int64_t offset;  // in pages_memory() or seats_memory()
  std::int64_t bytes;
};

// A page with what its stride leaves up to the next.
inline std::vector<ByteRange> page_ranges(const DeviceCache& device, PageId page) {
  const std::byte* memory = device.pages_memory().data();
  std::vector<ByteRange> ranges;
  const auto add = [&](const EntryPool& pool) {
    ranges.push_back(
        {pool.base - memory + page.value * pool.page_stride_bytes, pool.page_stride_bytes});
  };
  const std::vector<LayerKind>& layers = device.spec().layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    if (layers[i] == LayerKind::kCsa) {
      add(device.csa_pages(layer));
      add(device.indexer_pages(layer));
    } else if (layers[i] == LayerKind::kHca) {
      add(device.hca_pages(layer));
    }
  }
  // In page-major order the stride holds all layers, and the first pool begins where the page does.
  if (device.options().page_order == PageOrder::kPageMajor && !ranges.empty()) {
    ranges.erase(ranges.begin() + 1, ranges.end());
  }
  return ranges;
}

// Window ring, CSA state rings and HCA banks of every layer.
inline std::vector<ByteRange> seat_ranges(const DeviceCache& device, SeatId seat) {
  const std::byte* memory = device.seats_memory().data();
  std::vector<ByteRange> ranges;
  const auto add = [&](const void* base, std::int64_t bytes) {
    ranges.push_back({static_cast<const std::byte*>(base) - memory + seat.value * bytes, bytes});
  };
  const std::vector<LayerKind>& layers = device.spec().layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    const EntryPool ring = device.window_ring(layer);
    add(ring.base, device.window_ring_tokens() / ring.entries_per_page * ring.page_stride_bytes);
    if (layers[i] == LayerKind::kCsa) {
      add(device.csa_state(layer), device.csa_ring_tokens() * 2048 * 4);
      add(device.indexer_state(layer), device.csa_ring_tokens() * 512 * 4);
    } else if (layers[i] == LayerKind::kHca) {
      add(device.hca_state(layer), device.hca_banks() * 3 * 512 * 4);
    }
  }
  return ranges;
}

inline void zero(std::vector<std::byte>& memory, std::span<const ByteRange> ranges) {
  for (const ByteRange& range : ranges) {
    std::fill_n(memory.begin() + range.offset, range.bytes, std::byte{0});
  }
}

inline std::vector<std::byte> cut(const std::vector<std::byte>& memory,
                                  std::span<const ByteRange> ranges) {
  std::vector<std::byte> bytes;
  for (const ByteRange& range : ranges) {
    bytes.insert(bytes.end(), memory.begin() + range.offset,
                 memory.begin() + range.offset + range.bytes);
  }
  return bytes;
}

inline bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace quire::test
