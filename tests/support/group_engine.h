// An engine for models with draft layers: one captured step has the verify plan, the draft group's
// extension by what was kept, and draft passes at supplied positions; a visit replays it K times.
// The host foretells all of it: kept counts, stops and positions lie on the device, step behind
// step, and copies on the stream bring them and the input rows of each step to where the graph
// reads them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/support/live_book.h"
#include "tests/support/test_engine.h"

namespace quire::test {

// One batch row of a visit. In step k it keeps kept[k mod size] of its tokens as long as it lives.
struct VisitRow {
  RequestId request;
  std::vector<std::int32_t> kept;
  std::int32_t stop_step = -1;  // in which it stops itself; -1: in none
};

struct VisitShape {
  std::int32_t drafts = 0;  // tokens per batch row less one, and draft passes
  std::int32_t steps = 1;   // K
  bool looks_ahead = true;  // secures the room of the last draft passes
};

class GroupEngine {
 public:
  // What the host knows of a request.
  struct Sequence {
    std::int64_t content = 0;
    std::int64_t target = 0, draft = 0;  // lengths
    bool stopped = false;

    std::int64_t length(LayerGroup group) const {
      return group == LayerGroup::kTarget ? target : draft;
    }
  };
  // What one step does to one batch row.
  struct Told {
    bool lives = false, stops = false;
    std::int64_t start = 0, draft_start = 0;
    std::int32_t kept = 0;
  };
  using Steps = std::vector<std::vector<Told>>;  // [steps][batch rows]

  explicit GroupEngine(const TestEngineOptions& options);

  TestEngine& engine() { return engine_; }
  DeviceCache& device() { return engine_.cache().device(); }
  Ledger& ledger() { return engine_.cache().ledger(); }
  Stream& stream() { return engine_.stream(); }
  Sequence& of(RequestId request) { return sequences_.at(request.index); }
  SeatId seat_of(RequestId request) { return ledger().info(request).seat; }
  StepShape shape(std::int32_t drafts) const { return StepShape::decode(rows_, drafts + 1); }

  // Admits a request and prefills both groups with the first tokens of a content.
  RequestId admit(std::int64_t content, std::int32_t tokens);
  void release(RequestId request);

  // --- A step in its parts, as the graph has them ---

  void enqueue_verify();
  void enqueue_extend();
  void enqueue_pass(std::int32_t drafts, std::int32_t pass);
  const GraphExec& graph_of(std::int32_t drafts);

  // --- A visit ---

  StepId begin(const std::vector<VisitRow>& rows, const VisitShape& visit);
  // What every step does to every row, told to the device; moves what the host knows.
  Steps foretell(const std::vector<VisitRow>& rows, const VisitShape& visit);
  // Enqueue the copies of one step. Everything that no live token has is NaN; refused tokens and
  // draft passes have rows of the next content.
  void bring_numbers(std::int32_t step);
  void bring_rows(const std::vector<VisitRow>& rows, const std::vector<Told>& step,
                  std::int32_t drafts);
  // The same in two parts, for steps behind each other on a stream that is held: what bring_rows
  // enqueues for a step, made ahead and waited for; then one copy for each input.
  DeviceArray<std::byte> make_rows(const std::vector<VisitRow>& rows, const std::vector<Told>& step,
                                   std::int32_t drafts);
  void bring_made(const DeviceArray<std::byte>& made, std::int32_t drafts);
  // For an extension that is not in step with the target: counts, and the rows that it reads.
  void bring_extension(const std::vector<RequestId>& requests,
                       const std::vector<std::int32_t>& counts);
  // A whole visit, without a wait between its steps but where `after_step` makes one. Checks
  // results and report and tells the ledger.
  void visit(const std::vector<VisitRow>& rows, const VisitShape& visit,
             const std::function<void(std::int32_t)>& after_step = {});

  // --- What must hold ---

  void check_results(const std::vector<VisitRow>& rows);
  // Live bytes of both groups, each at its length, are those of the books; so are the lengths in
  // the step table.
  void check_live(RequestId request, const std::vector<LiveBook>& books);
  std::int32_t length_on_device(RequestId request, LayerGroup group);

 private:
  // What append reads of one part of one layer, and where the right rows come from.
  struct Input {
    LayerGroup group;
    std::byte* rows;
    const std::byte* bank;
    std::int64_t row_bytes;
  };

  std::size_t rows_size() const { return static_cast<std::size_t>(rows_); }
  std::size_t numbers_size() const { return static_cast<std::size_t>(numbers_per_step_); }
  std::size_t told_steps() const;
  // Input rows of the parts of a step lie behind each other: those of verify and extension, then
  // one part for each draft pass.
  std::int64_t pass_rows(std::int32_t drafts, std::int32_t pass) const {
    return shape(drafts).tokens + std::int64_t{pass} * rows_;
  }
  void append(LayerGroup group, std::int64_t first_row);
  void put(LayerGroup group, std::int64_t to_row, std::int64_t content, std::int64_t position,
           std::int64_t tokens);
  void tell(const Steps& steps, std::int32_t drafts);
  void check_report(const std::vector<VisitRow>& rows, const Steps& steps);
  std::string wrong_live_bytes(const Snapshot& snapshot, RequestId request, LayerGroup group,
                               const std::vector<LiveBook>& books);

  TestEngine engine_;
  std::int32_t rows_;
  std::int32_t numbers_per_step_;           // kept counts, then the positions of each pass
  DeviceArray<std::int32_t> told_numbers_;  // [repeat_max, numbers_per_step_]
  DeviceArray<std::uint8_t> told_stops_;    // [repeat_max, rows]
  DeviceArray<std::int32_t> numbers_;       // of the step that runs, where the graph reads them
  DeviceArray<std::uint8_t> stops_;
  std::vector<Input> inputs_;
  std::map<std::int32_t, Sequence> sequences_;  // by request index
  std::map<std::int32_t, GraphExec> graphs_;    // by drafts
};

}  // namespace quire::test
