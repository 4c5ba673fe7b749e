// One layout function measures: a count is tried by laying everything out with it. Both searches
// are over counts that bytes grow with, so halving finds the largest that fits.
#include <quire/cache/capacity.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include <quire/cache/entry_layout.h>
#include <quire/cache/memory_layout.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>

namespace quire {
namespace {

using Region = CapacityItem::Region;

constexpr std::int64_t kPagesMax = std::int64_t{1} << 30;  // as Limits::check
constexpr std::int64_t kSeatsMax = std::int64_t{1} << 24;
constexpr std::int64_t kRopePositionsMax = std::int64_t{1} << 24;  // as make_rope_table
constexpr std::int64_t kGranularityMax = std::int64_t{1} << 40;

void check_options(const CapacityOptions& options) {
  // Written so that NaN is refused too.
  QUIRE_CHECK(options.seats_fraction > 0 && options.seats_fraction < 1,
              "CapacityOptions::seats_fraction is ", options.seats_fraction,
              "; supported: above 0, below 1");
  QUIRE_CHECK(options.rope_positions >= 0 && options.rope_positions <= kRopePositionsMax,
              "CapacityOptions::rope_positions is ", options.rope_positions, "; supported: 0 to ",
              kRopePositionsMax);
  QUIRE_CHECK(
      options.pool_granularity_bytes >= 1 && options.pool_granularity_bytes <= kGranularityMax,
      "CapacityOptions::pool_granularity_bytes is ", options.pool_granularity_bytes,
      "; supported: 1 to ", kGranularityMax);
}

// The largest value in [least, most] for which `fits` holds; `least` is known to fit.
template <class Fits>
std::int64_t largest(std::int64_t least, std::int64_t most, Fits fits) {
  while (least < most) {
    const std::int64_t middle = least + (most - least + 1) / 2;
    if (fits(middle)) {
      least = middle;
    } else {
      most = middle - 1;
    }
  }
  return least;
}

// Adds up the same part of all layers: those that have it count.
class Collector {
 public:
  Collector(const MemoryLayout& layout, std::vector<CapacityItem>& items)
      : layout_(layout), items_(items) {}

  // `per_layer` items of `item_bytes` in every layer with the part.
  std::int64_t add(Region region, const char* name, MemoryPart LayerLayout::*part,
                   std::int64_t per_layer, std::int64_t item_bytes) {
    CapacityItem item{region, name, 0, item_bytes, 0};
    for (const LayerLayout& layer : layout_.layers) {
      if ((layer.*part).offset < 0) continue;
      item.count += per_layer;
      item.bytes += (layer.*part).bytes;
    }
    if (item.count == 0) return 0;
    items_.push_back(item);
    return item.count / per_layer * item_bytes;
  }

 private:
  const MemoryLayout& layout_;
  std::vector<CapacityItem>& items_;
};

void add_pages(Capacity& to, const MemoryLayout& layout, const DeviceCacheOptions& options) {
  const auto taken = [](std::int64_t asked, std::int64_t tight) {
    return asked == 0 ? tight : asked;
  };
  Collector collect(layout, to.items);
  const std::int64_t pages = to.limits.pages;
  to.page_bytes +=
      collect.add(Region::kPages, "CSA pages", &LayerLayout::csa_pages, pages,
                  taken(options.csa_page_stride_bytes, main_page_bytes(kCsaPageEntries)));
  to.page_bytes +=
      collect.add(Region::kPages, "indexer pages", &LayerLayout::indexer_pages, pages,
                  taken(options.indexer_page_stride_bytes, indexer_page_bytes(kCsaPageEntries)));
  to.page_bytes +=
      collect.add(Region::kPages, "HCA pages", &LayerLayout::hca_pages, pages,
                  taken(options.hca_page_stride_bytes, main_page_bytes(kHcaPageEntries)));
  if (options.page_order == PageOrder::kLayerMajor || to.page_bytes == 0) return;
  // All strides are the same there: the whole page.
  const std::int64_t padding = layout.csa_page_stride - to.page_bytes;
  to.page_bytes = layout.csa_page_stride;
  std::int64_t placed = 0;
  for (const CapacityItem& item : to.items) placed += item.bytes;
  to.items.push_back({Region::kPages, "padding", pages, padding, layout.pages.bytes - placed});
}

void add_seats(Capacity& to, const MemoryLayout& layout) {
  Collector collect(layout, to.items);
  const std::int64_t seats = to.limits.seats_max;
  constexpr std::int64_t kRowBytes = 4 * 4;  // four vectors of fp32
  to.seat_bytes +=
      collect.add(Region::kSeats, "window rings", &LayerLayout::window_ring, seats,
                  layout.window_ring_tokens / kWindowPageEntries * layout.window_page_bytes);
  to.seat_bytes += collect.add(Region::kSeats, "CSA state", &LayerLayout::csa_state, seats,
                               layout.csa_ring_tokens * kRowBytes * kHeadDim);
  to.seat_bytes += collect.add(Region::kSeats, "indexer state", &LayerLayout::indexer_state, seats,
                               layout.csa_ring_tokens * kRowBytes * kIndexerDim);
  to.seat_bytes += collect.add(Region::kSeats, "HCA banks", &LayerLayout::hca_state, seats,
                               to.limits.hca_banks() * kHcaBankFloats * 4);
}

void add_rest(Capacity& to, const MemoryLayout& layout, const ModelSpec& spec) {
  const Limits& limits = to.limits;
  const PlanBufferLayout& buffer = layout.buffers.front();
  to.items.push_back({Region::kScratch, "window scratch", limits.plan_buffers, buffer.scratch.bytes,
                      layout.scratch.bytes});
  to.items.push_back({Region::kStepTable, "lengths, limits, flags, owners", limits.seats_max,
                      4 * (spec.groups() + 3),
                      layout.table.length.bytes + layout.table.limit.bytes +
                          layout.table.stopped.bytes + layout.table.owner.bytes});
  to.items.push_back({Region::kStepTable, "page tables", limits.seats_max, limits.cells_max() * 4,
                      layout.table.page_table.bytes});
  to.items.push_back({Region::kPlanBuffers, "plans and views", limits.plan_buffers,
                      layout.plan_buffers.bytes / limits.plan_buffers, layout.plan_buffers.bytes});
}

// One table for the sliding layers, one for the others, where there are such layers.
std::int64_t rope_tables(const ModelSpec& spec) {
  const std::int64_t sliding = spec.count(LayerKind::kSliding);
  const auto all = static_cast<std::int64_t>(spec.layers.size());
  return (sliding > 0 ? 1 : 0) + (sliding < all ? 1 : 0);
}

// What must be there at least, each need by name.
[[noreturn]] void refuse(const Capacity& least, std::int64_t bytes) {
  const Limits& limits = least.limits;
  throw UsageError(concat(
      "a budget of ", bytes, " bytes is too small for one request of context_max ",
      limits.context_max, " tokens: at least ", least.total(), " bytes are needed (", limits.pages,
      " pages: ", least.cache.pages, "; ", limits.seats_max,
      limits.seats_max == 1 ? " seat: " : " seats: ", least.cache.seats, "; window scratch for ",
      limits.tokens_max, " tokens and ", limits.rows_max, " batch rows: ", least.cache.scratch,
      "; step table: ", least.cache.step_table, "; ", limits.plan_buffers,
      " plan buffers: ", least.cache.plan_buffers, "; RoPE tables: ", least.rope_bytes,
      "; granularity of the pool: ", least.pool_adds_bytes,
      "). Give more bytes, or lower context_max, seats_max, tokens_max, rows_max or plan_buffers"));
}

}  // namespace

const char* name_of(CapacityItem::Region region) {
  switch (region) {
    case Region::kPages:
      return "pages";
    case Region::kSeats:
      return "seats";
    case Region::kScratch:
      return "scratch";
    case Region::kStepTable:
      return "step table";
    case Region::kPlanBuffers:
      return "plan buffers";
    case Region::kRopeTables:
      return "RoPE tables";
  }
  return "unknown region";
}

std::int64_t Capacity::tokens_per_gib() const {
  return page_bytes == 0 ? 0 : (std::int64_t{1} << 30) * kPageTokens / page_bytes;
}

std::int64_t Capacity::requests_of(std::int64_t context_tokens) const {
  QUIRE_CHECK(context_tokens >= 1, "Capacity::requests_of ", context_tokens,
              " tokens; supported: 1 and more");
  return std::min(limits.seats_max, limits.pages / ceil_div(context_tokens, kPageTokens));
}

Capacity measure_capacity(const ModelSpec& spec, const Limits& limits,
                          const DeviceCacheOptions& layout_options,
                          const CapacityOptions& options) {
  check_options(options);
  const MemoryLayout layout = make_memory_layout(spec, limits, layout_options);
  Capacity capacity;
  capacity.limits = limits;
  capacity.cache = layout.bytes();
  add_pages(capacity, layout, layout_options);
  add_seats(capacity, layout);
  add_rest(capacity, layout, spec);
  if (options.rope_positions > 0) {
    const std::int64_t table_bytes = options.rope_positions * kRopeDim * 4;
    capacity.rope_bytes = rope_tables(spec) * table_bytes;
    capacity.items.push_back(
        {Region::kRopeTables, "cos and sin", rope_tables(spec), table_bytes, capacity.rope_bytes});
  }
  const std::int64_t total = capacity.cache.total();
  capacity.pool_adds_bytes = round_up(total, options.pool_granularity_bytes) - total;
  return capacity;
}

Capacity plan_capacity(const ModelSpec& spec, const Limits& asked, const DeviceCacheOptions& layout,
                       std::int64_t bytes, const CapacityOptions& options) {
  Limits limits = asked;
  limits.pages = std::clamp<std::int64_t>(limits.cells_max(), 1, kPagesMax);
  const bool find_seats = limits.seats_max == 0;
  if (find_seats) limits.seats_max = 1;
  // Padding locations cost no bytes, and exist or not by the pages that are still to be found.
  DeviceCacheOptions tried_layout = layout;
  tried_layout.padding_csa_location = -1;
  tried_layout.padding_hca_location = -1;
  tried_layout.padding_ring_location = -1;
  const auto measure = [&](const Limits& tried) {
    return measure_capacity(spec, tried, tried_layout, options);
  };
  const Capacity least = measure(limits);
  if (least.total() > bytes) refuse(least, bytes);
  if (find_seats) {
    const auto share =
        static_cast<std::int64_t>(static_cast<double>(bytes) * options.seats_fraction);
    const std::int64_t most = std::clamp<std::int64_t>(share / least.seat_bytes, 1, kSeatsMax);
    limits.seats_max = largest(1, most, [&](std::int64_t seats) {
      Limits tried = limits;
      tried.seats_max = seats;
      const Capacity found = measure(tried);
      return found.cache.seats + found.cache.step_table <= share && found.total() <= bytes;
    });
  }
  // Without layers that have pages, a page costs nothing: what all seats can fill is enough.
  const std::int64_t enough =
      least.page_bytes > 0 ? bytes / least.page_bytes : limits.seats_max * limits.pages;
  limits.pages = largest(limits.pages, std::min(kPagesMax, enough), [&](std::int64_t pages) {
    Limits tried = limits;
    tried.pages = pages;
    return measure(tried).total() <= bytes;
  });
  return measure_capacity(spec, limits, layout, options);
}

}  // namespace quire
