// Verification of tiny_v4: the request alone, from its whole prefix, in a cache of its own. What
// was served in chunks, in batches and from captured graphs must have the same tokens and bytes.
#include <algorithm>

#include <quire/runtime/base/errors.h>

#include "examples/live_bytes.h"
#include "examples/tiny_v4.h"

namespace quire::serving {
namespace {

// Longer prefixes are computed in several steps.
constexpr std::int64_t kStepTokensMax = 8192;

Limits replica_limits(const Limits& served) {
  Limits limits;
  limits.seats_max = 1;
  limits.rows_max = 1;
  limits.context_max = served.context_max;
  limits.tokens_max = std::min(served.context_max, kStepTokensMax);
  limits.pages = served.cells_max();
  limits.draft_max = served.draft_max;
  return limits;
}

}  // namespace

struct TinyV4::Replica {
  Replica(Backend& backend, const DeviceCache& served, const Limits& replica_limits,
          const TinyV4Config& config, Stream& stream)
      : cache(backend, served.spec(), replica_limits, options_of(served)),
        model(backend, served.spec(), replica_limits, stream, config) {
    model.bind(cache.device());
  }

  // What says how bytes are made, not where they lie.
  static DeviceCacheOptions options_of(const DeviceCache& served) {
    DeviceCacheOptions options;
    options.norm_eps = served.options().norm_eps;
    options.scale_floor = served.options().scale_floor;
    options.hadamard = served.options().hadamard;
    return options;
  }

  // Admits the request and computes all its tokens; the tokens that were served follow its prompt.
  RequestId wait_to_prefill(const ServedRequest& request, std::span<const std::int32_t> served,
                            Stream& stream);
  // Tokens and live bytes; returns how many bytes were compared.
  std::int64_t compare(RequestId id, const ServedRequest& request,
                       std::span<const std::int32_t> served, const DeviceCache& served_cache,
                       Stream& stream) const;

  CacheManager cache;
  TinyV4 model;
};

TinyV4::Replica& TinyV4::replica(const DeviceCache& cache, Stream& stream) {
  if (replica_ == nullptr) {
    replica_ =
        std::make_shared<Replica>(*backend_, cache, replica_limits(limits_), config_, stream);
  }
  return *replica_;
}

std::vector<std::int32_t> TinyV4::wait_for_tokens(const std::int32_t* tokens, SeatId seat,
                                                  Stream& stream) const {
  std::vector<std::int32_t> row(static_cast<std::size_t>(limits_.context_max + 1));
  backend_->copy(row.data(), tokens + seat.value * (limits_.context_max + 1),
                 static_cast<std::int64_t>(row.size() * sizeof(std::int32_t)), stream);
  stream.wait();
  return row;
}

void TinyV4::wait_to_set_history(SeatId seat, std::span<const std::int32_t> tokens,
                                 Stream& stream) {
  QUIRE_CHECK(static_cast<std::int64_t>(tokens.size()) <= limits_.context_max + 1,
              "TinyV4::wait_to_set_history: ", tokens.size(), " tokens; context_max is ",
              limits_.context_max);
  backend_->copy(arrays_.history + seat.value * (limits_.context_max + 1), tokens.data(),
                 static_cast<std::int64_t>(tokens.size_bytes()), stream);
  stream.wait();  // `tokens` may go
}

std::int64_t TinyV4::wait_to_verify(const DeviceCache& cache, Stream& stream,
                                    const ServedRequest& request) {
  Replica& alone = replica(cache, stream);
  const std::vector<std::int32_t> served = wait_for_tokens(arrays_.history, request.seat, stream);
  const RequestId id = alone.wait_to_prefill(request, served, stream);
  try {
    const std::int64_t bytes = alone.compare(id, request, served, cache, stream);
    alone.cache.ledger().release(id);
    return bytes;
  } catch (...) {
    alone.cache.ledger().release(id);
    throw;
  }
}

RequestId TinyV4::Replica::wait_to_prefill(const ServedRequest& request,
                                           std::span<const std::int32_t> served, Stream& stream) {
  Ledger& ledger = cache.ledger();
  const RequestId id = ledger.admit(request.tokens, request.tokens).value();
  const SeatId seat = ledger.info(id).seat;
  model.begin_request(seat, {request.seed, request.prompt_tokens}, stream);
  model.wait_to_set_history(seat, served, stream);
  for (std::int64_t done = 0; done < request.tokens;) {
    const auto tokens = static_cast<std::int32_t>(
        std::min(cache.device().limits().tokens_max, request.tokens - done));
    ledger.reserve(id, tokens).value();
    const BatchRow row{id, tokens};
    const StepShape shape = StepShape::ragged(1, tokens);
    const StepId step = cache.begin_step({&row, 1}, shape, PlanBufferId(0), stream);
    model.enqueue_step(cache.device(), PlanBufferId(0), shape, stream);
    stream.wait();
    const Outcome outcome{tokens, false};
    ledger.settle(step, {&outcome, 1});
    done += tokens;
  }
  return id;
}

std::int64_t TinyV4::Replica::compare(RequestId id, const ServedRequest& request,
                                      std::span<const std::int32_t> served,
                                      const DeviceCache& served_cache, Stream& stream) const {
  const SeatId seat = cache.ledger().info(id).seat;
  const std::vector<std::int32_t> computed =
      model.wait_for_tokens(model.arrays().predicted, seat, stream);
  for (std::int64_t p = request.prompt_tokens; p <= request.tokens; ++p) {
    const auto at = static_cast<std::size_t>(p);
    if (served[at] != computed[at]) {
      throw Error(concat("request ", request.number, ": token ", served[at], " was generated at ",
                         "position ", p, "; computed alone from the whole prefix it is ",
                         computed[at]));
    }
  }
  std::int64_t bytes = 4 * (request.tokens - request.prompt_tokens + 1);
  const CachedRequest there{served_cache, request.seat, request.pages, request.tokens};
  const CachedRequest here{cache.device(), seat, cache.ledger().pages_of(id), request.tokens};
  for (std::size_t i = 0; i < cache.device().spec().layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    const std::vector<std::byte> live = wait_for_live_bytes(here, layer, stream);
    if (wait_for_live_bytes(there, layer, stream) != live) {
      throw Error(concat("request ", request.number, ", layer ", layer.value, ": the cache holds ",
                         "other bytes than a cache that saw this request alone"));
    }
    bytes += static_cast<std::int64_t>(live.size());
  }
  return bytes;
}

}  // namespace quire::serving
