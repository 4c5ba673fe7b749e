// Optional helper: one captured graph per decode shape around the engine's callback. An engine that
// owns its capture does not need it.
#pragma once

#include <quire/cache/cache_manager.h>
#include <quire/runtime/owners.h>

#include <functional>
#include <map>
#include <span>
#include <vector>

namespace quire {

class DecodeGraphs {
 public:
  // Enqueues one step on the stream: plan, GEMMs and appends of every layer, sampling, commit.
  using Step = std::function<void(StepShape, PlanBufferId, StreamView)>;

  // Captures `step` for every shape, largest first: applies a padding update, runs the step once
  // eagerly as a warm-up, waits, captures. Blocks. The cache's pages, seats and step table are as
  // before. What `step` throws passes through, and the stream is not left capturing.
  DecodeGraphs(CacheManager& cache, PlanBufferId buffer, std::span<const StepShape> shapes,
               Step step, StreamView stream);

  // The smallest captured shape with room. UsageError that lists the shapes where none has.
  StepShape shape_for(std::int64_t rows, std::int32_t tokens_per_row = 1) const;

  // Replays the graph of the shape; its update must have been applied. Does not block.
  // UsageError where the shape is not captured or another one was applied.
  void launch(StepShape shape, StreamView stream) const;

  const GraphExec& graph(StepShape shape) const;

 private:
  struct Entry {
    StepShape shape;
    GraphExec graph;
  };
  CacheManager* cache_;
  PlanBufferId buffer_;
  std::vector<Entry> entries_;
};

}  // namespace quire
