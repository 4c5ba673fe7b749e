// A serving loop as an engine would have it: admits requests, prefills them in chunks, decodes all
// that are ready in visits of one captured graph replayed K times, with drafts if asked for, one
// visit ahead of what the host has heard.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/decode_graphs.h>
#include <quire/runtime/owners.h>

#include "examples/pinned_memory.h"
#include "examples/serving_model.h"
#include "examples/statistics.h"
#include "examples/tiny_v4.h"
#include "examples/workload.h"

namespace quire::serving {

// What `admit` sets aside for a request. kPrompt admits more and may have to preempt.
enum class Promise { kWhole, kPrompt };

enum class ModelKind { kStandIn, kTinyV4 };

// The server raises the limits that drafts and visits of several steps need; context_max is for the
// requests' own tokens.
struct ServerOptions {
  ModelSpec spec;
  ModelKind model = ModelKind::kStandIn;
  TinyV4Config tiny_v4;
  Limits limits;
  std::int64_t chunk_tokens = 0;  // most prompt tokens of one prefill step; 0: tokens_max
  Promise promise = Promise::kWhole;
  std::int32_t steps_per_visit = 1;  // decode steps between two times that the host hears
  std::int32_t drafts = 0;           // of one batch row in one step; tiny_v4 needs a draft layer
  float draft_acceptance = 0.7f;     // stand-in model: share of the drafts that are right
  std::int64_t verify = 0;           // so many requests, spread over the workload
  std::uint32_t seed = 1;            // of the prompts
};

// Tokens beyond its own for which a request may need pages, since visits are prepared before it is
// known how far the ones in front got.
std::int64_t tokens_beyond(const ServerOptions& options);

class Server {
 public:
  Server(Backend& backend, const ServerOptions& options);
  ~Server();  // blocks: after an error steps may be in flight

  // Serves all requests to their end; blocks. `progress` is called about once a second. Throws
  // UsageError where a request can never fit, Error where a verified byte or token differs.
  ServerStatistics run(const std::vector<TraceRequest>& requests,
                       const std::function<void(const ServerStatistics&)>& progress);

  const CacheManager& cache() const { return cache_; }

 private:
  struct Request {
    std::int64_t number;
    std::uint32_t seed;
    TraceRequest lengths;
    RequestId id = {};
    std::int64_t tokens = 0;        // of the prompt: prepared; of the output: heard
    std::int64_t visits_ahead = 0;  // prepared, not heard
    bool stopped = false;

    // In the cache: the token that is sampled behind the last of them is dropped.
    std::int64_t total() const { return lengths.prompt_tokens + lengths.output_tokens; }
    bool prefilling() const { return tokens < lengths.prompt_tokens; }
    bool finished() const { return !prefilling() && (stopped || tokens >= total()); }
  };
  using RequestPointer = std::shared_ptr<Request>;  // a pending step may outlive a request
  struct PendingStep {
    StepId id;
    std::vector<Outcome> outcomes;         // of a decode visit: once it is heard
    std::vector<RequestPointer> requests;  // that get tokens by it; of a decode visit by batch row
    bool decodes;
    std::size_t place;  // of its event and what it leaves
  };
  // What a visit leaves for the host.
  struct Heard {
    DeviceReport* report;
    std::span<RowResult> results;
  };
  using Clock = std::chrono::steady_clock;

  std::vector<StepShape> decode_shapes() const;
  std::int32_t tokens_per_row() const { return options_.drafts + 1; }
  bool decodes_next(const Request& request) const;
  void admit_waiting();
  // Whether there was anything to do.
  bool prefill_step();
  bool decode_visit();
  bool secure(const Request& request, std::int64_t tokens);
  void preempt_youngest();
  void begin(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
             std::vector<RequestPointer> requests);
  void launch_visit(StepShape shape, std::size_t rows);
  Heard heard_at(std::size_t place) const;
  void settle_oldest();
  void hear_visit(PendingStep& visit, Clock::time_point now);
  void count_latency(const Request& request, std::int64_t tokens, Clock::time_point now);
  void retire_finished();
  void wait_to_verify(const Request& request);
  bool verified(const Request& request) const;

  Backend* backend_;
  ServerOptions options_;
  Stream stream_;
  CacheManager cache_;
  std::unique_ptr<ServingModel> model_;
  DecodeGraphs graphs_;
  std::int64_t verify_every_ = 0;
  std::deque<Request> waiting_;
  std::vector<RequestPointer> running_;  // oldest first
  std::deque<PendingStep> pending_;      // at most run_ahead_max + 1
  PinnedMemory heard_;                   // of each pending step
  std::vector<Event> events_;            // likewise
  std::size_t next_place_ = 0;
  std::vector<Clock::time_point> last_token_;  // by request number; its admission before that
  std::vector<bool> has_token_;
  ServerStatistics statistics_;
};

}  // namespace quire::serving
