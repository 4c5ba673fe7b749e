// Construction, clearing and the read side of DeviceCache. What it enqueues is in
// device_cache_steps.cpp.
#include <quire/kernels/known_answers.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache.h>
#include <quire/runtime/device_cache_state.h>
#include <quire/runtime/operation_checks.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

namespace quire {
namespace {

// What the layout does not see.
void check_options(const DeviceCacheOptions& options) {
  check_scale_floor("DeviceCacheOptions::scale_floor", options.scale_floor);
  // A NaN fails both comparisons.
  QUIRE_CHECK(
      options.norm_eps >= 0.0f && options.norm_eps <= std::numeric_limits<float>::max(),
      "DeviceCacheOptions::norm_eps is ", options.norm_eps, "; supported: finite, from 0");
}

}  // namespace

DeviceCache::State::State(Backend& b, const ModelSpec& s, const Limits& l,
                          const DeviceCacheOptions& o)
    : backend(b),
      spec(s),
      limits(l),
      options(o),
      layout(make_memory_layout(s, l, o)),
      geometry{static_cast<std::int32_t>(layout.window_ring_tokens),
               static_cast<std::int32_t>(l.draft_max),
               kCsaPageEntries,
               kHcaPageEntries,
               o.padding_ring_location,
               o.padding_scratch_location,
               o.padding_csa_location,
               o.padding_hca_location},
      stream(b),
      named_seats(l.seats_max) {
  check_options(o);
  backend.load_kernels();
  check_known_answers();
  open_memory();
  place();
  if (options.clear_on_reuse) find_owned_bytes();
  zero_everything();
  const CacheBytes sizes = layout.bytes();
  log(LogLevel::kInfo, "device cache opened: ", spec.layers.size(), " layers, ", limits.pages,
      " pages, ", limits.seats_max, " seats; bytes: pages ", sizes.pages, ", seats ", sizes.seats,
      ", scratch ", sizes.scratch, ", step table ", sizes.step_table, ", plan buffers ",
      sizes.plan_buffers);
}

void DeviceCache::State::zero_everything() {
  try {
    backend.fill(base, 0, layout.bytes().total(), stream);
    stream.wait();
  } catch (...) {
    backend.wait_for_all();  // the engine may take its memory back at once
    throw;
  }
}

void DeviceCache::State::open_memory() {
  const std::int64_t total = layout.bytes().total();
  if (!options.memory) {
    pool.emplace(backend, total);
    memory.emplace(*pool, total, stream);
    base = memory->data();
    return;
  }
  const auto given = static_cast<std::int64_t>(options.memory->size());
  base = options.memory->data();
  QUIRE_CHECK(given >= total, "DeviceCacheOptions::memory has ", given,
              " bytes; these limits need ", total, " (DeviceCache::bytes_needed)");
  QUIRE_CHECK(reinterpret_cast<std::uintptr_t>(base) % kPartAlignment == 0,
              "DeviceCacheOptions::memory starts at ", static_cast<const void*>(base),
              ", which is not a multiple of ", kPartAlignment, " bytes");
  backend.check_memory(base, "DeviceCacheOptions::memory");
  backend.check_memory(base + total - 1, "the end of DeviceCacheOptions::memory");
}

// SPEC 3.7: two machines that do not agree on these bits do not write the same cache.
void DeviceCache::State::check_known_answers() {
  const std::vector<std::uint32_t> there = backend.wait_for_known_answers();
  const std::vector<std::uint32_t> here = host::known_answers();
  const std::uint64_t digest = known_answers_digest(here.data(), static_cast<int>(here.size()));
  if (digest != kKnownAnswersDigest) {
    throw BrokenInvariant(
        concat("the arithmetic of this build is not that of SPEC 3.7: its known "
               "answers have the digest ",
               digest, ", expected ", kKnownAnswersDigest));
  }
  for (std::size_t i = 0; i < std::min(there.size(), here.size()); ++i) {
    if (there[i] == here[i]) continue;
    throw BrokenInvariant(concat("the arithmetic of this machine differs: known answer ", i,
                                 " has the bits ", there[i], ", expected ", here[i]));
  }
  if (there.size() != here.size()) {
    throw BrokenInvariant(
        concat("the backend computed ", there.size(), " known answers, expected ", here.size()));
  }
}

void DeviceCache::State::place() {
  table = place_step_table(layout, spec, limits, base);
  for (const LayerLayout& from : layout.layers) {
    LayerState to;
    to.window_ring = make_entry_pool(base + from.window_ring.offset, layout.window_page_bytes,
                                     kWindowPageEntries);
    if (from.csa_pages.offset >= 0) {
      to.csa_pages =
          make_entry_pool(base + from.csa_pages.offset, layout.csa_page_stride, kCsaPageEntries);
      to.indexer_pages = make_entry_pool(base + from.indexer_pages.offset,
                                         layout.indexer_page_stride, kCsaPageEntries);
      to.csa_state = reinterpret_cast<float*>(base + from.csa_state.offset);
      to.indexer_state = reinterpret_cast<float*>(base + from.indexer_state.offset);
    }
    if (from.hca_pages.offset >= 0) {
      to.hca_pages =
          make_entry_pool(base + from.hca_pages.offset, layout.hca_page_stride, kHcaPageEntries);
      to.hca_state = reinterpret_cast<float*>(base + from.hca_state.offset);
    }
    layers.push_back(to);
  }
  for (std::size_t i = 0; i < layout.buffers.size(); ++i) {
    PlanBufferState to;
    to.plan = place_plan_buffer(layout, i, base);
    to.scratch = make_entry_pool(base + layout.buffers[i].scratch.offset, layout.window_page_bytes,
                                 kWindowPageEntries);
    to.older_window_copied.assign(layers.size(), 0);
    to.appended_parts.assign(layers.size(), 0);
    buffers.push_back(std::move(to));
  }
}

void DeviceCache::State::check_usable() const {
  if (!broken.empty()) throw BrokenInvariant(broken);
}

std::size_t DeviceCache::State::index_of(LayerId layer) const {
  const auto count = static_cast<std::int32_t>(layers.size());
  QUIRE_CHECK(layer.value >= 0 && layer.value < count, "layer ", layer.value,
              " does not exist; layers are 0 to ", count - 1);
  return static_cast<std::size_t>(layer.value);
}

std::size_t DeviceCache::State::index_of(PlanBufferId buffer) const {
  const auto count = static_cast<std::int32_t>(buffers.size());
  QUIRE_CHECK(buffer.value >= 0 && buffer.value < count, "plan buffer ", buffer.value,
              " does not exist; plan buffers are 0 to ", count - 1);
  return static_cast<std::size_t>(buffer.value);
}

// Plan buffers and scratch are working memory: what they hold means nothing without a header that
// says so. Owners are counted anew, so what was applied before names them wrongly: the headers go.
void DeviceCache::State::clear(StreamView on) {
  const auto what = [] { return "the clear"; };
  do_whole(what, [&](bool& begun) {
    for (const MemoryPart& part : {layout.pages, layout.seats, layout.step_table_and_headers}) {
      if (part.bytes == 0) continue;
      backend.fill(base + part.offset, 0, part.bytes, on);
      begun = true;
    }
  });
  next_id = 0;
  for (PlanBufferState& buffer : buffers) {
    buffer.applied.reset();
    buffer.start_plan({});
  }
  log(LogLevel::kInfo, "device cache cleared");
}

DeviceCache::DeviceCache(Backend& backend, const ModelSpec& spec, const Limits& limits,
                         const DeviceCacheOptions& options)
    : state_(std::make_unique<State>(backend, spec, limits, options)) {}
DeviceCache::~DeviceCache() = default;
DeviceCache::DeviceCache(DeviceCache&&) noexcept = default;

CacheBytes DeviceCache::bytes_needed(const ModelSpec& spec, const Limits& limits,
                                     const DeviceCacheOptions& options) {
  return make_memory_layout(spec, limits, options).bytes();
}

void DeviceCache::clear(StreamView stream) {
  check_can_apply(stream);
  state_->clear(stream);
}

void DeviceCache::report(PlanBufferId buffer, DeviceReport* to, StreamView stream) const {
  state_->check_usable();
  QUIRE_CHECK(to != nullptr, "DeviceCache::report was given no place to copy to");
  const PlanBufferState& from = state_->buffers[state_->index_of(buffer)];
  state_->backend.copy(to, from.plan.report, sizeof(DeviceReport), stream);
}

void DeviceCache::results(PlanBufferId buffer, std::span<RowResult> to, StreamView stream) const {
  state_->check_usable();
  const auto count = static_cast<std::int64_t>(to.size());
  QUIRE_CHECK(count >= 1 && count <= state_->limits.rows_max, "DeviceCache::results was given room ",
              "for ", count, " batch rows; supported: 1 to rows_max ", state_->limits.rows_max);
  const PlanBufferState& from = state_->buffers[state_->index_of(buffer)];
  state_->backend.copy(to.data(), from.plan.results,
                       count * static_cast<std::int64_t>(sizeof(RowResult)), stream);
}

const PlanViews& DeviceCache::views(PlanBufferId buffer) const { return plan_buffer(buffer).views; }
const PlanBuffer& DeviceCache::plan_buffer(PlanBufferId buffer) const {
  return state_->buffers[state_->index_of(buffer)].plan;
}
std::optional<StepShape> DeviceCache::applied_shape(PlanBufferId buffer) const {
  return state_->buffers[state_->index_of(buffer)].applied;
}
const StepTable& DeviceCache::step_table() const { return state_->table; }

EntryPool DeviceCache::window_ring(LayerId layer) const {
  return state_->layers[state_->index_of(layer)].window_ring;
}
EntryPool DeviceCache::window_scratch(PlanBufferId buffer) const {
  return state_->buffers[state_->index_of(buffer)].scratch;
}

namespace {

void check_kind(const ModelSpec& spec, LayerId layer, LayerKind wanted, const char* parts) {
  const LayerKind kind = spec.layers[static_cast<std::size_t>(layer.value)];
  QUIRE_CHECK(kind == wanted, "layer ", layer.value, " is of kind ", name_of(kind), ": it has no ",
              parts, "; layers of kind ", name_of(wanted), " have them");
}

}  // namespace

const LayerState& DeviceCache::State::csa_layer(LayerId layer) const {
  const LayerState& found = layers[index_of(layer)];
  check_kind(spec, layer, LayerKind::kCsa, "CSA pages and no CSA state");
  return found;
}
const LayerState& DeviceCache::State::hca_layer(LayerId layer) const {
  const LayerState& found = layers[index_of(layer)];
  check_kind(spec, layer, LayerKind::kHca, "HCA pages and no HCA state");
  return found;
}

EntryPool DeviceCache::csa_pages(LayerId layer) const { return state_->csa_layer(layer).csa_pages; }
EntryPool DeviceCache::indexer_pages(LayerId layer) const {
  return state_->csa_layer(layer).indexer_pages;
}
const float* DeviceCache::csa_state(LayerId layer) const {
  return state_->csa_layer(layer).csa_state;
}
const float* DeviceCache::indexer_state(LayerId layer) const {
  return state_->csa_layer(layer).indexer_state;
}
EntryPool DeviceCache::hca_pages(LayerId layer) const { return state_->hca_layer(layer).hca_pages; }
const float* DeviceCache::hca_state(LayerId layer) const {
  return state_->hca_layer(layer).hca_state;
}
std::int64_t DeviceCache::hca_banks() const { return state_->limits.hca_banks(); }
std::int64_t DeviceCache::csa_ring_tokens() const { return state_->layout.csa_ring_tokens; }
std::int64_t DeviceCache::window_ring_tokens() const { return state_->layout.window_ring_tokens; }

namespace {

std::span<std::byte> span_of(std::byte* base, const MemoryPart& part) {
  return {base + part.offset, static_cast<std::size_t>(part.bytes)};
}

}  // namespace

std::span<std::byte> DeviceCache::pages_memory() const {
  return span_of(state_->base, state_->layout.pages);
}
std::span<std::byte> DeviceCache::seats_memory() const {
  return span_of(state_->base, state_->layout.seats);
}
std::span<std::byte> DeviceCache::step_table_memory() const {
  return span_of(state_->base, state_->layout.step_table);
}

Backend& DeviceCache::backend() const { return state_->backend; }
const ModelSpec& DeviceCache::spec() const { return state_->spec; }
const Limits& DeviceCache::limits() const { return state_->limits; }
const DeviceCacheOptions& DeviceCache::options() const { return state_->options; }
CacheBytes DeviceCache::bytes() const { return state_->layout.bytes(); }

}  // namespace quire
