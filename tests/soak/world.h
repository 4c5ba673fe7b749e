// One cache on a backend, as the soak's engine sees it: steps eager or as captured graphs, results
// of visits that are read behind the newest work, and whole requests compared byte by byte with a
// prefill in one chunk.
#pragma once

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

inline constexpr std::int32_t kLayers = 3;  // sliding, CSA, HCA
inline constexpr std::int64_t kContents = 3;
inline constexpr std::int64_t kContext = 640;  // of every world: five HCA windows, three pages

// What a request must hold: live bytes of a prefill in one chunk, in a cache of its own.
class Oracle {
 public:
  explicit Oracle(Backend& backend);
  const std::vector<std::byte>& bytes_of(std::int64_t content, std::int64_t tokens);

 private:
  test::TestEngine engine_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::byte>> known_;
};

// What the device says after a visit.
struct VisitResult {
  DeviceReport report;
  std::int32_t length[kSeatsMost];
  std::int32_t stopped[kSeatsMost];
};

enum class Run { kEager, kEagerPlannedTwice, kEagerCommittedTwice, kReplay };

class World {
 public:
  World(Backend& backend, const Limits& limits);

  Ledger& ledger() { return engine_.cache().ledger(); }
  CacheManager& cache() { return engine_.cache(); }
  StreamView stream() { return engine_.stream(); }
  const Limits& limits() const { return engine_.options().limits; }

  StepShape captured_shape(std::int64_t rows, std::int32_t tokens_per_row, PlanBufferId buffer);
  void start_visit(PlanBufferId buffer, const VisitInput& visit);
  void run(PlanBufferId buffer, StepShape shape, Run how);
  // A graph of another shape than the one applied; null where there is none.
  void replay_graph(PlanBufferId buffer, StepShape graph);
  std::vector<StepShape> captured_shapes() const { return shapes_; }

  // Keeps what the device says now, in stream order. `wait_for_result` returns it without waiting
  // for what was enqueued later.
  void keep_result(StepId id, PlanBufferId buffer);
  VisitResult wait_for_result(StepId id);

  test::Snapshot wait_for_snapshot() { return engine_.snapshot(); }
  std::vector<std::byte> live_bytes(const test::Snapshot& snapshot, SeatId seat,
                                    std::span<const PageId> pages, std::int64_t tokens) const {
    return engine_.live_bytes(snapshot, seat, pages, tokens);
  }
  std::vector<std::int32_t> wait_for_words(const std::int32_t* from, std::int64_t count);

  // Everything is forgotten and poisoned; graphs stay.
  void reset();

 private:
  void enqueue_step(StepShape shape, PlanBufferId buffer, StreamView stream);
  void enqueue_appends(StepShape shape, PlanBufferId buffer, StreamView stream);

  test::TestEngine engine_;
  Stream reader_;
  test::DeviceArray<VisitInput> visits_;    // [plan buffers]
  test::DeviceArray<VisitResult> results_;  // [steps in flight]
  test::DeviceArray<std::int32_t> kept_;    // [rows]
  test::DeviceArray<std::uint8_t> stop_;    // [rows]
  FeedParams feed_;
  std::vector<Event> events_;  // [steps in flight]
  std::vector<StepShape> shapes_;
  std::vector<std::unique_ptr<DecodeGraphs>> graphs_;  // [plan buffers]
};

}  // namespace quire::soak
