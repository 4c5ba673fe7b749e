// The lists that plans write for attention kernels, on a backend, beside what should be in them:
// found by a walk over the tokens and positions of the reference planner's image.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/plan_pair.h"

namespace quire::test {

inline constexpr std::int32_t kListPoison = 0x5A5A5A5A;
inline constexpr std::size_t kListGuard = 64;  // int32 behind each list that nobody may touch

// The four lists on the backend, and what should be in them.
class Lists {
 public:
  Lists(Backend& backend, std::int64_t tokens, std::int64_t rows, std::int64_t hca_width)
      : stream_(backend), width_(hca_width) {
    const std::int64_t hca_lists = std::max(tokens, rows);
    for (const std::int64_t count : {tokens * 128, tokens, hca_lists * hca_width, tokens}) {
      const auto size = static_cast<std::size_t>(count) + kListGuard;
      arrays_.emplace_back(backend, stream_, size, std::uint8_t{0x5A});
      expected_.emplace_back(size, kListPoison);
    }
  }

  ReadLists bound(std::int32_t padding = -1, std::int32_t floor = 0) {
    return {arrays_[0].data(),
            arrays_[1].data(),
            arrays_[2].data(),
            arrays_[3].data(),
            width_,
            padding,
            floor};
  }

  // Moves the expectation by what a plan of the shape writes into the bound lists.
  void expect(PlanPair& pair, StepShape shape) {
    const PlanPlaces at = pair.places();
    const ReadLists& read = pair.read;
    for (std::int32_t t = 0; t < shape.tokens; ++t) expect_token(pair, shape, t);
    if (shape.is_decode() || read.hca_locations == nullptr) return;
    for (std::int32_t r = 0; r < shape.rows; ++r) {
      const std::int32_t entries = at.plan.rows[r].live_tokens > 0
                                       ? (at.plan.rows[r].start + at.plan.rows[r].live_tokens) / 128
                                       : 0;
      expect_hca(at, read, r, at.plan.rows[r].seat, entries);
    }
  }

  // Empty: all lists and what lies behind them are as expected.
  std::string difference() const {
    constexpr const char* kNames[] = {"window_locations", "window_lengths", "hca_locations",
                                      "hca_lengths"};
    for (std::size_t list = 0; list < 4; ++list) {
      const std::vector<std::int32_t> found = arrays_[list].download();
      const auto [a, b] = std::mismatch(found.begin(), found.end(), expected_[list].begin());
      if (a == found.end()) continue;
      return concat(kNames[list], "[", a - found.begin(), "] is ", *a, ", expected ", *b);
    }
    return {};
  }

  std::vector<std::int32_t> window() const { return arrays_[0].download(); }
  const std::vector<std::int32_t>& expected(std::size_t list) const { return expected_[list]; }

 private:
  void expect_token(PlanPair& pair, StepShape shape, std::int32_t t) {
    const PlanPlaces at = pair.places();
    const ReadLists& read = pair.read;
    const TokenRecord& token = at.plan.tokens[t];
    const bool live = token.seat >= 0;
    std::int32_t visible = 0;
    for (std::int32_t i = 0; i < 128; ++i) {
      std::int32_t location = read.padding_location;
      const std::int32_t position = token.position - i;
      if (live && position >= 0) {
        const BatchRowRecord& row = at.plan.rows[token.batch_row];
        const bool in_ring = row.live_tokens <= pair.geometry.draft_max + 1;
        const std::int64_t ring = pair.geometry.window_ring_tokens;
        const std::int64_t before_rows = 127 * (std::int64_t{token.batch_row} + 1);
        location = static_cast<std::int32_t>(in_ring ? token.seat * ring + position % ring
                                                     : t + before_rows - i);
        ++visible;
      }
      if (read.window_locations != nullptr) at_place(0, t * 128 + i) = location;
    }
    const std::int32_t entries = live ? (token.position + 1) / 128 : 0;
    if (read.window_lengths != nullptr) at_place(1, t) = std::max(visible, read.length_floor);
    if (read.hca_lengths != nullptr) at_place(3, t) = std::max(entries, read.length_floor);
    if (shape.is_decode() && read.hca_locations != nullptr) {
      expect_hca(at, read, t, token.seat, entries);
    }
  }

  void expect_hca(const PlanPlaces& at, const ReadLists& read, std::int64_t list, std::int32_t seat,
                  std::int32_t entries) {
    for (std::int64_t e = 0; e < width_; ++e) {
      at_place(2, list * width_ + e) =
          e < entries ? at.table.page_table[seat * at.table.cells + e / 2] * 2 +
                            static_cast<std::int32_t>(e % 2)
                      : read.padding_location;
    }
  }

  std::int32_t& at_place(std::size_t list, std::int64_t place) {
    return expected_[list][static_cast<std::size_t>(place)];
  }

  Stream stream_;
  std::int64_t width_;
  std::vector<DeviceArray<std::int32_t>> arrays_;
  std::vector<std::vector<std::int32_t>> expected_;
};

}  // namespace quire::test
