// What fits into a byte budget: from the model, the limits and the layout options to counts of
// pages and seats and a report by purpose, to the byte. Plain arithmetic over the layout that a
// device cache really uses; no backend, nothing is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <quire/cache/limits.h>
#include <quire/cache/model_spec.h>
#include <quire/runtime/device_cache.h>

namespace quire {

// What is asked beside the limits.
struct CapacityOptions {
  // Share of the budget that goes to seats where Limits::seats_max is 0, above 0 and below 1. What
  // a seat takes of the step table counts as the seat's.
  double seats_fraction = 0.1;
  // Counts RoPE tables of this many positions, for engines that let `make_rope_table` fill them:
  // one per group that has layers. 0: the engine has its own.
  std::int64_t rope_positions = 0;
  // The step in which the memory source grows: what a device cache asks for is rounded up to it.
  // 1: nothing is added (memory that the engine hands over, the host).
  std::int64_t pool_granularity_bytes = 1;
};

// One purpose of the report.
struct CapacityItem {
  enum class Region { kPages, kSeats, kScratch, kStepTable, kPlanBuffers, kRopeTables };

  Region region;
  std::string name;
  std::int64_t count = 0;       // over all layers, seats, pages or plan buffers
  std::int64_t item_bytes = 0;  // of one
  std::int64_t bytes = 0;       // count x item_bytes, and up to 255 bytes a part of alignment
};

const char* name_of(CapacityItem::Region region);

struct Capacity {
  Limits limits;  // with pages and seats filled
  std::vector<CapacityItem> items;

  // DeviceCache::bytes_needed of these limits: the sum of all items but the RoPE tables.
  CacheBytes cache;
  std::int64_t rope_bytes = 0;
  std::int64_t pool_adds_bytes = 0;  // cache.total() rounded up to the granularity, less itself
  std::int64_t total() const { return cache.total() + rope_bytes + pool_adds_bytes; }

  std::int64_t page_bytes = 0;  // one page in every layer
  std::int64_t seat_bytes = 0;  // one seat in every layer: window ring, CSA ring, HCA banks

  // Tokens that all pages hold together, each request's last page taken as full.
  std::int64_t tokens() const { return limits.pages * kPageTokens; }
  // 2^30 x 256 / page bytes, rounded down; 0 where no layer has pages.
  std::int64_t tokens_per_gib() const;
  // Requests of `context_tokens` that pages and seats hold at once.
  std::int64_t requests_of(std::int64_t context_tokens) const;
};

// The report for given limits, nothing searched. Errors as of DeviceCache::bytes_needed; UsageError
// naming a CapacityOptions field out of range.
Capacity measure_capacity(const ModelSpec& spec, const Limits& limits,
                          const DeviceCacheOptions& layout, const CapacityOptions& options = {});

// The most pages that fit into `bytes` beside everything else that the limits demand. Limits::pages
// is not read; Limits::seats_max is kept, or found where it is 0. The result's total() is at most
// `bytes`, with one page more it would be above. UsageError where the budget does not hold the
// pages of one request of context_max beside the rest: it names each need; errors of
// `measure_capacity`. Without layers that have pages (all sliding) a page costs nothing: one
// request's pages per seat.
Capacity plan_capacity(const ModelSpec& spec, const Limits& limits,
                       const DeviceCacheOptions& layout, std::int64_t bytes,
                       const CapacityOptions& options = {});

}  // namespace quire
