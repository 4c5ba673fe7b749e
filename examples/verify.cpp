#include "examples/verify.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/runtime/base/errors.h>

#include "examples/stand_in_math.h"

namespace quire::serving {
namespace {

// One page of entries that are expected, on the host.
struct ExpectedPage {
  explicit ExpectedPage(std::int64_t page_bytes, std::int32_t entries)
      : bytes(static_cast<std::size_t>(page_bytes)),
        pool(make_entry_pool(bytes.data(), page_bytes, entries)) {}

  std::vector<std::byte> bytes;
  EntryPool pool;
};

class Verifier {
 public:
  Verifier(const DeviceCache& cache, const StandInModel& model, Stream& stream,
           const ServedRequest& request)
      : cache_(cache), model_(model), stream_(stream), request_(request) {
    tokens_.reserve(static_cast<std::size_t>(request.tokens));
    for (std::int32_t p = 0; p < request.tokens; ++p) {
      tokens_.push_back(p < request.prompt_tokens ? prompt_token(request.seed, p)
                                                  : next_token(tokens_.back(), p - 1));
    }
  }

  std::int64_t verify() {
    for (std::size_t i = 0; i < cache_.spec().layers.size(); ++i) {
      layer_ = LayerId(static_cast<std::int32_t>(i));
      const bool compressing = cache_.spec().layers[i] != LayerKind::kSliding;
      rope_ = {model_.rope(compressing ? RopeGroup::kCompressing : RopeGroup::kSliding).data(),
               cache_.limits().context_max, RopeLayout::kInterleaved};
      verify_window();
      if (cache_.spec().layers[i] == LayerKind::kCsa) verify_csa();
      if (cache_.spec().layers[i] == LayerKind::kHca) verify_hca();
    }
    return bytes_;
  }

 private:
  std::vector<float> input_row(RowPart part, std::int32_t width, std::int64_t position) const {
    const auto p = static_cast<std::int32_t>(position);
    const std::uint32_t key =
        row_key(tokens_[static_cast<std::size_t>(position)], p, layer_.value, part);
    std::vector<float> row(static_cast<std::size_t>(width));
    for (std::int32_t c = 0; c < width; ++c) {
      row[static_cast<std::size_t>(c)] =
          part == RowPart::kWindow
              ? std::bit_cast<float>(static_cast<std::uint32_t>(row_value_bf16(key, c)) << 16)
              : row_value(key, c);
    }
    return row;
  }

  std::vector<std::byte> fetch(const void* from, std::int64_t bytes) const {
    std::vector<std::byte> to(static_cast<std::size_t>(bytes));
    cache_.backend().copy(to.data(), from, bytes, stream_);
    stream_.wait();
    return to;
  }

  void compare(const void* expected, const void* found, std::int64_t bytes, const char* what,
               std::int64_t index) {
    if (std::memcmp(expected, found, static_cast<std::size_t>(bytes)) != 0) {
      throw Error(concat("request ", request_.number, ", layer ", layer_.value, ": ", what, " ",
                         index, " differs from what the specification says"));
    }
    bytes_ += bytes;
  }

  void compare_main(const EntryPool& expected, const EntryPool& found, std::int64_t at,
                    const char* what, std::int64_t index) {
    compare(expected.main_data(at), found.main_data(at), kMainDataBytes, what, index);
    compare(expected.main_scales(at), found.main_scales(at), kMainScaleBytes, what, index);
  }

  void verify_window() {
    const EntryPool ring = cache_.window_ring(layer_);
    const std::int64_t ring_tokens = cache_.window_ring_tokens();
    const std::int64_t page_bytes = main_page_bytes(ring.entries_per_page);
    ExpectedPage expected(page_bytes, ring.entries_per_page);
    for (std::int64_t page = 0; page < ring_tokens / ring.entries_per_page; ++page) {
      const std::int64_t first = page * ring.entries_per_page;
      auto bytes = fetch(ring.page_of(request_.seat.value * ring_tokens + first), page_bytes);
      const EntryPool found = make_entry_pool(bytes.data(), page_bytes, ring.entries_per_page);
      const std::int64_t oldest = std::max<std::int64_t>(0, request_.tokens - 128);
      for (std::int64_t p = oldest; p < request_.tokens; ++p) {
        const std::int64_t at = p % ring_tokens - first;
        if (at < 0 || at >= ring.entries_per_page) continue;
        std::vector<float> entry = input_row(RowPart::kWindow, 512, p);
        host::normalise(entry.data(), kHeadDim, model_.weights(layer_).window_norm.data(),
                        cache_.options().norm_eps);
        host::rotate_tail(entry.data(), kHeadDim, rope_, p);
        host::store_main_entry(entry.data(), expected.pool, at, cache_.options().scale_floor);
        compare_main(expected.pool, found, at, "window entry of position", p);
      }
    }
  }

  // Pooled, normed and rotated: entry e of d channels.
  std::vector<float> csa_entry(RowPart part, std::int64_t d, const std::vector<float>& bias,
                               const std::vector<float>& norm, std::int64_t e) const {
    std::array<std::vector<float>, host::kC4Rows> rows;
    host::SourceRow sources[host::kC4Rows];
    for (std::int64_t i = 0; i < host::kC4Rows; ++i) {
      const std::int64_t p = 4 * e - 4 + i;
      if (p < 0) continue;
      auto& row = rows[static_cast<std::size_t>(i)];
      row = input_row(part, static_cast<std::int32_t>(4 * d), p);
      sources[i] = {row.data(), ElementType::kFloat32};
    }
    const float* biases[host::kC4Rows];
    host::bias_rows(bias.data(), BiasOrder::kKernel, d, biases);
    std::vector<float> entry(static_cast<std::size_t>(d));
    host::pool_c4(d, sources, biases, entry.data());
    host::normalise(entry.data(), d, norm.data(), cache_.options().norm_eps);
    host::rotate_tail(entry.data(), d, rope_, 4 * e);
    return entry;
  }

  void verify_csa() {
    const EntryPool main = cache_.csa_pages(layer_);
    const EntryPool keys = cache_.indexer_pages(layer_);
    const std::int32_t entries = main.entries_per_page;
    ExpectedPage main_expected(main_page_bytes(entries), entries);
    ExpectedPage keys_expected(indexer_page_bytes(entries), entries);
    const LayerWeights& weights = model_.weights(layer_);
    const float floor = cache_.options().scale_floor;
    for (std::int64_t first = 0; first < request_.tokens / 4; first += entries) {
      const std::int64_t page = request_.pages[static_cast<std::size_t>(first / entries)].value;
      auto main_bytes = fetch(main.page_of(page * entries), main_page_bytes(entries));
      auto keys_bytes = fetch(keys.page_of(page * entries), indexer_page_bytes(entries));
      const EntryPool main_found =
          make_entry_pool(main_bytes.data(), main_page_bytes(entries), entries);
      const EntryPool keys_found =
          make_entry_pool(keys_bytes.data(), indexer_page_bytes(entries), entries);
      const std::int64_t last = std::min<std::int64_t>(first + entries, request_.tokens / 4);
      for (std::int64_t e = first; e < last; ++e) {
        const std::int64_t at = e - first;
        const auto entry =
            csa_entry(RowPart::kCsa, kHeadDim, weights.csa_bias, weights.csa_norm, e);
        host::store_main_entry(entry.data(), main_expected.pool, at, floor);
        compare_main(main_expected.pool, main_found, at, "CSA entry", e);

        auto key = csa_entry(RowPart::kIndexer, kIndexerDim, weights.indexer_bias,
                             weights.indexer_norm, e);
        if (cache_.options().hadamard) host::hadamard(key.data());
        host::store_indexer_entry(key.data(), keys_expected.pool, at, floor);
        compare(keys_expected.pool.indexer_values(at), keys_found.indexer_values(at), kIndexerDim,
                "indexer entry", e);
        compare(keys_expected.pool.indexer_scale(at), keys_found.indexer_scale(at),
                kIndexerScaleBytes, "scale of indexer entry", e);
      }
    }
    verify_state(RowPart::kCsa, kHeadDim, cache_.csa_state(layer_));
    verify_state(RowPart::kIndexer, kIndexerDim, cache_.indexer_state(layer_));
  }

  void verify_state(RowPart part, std::int64_t d, const float* state) {
    const std::int64_t ring = cache_.csa_ring_tokens();
    const auto bytes =
        fetch(state + request_.seat.value * ring * 4 * d, ring * 4 * d * std::int64_t{4});
    const std::int64_t oldest = std::max<std::int64_t>(0, request_.tokens / 4 * 4 - 4);
    for (std::int64_t p = oldest; p < request_.tokens; ++p) {
      const auto row = input_row(part, static_cast<std::int32_t>(4 * d), p);
      compare(row.data(), bytes.data() + (p % ring) * 4 * d * 4, 4 * d * 4,
              "state row of position", p);
    }
  }

  // Over the tokens of [begin, end), which lie in one pooling window.
  host::ChannelFolds hca_folds(std::int64_t begin, std::int64_t end) const {
    const LayerWeights& weights = model_.weights(layer_);
    host::ChannelFolds folds{};
    for (std::int64_t p = begin; p < end; ++p) {
      const std::vector<float> row = input_row(RowPart::kHca, 1024, p);
      host::fold_hca_row(folds, {row.data(), ElementType::kFloat32}, weights.hca_bias.data(),
                         static_cast<std::int32_t>(p));
    }
    return folds;
  }

  void verify_hca() {
    const EntryPool pages = cache_.hca_pages(layer_);
    const std::int32_t entries = pages.entries_per_page;
    const std::int64_t page_bytes = main_page_bytes(entries);
    ExpectedPage expected(page_bytes, entries);
    for (std::int64_t e = 0; e < request_.tokens / 128; ++e) {
      const std::int64_t page = request_.pages[static_cast<std::size_t>(e / entries)].value;
      auto bytes = fetch(pages.page_of(page * entries), page_bytes);
      std::vector<float> entry(static_cast<std::size_t>(kHeadDim));
      host::fold_entries(hca_folds(128 * e, 128 * e + 128), kHeadDim, entry.data());
      host::normalise(entry.data(), kHeadDim, model_.weights(layer_).hca_norm.data(),
                      cache_.options().norm_eps);
      host::rotate_tail(entry.data(), kHeadDim, rope_, 128 * e);
      host::store_main_entry(entry.data(), expected.pool, e % entries,
                             cache_.options().scale_floor);
      compare_main(expected.pool, make_entry_pool(bytes.data(), page_bytes, entries), e % entries,
                   "HCA entry", e);
    }
    verify_fold();
  }

  // Of the tokens that no entry has taken yet, in the bank that the next one reads.
  void verify_fold() {
    const std::int64_t length = request_.tokens;
    if (length % 128 == 0) return;
    const host::ChannelFolds folds = hca_folds(length / 128 * 128, length);
    const std::int64_t bank =
        request_.seat.value * cache_.hca_banks() + length % cache_.hca_banks();
    constexpr std::int64_t kPartBytes = kHeadDim * std::int64_t{sizeof(float)};
    const auto bytes =
        fetch(cache_.hca_state(layer_) + bank * kHcaBankFloats, 3 * kPartBytes);
    std::int64_t part = 0;
    for (const float* expected : {folds.m, folds.z, folds.a}) {
      compare(expected, bytes.data() + part++ * kPartBytes, kPartBytes, "HCA fold at length",
              length);
    }
  }

  const DeviceCache& cache_;
  const StandInModel& model_;
  Stream& stream_;
  const ServedRequest& request_;
  std::vector<std::uint32_t> tokens_;  // by position
  LayerId layer_;
  RopeTable rope_;
  std::int64_t bytes_ = 0;
};

}  // namespace

std::int64_t verify_request(const DeviceCache& cache, const StandInModel& model, Stream& stream,
                            const ServedRequest& request) {
  const host::FloatEnvironment environment;
  return Verifier(cache, model, stream, request).verify();
}

}  // namespace quire::serving
