// DeviceCacheOptions::clear_on_reuse: where the bytes of a page and of a seat lie, found once, and
// what an update has zeroed of them.
//
// A page is zeroed when a cell names it, a seat when an update names its new owner: in front of the
// update on the stream, so behind all work of the former owner and before any of the new one.
#include <quire/planner/clear_chunks.h>
#include <quire/runtime/base/integers.h>
#include <quire/runtime/device_cache_state.h>

#include <cstdint>
#include <span>

namespace quire {
namespace {

// A block of threads zeroes one piece. Small enough that one page keeps a GPU busy.
constexpr std::int64_t kPieceBytesMax = std::int64_t{64} << 10;

// Cuts what page or seat 0 has at `base`, and the next one `stride` further on, into equal pieces.
void add_pieces(std::vector<OwnedBytes>& pieces, std::byte* base, std::int64_t stride) {
  if (stride == 0) return;
  const std::int64_t piece =
      round_up<std::int64_t>(ceil_div(stride, ceil_div(stride, kPieceBytesMax)), std::int64_t{16});
  for (std::int64_t at = 0; at < stride; at += piece) {
    pieces.push_back({base + at, stride, min_of(piece, stride - at)});
  }
}

}  // namespace

// Pages are zeroed up to the next: what padded strides leave between them is theirs.
void DeviceCache::State::find_owned_bytes() {
  const auto add_page = [&](const MemoryPart& part, std::int64_t stride) {
    if (part.offset >= 0) add_pieces(page_pieces, base + part.offset, stride);
  };
  const auto add_seat = [&](const MemoryPart& part, std::int64_t bytes) {
    if (part.offset >= 0) add_pieces(seat_pieces, base + part.offset, bytes);
  };
  if (options.page_order == PageOrder::kPageMajor && layout.pages.bytes > 0) {
    add_page(layout.pages, layout.csa_page_stride);  // all layers together
  }
  constexpr std::int64_t kFloat = sizeof(float);
  for (const LayerLayout& layer : layout.layers) {
    if (options.page_order == PageOrder::kLayerMajor) {
      add_page(layer.csa_pages, layout.csa_page_stride);
      add_page(layer.indexer_pages, layout.indexer_page_stride);
      add_page(layer.hca_pages, layout.hca_page_stride);
    }
    add_seat(layer.window_ring,
             layout.window_ring_tokens / kWindowPageEntries * layout.window_page_bytes);
    add_seat(layer.csa_state, layout.csa_ring_tokens * 4 * kHeadDim * kFloat);
    add_seat(layer.indexer_state, layout.csa_ring_tokens * 4 * kIndexerDim * kFloat);
    add_seat(layer.hca_state, limits.hca_banks() * kHcaBankFloats * kFloat);
  }
}

void DeviceCache::State::clear_for_new_owners(const StepUpdate& update, StreamView on) {
  const auto run = [&](const ClearParams& chunk) { backend.clear(chunk, on); };
  for_each_clear_chunk(update.batch_rows(), seat_to_clear, std::span<const OwnedBytes>(seat_pieces),
                       run);
  for_each_clear_chunk(update.cells(), page_to_clear, std::span<const OwnedBytes>(page_pieces),
                       run);
}

}  // namespace quire
