// What a cache holds of one request, as the bytes that a reader may still see (DESIGN 5.3) in an
// order that does not depend on where they lie: two caches that served the same request compare by
// memcmp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <quire/runtime/device_cache.h>
#include <quire/runtime/owners.h>

namespace quire::serving {

struct CachedRequest {
  const DeviceCache& cache;
  SeatId seat;
  std::span<const PageId> pages;
  std::int64_t tokens;  // of its length in the layer's group
};

// Complete entries with their scales, the window, the state that the next token reads. Blocks, in
// stream order.
std::vector<std::byte> wait_for_live_bytes(const CachedRequest& request, LayerId layer,
                                           Stream& stream);

}  // namespace quire::serving
