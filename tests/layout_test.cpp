// The arena of a device cache: every part aligned and apart from every other, sizes as
// SPEC 3.4, 3.5 and DESIGN 8 give them, totals equal to what is asked of the pool.
#include <doctest/doctest.h>
#include <quire/cache/entry_layout.h>
#include <quire/cache/memory_layout.h>
#include <quire/runtime/base/errors.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace {

using namespace quire;

ModelSpec spec_of(std::int64_t sliding, std::int64_t csa, std::int64_t hca = 0) {
  ModelSpec spec;
  for (std::int64_t i = 0; i < sliding; ++i) spec.layers.push_back(LayerKind::kSliding);
  for (std::int64_t i = 0; i < csa; ++i) spec.layers.push_back(LayerKind::kCsa);
  for (std::int64_t i = 0; i < hca; ++i) spec.layers.push_back(LayerKind::kHca);
  return spec;
}

Limits some_limits() {
  Limits limits;
  limits.seats_max = 3;
  limits.pages = 7;
  limits.rows_max = 5;
  limits.tokens_max = 100;
  limits.context_max = 1000;
  limits.draft_max = 2;
  limits.plan_buffers = 2;
  return limits;
}

void add(std::vector<MemoryPart>& parts, std::initializer_list<MemoryPart> more) {
  for (const MemoryPart& part : more) {
    if (part.offset >= 0) parts.push_back(part);
  }
}

std::vector<MemoryPart> parts_of(const MemoryLayout& layout) {
  std::vector<MemoryPart> parts;
  for (const LayerLayout& l : layout.layers) {
    add(parts, {l.csa_pages, l.indexer_pages, l.hca_pages, l.window_ring, l.csa_state,
                l.indexer_state, l.hca_state});
  }
  const StepTableLayout& t = layout.table;
  add(parts, {t.length, t.limit, t.stopped, t.owner, t.page_table});
  for (const PlanBufferLayout& b : layout.buffers) {
    add(parts, {b.scratch,
                b.header,
                b.report,
                b.row_seats,
                b.row_tokens,
                b.row_owners,
                b.row_lives,
                b.results,
                b.rows,
                b.tokens,
                b.csa_entries,
                b.hca_entries,
                b.positions,
                b.token_batch_row,
                b.token_window_length,
                b.token_csa_length,
                b.token_hca_length,
                b.ring_locations,
                b.scratch_locations,
                b.csa_locations,
                b.hca_locations,
                b.cu_extend,
                b.row_seat,
                b.row_length,
                b.row_window_length,
                b.row_csa_length,
                b.row_hca_length,
                b.page_table});
  }
  return parts;
}

void check_layout(const MemoryLayout& layout) {
  std::vector<MemoryPart> parts = parts_of(layout);
  std::sort(parts.begin(), parts.end(),
            [](const MemoryPart& a, const MemoryPart& b) { return a.offset < b.offset; });
  std::int64_t at = 0;
  for (const MemoryPart& part : parts) {
    CHECK(part.offset % 256 == 0);
    CHECK(part.offset == at);  // no two overlap, nothing is lost between them
    at = part.end();
  }
  CHECK(at == layout.bytes().total());
  CHECK(layout.plan_buffers.end() == layout.bytes().total());
  // What a clear zeroes in one piece: the step table and every header, nothing else.
  const MemoryPart& cleared = layout.step_table_and_headers;
  const auto headers = static_cast<std::int64_t>(layout.buffers.size()) * kPartAlignment;
  CHECK(cleared.offset == layout.step_table.offset);
  CHECK(cleared.bytes == layout.step_table.bytes + headers);
  for (const PlanBufferLayout& buffer : layout.buffers) {
    CHECK(buffer.header.offset >= layout.plan_buffers.offset);
    CHECK(buffer.header.end() <= cleared.end());
    CHECK(buffer.report.offset >= cleared.end());
  }
}

TEST_CASE("no two parts overlap, each is aligned, and together they are the total") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto draw = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    Limits limits = some_limits();
    limits.seats_max = draw(1, 40);
    limits.context_max = draw(1, 5000);
    limits.pages = draw(limits.cells_max(), 300);
    limits.rows_max = draw(1, 50);
    limits.draft_max = draw(0, 100);
    limits.tokens_max = draw(limits.draft_max + 1, 3000);
    limits.plan_buffers = draw(1, 4);
    ModelSpec spec = spec_of(draw(1, 3), draw(0, 4), draw(0, 4));
    spec.draft_layers = draw(0, 1);
    check_layout(make_memory_layout(spec, limits, {}));
  }
}

TEST_CASE("pages have the bytes of SPEC 3.4 and 3.5") {
  CHECK(main_page_bytes(64) == 37440);
  CHECK(main_page_bytes(256) == 149760);
  CHECK(main_page_bytes(2) == 1728);
  CHECK(indexer_page_bytes(64) == 8448);
  const Limits limits = some_limits();
  const MemoryLayout layout = make_memory_layout(spec_of(0, 1, 1), limits, {});
  CHECK(layout.hca_page_stride == 1728);
  CHECK(layout.layers[1].hca_pages.bytes == round_up<std::int64_t>(7 * 1728, 256));
  CHECK(layout.csa_page_stride == 37440);
  CHECK(layout.indexer_page_stride == 8448);
  CHECK(layout.layers[0].csa_pages.bytes == round_up<std::int64_t>(7 * 37440, 256));
  CHECK(layout.layers[0].indexer_pages.bytes == 7 * 8448);
}

TEST_CASE("a seat of a model like V4-Flash keeps the bytes of DESIGN 8") {
  Limits limits = some_limits();
  limits.draft_max = 0;
  limits.seats_max = 64;
  const MemoryLayout layout = make_memory_layout(spec_of(2, 21, 20), limits, {});
  std::int64_t ring = 0;
  std::int64_t state = 0;
  std::int64_t banks = 0;
  for (const LayerLayout& layer : layout.layers) {
    ring += layer.window_ring.bytes;
    state += layer.csa_state.bytes + layer.indexer_state.bytes;
    banks += layer.hca_state.bytes;
  }
  CHECK(ring == 64 * std::int64_t{43} * 2 * 37440);
  CHECK(ring / 64 == 3'219'840);              // 3.22 MB
  CHECK(state / 64 == 1'720'320);             // 1.72 MB
  CHECK(banks / 64 == 20 * 2 * 3 * 512 * 4);  // 0.25 MB
  CHECK((ring + state + banks) / 64 <= 5'200'000);
}

TEST_CASE("each seat has a length for each layer group") {
  Limits limits = some_limits();
  limits.seats_max = 100;
  ModelSpec spec = spec_of(1, 1, 1);
  std::vector<std::byte> arena(1024);
  const MemoryLayout one = make_memory_layout(spec, limits, {});
  CHECK(one.table.length.bytes == 512);  // 100 x 4, rounded up
  CHECK(place_step_table(one, spec, limits, arena.data()).groups == 1);
  spec.draft_layers = 2;
  const MemoryLayout two = make_memory_layout(spec, limits, {});
  CHECK(two.table.length.bytes == 1024);
  const StepTable table = place_step_table(two, spec, limits, arena.data());
  CHECK(table.groups == 2);
  CHECK(table.seats == 100);
  CHECK(table.length_of(LayerGroup::kTarget) == table.length);
  CHECK(table.length_of(LayerGroup::kDraft) == table.length + 100);
}

TEST_CASE("rings follow the drafts and options may only enlarge them") {
  Limits limits = some_limits();
  limits.draft_max = 70;
  limits.tokens_max = 100;
  DeviceCacheOptions options;
  CHECK(make_memory_layout(spec_of(1, 1), limits, options).window_ring_tokens == 256);
  CHECK(make_memory_layout(spec_of(1, 1), limits, options).csa_ring_tokens == 80);
  options.window_ring_tokens = 320;
  options.csa_ring_tokens = 128;
  const MemoryLayout larger = make_memory_layout(spec_of(1, 1), limits, options);
  check_layout(larger);
  CHECK(larger.window_ring_tokens == 320);
  CHECK(larger.layers[1].csa_state.bytes == 3 * 128 * 2048 * 4);
  const MemoryLayout hca = make_memory_layout(spec_of(0, 0, 1), limits, {});
  CHECK(hca.layers[0].hca_state.bytes == 3 * 72 * 3 * 512 * 4);  // a bank for each kept prefix
}

TEST_CASE("page strides are data") {
  DeviceCacheOptions options;
  options.csa_page_stride_bytes = 1'039'680;
  options.indexer_page_stride_bytes = 8704;
  options.hca_page_stride_bytes = 2304;
  const MemoryLayout layout = make_memory_layout(spec_of(0, 2, 1), some_limits(), options);
  check_layout(layout);
  CHECK(layout.layers[2].hca_pages.bytes == round_up<std::int64_t>(7 * 2304, 256));
  CHECK(layout.layers[1].csa_pages.bytes == round_up<std::int64_t>(7 * 1'039'680, 256));
}

TEST_CASE("options that do not hold are refused by name") {
  const auto text_of = [](const DeviceCacheOptions& options) -> std::string {
    try {
      static_cast<void>(make_memory_layout(spec_of(1, 1), some_limits(), options));
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto refuses = [&](auto member, std::int64_t value, const char* name) {
    DeviceCacheOptions options;
    options.*member = value;
    const std::string text = text_of(options);
    CAPTURE(text);
    CAPTURE(value);
    CHECK(text.find(name) != std::string::npos);
  };
  CHECK(text_of({}) == "accepted");
  using O = DeviceCacheOptions;
  refuses(&O::window_ring_tokens, 128, "window_ring_tokens");  // draft_max 2 needs 192
  refuses(&O::window_ring_tokens, 200, "window_ring_tokens");
  refuses(&O::csa_ring_tokens, 8, "csa_ring_tokens");  // needs 12
  refuses(&O::csa_ring_tokens, 14, "csa_ring_tokens");
  refuses(&O::csa_page_stride_bytes, 37424, "csa_page_stride_bytes");
  refuses(&O::csa_page_stride_bytes, 37441, "csa_page_stride_bytes");
  refuses(&O::indexer_page_stride_bytes, -8448, "indexer_page_stride_bytes");
  refuses(&O::hca_page_stride_bytes, 1712, "hca_page_stride_bytes");
  refuses(&O::hca_page_stride_bytes, 1736, "hca_page_stride_bytes");
  refuses(&O::padding_hca_location, 7 * 2, "padding_hca_location");
  refuses(&O::padding_csa_location, -2, "padding_csa_location");
  refuses(&O::padding_csa_location, 7 * 64, "padding_csa_location");
  refuses(&O::padding_ring_location, 3 * 192, "padding_ring_location");
}

// A3
TEST_CASE("limits that cannot be addressed are refused, not wrapped around") {
  Limits limits = some_limits();
  limits.pages = std::int64_t{1} << 30;
  DeviceCacheOptions options;
  options.csa_page_stride_bytes = std::int64_t{1} << 30;
  CHECK_THROWS_WITH_AS(static_cast<void>(make_memory_layout(spec_of(0, 16), limits, options)),
                       doctest::Contains("cannot be addressed"), UsageError);
  limits.tokens_max = std::int64_t{1} << 33;
  CHECK_THROWS_WITH_AS(static_cast<void>(make_memory_layout(spec_of(0, 1), limits, {})),
                       doctest::Contains("tokens_max"), UsageError);
}

TEST_CASE("page-major order puts all layers of a page side by side") {
  DeviceCacheOptions options;
  options.page_order = PageOrder::kPageMajor;
  options.indexer_page_stride_bytes = 8640;
  const MemoryLayout layout = make_memory_layout(spec_of(1, 2, 2), some_limits(), options);
  const std::int64_t stride = round_up<std::int64_t>(2 * (37440 + 8640) + 2 * 1728, 576);
  CHECK(layout.csa_page_stride == stride);
  CHECK(layout.indexer_page_stride == stride);
  CHECK(layout.hca_page_stride == stride);
  CHECK(layout.pages.bytes == round_up<std::int64_t>(7 * stride, 256));
  CHECK(layout.seats.offset == layout.pages.end());
  CHECK(layout.layers[0].csa_pages.offset == -1);
  CHECK(layout.layers[1].csa_pages.offset == 0);
  CHECK(layout.layers[1].indexer_pages.offset == 37440);
  CHECK(layout.layers[2].csa_pages.offset == 37440 + 8640);
  CHECK(layout.layers[3].hca_pages.offset == 2 * (37440 + 8640));
  CHECK(layout.layers[4].hca_pages.offset == 2 * (37440 + 8640) + 1728);
  // Sliding layers have no pages: nothing is taken for them.
  CHECK(make_memory_layout(spec_of(3, 0), some_limits(), options).pages.bytes == 0);
}

}  // namespace
