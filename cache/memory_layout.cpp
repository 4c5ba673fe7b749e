// A cursor walks the arena once; each part takes its bytes and moves it on. Products of limits and
// strides are checked, so that no region wraps around (the limits alone stay far below 2^63).
#include <quire/cache/memory_layout.h>

#include <limits>

#include <quire/cache/entry_layout.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>

namespace quire {
namespace {

constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kStrideMax = std::int64_t{1} << 30;
constexpr std::int64_t kRingMax = std::int64_t{1} << 20;

class Cursor {
 public:
  MemoryPart take(const char* what, std::int64_t count, std::int64_t item_bytes) {
    std::int64_t bytes = 0;
    QUIRE_CHECK(!__builtin_mul_overflow(count, item_bytes, &bytes) &&
                    bytes <= std::numeric_limits<std::int64_t>::max() / 2 - at_,
                what, ": ", count, " items of ", item_bytes, " bytes cannot be addressed");
    bytes = round_up(bytes, kPartAlignment);
    const MemoryPart part{at_, bytes};
    at_ += bytes;
    return part;
  }
  MemoryPart region_since(std::int64_t start) const { return {start, at_ - start}; }
  std::int64_t at() const { return at_; }

 private:
  std::int64_t at_ = 0;
};

std::int64_t resolve_ring(const char* name, std::int64_t asked, std::int64_t least,
                          std::int64_t multiple) {
  const std::int64_t tokens = asked == 0 ? least : asked;
  QUIRE_CHECK(tokens >= least && tokens <= kRingMax && tokens % multiple == 0,
              "DeviceCacheOptions::", name, " is ", asked, "; these limits need at least ", least,
              ", a multiple of ", multiple, ", at most ", kRingMax);
  return tokens;
}

std::int64_t resolve_stride(const char* name, std::int64_t asked, std::int64_t page_bytes) {
  const std::int64_t stride = asked == 0 ? page_bytes : asked;
  QUIRE_CHECK(stride >= page_bytes && stride <= kStrideMax && stride % 16 == 0,
              "DeviceCacheOptions::", name, " is ", asked, "; supported: multiples of 16 from ",
              page_bytes, " to ", kStrideMax);
  return stride;
}

// Locations that padding shows are either nowhere or exist.
void check_padding(const char* name, std::int64_t location, std::int64_t locations) {
  QUIRE_CHECK(location >= -1 && location < locations, "DeviceCacheOptions::", name, " is ",
              location, "; supported: -1, or 0 to ", locations - 1);
}

void place_layer_major(MemoryLayout& layout, Cursor& cursor, const ModelSpec& spec,
                       const Limits& limits) {
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    LayerLayout& layer = layout.layers[i];
    if (spec.layers[i] == LayerKind::kCsa) {
      layer.csa_pages = cursor.take("CSA pages", limits.pages, layout.csa_page_stride);
      layer.indexer_pages = cursor.take("indexer pages", limits.pages, layout.indexer_page_stride);
    } else if (spec.layers[i] == LayerKind::kHca) {
      layer.hca_pages = cursor.take("HCA pages", limits.pages, layout.hca_page_stride);
    }
  }
}

// The arena starts with the pages: where a layer's part begins in page 0 is its offset.
void place_page_major(MemoryLayout& layout, Cursor& cursor, const ModelSpec& spec,
                      const Limits& limits) {
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const MemoryPart part{at, limits.pages * bytes};
    at += bytes;
    return part;
  };
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    LayerLayout& layer = layout.layers[i];
    if (spec.layers[i] == LayerKind::kCsa) {
      layer.csa_pages = take(layout.csa_page_stride);
      layer.indexer_pages = take(layout.indexer_page_stride);
    } else if (spec.layers[i] == LayerKind::kHca) {
      layer.hca_pages = take(layout.hca_page_stride);
    }
  }
  // FlashMLA's rule for the page stride of a pool holds for the whole page too (SPEC 3.4).
  const std::int64_t stride = round_up(at, kMainDataBytes);
  cursor.take("pages of all layers", limits.pages, stride);
  layout.csa_page_stride = stride;
  layout.indexer_page_stride = stride;
  layout.hca_page_stride = stride;
}

void place_seats(MemoryLayout& layout, Cursor& cursor, const ModelSpec& spec,
                 const Limits& limits) {
  const std::int64_t ring_pages = layout.window_ring_tokens / kWindowPageEntries;
  const std::int64_t state_rows = limits.seats_max * layout.csa_ring_tokens;
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    LayerLayout& layer = layout.layers[i];
    layer.window_ring =
        cursor.take("window ring", limits.seats_max * ring_pages, layout.window_page_bytes);
    if (spec.layers[i] == LayerKind::kCsa) {
      layer.csa_state = cursor.take("CSA state", state_rows, 4 * kHeadDim * kFloatBytes);
      layer.indexer_state = cursor.take("indexer state", state_rows, 4 * kIndexerDim * kFloatBytes);
    } else if (spec.layers[i] == LayerKind::kHca) {
      layer.hca_state = cursor.take("HCA banks", limits.seats_max * limits.hca_banks(),
                                    kHcaBankFloats * kFloatBytes);
    }
  }
}

void place_step_table(MemoryLayout& layout, Cursor& cursor, const ModelSpec& spec,
                      const Limits& limits) {
  constexpr auto kInt = static_cast<std::int64_t>(sizeof(std::int32_t));
  layout.table.length = cursor.take("lengths", limits.seats_max, spec.groups() * kInt);
  layout.table.limit = cursor.take("limits", limits.seats_max, kInt);
  layout.table.stopped = cursor.take("stopped flags", limits.seats_max, kInt);
  layout.table.owner = cursor.take("owner counts", limits.seats_max, kInt);
  layout.table.page_table = cursor.take("page table", limits.seats_max, limits.cells_max() * kInt);
}

void place_plan_buffer(PlanBufferLayout& buffer, Cursor& cursor, const Limits& limits,
                       std::int64_t view_cells) {
  const auto take = [&cursor](const char* what, std::int64_t count, std::size_t item_bytes) {
    return cursor.take(what, count, static_cast<std::int64_t>(item_bytes));
  };
  const std::int64_t rows = limits.rows_max;
  const std::int64_t tokens = limits.tokens_max;
  buffer.report = take("device report", 1, sizeof(DeviceReport));
  buffer.row_seats = take("applied seats", rows, 4);
  buffer.row_tokens = take("applied tokens", rows, 4);
  buffer.row_owners = take("applied owners", rows, 4);
  buffer.row_lives = take("live batch rows", rows, 4);
  buffer.results = take("batch row results", rows, sizeof(RowResult));
  buffer.rows = take("batch row records", rows, sizeof(BatchRowRecord));
  buffer.tokens = take("token records", tokens, sizeof(TokenRecord));
  buffer.csa_entries =
      take("CSA entry records", compress_capacity(kCsaRule, rows, tokens), sizeof(PlanRecord));
  buffer.hca_entries =
      take("HCA entry records", compress_capacity(kHcaRule, rows, tokens), sizeof(PlanRecord));
  for (MemoryPart* view : {&buffer.positions, &buffer.token_batch_row, &buffer.token_window_length,
                           &buffer.token_csa_length, &buffer.token_hca_length}) {
    *view = take("token view", tokens, 4);
  }
  for (MemoryPart* view : {&buffer.ring_locations, &buffer.scratch_locations, &buffer.csa_locations,
                           &buffer.hca_locations}) {
    *view = take("location view", tokens, 8);
  }
  buffer.cu_extend = take("cu_extend view", rows + 1, 4);
  for (MemoryPart* view : {&buffer.row_seat, &buffer.row_length, &buffer.row_window_length,
                           &buffer.row_csa_length, &buffer.row_hca_length}) {
    *view = take("batch row view", rows, 4);
  }
  buffer.page_table = cursor.take("page table view", rows, view_cells * 4);
}

}  // namespace

MemoryLayout make_memory_layout(const ModelSpec& spec, const Limits& limits,
                                const DeviceCacheOptions& options) {
  spec.check();
  limits.check();
  MemoryLayout layout;
  layout.window_ring_tokens = resolve_ring("window_ring_tokens", options.window_ring_tokens,
                                           limits.window_ring_tokens(), kWindowPageEntries);
  layout.csa_ring_tokens =
      resolve_ring("csa_ring_tokens", options.csa_ring_tokens, limits.csa_ring_tokens(), 4);
  layout.window_page_bytes = main_page_bytes(kWindowPageEntries);
  layout.csa_page_stride = resolve_stride("csa_page_stride_bytes", options.csa_page_stride_bytes,
                                          main_page_bytes(kCsaPageEntries));
  layout.indexer_page_stride =
      resolve_stride("indexer_page_stride_bytes", options.indexer_page_stride_bytes,
                     indexer_page_bytes(kCsaPageEntries));
  layout.hca_page_stride = resolve_stride("hca_page_stride_bytes", options.hca_page_stride_bytes,
                                          main_page_bytes(kHcaPageEntries));
  // Rows of the view start on 16 bytes, for wide copies and readers.
  layout.view_page_table_stride = round_up<std::int64_t>(limits.cells_max(), 4);
  check_padding("padding_csa_location", options.padding_csa_location,
                limits.pages * kCsaPageEntries);
  check_padding("padding_hca_location", options.padding_hca_location,
                limits.pages * kHcaPageEntries);
  check_padding("padding_ring_location", options.padding_ring_location,
                limits.seats_max * layout.window_ring_tokens);
  check_padding("padding_scratch_location", options.padding_scratch_location,
                limits.scratch_tokens());

  layout.layers.resize(spec.layers.size());
  layout.buffers.resize(static_cast<std::size_t>(limits.plan_buffers));
  Cursor cursor;
  const bool by_layer = options.page_order == PageOrder::kLayerMajor;
  (by_layer ? place_layer_major : place_page_major)(layout, cursor, spec, limits);
  layout.pages = cursor.region_since(0);
  std::int64_t start = cursor.at();
  place_seats(layout, cursor, spec, limits);
  layout.seats = cursor.region_since(start);
  start = cursor.at();
  for (PlanBufferLayout& buffer : layout.buffers) {
    buffer.scratch = cursor.take("window scratch", limits.scratch_tokens() / kWindowPageEntries,
                                 layout.window_page_bytes);
  }
  layout.scratch = cursor.region_since(start);
  start = cursor.at();
  place_step_table(layout, cursor, spec, limits);
  layout.step_table = cursor.region_since(start);
  start = cursor.at();
  for (PlanBufferLayout& buffer : layout.buffers) {
    buffer.header = cursor.take("plan header", 1, sizeof(PlanHeader));
  }
  layout.step_table_and_headers = cursor.region_since(layout.step_table.offset);
  for (PlanBufferLayout& buffer : layout.buffers) {
    place_plan_buffer(buffer, cursor, limits, layout.view_page_table_stride);
  }
  layout.plan_buffers = cursor.region_since(start);
  return layout;
}

namespace {

template <class T>
void place(T*& pointer, std::byte* base, const MemoryPart& part) {
  pointer = reinterpret_cast<T*>(base + part.offset);
}

}  // namespace

StepTable place_step_table(const MemoryLayout& layout, const ModelSpec& spec, const Limits& limits,
                           std::byte* base) {
  StepTable table;
  place(table.length, base, layout.table.length);
  place(table.limit, base, layout.table.limit);
  place(table.stopped, base, layout.table.stopped);
  place(table.owner, base, layout.table.owner);
  place(table.page_table, base, layout.table.page_table);
  table.cells = limits.cells_max();
  table.seats = limits.seats_max;
  table.groups = spec.groups();
  return table;
}

PlanBuffer place_plan_buffer(const MemoryLayout& layout, std::size_t buffer, std::byte* base) {
  const PlanBufferLayout& from = layout.buffers.at(buffer);
  PlanBuffer to;
  place(to.header, base, from.header);
  place(to.report, base, from.report);
  place(to.row_seats, base, from.row_seats);
  place(to.row_tokens, base, from.row_tokens);
  place(to.row_owners, base, from.row_owners);
  place(to.row_lives, base, from.row_lives);
  place(to.results, base, from.results);
  place(to.rows, base, from.rows);
  place(to.tokens, base, from.tokens);
  place(to.csa_entries, base, from.csa_entries);
  place(to.hca_entries, base, from.hca_entries);
  PlanViews& views = to.views;
  place(views.positions, base, from.positions);
  place(views.token_batch_row, base, from.token_batch_row);
  place(views.token_window_length, base, from.token_window_length);
  place(views.token_csa_length, base, from.token_csa_length);
  place(views.token_hca_length, base, from.token_hca_length);
  place(views.ring_locations, base, from.ring_locations);
  place(views.scratch_locations, base, from.scratch_locations);
  place(views.csa_locations, base, from.csa_locations);
  place(views.hca_locations, base, from.hca_locations);
  place(views.cu_extend, base, from.cu_extend);
  place(views.row_seat, base, from.row_seat);
  place(views.row_length, base, from.row_length);
  place(views.row_window_length, base, from.row_window_length);
  place(views.row_csa_length, base, from.row_csa_length);
  place(views.row_hca_length, base, from.row_hca_length);
  place(views.page_table, base, from.page_table);
  views.page_table_stride = layout.view_page_table_stride;
  return to;
}

}  // namespace quire
