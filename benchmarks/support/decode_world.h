// A cache in the middle of serving: requests of random lengths, so that phases are mixed, of which
// each replay decodes one token of the next `batch`. There are so many sets of them that a set
// comes back only after three times the L2 of other traffic. Weights differ from layer to layer;
// input rows are shared by all layers of a kind, as activations are.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/owners.h>

#include "benchmarks/support/timing.h"
#include "benchmarks/support/traffic.h"

namespace quire::bench {

class DecodeWorld {
 public:
  // Prefills every request, with rows of random numbers in all layers. Blocks.
  DecodeWorld(Backend& backend, const ModelSpec& spec, std::int64_t batch);

  Backend& backend() { return *backend_; }
  Stream& stream() { return stream_; }
  CacheManager& cache() { return *cache_; }
  StepShape shape() const { return StepShape::decode(static_cast<std::int32_t>(batch_), 1); }
  std::int64_t layers() const { return static_cast<std::int64_t>(spec_.layers.size()); }

  // The pieces of a step, to be captured.
  void enqueue_plan();
  void enqueue_append(std::int64_t layer, Pdl pdl = Pdl::kPrologue);
  void enqueue_append(std::int64_t layer, const AppendInputs& inputs, Pdl pdl);
  void enqueue_commit();

  // All rows again, as if the kernel in front had made them.
  void touch_rows();
  AppendInputs inputs_of(std::int64_t layer) const;

  // The next set's seats into the plan buffer, as an update would bring them. A plain kernel.
  void next_set();
  // Throws where a row of any replay was inert: what was measured would be nothing.
  void check();

 private:
  void bind();
  void prefill(std::int64_t set);
  void upload_seats();

  Backend* backend_;
  ModelSpec spec_;
  std::int64_t batch_;
  std::int64_t sets_;
  Stream stream_;
  std::unique_ptr<CacheManager> cache_;
  MemoryPool pool_;
  Memory memory_;                        // input rows, then weights
  std::vector<RequestId> requests_;      // [sets x batch]
  const std::int32_t* seats_ = nullptr;  // [sets x batch] on the device
  std::int32_t* set_ = nullptr;          // the next, on the device
};

}  // namespace quire::bench
