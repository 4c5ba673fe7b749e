// The random engine: a life of requests on one cache from empty to reset. Every decision follows
// from the seed and from what the ledger answers, never from time, so that it can be repeated.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/soak/model.h"
#include "tests/soak/world.h"

namespace quire::soak {

using Counts = std::map<std::string, std::int64_t>;

// What a request is there for; a preempted one starts over.
struct Job {
  std::int32_t content;
  std::int64_t goal;         // stops itself there
  std::int64_t context_max;  // admitted with
};

struct Live {
  RequestId id;
  Job job;
  std::int32_t lookahead = 0;  // of the newest step that names it
};

struct HoldRecord {
  HoldId id;
  RequestId request;
  std::vector<PageId> pages;
  Job job;
  bool with_seat;
  std::optional<Lengths> final_lengths{};  // released: what stays readable
};

struct VisitRow {
  RequestId request;
  std::int32_t seat;
  std::int32_t tokens;
  std::int64_t length_before;
};

struct Visit {
  StepId id;
  std::vector<VisitRow> rows;
  Foretold foretold;
  bool settled = false;
};

// What is going to be prepared.
struct Batch {
  std::vector<BatchRow> rows;
  StepShape shape;
  std::int32_t repeat = 1;
  bool captured = false;
  bool all_short = true;
};

// One run of a visit.
struct Chosen {
  bool replays = false;
  std::int32_t captured_part = 0;  // where it replays
  Enqueued enqueued;
};

class Engine {
 public:
  Engine(World& world, Oracle& oracle, Counts& counts, std::uint64_t seed);

  // Calls between steps, and one visit. Throws what went wrong.
  void one_step();
  // Compares what lives, then forgets everything, at times with work in flight.
  void finish();

 private:
  bool chance(std::int64_t percent) { return random_.chance(percent); }
  std::int64_t in(std::int64_t least, std::int64_t most) { return random_.in(least, most); }
  Ledger& ledger() { return world_.ledger(); }
  std::size_t any_live() { return test::size(in(0, std::ssize(live_) - 1)); }

  // engine.cpp: everything between steps.
  void call_between();
  void admit();
  Job new_job();
  void release(std::size_t at, const char* why);
  void preempt_for(const Batch& batch, RequestId needy);
  void finish_stopped();
  void hold();
  void drop();
  void check_pages();
  void check_addresses();

  // visits.cpp: steps.
  std::vector<RequestId> random_requests();
  Batch choose_batch();
  void fill_decode(Batch& batch);
  void fill_ragged(Batch& batch);
  std::int64_t chunk(std::int64_t most);
  bool secure(Batch& batch, RequestId request, std::int64_t tokens);
  bool is_live(RequestId request) const;
  void prepare_and_abandon();
  void padding_visit();
  void visit();
  VisitInput make_input();
  std::int32_t any_captured_part();
  DraftPart any_part(const Batch& batch);
  Chosen choose_run(const Batch& batch);
  void run_wrong_graph(const StepUpdate& update, PlanBufferId buffer);
  void count_foretold(const Foretold& foretold);
  void count_part(const DraftPart& part);
  void run(const StepUpdate& update, const Batch& batch, PlanBufferId buffer,
           const VisitInput& input);
  void settle(Visit& visit);
  void settle_due();

  // comparing.cpp: bytes.
  void compare_some(std::int64_t most);
  void compare_table();
  void compare(const test::Snapshot& snapshot, std::int32_t seat, std::span<const PageId> pages,
               const Lengths& lengths, std::int32_t content, const char* what);
  void compare_group(const test::Snapshot& snapshot, std::int32_t seat,
                     std::span<const PageId> pages, LayerGroup group, std::int64_t tokens,
                     std::int32_t content, const char* what);

  World& world_;
  Oracle& oracle_;
  Counts& counts_;
  test::Random random_;
  DeviceModel model_;
  std::vector<Live> live_;
  std::deque<Job> waiting_;  // preempted
  std::vector<HoldRecord> holds_;
  std::deque<Visit> visits_;  // that a later prepare counts
  StepId next_ = 0;
  std::int64_t personality_ = 0;  // how impatient this life is
};

}  // namespace quire::soak
