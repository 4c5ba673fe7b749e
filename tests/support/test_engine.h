// A small engine for tests: feeds requests from banks of made-up input rows, runs steps eagerly, or
// captured and replayed, and cuts out the live bytes of a request (DESIGN 5.3) for memcmp.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"

namespace quire::test {

std::uint32_t hash32(std::uint32_t x);

// Values of the rows: kPlain looks like a model's; kNasty also has NaN (quiet and signalling),
// infinities, -0 and subnormals. As the norm spreads a NaN, all entries of kNasty rows are NaN; of
// kRare rows, which have one NaN or infinity in 65,521 values, few are.
enum class RowStyle { kPlain, kNasty, kRare };

struct TestEngineOptions {
  ModelSpec spec{{LayerKind::kSliding, LayerKind::kCsa}};
  Limits limits;
  DeviceCacheOptions cache;
  RowStyle style = RowStyle::kPlain;
  ElementType compressor_rows = ElementType::kFloat32;
  ElementType window_rows = ElementType::kBfloat16;
  bool window_normed = false;  // rows come normed: no window norm is bound
  BiasOrder bias_order = BiasOrder::kKernel;
  std::int64_t contents = 1;      // different sequences of input rows
  std::int64_t bank_tokens = 0;   // positions of each; 0: context_max
  Pdl pdl = Pdl::kPrologue;
};

// One batch row of a step: the next `tokens` of the request, of which `kept` stay (-1: all).
struct StepRow {
  RequestId request;
  std::int32_t tokens = 1;
  std::int32_t kept = -1;
};

// Of the input rows of tokens that are refused: finite in fp32 and bf16, and no other token's.
// Whatever a refused token leaves is wrong then, unless the tokens that come next rewrite it.
inline constexpr std::uint8_t kRefusedBytes = 0x3F;

enum class Run {
  kOnce,
  kTwiceBeforeCommit,  // plan and appends run again before the commit
  kCommitTwice,
};

// Layers from `first` on, in front of `end`.
struct LayerRange {
  std::int32_t first = 0;
  std::int32_t end = INT32_MAX;
};

// All memory of the cache, copied to the host at one moment.
struct Snapshot {
  std::vector<std::byte> pages;
  std::vector<std::byte> seats;
};

class TestEngine {
 public:
  TestEngine(Backend& backend, const TestEngineOptions& options);

  Backend& backend() { return *backend_; }
  Stream& stream() { return stream_; }
  CacheManager& cache() { return *cache_; }
  const TestEngineOptions& options() const { return options_; }

  // Admits a request whose rows come from the bank of `content`; promises all of `context_tokens`.
  RequestId admit(std::int64_t content, std::int64_t context_tokens);
  void release(RequestId request);
  // Poisons its seat and pages first: whoever gets them next finds nothing right there, also where
  // it brings the same rows. Not while others hold its pages.
  void poison_and_release(RequestId request);
  std::int64_t length(RequestId request) const;

  // Reserves, prepares, applies, runs and settles one step, eagerly.
  void step(std::span<const StepRow> rows, StepShape shape, Run run = Run::kOnce);
  // The same by replaying a graph of plan, appends and commit, captured on first use of the shape.
  void replay_step(std::span<const StepRow> rows, StepShape shape);
  // The same with a graph of the caller's.
  void launch_step(const GraphExec& graph, std::span<const StepRow> rows, StepShape shape);
  // One ragged step of exactly these rows, short ones first.
  void ragged_step(std::vector<StepRow> rows);

  // Parts of a step, for tests that put something between them. `begin` uploads the rows and the
  // kept counts too; where kernels of the graph write them, `poison_inputs` behind it makes rows of
  // NaN and counts that no row can have, so that nothing comes right without those kernels.
  StepId begin(std::span<const StepRow> rows, StepShape shape);
  void poison_inputs();
  void enqueue_body(StepShape shape, StreamView stream);
  void enqueue_append(LayerId layer, StepShape shape, StreamView stream);
  void enqueue_commit(StreamView stream);
  void finish(StepId id, std::span<const StepRow> rows);

  // Banks hold `bank_tokens` input rows per content; inputs are what append reads. Parts that the
  // layer's kind has not are null.
  struct RowPointers {
    const std::byte *window_bank, *csa_bank, *indexer_bank, *hca_bank;
    std::byte *window, *csa, *indexer, *hca;
  };
  RowPointers rows_of(LayerId layer);
  std::int32_t* kept() { return kept_.data(); }  // [rows_max], what commit reads

  Snapshot snapshot();
  // In canonical order: per layer the window entries, then CSA and indexer entries and state rows, or
  // HCA entries and the fold that the next token reads.
  std::vector<std::byte> live_bytes(const Snapshot& snapshot, RequestId request) const;
  std::vector<std::byte> live_bytes(RequestId request) { return live_bytes(snapshot(), request); }
  // The same of whatever stands in a seat and pages, also of one that `admit` above did not make.
  std::vector<std::byte> live_bytes(const Snapshot& snapshot, SeatId seat,
                                    std::span<const PageId> pages, std::int64_t length,
                                    LayerRange layers = {}) const;

  // Of pages, seats and step table.
  std::uint64_t memory_hash();
  // Fills pages and seats with NaN patterns, page tables with a huge id.
  void poison();

 private:
  struct Content {
    std::int64_t content;
    std::int64_t length = 0;
  };
  struct LayerRows {
    std::unique_ptr<DeviceArray<std::byte>> window_bank, csa_bank, indexer_bank, hca_bank;
    std::unique_ptr<DeviceArray<std::byte>> window, csa, indexer, hca;  // [tokens_max, width]
    std::vector<std::unique_ptr<DeviceArray<float>>> weights;
  };

  void make_layer(std::size_t index);
  void upload_rows(std::span<const StepRow> rows, StepShape shape);
  std::unique_ptr<DeviceArray<std::byte>> make_bank(std::uint32_t key, std::int64_t width,
                                                    ElementType type);
  const float* make_weights(LayerRows& layer, std::uint32_t key, std::int64_t count, float centre);

  Backend* backend_;
  TestEngineOptions options_;
  Stream stream_;
  std::unique_ptr<CacheManager> cache_;
  std::vector<LayerRows> layers_;
  std::vector<std::unique_ptr<DeviceArray<float>>> ropes_;
  DeviceArray<std::int32_t> kept_;
  std::map<std::int32_t, Content> contents_;  // by request index
  std::vector<std::pair<StepShape, GraphExec>> graphs_;
};

// A CSA and an HCA layer, pages for every seat, outcomes that count at once.
TestEngineOptions small_engine(std::int64_t seats, std::int64_t context);

// Throws where a block of 64 live bytes holds zeros or poison only: it was never written. Says nothing
// of rows with NaN, which look like that.
void check_written(const TestEngine& engine, std::span<const std::byte> live);

// Live bytes of the first `tokens` of a content, prefilled alone in one chunk, all written; poisoned
// and released again.
std::vector<std::byte> one_shot(TestEngine& engine, std::int64_t content, std::int32_t tokens);

// Splits `tokens` into chunks of 1..chunk_max, by seed.
std::vector<std::int32_t> random_chunks(std::uint32_t seed, std::int32_t tokens,
                                        std::int32_t chunk_max);

}  // namespace quire::test
