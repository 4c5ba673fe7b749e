#include "tests/support/test_engine.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace quire::test {
namespace {

constexpr PlanBufferId kBuffer(0);
constexpr std::int64_t kWindowWidth = 512;
constexpr std::int64_t kCsaWidth = 2048;
constexpr std::int64_t kIndexerWidth = 512;
constexpr std::int64_t kHcaWidth = 1024;

float plain_value(std::uint32_t hash) {
  // Sum of four bytes: bell-shaped, about N(0, 1), exact in binary.
  const auto sum = static_cast<std::int32_t>((hash & 255) + (hash >> 8 & 255) +
                                             (hash >> 16 & 255) + (hash >> 24)) - 510;
  return static_cast<float>(sum) * 0x1p-7f + static_cast<float>(hash & 1023) * 0x1p-17f;
}

std::uint32_t row_bits(RowStyle style, std::uint32_t hash) {
  constexpr std::uint32_t kFinite = 5;  // from here on
  constexpr std::uint32_t kSpecial[8] = {
      0x7FC00000u, 0xFFC12345u, 0x7F800001u, 0x7F800000u,   // NaNs (one signalling), +inf
      0xFF800000u, 0x80000000u, 0x00000123u, 0x80400000u};  // -inf, -0, subnormals
  const std::uint32_t special = hash % 1021;
  if (style == RowStyle::kNasty && special < 8) return kSpecial[special];
  if (style == RowStyle::kRare) {
    if (hash % 65521 == 0) return kSpecial[hash / 65521 % kFinite];
    if (special >= kFinite && special < 8) return kSpecial[special];
  }
  return std::bit_cast<std::uint32_t>(plain_value(hash));
}

std::uint64_t fnv(std::uint64_t hash, std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001B3ull;
  }
  return hash;
}

}  // namespace

std::uint32_t hash32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x45D9F3Bu;
  x = (x ^ (x >> 15)) * 0x2C1B3C6Du;
  return x ^ (x >> 16);
}

std::vector<std::int32_t> random_chunks(std::uint32_t seed, std::int32_t tokens,
                                        std::int32_t chunk_max) {
  std::vector<std::int32_t> chunks;
  while (tokens > 0) {
    seed = hash32(seed + 0x9E3779B9u);
    const auto chunk = static_cast<std::int32_t>(1 + seed % static_cast<std::uint32_t>(chunk_max));
    chunks.push_back(std::min(tokens, chunk));
    tokens -= chunks.back();
  }
  return chunks;
}

TestEngineOptions small_engine(std::int64_t seats, std::int64_t context) {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kCsa, LayerKind::kHca};
  options.limits.seats_max = seats;
  options.limits.pages = seats * ceil_div(context, kPageTokens);
  options.limits.rows_max = seats;
  options.limits.tokens_max = std::max<std::int64_t>(seats * 8, 2 * context);
  options.limits.context_max = context;
  options.limits.run_ahead_max = 0;
  return options;
}

void check_written(const TestEngine& engine, std::span<const std::byte> live) {
  if (engine.options().style != RowStyle::kPlain) return;
  constexpr std::size_t kBlock = 64;
  for (std::size_t at = 0; at + kBlock <= live.size(); at += kBlock) {
    const auto block = live.subspan(at, kBlock);
    const bool one_value = std::all_of(block.begin(), block.end(), [&](std::byte b) {
      return b == block.front() && (b == std::byte{0} || b == std::byte{0xFF});
    });
    QUIRE_CHECK(!one_value, "of ", live.size(), " live bytes those at ", at, " were never written");
  }
}

std::vector<std::byte> one_shot(TestEngine& engine, std::int64_t content, std::int32_t tokens) {
  const RequestId request = engine.admit(content, tokens);
  engine.ragged_step({{request, tokens}});
  auto bytes = engine.live_bytes(request);
  check_written(engine, bytes);
  engine.poison_and_release(request);
  return bytes;
}

TestEngine::TestEngine(Backend& backend, const TestEngineOptions& options)
    : backend_(&backend),
      options_(options),
      stream_(backend),
      cache_(std::make_unique<CacheManager>(backend, options.spec, options.limits, options.cache)),
      layers_(options.spec.layers.size()),
      kept_(backend, stream_, static_cast<std::size_t>(options.limits.rows_max), 0) {
  if (options_.bank_tokens == 0) options_.bank_tokens = options.limits.context_max;
  for (const RopeGroup group : {RopeGroup::kSliding, RopeGroup::kCompressing}) {
    std::vector<float> table(static_cast<std::size_t>(options.limits.context_max * kRopeDim));
    make_rope_table(group, options.limits.context_max, RopeLayout::kInterleaved, table);
    ropes_.push_back(std::make_unique<DeviceArray<float>>(backend, stream_, table));
    cache_->device().bind_rope(
        group, {ropes_.back()->data(), options.limits.context_max, RopeLayout::kInterleaved});
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) make_layer(i);
}

std::unique_ptr<DeviceArray<std::byte>> TestEngine::make_bank(std::uint32_t key,
                                                              std::int64_t width,
                                                              ElementType type) {
  const std::int64_t count = options_.contents * options_.bank_tokens * width;
  const std::int64_t size = bytes_of(type);
  std::vector<std::byte> bank(static_cast<std::size_t>(count * size));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t u =
        row_bits(options_.style, hash32(key + hash32(static_cast<std::uint32_t>(i))));
    // Cut to bf16 where asked: keeps what is special about a special value, but for small payloads.
    const std::uint32_t placed = size == 4 ? u : u >> 16;
    std::memcpy(bank.data() + i * size, &placed, static_cast<std::size_t>(size));
  }
  return std::make_unique<DeviceArray<std::byte>>(*backend_, stream_, bank);
}

const float* TestEngine::make_weights(LayerRows& layer, std::uint32_t key, std::int64_t count,
                                      float centre) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = centre + 0.25f * plain_value(hash32(key + hash32(static_cast<std::uint32_t>(i))));
  }
  layer.weights.push_back(std::make_unique<DeviceArray<float>>(*backend_, stream_, values));
  return layer.weights.back()->data();
}

void TestEngine::make_layer(std::size_t index) {
  LayerRows& layer = layers_[index];
  const auto key = [&](std::uint32_t part) {
    return hash32(static_cast<std::uint32_t>(index) * 64 + part + 7);
  };
  const auto input = [&](std::int64_t width, ElementType type) {
    const std::int64_t bytes = options_.limits.tokens_max * width * bytes_of(type);
    return std::make_unique<DeviceArray<std::byte>>(*backend_, stream_,
                                                    static_cast<std::size_t>(bytes), 0xFF);
  };
  LayerBinding binding;
  binding.window_rows = options_.window_rows;
  binding.compressor_rows = options_.compressor_rows;
  binding.bias_order = options_.bias_order;
  layer.window_bank = make_bank(key(0), kWindowWidth, options_.window_rows);
  layer.window = input(kWindowWidth, options_.window_rows);
  if (!options_.window_normed) binding.window_norm = make_weights(layer, key(1), 512, 1.0f);
  if (options_.spec.layers[index] == LayerKind::kCsa) {
    layer.csa_bank = make_bank(key(2), kCsaWidth, options_.compressor_rows);
    layer.indexer_bank = make_bank(key(3), kIndexerWidth, options_.compressor_rows);
    layer.csa = input(kCsaWidth, options_.compressor_rows);
    layer.indexer = input(kIndexerWidth, options_.compressor_rows);
    binding.csa_bias = make_weights(layer, key(4), 8 * 512, 0.0f);
    binding.csa_norm = make_weights(layer, key(5), 512, 1.0f);
    binding.indexer_bias = make_weights(layer, key(6), 8 * 128, 0.0f);
    binding.indexer_norm = make_weights(layer, key(7), 128, 1.0f);
  }
  if (options_.spec.layers[index] == LayerKind::kHca) {
    layer.hca_bank = make_bank(key(8), kHcaWidth, options_.compressor_rows);
    layer.hca = input(kHcaWidth, options_.compressor_rows);
    binding.hca_bias = make_weights(layer, key(9), 128 * 512, 0.0f);
    binding.hca_norm = make_weights(layer, key(10), 512, 1.0f);
  }
  cache_->device().bind_layer(LayerId(static_cast<std::int32_t>(index)), binding);
}

RequestId TestEngine::admit(std::int64_t content, std::int64_t context_tokens) {
  const RequestId request =
      cache_->ledger().admit(context_tokens, context_tokens).value();
  contents_[request.index] = {content, 0};
  return request;
}

void TestEngine::release(RequestId request) { cache_->ledger().release(request); }

std::int64_t TestEngine::length(RequestId request) const {
  return contents_.at(request.index).length;
}

void TestEngine::upload_rows(std::span<const StepRow> rows, StepShape shape) {
  std::vector<std::int32_t> kept(static_cast<std::size_t>(options_.limits.rows_max), 0);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    kept[r] = rows[r].kept < 0 ? rows[r].tokens : rows[r].kept;
  }
  kept_.upload(kept);
  for (LayerRows& layer : layers_) {
    const auto place = [&](DeviceArray<std::byte>* input, DeviceArray<std::byte>* bank,
                           std::int64_t width, ElementType type) {
      if (input == nullptr) return;
      const std::int64_t row_bytes = width * bytes_of(type);
      // Whatever is no live token stays NaN.
      backend_->fill(input->data(), 0xFF, shape.tokens * row_bytes, stream_);
      std::int64_t at = 0;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const Content& content = contents_.at(rows[r].request.index);
        if (shape.is_decode()) at = static_cast<std::int64_t>(r) * shape.tokens_per_row;
        if (rows[r].tokens > 0) {
          backend_->copy(input->data() + at * row_bytes,
                         bank->data() + (content.content * options_.bank_tokens + content.length) *
                                            row_bytes,
                         rows[r].tokens * row_bytes, stream_);
        }
        if (kept[r] < rows[r].tokens) {
          backend_->fill(input->data() + (at + kept[r]) * row_bytes, kRefusedBytes,
                         (rows[r].tokens - kept[r]) * row_bytes, stream_);
        }
        at += rows[r].tokens;
      }
    };
    place(layer.window.get(), layer.window_bank.get(), kWindowWidth, options_.window_rows);
    place(layer.csa.get(), layer.csa_bank.get(), kCsaWidth, options_.compressor_rows);
    place(layer.indexer.get(), layer.indexer_bank.get(), kIndexerWidth, options_.compressor_rows);
    place(layer.hca.get(), layer.hca_bank.get(), kHcaWidth, options_.compressor_rows);
  }
}

StepId TestEngine::begin(std::span<const StepRow> rows, StepShape shape) {
  std::vector<BatchRow> batch;
  for (const StepRow& row : rows) {
    if (row.tokens > 0) cache_->ledger().reserve(row.request, row.tokens).value();
    batch.push_back({row.request, row.tokens});
  }
  const StepId id = cache_->begin_step(batch, shape, kBuffer, stream_);
  upload_rows(rows, shape);
  return id;
}

void TestEngine::poison_inputs() {
  const auto poison = [&](auto& array) {
    backend_->fill(array.data(), 0xFF,
                   static_cast<std::int64_t>(array.size() * sizeof(*array.data())), stream_);
  };
  poison(kept_);
  for (LayerRows& layer : layers_) {
    for (auto* input : {&layer.window, &layer.csa, &layer.indexer, &layer.hca}) {
      if (*input != nullptr) poison(**input);
    }
  }
}

void TestEngine::enqueue_append(LayerId layer, StepShape, StreamView stream) {
  LayerRows& rows = layers_[static_cast<std::size_t>(layer.value)];
  AppendInputs inputs;
  inputs.window.data = rows.window->data();
  if (rows.csa != nullptr) {
    inputs.csa.data = rows.csa->data();
    inputs.indexer.data = rows.indexer->data();
  }
  if (rows.hca != nullptr) inputs.hca.data = rows.hca->data();
  cache_->device().append(layer, kBuffer, inputs, stream, {options_.pdl});
}

void TestEngine::enqueue_body(StepShape shape, StreamView stream) {
  cache_->device().enqueue_plan(kBuffer, stream);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    enqueue_append(LayerId(static_cast<std::int32_t>(i)), shape, stream);
  }
}

void TestEngine::enqueue_commit(StreamView stream) {
  cache_->device().enqueue_commit(kBuffer, kept_.data(), nullptr, stream, {options_.pdl});
}

void TestEngine::finish(StepId id, std::span<const StepRow> rows) {
  std::vector<Outcome> outcomes;
  for (const StepRow& row : rows) {
    const std::int32_t kept = row.kept < 0 ? row.tokens : row.kept;
    contents_.at(row.request.index).length += kept;
    outcomes.push_back({kept, false});
  }
  cache_->ledger().settle(id, outcomes);
}

void TestEngine::step(std::span<const StepRow> rows, StepShape shape, Run run) {
  const StepId id = begin(rows, shape);
  enqueue_body(shape, stream_);
  if (run == Run::kTwiceBeforeCommit) enqueue_body(shape, stream_);
  enqueue_commit(stream_);
  if (run == Run::kCommitTwice) enqueue_commit(stream_);
  finish(id, rows);
}

void TestEngine::replay_step(std::span<const StepRow> rows, StepShape shape) {
  auto found = std::find_if(graphs_.begin(), graphs_.end(),
                            [&](const auto& entry) { return entry.first == shape; });
  if (found == graphs_.end()) {
    cache_->begin_padding_step(shape, kBuffer, stream_);
    stream_.wait();
    Capture capture(*backend_, stream_);
    enqueue_body(shape, stream_);
    enqueue_commit(stream_);
    graphs_.emplace_back(shape, capture.finish());
    found = graphs_.end() - 1;
  }
  launch_step(found->second, rows, shape);
}

void TestEngine::launch_step(const GraphExec& graph, std::span<const StepRow> rows,
                             StepShape shape) {
  const StepId id = begin(rows, shape);
  graph.launch(stream_);
  finish(id, rows);
}

void TestEngine::ragged_step(std::vector<StepRow> rows) {
  const auto is_short = [&](const StepRow& row) {
    return row.tokens <= options_.limits.draft_max + 1;
  };
  std::stable_partition(rows.begin(), rows.end(), is_short);
  std::int32_t tokens = 0;
  for (const StepRow& row : rows) tokens += row.tokens;
  step(rows, StepShape::ragged(static_cast<std::int32_t>(rows.size()), tokens));
}

TestEngine::RowPointers TestEngine::rows_of(LayerId layer) {
  LayerRows& rows = layers_[static_cast<std::size_t>(layer.value)];
  const auto at = [](auto& array) { return array == nullptr ? nullptr : array->data(); };
  return {at(rows.window_bank), at(rows.csa_bank), at(rows.indexer_bank), at(rows.hca_bank),
          at(rows.window),      at(rows.csa),      at(rows.indexer),      at(rows.hca)};
}

Snapshot TestEngine::snapshot() {
  Snapshot result;
  const auto fetch = [&](std::span<std::byte> from, std::vector<std::byte>& to) {
    to.resize(from.size());
    if (!from.empty()) {
      backend_->copy(to.data(), from.data(), static_cast<std::int64_t>(from.size()), stream_);
    }
  };
  fetch(cache_->device().pages_memory(), result.pages);
  fetch(cache_->device().seats_memory(), result.seats);
  stream_.wait();
  return result;
}

std::vector<std::byte> TestEngine::live_bytes(const Snapshot& snapshot, RequestId request) const {
  const Ledger& ledger = cache_->ledger();
  return live_bytes(snapshot, ledger.info(request).seat, ledger.pages_of(request),
                    length(request));
}

std::vector<std::byte> TestEngine::live_bytes(const Snapshot& snapshot, SeatId in_seat,
                                              std::span<const PageId> pages, std::int64_t L,
                                              LayerRange layers) const {
  const DeviceCache& device = cache_->device();
  const std::int64_t seat = in_seat.value;
  std::vector<std::byte> live;
  const auto add = [&](const std::byte* from, std::int64_t bytes) {
    live.insert(live.end(), from, from + bytes);
  };
  // The same pool, in the copy of its region.
  const auto moved = [](EntryPool pool, std::span<std::byte> region,
                        const std::vector<std::byte>& copy) {
    pool.base = const_cast<std::byte*>(copy.data()) + (pool.base - region.data());
    return pool;
  };
  const auto all = static_cast<std::int32_t>(layers_.size());
  for (std::int32_t number = layers.first; number < std::min(layers.end, all); ++number) {
    const auto i = static_cast<std::size_t>(number);
    const LayerId layer(number);
    const EntryPool ring = moved(device.window_ring(layer), device.seats_memory(), snapshot.seats);
    for (std::int64_t p = std::max<std::int64_t>(0, L - 128); p < L; ++p) {
      const std::int64_t at =
          seat * device.window_ring_tokens() + p % device.window_ring_tokens();
      add(ring.main_data(at), kMainDataBytes);
      add(ring.main_scales(at), kMainScaleBytes);
    }
    if (options_.spec.layers[i] == LayerKind::kHca) {
      const EntryPool entries =
          moved(device.hca_pages(layer), device.pages_memory(), snapshot.pages);
      for (std::int64_t e = 0; e < L / 128; ++e) {
        const std::int64_t at = pages[static_cast<std::size_t>(e / 2)].value * std::int64_t{2} +
                                e % 2;
        add(entries.main_data(at), kMainDataBytes);
        add(entries.main_scales(at), kMainScaleBytes);
      }
      if (L % 128 == 0) continue;
      const std::int64_t banks = device.hca_banks();
      const std::byte* base = snapshot.seats.data() +
                              (reinterpret_cast<const std::byte*>(device.hca_state(layer)) -
                               device.seats_memory().data());
      add(base + (seat * banks + L % banks) * 3 * 512 * 4, 3 * 512 * 4);
      continue;
    }
    if (options_.spec.layers[i] != LayerKind::kCsa) continue;
    const EntryPool main = moved(device.csa_pages(layer), device.pages_memory(), snapshot.pages);
    const EntryPool keys =
        moved(device.indexer_pages(layer), device.pages_memory(), snapshot.pages);
    for (std::int64_t e = 0; e < L / 4; ++e) {
      const std::int64_t at = pages[static_cast<std::size_t>(e / 64)].value * std::int64_t{64} +
                              e % 64;
      add(main.main_data(at), kMainDataBytes);
      add(main.main_scales(at), kMainScaleBytes);
      add(keys.indexer_values(at), kIndexerDim);
      add(keys.indexer_scale(at), kIndexerScaleBytes);
    }
    for (const auto& [state, width] : {std::pair(device.csa_state(layer), kCsaWidth),
                                       std::pair(device.indexer_state(layer), kIndexerWidth)}) {
      const std::byte* base = snapshot.seats.data() +
                              (reinterpret_cast<const std::byte*>(state) -
                               device.seats_memory().data());
      for (std::int64_t p = std::max<std::int64_t>(0, L / 4 * 4 - 4); p < L; ++p) {
        const std::int64_t row = seat * device.csa_ring_tokens() + p % device.csa_ring_tokens();
        add(base + row * width * 4, width * 4);
      }
    }
  }
  return live;
}

std::uint64_t TestEngine::memory_hash() {
  const Snapshot memory = snapshot();
  const auto table = cache_->device().step_table_memory();
  std::vector<std::byte> table_copy(table.size());
  backend_->copy(table_copy.data(), table.data(), static_cast<std::int64_t>(table.size()),
                 stream_);
  stream_.wait();
  return fnv(fnv(fnv(0xCBF29CE484222325ull, memory.pages), memory.seats), table_copy);
}

void TestEngine::poison() {
  const DeviceCache& device = cache_->device();
  for (const auto region : {device.pages_memory(), device.seats_memory()}) {
    if (region.empty()) continue;
    backend_->fill(region.data(), 0xFF, static_cast<std::int64_t>(region.size()), stream_);
  }
  const StepTable& table = device.step_table();
  backend_->fill(table.page_table, 0x7F,
                 options_.limits.seats_max * table.cells * std::int64_t{4}, stream_);
  stream_.wait();
}

void TestEngine::poison_and_release(RequestId request) {
  const DeviceCache& device = cache_->device();
  const std::int64_t seat = cache_->ledger().info(request).seat.value;
  const auto fill = [&](const void* from, std::int64_t bytes) {
    backend_->fill(const_cast<void*>(from), 0xFF, bytes, stream_);
  };
  const auto fill_page = [&](const EntryPool& pool, std::int64_t page, std::int64_t entry_bytes) {
    fill(pool.base + page * pool.page_stride_bytes, pool.entries_per_page * entry_bytes);
  };
  constexpr std::int64_t kMainBytes = kMainDataBytes + kMainScaleBytes;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    const EntryPool ring = device.window_ring(layer);
    const std::int64_t ring_pages = device.window_ring_tokens() / ring.entries_per_page;
    for (std::int64_t page = 0; page < ring_pages; ++page) {
      fill_page(ring, seat * ring_pages + page, kMainBytes);
    }
    const LayerKind kind = options_.spec.layers[i];
    for (const PageId page : cache_->ledger().pages_of(request)) {
      if (kind == LayerKind::kHca) fill_page(device.hca_pages(layer), page.value, kMainBytes);
      if (kind != LayerKind::kCsa) continue;
      fill_page(device.csa_pages(layer), page.value, kMainBytes);
      fill_page(device.indexer_pages(layer), page.value, kIndexerDim + kIndexerScaleBytes);
    }
    if (kind == LayerKind::kHca) {
      const std::int64_t seat_floats = device.hca_banks() * 3 * 512;
      fill(device.hca_state(layer) + seat * seat_floats, seat_floats * 4);
    }
    if (kind != LayerKind::kCsa) continue;
    for (const auto& [state, width] : {std::pair(device.csa_state(layer), kCsaWidth),
                                       std::pair(device.indexer_state(layer), kIndexerWidth)}) {
      const std::int64_t seat_floats = device.csa_ring_tokens() * width;
      fill(state + seat * seat_floats, seat_floats * 4);
    }
  }
  release(request);
}

}  // namespace quire::test
