// What a DeviceCache holds. Internal: shared by the sources of the class, not installed.
#pragma once

#include <quire/cache/memory_layout.h>
#include <quire/planner/plan.h>
#include <quire/planner/plan_rule.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/ids.h>
#include <quire/runtime/device_cache.h>
#include <quire/runtime/owners.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace quire {

// A plan as appends and commits see it.
struct Planned {
  StepShape shape;
  LayerGroup group = LayerGroup::kTarget;
  bool positions_supplied = false;

  friend bool operator==(const Planned&, const Planned&) = default;
};

// What was enqueued for one plan buffer since its last update: a visit. Replays of graphs pass
// unseen, so shapes whose plan was captured count as planned after any later update of the shape.
struct PlanBufferState {
  PlanBuffer plan;
  EntryPool scratch;
  std::optional<StepShape> applied;
  bool has_long_rows = false;  // of more than draft_max + 1 tokens: they run once
  Planned plan_now;            // the newest; after an update what it applied, for the target group
  bool planned = false;        // by enqueue_plan, since the update
  std::vector<Planned> captured_plans;
  std::optional<StreamView> plan_stream;
  bool next_append_is_plain = true;               // on the plan's stream
  std::vector<std::uint8_t> older_window_copied;  // [layers] since the plan
  std::vector<std::uint8_t> appended_parts;       // [layers] bits, since the update

  void start_plan(const Planned& next) {
    plan_now = next;
    planned = false;
    plan_stream.reset();
    next_append_is_plain = true;
    older_window_copied.assign(older_window_copied.size(), 0);
  }
};

struct LayerState {
  std::optional<LayerBinding> binding;
  EntryPool window_ring;
  EntryPool csa_pages;
  EntryPool indexer_pages;
  float* csa_state = nullptr;
  float* indexer_state = nullptr;
  EntryPool hca_pages;
  float* hca_state = nullptr;
};

// Which update named a seat last: finds a seat that one update names twice without clearing or
// allocating anything.
struct SeatStamps {
  explicit SeatStamps(std::int64_t seats) : stamps(static_cast<std::size_t>(seats), 0) {}

  void start() { ++now; }
  // False where it was named since `start`.
  bool name(std::int32_t seat) {
    return std::exchange(stamps[static_cast<std::size_t>(seat)], now) != now;
  }

  std::vector<std::uint64_t> stamps;  // [seats]
  std::uint64_t now = 0;
};

struct DeviceCache::State {
  State(Backend& b, const ModelSpec& s, const Limits& l, const DeviceCacheOptions& o);
  ~State() { backend.wait_for_all(); }  // the memory may still be written by steps in flight

  Backend& backend;
  ModelSpec spec;
  Limits limits;
  DeviceCacheOptions options;
  MemoryLayout layout;
  PlanGeometry geometry;

  // In the order of their dependence: memory is returned on the stream, to the pool.
  Stream stream;
  std::optional<MemoryPool> pool;
  std::optional<Memory> memory;
  std::byte* base = nullptr;

  StepTable table;
  std::vector<LayerState> layers;
  std::vector<PlanBufferState> buffers;
  std::optional<RopeTable> rope[2];
  StepId next_id = 0;
  SeatStamps named_seats;
  std::vector<OwnedBytes> page_pieces, seat_pieces;  // clear_on_reuse: all of a page, of a seat
  std::string broken;                                // why every later call is refused

  void check_usable() const;
  // Runs `body(begun)`, which enqueues several things that hold only together. What it throws
  // passes through; where `begun` was set by then, half is done and the cache refuses every later
  // call. `what()` names it.
  template <class What, class Body>
  void do_whole(const What& what, const Body& body) {
    bool begun = false;
    try {
      body(begun);
    } catch (const std::exception& error) {
      if (begun) break_half_done(what, error.what());
      throw;
    } catch (...) {
      if (begun) break_half_done(what, "an exception of unknown type");
      throw;
    }
  }
  template <class What>
  void break_half_done(const What& what, const char* why) {
    broken = "half was done";  // latched whatever happens while the reason is told
    broken = concat("half of ", what(), " was enqueued: ", why);
    log(LogLevel::kError, broken);
  }
  // A message that cannot be told changes nothing: what it tells of is done.
  template <class... Parts>
  void log(LogLevel level, const Parts&... parts) const noexcept {
    if (options.log == nullptr) return;
    try {
      options.log->log(level, concat(parts...));
    } catch (...) {
    }
  }
  std::size_t index_of(LayerId layer) const;
  std::size_t index_of(PlanBufferId buffer) const;
  const LayerState& csa_layer(LayerId layer) const;  // UsageError where the kind is another
  const LayerState& hca_layer(LayerId layer) const;
  void clear(StreamView on);
  // The plan that later work of the visit belongs to. UsageError that says what must be called
  // first.
  const Planned& planned(PlanBufferId buffer, const char* call) const;

  void find_owned_bytes();
  void clear_for_new_owners(const StepUpdate& update, StreamView on);

  void open_memory();
  void zero_everything();
  void check_known_answers();
  void place();
};

// Throws UsageError where an index or count of the update lies outside the limits, or where its
// changes could not be carried out in any order.
void check_update(const StepUpdate& update, const Limits& limits, SeatStamps& named_seats);

}  // namespace quire
