// A step table and one plan buffer in one block of memory, on a backend or on the host, at the same
// offsets: whole images can be compared byte for byte. Between the arrays lies a guard, so that a
// write past an end shows as a difference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <quire/cache/step_update.h>
#include <quire/planner/plan.h>

#include "tests/support/device_array.h"

namespace quire::test {

struct PlanSizes {
  std::int64_t seats = 0;
  std::int64_t cells = 0;  // of one seat's page table, and of one page table row
  std::int64_t rows = 0;   // batch rows
  std::int64_t tokens = 0;
  std::int64_t csa_entries = 0;  // capacity of the compact lists
  std::int64_t hca_entries = 0;
  std::int32_t groups = 1;  // layer groups with lengths of their own
};

// The header of a step that was applied to run once, and planned, for tests that bring their own
// records. All batch rows and tokens of the shape are used.
inline PlanHeader planned_header(StepShape shape, std::size_t csa_entries = 0,
                                 std::size_t hca_entries = 0) {
  PlanHeader header{};
  header.rows = header.planned_rows = header.used_rows = shape.rows;
  header.tokens_per_row = header.planned_form = shape.tokens_per_row;
  header.tokens = header.planned_tokens = header.used_tokens = shape.tokens;
  header.steps_left = header.steps_at_plan = 1;
  header.csa_entries = static_cast<std::int32_t>(csa_entries);
  header.hca_entries = static_cast<std::int32_t>(hca_entries);
  return header;
}

// Where everything is, for a block that begins at `base`; null: for sizes and offsets alone.
struct PlanPlaces {
  struct Region {
    const char* name;
    std::size_t offset, bytes;
  };

  StepTable table;
  PlanBuffer plan;
  std::vector<Region> regions;
  std::size_t bytes = 0;

  PlanPlaces(const PlanSizes& sizes, std::byte* base) {
    const auto put = [&](auto*& pointer, std::int64_t count, const char* name) {
      using Element = std::remove_reference_t<decltype(*pointer)>;
      const std::size_t size = static_cast<std::size_t>(count) * sizeof(Element);
      if (base != nullptr) pointer = reinterpret_cast<Element*>(base + bytes);
      regions.push_back({name, bytes, size});
      bytes += (size + 127) / 64 * 64;  // a guard of 64 to 127 bytes
    };
    put(table.length, sizes.groups * sizes.seats, "length");
    put(table.limit, sizes.seats, "limit");
    put(table.stopped, sizes.seats, "stopped");
    put(table.owner, sizes.seats, "owner");
    put(table.page_table, sizes.seats * sizes.cells, "page_table");
    table.cells = sizes.cells;
    table.seats = sizes.seats;
    table.groups = sizes.groups;
    put(plan.header, 1, "header");
    put(plan.report, 1, "report");
    put(plan.row_seats, sizes.rows, "row_seats");
    put(plan.row_tokens, sizes.rows, "row_tokens");
    put(plan.row_owners, sizes.rows, "row_owners");
    put(plan.row_lives, sizes.rows, "row_lives");
    put(plan.results, sizes.rows, "results");
    put(plan.rows, sizes.rows, "rows");
    put(plan.tokens, sizes.tokens, "tokens");
    put(plan.csa_entries, sizes.csa_entries, "csa_entries");
    put(plan.hca_entries, sizes.hca_entries, "hca_entries");
    PlanViews& views = plan.views;
    put(views.positions, sizes.tokens, "views.positions");
    put(views.token_batch_row, sizes.tokens, "views.token_batch_row");
    put(views.token_window_length, sizes.tokens, "views.token_window_length");
    put(views.token_csa_length, sizes.tokens, "views.token_csa_length");
    put(views.token_hca_length, sizes.tokens, "views.token_hca_length");
    put(views.ring_locations, sizes.tokens, "views.ring_locations");
    put(views.scratch_locations, sizes.tokens, "views.scratch_locations");
    put(views.csa_locations, sizes.tokens, "views.csa_locations");
    put(views.hca_locations, sizes.tokens, "views.hca_locations");
    put(views.cu_extend, sizes.rows + 1, "views.cu_extend");
    put(views.row_seat, sizes.rows, "views.row_seat");
    put(views.row_length, sizes.rows, "views.row_length");
    put(views.row_window_length, sizes.rows, "views.row_window_length");
    put(views.row_csa_length, sizes.rows, "views.row_csa_length");
    put(views.row_hca_length, sizes.rows, "views.row_hca_length");
    put(views.page_table, sizes.rows * sizes.cells, "views.page_table");
    views.page_table_stride = sizes.cells;
  }
};

struct alignas(64) PlanLine {
  std::byte bytes[64];
};

inline std::size_t plan_lines(const PlanSizes& sizes) {
  static_assert(sizeof(PlanLine) == 64);
  return PlanPlaces(sizes, nullptr).bytes / sizeof(PlanLine);
}

// The block on the host.
class PlanImage {
 public:
  explicit PlanImage(const PlanSizes& sizes, std::uint8_t fill = 0xA5)
      : sizes_(sizes), lines_(plan_lines(sizes)) {
    std::memset(lines_.data(), fill, lines_.size() * sizeof(PlanLine));
  }
  PlanImage(const PlanSizes& sizes, std::vector<PlanLine> lines)
      : sizes_(sizes), lines_(std::move(lines)) {}

  PlanPlaces places() { return PlanPlaces(sizes_, lines_.data()->bytes); }
  const PlanSizes& sizes() const { return sizes_; }
  std::span<const PlanLine> lines() const { return lines_; }
  const std::byte* bytes() const { return lines_.data()->bytes; }

  // The whole table as one string of bytes, for "nothing has changed".
  std::vector<std::byte> table_bytes() const {
    PlanImage copy = *this;
    const PlanPlaces at = copy.places();
    return {bytes(), bytes() + (reinterpret_cast<std::byte*>(at.plan.header) - copy.bytes())};
  }

 private:
  PlanSizes sizes_;
  std::vector<PlanLine> lines_;
};

// Names the first array in which the images differ, or the guard behind it, and where; empty:
// equal. The device planner's scratch is nobody's business, and `ignored` names one more array.
inline std::string difference(const PlanImage& a, const PlanImage& b,
                              std::string_view ignored = {}) {
  const PlanPlaces places(a.sizes(), nullptr);  // for the regions alone
  for (std::size_t i = 0; i < places.regions.size(); ++i) {
    const PlanPlaces::Region& region = places.regions[i];
    const std::size_t end =
        i + 1 < places.regions.size() ? places.regions[i + 1].offset : places.bytes;
    const std::string_view name = region.name;
    const bool skip = name == ignored;
    if (std::memcmp(a.bytes() + region.offset, b.bytes() + region.offset, end - region.offset) ==
        0) {
      continue;
    }
    for (std::size_t at = region.offset + (skip ? region.bytes : 0); at < end; ++at) {
      if (a.bytes()[at] == b.bytes()[at]) continue;
      return concat(region.name, at < region.offset + region.bytes ? "" : " (guard behind)",
                    ", byte ", at - region.offset, " of ", region.bytes);
    }
  }
  return {};
}

// The block on a backend.
class PlanFixture {
 public:
  PlanFixture(Backend& backend, Stream& stream, const PlanSizes& sizes, std::uint8_t fill = 0xA5)
      : sizes_(sizes),
        memory_(backend, stream, plan_lines(sizes), fill),
        places_(sizes, memory_.data()->bytes) {}

  const StepTable& table() const { return places_.table; }
  const PlanBuffer& plan() const { return places_.plan; }
  PlanImage download() const { return PlanImage(sizes_, memory_.download()); }
  void upload(const PlanImage& image) { memory_.upload(image.lines()); }

 private:
  PlanSizes sizes_;
  DeviceArray<PlanLine> memory_;
  PlanPlaces places_;
};

}  // namespace quire::test
