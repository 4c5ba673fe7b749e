// Copies whole rings and pages to the host and picks the live parts out of them there: few copies,
// for the order of the bytes matters here and not the time.
#include "examples/live_bytes.h"

#include <algorithm>

namespace quire::serving {
namespace {

// Of one layer, in canonical order.
class LiveBytes {
 public:
  LiveBytes(const CachedRequest& place, Stream& stream)
      : place_(place), stream_(stream), tokens_(place.tokens) {}

  std::vector<std::byte> of_layer(LayerId layer) {
    add_window(place_.cache.window_ring(layer));
    switch (place_.cache.spec().layers[static_cast<std::size_t>(layer.value)]) {
      case LayerKind::kCsa:
        add_entries(place_.cache.csa_pages(layer), kCsaRule, true);
        add_entries(place_.cache.indexer_pages(layer), kCsaRule, false);
        add_csa_state(place_.cache.csa_state(layer), 4 * kHeadDim);
        add_csa_state(place_.cache.indexer_state(layer), 4 * kIndexerDim);
        break;
      case LayerKind::kHca:
        add_entries(place_.cache.hca_pages(layer), kHcaRule, true);
        add_hca_state(place_.cache.hca_state(layer));
        break;
      case LayerKind::kSliding:
        break;
    }
    return bytes_;
  }

 private:
  std::vector<std::byte> fetch(const void* from, std::int64_t bytes) const {
    std::vector<std::byte> to(static_cast<std::size_t>(bytes));
    place_.cache.backend().copy(to.data(), from, bytes, stream_);
    stream_.wait();
    return to;
  }

  void add(const std::byte* from, std::int64_t bytes) {
    bytes_.insert(bytes_.end(), from, from + bytes);
  }

  void add_main(const EntryPool& page, std::int64_t at) {
    add(page.main_data(at), kMainDataBytes);
    add(page.main_scales(at), kMainScaleBytes);
  }

  void add_window(const EntryPool& ring) {
    const std::int64_t ring_tokens = place_.cache.window_ring_tokens();
    const std::int64_t first = place_.seat.value * ring_tokens;
    const std::int64_t bytes = ring_tokens / ring.entries_per_page * ring.page_stride_bytes;
    std::vector<std::byte> copy = fetch(ring.page_of(first), bytes);
    const EntryPool found =
        make_entry_pool(copy.data(), ring.page_stride_bytes, ring.entries_per_page);
    for (std::int64_t p = std::max<std::int64_t>(0, tokens_ - 128); p < tokens_; ++p) {
      add_main(found, p % ring_tokens);
    }
  }

  void add_entries(const EntryPool& pool, CompressionRule rule, bool main) {
    const std::int64_t per_page = pool.entries_per_page;
    const std::int64_t page_bytes = main ? main_page_bytes(per_page) : indexer_page_bytes(per_page);
    const std::int64_t entries = tokens_ / rule.ratio;
    for (std::int64_t first = 0; first < entries; first += per_page) {
      const std::int64_t page = place_.pages[static_cast<std::size_t>(first / per_page)].value;
      std::vector<std::byte> copy = fetch(pool.page_of(page * per_page), page_bytes);
      const EntryPool found = make_entry_pool(copy.data(), page_bytes, pool.entries_per_page);
      for (std::int64_t at = 0; at < std::min(per_page, entries - first); ++at) {
        if (main) {
          add_main(found, at);
        } else {
          add(found.indexer_values(at), kIndexerDim);
          add(found.indexer_scale(at), kIndexerScaleBytes);
        }
      }
    }
  }

  void add_csa_state(const float* state, std::int64_t width) {
    const std::int64_t ring = place_.cache.csa_ring_tokens();
    const std::int64_t row_bytes = width * 4;
    const auto copy = fetch(state + place_.seat.value * ring * width, ring * row_bytes);
    const std::int64_t oldest = std::max<std::int64_t>(0, round_down<std::int64_t>(tokens_, 4) - 4);
    for (std::int64_t p = oldest; p < tokens_; ++p) {
      add(copy.data() + p % ring * row_bytes, row_bytes);
    }
  }

  void add_hca_state(const float* state) {
    if (tokens_ % kHcaRule.ratio == 0) return;  // nothing is under way
    const std::int64_t banks = place_.cache.hca_banks();
    const std::int64_t bank = place_.seat.value * banks + tokens_ % banks;
    const auto copy = fetch(state + bank * 3 * kHeadDim, 3 * kHeadDim * 4);
    add(copy.data(), static_cast<std::int64_t>(copy.size()));
  }

  const CachedRequest& place_;
  Stream& stream_;
  std::int64_t tokens_;
  std::vector<std::byte> bytes_;
};

}  // namespace

std::vector<std::byte> wait_for_live_bytes(const CachedRequest& request, LayerId layer,
                                           Stream& stream) {
  return LiveBytes(request, stream).of_layer(layer);
}

}  // namespace quire::serving
