// What the server needs of a model: it stands where an engine's GEMMs, attention and sampling
// stand. Two implementations: one that costs nothing (stand_in_model.h), and a real decoder
// (tiny_v4.h).
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include <quire/runtime/device_cache.h>
#include <quire/runtime/owners.h>

namespace quire::serving {

struct ServedRequest {
  std::int64_t number;
  std::uint32_t seed;
  std::int64_t prompt_tokens;
  std::int64_t tokens;  // in the cache
  SeatId seat;
  std::span<const PageId> pages;
};

// A request as it takes its seat. The prompt follows from the seed; the request stops by itself at
// `tokens_max` tokens in the cache.
struct SeatRequest {
  std::uint32_t seed;
  std::int64_t prompt_tokens;
  std::int64_t tokens_max = std::numeric_limits<std::int32_t>::max();
};

class ServingModel {
 public:
  virtual ~ServingModel() = default;

  // Binds every layer and both RoPE tables.
  virtual void bind(DeviceCache& cache) const = 0;

  // In stream order: the seat belongs to this request.
  virtual void begin_request(SeatId seat, const SeatRequest& request, StreamView stream) = 0;

  // One whole step: plan, for every layer its rows and its append, sampling, commit. May be
  // captured.
  virtual void enqueue_step(DeviceCache& cache, PlanBufferId buffer, StepShape shape,
                            StreamView stream) const = 0;

  // Compares what the cache holds of a request with what it must hold; returns the number of bytes
  // compared. Blocks: the stream must hold no step of the request that is not done. Throws Error
  // that names the first difference.
  virtual std::int64_t wait_to_verify(const DeviceCache& cache, Stream& stream,
                                      const ServedRequest& request) = 0;
};

}  // namespace quire::serving
