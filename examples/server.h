// A serving loop as an engine would have it: admits requests, prefills them in chunks, decodes all
// that are ready in one captured graph, one step ahead of what the host has heard.
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

#include "examples/serving_model.h"
#include "examples/tiny_v4.h"
#include "examples/statistics.h"
#include "examples/workload.h"

namespace quire::serving {

// What `admit` sets aside for a request. kPrompt admits more and may have to preempt.
enum class Promise { kWhole, kPrompt };

enum class ModelKind { kStandIn, kTinyV4 };

struct ServerOptions {
  ModelSpec spec;
  ModelKind model = ModelKind::kStandIn;
  TinyV4Config tiny_v4;
  Limits limits;
  std::int64_t chunk_tokens = 0;  // most prompt tokens of one prefill step; 0: tokens_max
  Promise promise = Promise::kWhole;
  std::int64_t verify = 0;        // so many requests, spread over the workload
  std::uint32_t seed = 1;         // of the prompts
};

class Server {
 public:
  Server(Backend& backend, const ServerOptions& options);

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
    RequestId id;
    std::int64_t tokens = 0;  // prepared so far

    std::int64_t total() const { return lengths.prompt_tokens + lengths.output_tokens; }
    bool prefilling() const { return tokens < lengths.prompt_tokens; }
    bool finished() const { return tokens == total(); }
  };
  struct PendingStep {
    StepId id;
    std::vector<Outcome> outcomes;        // the models keep every token
    std::vector<std::int64_t> tokens_of;  // numbers of the requests that get a token by it
    Event done;
  };
  using Clock = std::chrono::steady_clock;

  std::vector<StepShape> decode_shapes() const;
  void admit_waiting();
  void prefill_step();
  void decode_step();
  bool secure(Request& request, std::int64_t tokens);
  void preempt_youngest();
  void begin(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
             std::vector<std::int64_t> tokens_of);
  void settle_oldest();
  void retire_finished();
  bool verified(const Request& request) const;

  Backend* backend_;
  ServerOptions options_;
  Stream stream_;
  CacheManager cache_;
  std::unique_ptr<ServingModel> model_;
  DecodeGraphs graphs_;
  std::int64_t verify_every_ = 0;
  std::deque<Request> waiting_;
  std::vector<Request> running_;  // oldest first
  std::deque<PendingStep> pending_;
  std::vector<Clock::time_point> last_token_;  // by request number; its admission before that
  std::vector<bool> has_token_;
  ServerStatistics statistics_;
};

}  // namespace quire::serving
