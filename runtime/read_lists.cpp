// Binding of the lists that plans write for attention kernels. All is checked here, once: whether
// the memory is there, whether every list fits its width, whether every location fits in 32 bits.
#include <quire/planner/read_rule.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache_state.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace quire {
namespace {

constexpr std::int64_t kLocationsMax = std::int64_t{1} << 31;

void check_list(const Backend& backend, const char* name, const std::int32_t* list,
                std::int64_t count) {
  if (list == nullptr) return;
  QUIRE_CHECK(reinterpret_cast<std::uintptr_t>(list) % 16 == 0, name, " at ",
              static_cast<const void*>(list), " is not 16-byte aligned");
  backend.check_memory(list, name);
  backend.check_memory(list + count - 1, name);
}

void check_locations(const char* list, const char* product, std::int64_t locations) {
  QUIRE_CHECK(locations < kLocationsMax, "ReadLists::", list, ": ", product, " is ", locations,
              " locations, which int32 does not hold; supported: below ", kLocationsMax);
}

// A sink must exist in every pool that a bound list points into.
void check_padding(std::int32_t padding, std::int64_t locations) {
  QUIRE_CHECK(padding >= -1 && padding < locations, "ReadLists::padding_location is ", padding,
              "; supported: -1, or a location of every pool that the bound lists name, 0 to ",
              locations - 1);
}

}  // namespace

void DeviceCache::bind_read_lists(PlanBufferId buffer, const ReadLists& lists) {
  State& state = *state_;
  state.check_usable();
  PlanBufferState& of_buffer = state.buffers[state.index_of(buffer)];
  const Limits& limits = state.limits;
  QUIRE_CHECK(lists.length_floor == 0 || lists.length_floor == 1, "ReadLists::length_floor is ",
              lists.length_floor, "; supported: 0, 1");
  std::int64_t locations = std::numeric_limits<std::int64_t>::max();
  if (lists.window_locations != nullptr) {
    const std::int64_t in_rings = limits.seats_max * state.layout.window_ring_tokens;
    const std::int64_t in_scratch = limits.scratch_tokens();
    check_locations("window_locations", "Limits::seats_max x ring tokens", in_rings);
    check_locations("window_locations", "Limits::tokens_max + 127 x Limits::rows_max", in_scratch);
    locations = std::min({locations, in_rings, in_scratch});
  }
  if (lists.hca_locations != nullptr) {
    const std::int64_t least = ceil_div(limits.context_max, std::int64_t{kHcaRule.ratio});
    QUIRE_CHECK(lists.hca_width >= least, "ReadLists::hca_width is ", lists.hca_width,
                "; Limits::context_max of ", limits.context_max, " tokens needs at least ", least,
                " (one entry per ", kHcaRule.ratio, " tokens)");
    QUIRE_CHECK(lists.hca_width < kLocationsMax, "ReadLists::hca_width is ", lists.hca_width,
                "; supported: below ", kLocationsMax);
    const std::int64_t in_pages = limits.pages * kHcaPageEntries;
    check_locations("hca_locations", "Limits::pages x entries per page", in_pages);
    locations = std::min(locations, in_pages);
  }
  check_padding(lists.padding_location, locations);

  const std::int64_t hca_lists = std::max(limits.tokens_max, limits.rows_max);
  const auto check = [&](const char* name, const std::int32_t* list, std::int64_t count) {
    check_list(state.backend, name, list, count);
  };
  check("ReadLists::window_locations", lists.window_locations,
        limits.tokens_max * kWindowListWidth);
  check("ReadLists::window_lengths", lists.window_lengths, limits.tokens_max);
  if (lists.hca_locations != nullptr) {
    check("ReadLists::hca_locations", lists.hca_locations, hca_lists * lists.hca_width);
  }
  check("ReadLists::hca_lengths", lists.hca_lengths, limits.tokens_max);
  of_buffer.plan.read = lists;
}

}  // namespace quire
