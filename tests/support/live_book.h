// All that one content has in live bytes (DESIGN 5.3) at any length, kept in pieces: a window entry
// of each position, state rows, entries, folds. From one run that decodes token by token and never
// drafts, so that a thousand comparisons cost little; differences are named.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>

#include "tests/support/test_engine.h"

namespace quire::test {

enum class Piece { kWindow, kCsaEntry, kCsaRow, kIndexerRow, kHcaEntry, kHcaFold };

constexpr const char* name_of(Piece piece) {
  constexpr const char* kNames[] = {
      "window entry", "CSA and indexer entry", "CSA row", "indexer row", "HCA entry", "HCA fold"};
  return kNames[static_cast<std::size_t>(piece)];
}

constexpr std::int64_t bytes_of(Piece piece) {
  constexpr std::int64_t kMain = kMainDataBytes + kMainScaleBytes;
  constexpr std::int64_t kBytes[] = {kMain,
                                     kMain + kIndexerDim + kIndexerScaleBytes,
                                     4 * kHeadDim * 4,
                                     4 * kIndexerDim * 4,
                                     kMain,
                                     3 * kHeadDim * 4};
  return kBytes[static_cast<std::size_t>(piece)];
}

struct Pieces {
  std::size_t layer;
  Piece piece;
  std::int64_t first;  // position, entry, or the length that a fold belongs to
  std::int64_t count;

  std::int64_t bytes() const { return count * bytes_of(piece); }
};

// In the order of TestEngine::live_bytes.
inline std::vector<Pieces> live_pieces(const ModelSpec& spec, std::int64_t length) {
  std::vector<Pieces> pieces;
  const std::int64_t window = std::max<std::int64_t>(0, length - 128);
  const std::int64_t state = std::max<std::int64_t>(0, length / 4 * 4 - 4);
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    pieces.push_back({i, Piece::kWindow, window, length - window});
    if (spec.layers[i] == LayerKind::kCsa) {
      pieces.push_back({i, Piece::kCsaEntry, 0, length / 4});
      pieces.push_back({i, Piece::kCsaRow, state, length - state});
      pieces.push_back({i, Piece::kIndexerRow, state, length - state});
    } else if (spec.layers[i] == LayerKind::kHca) {
      pieces.push_back({i, Piece::kHcaEntry, 0, length / 128});
      pieces.push_back({i, Piece::kHcaFold, length, length % 128 == 0 ? 0 : 1});
    }
  }
  return pieces;
}

class LiveBook {
 public:
  // Decodes a content up to context_max, on the host.
  LiveBook(TestEngineOptions options, std::int64_t content) : spec_(options.spec) {
    const auto host = make_host_backend();
    options.limits.draft_max = 0;
    options.limits.seats_max = options.limits.rows_max = options.limits.tokens_max = 1;
    options.limits.pages = options.limits.cells_max();
    TestEngine engine(*host, options);
    engine.poison();
    const RequestId request = engine.admit(content, options.limits.context_max);
    for (std::int64_t length = 1; length <= options.limits.context_max; ++length) {
      engine.step(std::vector<StepRow>{{request}}, StepShape::decode(1));
      const std::vector<std::byte> live = engine.live_bytes(request);
      check_written(engine, live);
      take(live, length);
    }
  }

  bool has(std::size_t layer, Piece piece, std::int64_t index, const std::byte* bytes) const {
    const std::byte* from = pieces_.at({layer, piece}).data() + index * bytes_of(piece);
    return std::memcmp(bytes, from, static_cast<std::size_t>(bytes_of(piece))) == 0;
  }

  // Names the first piece of `live`, those of a request of `length` tokens, that differs; window
  // position length - 128 is compared where `with_oldest` says so.
  std::string difference(const std::vector<std::byte>& live, std::int64_t length,
                         bool with_oldest) const {
    const std::vector<Pieces> all = live_pieces(spec_, length);
    if (total(all) != static_cast<std::int64_t>(live.size())) return "another number of live bytes";
    const std::byte* at = live.data();
    for (const Pieces& run : all) {
      for (std::int64_t i = run.first; i < run.first + run.count; ++i) {
        const bool skipped = !with_oldest && run.piece == Piece::kWindow && i == length - 128;
        if (!skipped && !has(run.layer, run.piece, i, at)) {
          return concat(name_of(run.piece), " ", i, " of layer ", run.layer);
        }
        at += bytes_of(run.piece);
      }
    }
    return "";
  }

 private:
  static std::int64_t total(const std::vector<Pieces>& all) {
    std::int64_t bytes = 0;
    for (const Pieces& run : all) bytes += run.bytes();
    return bytes;
  }

  void take(const std::vector<std::byte>& live, std::int64_t length) {
    const std::vector<Pieces> all = live_pieces(spec_, length);
    REQUIRE(total(all) == static_cast<std::int64_t>(live.size()));
    const std::byte* at = live.data();
    for (const Pieces& run : all) {
      auto& bytes = pieces_[{run.layer, run.piece}];
      const std::int64_t from = run.first * bytes_of(run.piece);
      bytes.resize(std::max(bytes.size(), static_cast<std::size_t>(from + run.bytes())));
      std::copy_n(at, run.bytes(), bytes.data() + from);
      at += run.bytes();
    }
  }

  ModelSpec spec_;
  std::map<std::pair<std::size_t, Piece>, std::vector<std::byte>> pieces_;  // by layer
};

}  // namespace quire::test
