// A cache that serves tenant B, and tenant A or not; what B reads in a turn comes back as bytes
// that name no page and no seat: entries through read lists, translated picks and gathers, views'
// lengths, and the live bytes of its requests. Whatever is freed is poisoned at once, with NaNs of
// both sorts.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "tests/support/device_array.h"
#include "tests/support/field_stories.h"
#include "tests/support/owned_ranges.h"
#include "tests/support/tenants.h"

namespace quire::test {

inline TestEngineOptions tenant_options(bool clear_on_reuse) {
  TestEngineOptions options = small_engine(2 * kPlaces, kTenantContext);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.draft_max = kDraftMax;
  options.limits.tokens_max = 2 * kPlaces * kLongRow + 8;
  options.contents = 6;  // two of B, two of A, and two more that A may have instead
  options.cache.clear_on_reuse = clear_on_reuse;
  return options;
}

// A batch row of a turn, and what its request owns.
struct TenantRow {
  bool of_b = false;
  AheadRow ahead;
  bool stops = false;
  std::int32_t first_token = 0;
  std::int32_t seat = -1;
  std::vector<PageId> pages;
  bool is_long() const { return ahead.row.tokens > kShortRow; }
};

class TenantWorld {
 public:
  // Contents of A are `a_content` and the one behind it.
  TenantWorld(std::int64_t a_content, bool clear_on_reuse)
      : engine(test_backend(), tenant_options(clear_on_reuse)),
        a_content_(a_content),
        quiet_(test_backend(), engine.stream(), kPoisonBytes, 0xFF),
        window_(array<std::int32_t>(tokens_max() * 128)),
        hca_(array<std::int32_t>(tokens_max() * kHcaWidth)),
        lengths_(array<std::int32_t>(3 * tokens_max())),
        picks_(array<std::int32_t>(tokens_max() * kPicks)),
        picked_(array<std::int32_t>(tokens_max() * kPicks)),
        ranges_(array<std::int32_t>(3 * tokens_max())),
        keys_(array<std::uint8_t>(kKeys * kIndexerDim)),
        scales_(array<float>(kKeys)),
        gathered_(array<std::byte>(kGatheredRows * kRowBytes)) {
    std::vector<std::uint16_t> signalling(kPoisonBytes / 2, 0x7FA0);
    signalling_ =
        std::make_unique<DeviceArray<std::uint16_t>>(test_backend(), engine.stream(), signalling);
    std::vector<std::int32_t> picks(picks_.size());
    for (std::size_t i = 0; i < picks.size(); ++i) {
      const std::size_t place = i % kPicks;
      picks[i] = static_cast<std::int32_t>(place * 5 % kPicks);  // each once
      if (place == 3) picks[i] = -7;
      if (place == 77) picks[i] = INT32_MAX;
    }
    picks_.upload(picks);
    ReadLists lists;
    lists.window_locations = window_.data();
    lists.hca_locations = hca_.data();
    lists.window_lengths = lengths_.data();
    lists.hca_lengths = lengths_.data() + tokens_max();
    lists.hca_width = kHcaWidth;
    engine.cache().device().bind_read_lists(kBuffer, lists);
    engine.poison();
  }

  // One turn of B, and of A unless it is null. What B has read.
  std::vector<std::byte> run(const TenantTurn* a, const TenantTurn& b, bool ragged) {
    if (a != nullptr) admit(*a, false);
    admit(b, true);
    rows.clear();
    for (std::size_t i = 0; i < kPlaces; ++i) {
      if (a != nullptr) add_row((*a)[i], false, i);
      add_row(b[i], true, i);
    }
    std::stable_partition(rows.begin(), rows.end(),
                          [](const TenantRow& row) { return !row.is_long(); });
    shape = shape_of_rows(ragged);
    const StepId id = begin();
    std::vector<std::byte> read;
    enqueue_and_read(read);
    commit(id);
    const Snapshot memory = engine.snapshot();
    for (const auto& request : requests_[1]) {
      if (!request.has_value()) continue;
      const auto live = engine.live_bytes(memory, *request);
      read.insert(read.end(), live.begin(), live.end());
    }
    if (a != nullptr) release(*a, false);
    release(b, true);
    return read;
  }

  static constexpr PlanBufferId kBuffer{0};
  static constexpr std::int64_t kHcaWidth = 8;

  std::int64_t tokens_max() const { return engine.options().limits.tokens_max; }
  const DeviceArray<std::int32_t>& window_lists() const { return window_; }
  const DeviceArray<std::int32_t>& hca_lists() const { return hca_; }
  const DeviceArray<std::int32_t>& list_lengths() const { return lengths_; }  // window, then HCA

  TestEngine engine;
  // Of the newest turn.
  std::vector<TenantRow> rows;
  StepShape shape;
  std::int64_t poisoned_pages = 0;

 private:
  static constexpr std::int64_t kPoisonBytes = 1 << 18;  // no range is longer
  static constexpr std::int64_t kPicks = 144;            // more than entries of any request
  static constexpr std::int64_t kKeys = 2 * kPlaces * 144;
  static constexpr std::int64_t kRowBytes = kHeadDim * 2;
  static constexpr std::int64_t kGatheredRows =
      2 * kPlaces * (3 * 128 + kPicks + kHcaWidth);  // two tokens of each of B's rows

  template <class T>
  DeviceArray<T> array(std::int64_t count) {
    return DeviceArray<T>(test_backend(), engine.stream(), static_cast<std::size_t>(count), 0xFF);
  }

  void admit(const TenantTurn& turn, bool of_b) {
    for (std::size_t i = 0; i < kPlaces; ++i) {
      if (!turn[i].admits) continue;
      contents_[of_b][i] = turn[i].content + (of_b ? 0 : a_content_);
      requests_[of_b][i] = engine.admit(contents_[of_b][i], kTenantContext);
    }
  }

  void add_row(const PlaceTurn& turn, bool of_b, std::size_t place) {
    if (turn.tokens < 0) return;
    rows.push_back(
        {.of_b = of_b,
         .ahead = {{*requests_[of_b][place], turn.tokens, turn.kept}, contents_[of_b][place]},
         .stops = turn.stops,
         .pages = {}});
  }

  // With room for more rows and tokens than there are.
  StepShape shape_of_rows(bool ragged) {
    const auto count = std::max(static_cast<std::int32_t>(rows.size()), 1);
    std::int32_t tokens = 3;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r].first_token = ragged ? tokens - 3 : static_cast<std::int32_t>(r) * kShortRow;
      tokens += rows[r].ahead.row.tokens;
    }
    return ragged ? StepShape::ragged(count, tokens) : StepShape::decode(count, kShortRow);
  }

  StepId begin() {
    std::vector<BatchRow> batch;
    Ledger& ledger = engine.cache().ledger();
    for (const TenantRow& row : rows) {
      const StepRow& step = row.ahead.row;
      if (step.tokens > 0) ledger.reserve(step.request, step.tokens).value();
      batch.push_back({step.request, step.tokens});
    }
    const StepId id = engine.cache().begin_step(batch, shape, kBuffer, engine.stream());
    for (TenantRow& row : rows) {
      row.seat = ledger.info(row.ahead.row.request).seat.value;
      const auto pages = ledger.pages_of(row.ahead.row.request);
      row.pages.assign(pages.begin(), pages.end());
    }
    poison_freed_pages();
    feed();
    return id;
  }

  // Input rows that belong to no token are NaN.
  void feed() {
    std::vector<AheadRow> ahead;
    for (const TenantRow& row : rows) ahead.push_back(row.ahead);
    for (std::size_t i = 0; i < engine.options().spec.layers.size(); ++i) {
      const auto at = engine.rows_of(LayerId(static_cast<std::int32_t>(i)));
      const auto fill = [&](std::byte* input, std::int64_t row_bytes) {
        if (input == nullptr) return;
        test_backend().fill(input, 0xFF, shape.tokens * row_bytes, engine.stream());
      };
      fill(at.window, 512 * 2);
      fill(at.csa, 2048 * 4);
      fill(at.indexer, 512 * 4);
      fill(at.hca, 1024 * 4);
    }
    copy_rows(engine, ahead, shape);
  }

  // Two tokens of each of B's rows: all they can read of this layer. The scratch is the next
  // layer's after this.
  void gather(LayerId layer, std::int64_t& gathered) {
    const DeviceCache& device = engine.cache().device();
    const LayerKind kind = engine.options().spec.layers[static_cast<std::size_t>(layer.value)];
    const auto gather_list = [&](const EntryPool& pool, const std::int32_t* list,
                                 std::int64_t count) {
      GatherMainParams params;
      params.pool = pool;
      params.locations = list;
      params.count = count;
      params.output = gathered_.data() + gathered * kRowBytes;
      test_backend().gather_main(params, Pdl::kOff, engine.stream());
      gathered += count;
    };
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const TenantRow& row = rows[r];
      if (!row.of_b || row.ahead.row.tokens == 0) continue;
      for (const std::int32_t j : {0, row.ahead.row.tokens - 1}) {
        const std::int64_t token = row.first_token + j;
        gather_list(row.is_long() ? device.window_scratch(kBuffer) : device.window_ring(layer),
                    window_.data() + token * 128, 128);
        if (kind == LayerKind::kHca) {
          const std::int64_t list = shape.is_decode() ? token : static_cast<std::int64_t>(r);
          gather_list(device.hca_pages(layer), hca_.data() + list * kHcaWidth, kHcaWidth);
        } else if (kind == LayerKind::kCsa) {
          gather_list(device.csa_pages(layer), picked_.data() + token * kPicks, kPicks);
        }
      }
    }
    if (kind == LayerKind::kCsa) gather_keys(layer);
  }

  void translate() {
    const PlanViews& views = engine.cache().device().views(kBuffer);
    TranslatePicksParams params;
    params.tokens = shape.tokens;
    params.k = static_cast<std::int32_t>(kPicks);
    params.picks = picks_.data();
    params.locations = picked_.data();
    params.picks_stride = params.locations_stride = kPicks;
    params.token_batch_row = views.token_batch_row;
    params.token_csa_length = views.token_csa_length;
    params.page_table = views.page_table;
    params.page_table_stride = views.page_table_stride;
    params.lengths = lengths_.data() + 2 * tokens_max();
    test_backend().translate_picks(params, Pdl::kOff, engine.stream());
  }

  void gather_keys(LayerId layer) {
    const PlanViews& views = engine.cache().device().views(kBuffer);
    GatherIndexerParams params;
    params.pool = engine.cache().device().indexer_pages(layer);
    params.rows = shape.rows;
    params.row_entries = views.row_csa_length;
    params.page_table = views.page_table;
    params.page_table_stride = views.page_table_stride;
    params.cu_entries = ranges_.data();
    params.capacity = kKeys;
    params.keys = keys_.data();
    params.scales = scales_.data();
    params.tokens = shape.tokens;
    params.token_batch_row = views.token_batch_row;
    params.token_entries = views.token_csa_length;
    params.k_start = ranges_.data() + tokens_max();
    params.k_end = ranges_.data() + 2 * tokens_max();
    test_backend().gather_indexer(params, Pdl::kOff, engine.stream());
  }

  void enqueue_and_read(std::vector<std::byte>& read) {
    engine.cache().device().enqueue_plan(kBuffer, engine.stream());
    translate();
    std::int64_t gathered = 0;
    for (std::size_t i = 0; i < engine.options().spec.layers.size(); ++i) {
      const LayerId layer(static_cast<std::int32_t>(i));
      engine.enqueue_append(layer, shape, engine.stream());
      gather(layer, gathered);
    }
    if (gathered > 0) read = fetch(engine, gathered_.data(), gathered * kRowBytes);
    const std::vector<std::int32_t> ranges = ranges_.download();
    const std::vector<std::int32_t> lengths = lengths_.download();
    const std::vector<std::uint8_t> keys = keys_.download();
    const std::vector<float> scales = scales_.download();
    const auto add = [&](const auto* from, std::int64_t count) {
      const auto* bytes = reinterpret_cast<const std::byte*>(from);
      read.insert(read.end(), bytes, bytes + count * std::int64_t{sizeof(*from)});
    };
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (!rows[r].of_b) continue;
      const std::int32_t first = ranges[r];
      add(keys.data() + first * kIndexerDim, (ranges[r + 1] - first) * kIndexerDim);
      add(scales.data() + first, ranges[r + 1] - first);
      for (std::int32_t j = 0; j < rows[r].ahead.row.tokens; ++j) {
        const std::int64_t token = rows[r].first_token + j;
        for (std::int64_t part = 0; part < 3; ++part) {
          add(lengths.data() + part * tokens_max() + token, 1);
        }
        const std::int32_t range[2] = {
            // among the own keys
            ranges[static_cast<std::size_t>(tokens_max() + token)] - first,
            ranges[static_cast<std::size_t>(2 * tokens_max() + token)] - first};
        const bool inert = range[1] == range[0];
        add(range, inert ? 0 : 2);
      }
    }
  }

  void commit(StepId id) {
    std::vector<std::int32_t> kept(static_cast<std::size_t>(shape.rows), 0);
    std::vector<std::uint8_t> stop(static_cast<std::size_t>(shape.rows), 0);
    std::vector<StepRow> step_rows;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      kept[r] = rows[r].ahead.row.kept;
      stop[r] = rows[r].stops ? 1 : 0;
      step_rows.push_back(rows[r].ahead.row);
    }
    const DeviceArray<std::int32_t> kept_there(test_backend(), engine.stream(), kept);
    const DeviceArray<std::uint8_t> stop_there(test_backend(), engine.stream(), stop);
    engine.cache().device().enqueue_commit(kBuffer, kept_there.data(), stop_there.data(),
                                           engine.stream());
    engine.stream().wait();
    engine.finish(id, step_rows);
  }

  void release(const TenantTurn& turn, bool of_b) {
    for (std::size_t i = 0; i < kPlaces; ++i) {
      if (!turn[i].releases) continue;
      const SeatId seat = engine.cache().ledger().info(*requests_[of_b][i]).seat;
      engine.release(*requests_[of_b][i]);
      requests_[of_b][i].reset();
      poison(engine.cache().device().seats_memory(), seat_ranges(engine.cache().device(), seat));
    }
    poison_freed_pages();
  }

  // Those that nobody owns any more.
  void poison_freed_pages() {
    std::set<std::int32_t> owned;
    for (const auto& tenant : requests_) {
      for (const auto& request : tenant) {
        if (!request.has_value()) continue;
        for (const PageId page : engine.cache().ledger().pages_of(*request)) {
          owned.insert(page.value);
        }
      }
    }
    for (const std::int32_t page : owned_) {
      if (owned.contains(page)) continue;
      ++poisoned_pages;
      poison(engine.cache().device().pages_memory(),
             page_ranges(engine.cache().device(), PageId(page)));
    }
    owned_ = owned;
  }

  void poison(std::span<std::byte> memory, std::span<const ByteRange> ranges) {
    next_is_quiet_ = !next_is_quiet_;
    const void* from = next_is_quiet_ ? static_cast<const void*>(quiet_.data())
                                      : static_cast<const void*>(signalling_->data());
    for (const ByteRange& range : ranges) {
      QUIRE_CHECK(range.bytes <= kPoisonBytes, "a range of ", range.bytes, " bytes");
      test_backend().copy(memory.data() + range.offset, from, range.bytes, engine.stream());
    }
  }

  std::int64_t a_content_;
  DeviceArray<std::uint8_t> quiet_;
  std::unique_ptr<DeviceArray<std::uint16_t>> signalling_;
  bool next_is_quiet_ = false;
  DeviceArray<std::int32_t> window_, hca_, lengths_, picks_, picked_, ranges_;
  DeviceArray<std::uint8_t> keys_;
  DeviceArray<float> scales_;
  DeviceArray<std::byte> gathered_;
  std::array<std::optional<RequestId>, kPlaces> requests_[2];  // of A, of B
  std::array<std::int64_t, kPlaces> contents_[2] = {};
  std::set<std::int32_t> owned_;
};

}  // namespace quire::test
