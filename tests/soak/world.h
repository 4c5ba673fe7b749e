// One cache on a backend, as the soak's engine sees it: steps eager or as captured graphs, results
// of visits that are read behind the newest work, and whole requests compared byte by byte with a
// prefill in one chunk.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <quire/runtime/decode_graphs.h>

#include "tests/soak/feed.h"
#include "tests/support/test_engine.h"

namespace quire::soak {

inline constexpr std::int32_t kTargetLayers = 3;  // sliding, CSA, HCA
inline constexpr std::int32_t kDraftLayers = 2;   // HCA, CSA
inline constexpr std::int32_t kLayers = kTargetLayers + kDraftLayers;
inline constexpr std::int64_t kContents = 3;
inline constexpr std::int64_t kContext = 640;  // of every world: five HCA windows, three pages

constexpr test::LayerRange layers_of(LayerGroup group) {
  return group == LayerGroup::kTarget ? test::LayerRange{0, kTargetLayers}
                                      : test::LayerRange{kTargetLayers, kLayers};
}

// What a request must hold in the layers of each group: live bytes of a prefill in one chunk, in a
// cache of its own, which knows no groups.
class Oracle {
 public:
  explicit Oracle(Backend& backend);
  const std::vector<std::byte>& bytes_of(std::int64_t content, LayerGroup group,
                                         std::int64_t tokens);

 private:
  using Groups = std::array<std::vector<std::byte>, 2>;
  test::TestEngine engine_;
  std::map<std::pair<std::int64_t, std::int64_t>, Groups> known_;
};

// What the device says after a visit.
struct VisitResult {
  DeviceReport report;
  std::int32_t length[kSeatsMost];
  std::int32_t draft_length[kSeatsMost];
  std::int32_t stopped[kSeatsMost];
};

// How often each plan of a step runs, with its appends, and each commit.
struct Times {
  std::int32_t plans = 1;
  std::int32_t commits = 1;
};

// Steps are captured with some of the draft parts that there are: none, one extension and passes,
// one that catches up, one whose commit has the counts.
inline constexpr std::int32_t kCapturedParts = 4;
DraftPart captured_part(std::int32_t number, StepShape shape, std::int64_t draft_max);

class World {
 public:
  World(Backend& backend, const Limits& limits);

  Ledger& ledger() { return engine_.cache().ledger(); }
  CacheManager& cache() { return engine_.cache(); }
  StreamView stream() { return engine_.stream(); }
  const Limits& limits() const { return engine_.options().limits; }

  StepShape captured_shape(std::int64_t rows, std::int32_t tokens_per_row, PlanBufferId buffer);
  void start_visit(PlanBufferId buffer, const VisitInput& visit);
  // Eagerly; a ragged shape with long rows once each.
  void run(PlanBufferId buffer, StepShape shape, const DraftPart& part, const Times& times);
  // One of the graphs with captured_part(part).
  void replay(PlanBufferId buffer, StepShape shape, std::int32_t part);
  // Of another shape than the one applied.
  void replay_wrong(PlanBufferId buffer, StepShape shape, std::int32_t part);
  std::vector<StepShape> captured_shapes() const { return shapes_; }

  // Keeps what the device says now, in stream order. `wait_for_result` returns it without waiting
  // for what was enqueued later.
  void keep_result(StepId id, PlanBufferId buffer);
  VisitResult wait_for_result(StepId id);

  test::Snapshot wait_for_snapshot() { return engine_.snapshot(); }
  std::vector<std::byte> live_bytes(const test::Snapshot& snapshot, SeatId seat,
                                    std::span<const PageId> pages, LayerGroup group,
                                    std::int64_t tokens) const {
    return engine_.live_bytes(snapshot, seat, pages, tokens, layers_of(group));
  }
  std::vector<std::int32_t> wait_for_words(const std::int32_t* from, std::int64_t count);

  // Everything is forgotten and poisoned; graphs stay.
  void reset();

 private:
  // What a step enqueues, where, and how often.
  struct Step {
    StepShape shape;
    PlanBufferId buffer;
    StreamView on;
    Times times;
  };

  void add_inputs();
  void capture(std::int32_t buffer);
  void enqueue_step(const Step& step, const DraftPart& part);
  void enqueue_target(const Step& step);
  void enqueue_extension(const Step& step, std::int32_t number, bool counted);
  void enqueue_pass(const Step& step, std::int32_t number);
  void enqueue_plan_and_appends(const Step& step, const PlanInputs& inputs, const FeedParams& feed);
  FeedParams feed_of(const Step& step, FeedPart part, std::int32_t number, bool counted);

  test::TestEngine engine_;
  Stream reader_;
  test::DeviceArray<VisitInput> visits_;      // [plan buffers]
  test::DeviceArray<VisitResult> results_;    // [steps in flight]
  test::DeviceArray<std::int32_t> kept_;      // [rows]
  test::DeviceArray<std::uint8_t> stop_;      // [rows]
  test::DeviceArray<RowSeen> seen_;           // [rows]
  test::DeviceArray<std::int32_t> supplied_;  // [rows]
  test::DeviceArray<std::int32_t> lasting_;   // [rows]
  FeedParams feed_;                           // what all have in common
  struct Inputs {
    std::int32_t count = 0;
    FeedInput input[FeedParams::kInputsMost];
  } inputs_[2];                // by layer group
  std::vector<Event> events_;  // [steps in flight]
  std::vector<StepShape> shapes_;
  std::vector<std::unique_ptr<DecodeGraphs>> graphs_;  // [plan buffers, captured parts]
};

}  // namespace quire::soak
