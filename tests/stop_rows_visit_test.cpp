// A captured visit of many steps in which batch rows stop themselves at different steps: the
// sampler, on the device, looks tokens up by position, `stop_rows` cuts and flags, the commit feeds
// the next plan.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/kernels/params.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/stop_walk.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using test::DeviceArray;
using test::Snapshot;
using test::Stopped;
using test::test_backend;
using test::TestEngine;
using test::walked;

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr PlanBufferId kBuffer(0);
constexpr std::int32_t kSteps = 16;
constexpr std::int32_t kRequests = 5;
constexpr std::int32_t kRows = kRequests + 1;  // the last is padding
constexpr std::int32_t kContext = 512;         // width of a script
constexpr std::int32_t kEnds[] = {0, 7};

// What a model would sample behind each position of each batch row, and how many of its drafts it
// would accept there: of everything that is padding, end tokens and counts that cannot be.
struct Script {
  std::vector<std::int32_t> tokens = std::vector<std::int32_t>(kRows * kContext, 7);
  std::vector<std::int32_t> kept = std::vector<std::int32_t>(kRows * kContext, 3);

  static std::size_t at(std::int32_t row, std::int32_t position) {
    return static_cast<std::size_t>(row * kContext + position);
  }
};

struct VisitCase {
  std::int32_t tokens_per_row;
  bool all_stop;
};

// Where the batch rows of a visit stand, and what is to become of them.
struct Progress {
  std::int32_t length = 0, limit = kMost;
  bool stopped = false;
  std::vector<std::byte> live;  // since it has stopped
};

// A captured step whose sampler looks things up by position, on the device: `translate_picks` with
// positions as picks, and a script as the page table. Input rows are the same in every step.
struct Visit : VisitCase {
  std::unique_ptr<TestEngine> engine;
  StepShape shape;
  std::vector<RequestId> requests;  // by batch row
  std::vector<Progress> rows;
  Script script;
  Stream& stream;
  DeviceArray<std::int32_t> on_script, on_kept_script, batch_rows, widths, tokens, ends, limits,
      kept;
  DeviceArray<std::uint8_t> stop;
  std::int32_t rows_stopped = 0;  // as the report should count them

  static test::TestEngineOptions engine_options(const VisitCase& of) {
    test::TestEngineOptions options = test::small_engine(kRequests + 1, kContext);
    options.limits.rows_max = kRows;
    options.limits.draft_max = of.tokens_per_row - 1;
    options.limits.repeat_max = kSteps;
    options.contents = kRequests;
    options.bank_tokens = 160;
    return options;
  }

  explicit Visit(const VisitCase& of)
      : VisitCase(of),
        engine(std::make_unique<TestEngine>(test_backend(), engine_options(of))),
        shape(StepShape::decode(kRows, of.tokens_per_row)),
        rows(kRequests),
        stream(engine->stream()),
        on_script(test_backend(), stream, script.tokens),
        on_kept_script(test_backend(), stream, script.kept),
        batch_rows(test_backend(), stream, std::vector<std::int32_t>{0, 1, 2, 3, 4, 5}),
        widths(test_backend(), stream,
               std::vector<std::int32_t>(static_cast<std::size_t>(shape.tokens), kContext)),
        tokens(test_backend(), stream, static_cast<std::size_t>(shape.tokens), 0),
        ends(test_backend(), stream, kEnds),
        limits(test_backend(), stream, kRequests + 1, 0),
        kept(test_backend(), stream, kRows, 0),
        stop(test_backend(), stream, kRows, 0x5A) {
    admit();
    write_script();
    place_input_rows();
  }

  // No request has the seat of its batch row's number; each is prefilled to a length of its own.
  void admit() {
    engine->admit(0, 1);
    for (std::int32_t r = 0; r < kRequests; ++r) {
      requests.push_back(engine->admit(r, kContext));
    }
    std::reverse(requests.begin(), requests.end());
    for (std::int32_t r = 0; r < kRequests; ++r) {
      const std::int32_t prompt = 118 + 5 * r;
      engine->ragged_step({{requests[static_cast<std::size_t>(r)], prompt}});
      rows[static_cast<std::size_t>(r)].length = prompt;
    }
  }

  void write_script() {
    for (std::int32_t r = 0; r < kRequests; ++r) {
      const std::int32_t start = rows[static_cast<std::size_t>(r)].length;
      for (std::int32_t p = start; p < kContext; ++p) {
        script.tokens[Script::at(r, p)] = 1000 + p;
        // All drafts of the first two, so that what stops them stands inside of a step.
        script.kept[Script::at(r, p)] = r < 2 ? tokens_per_row : 1 + (p * 7 + r) % tokens_per_row;
      }
    }
    const auto end_at = [&](std::int32_t r, std::int32_t after) {
      script.tokens[Script::at(r, rows[static_cast<std::size_t>(r)].length + after)] = kEnds[r % 2];
    };
    const auto limit_at = [&](std::int32_t r, std::int32_t after) {
      Progress& row = rows[static_cast<std::size_t>(r)];
      row.limit = row.length + after;
    };
    end_at(0, 4);
    limit_at(1, 7);
    end_at(2, 10);
    limit_at(2, 11);
    limit_at(3, 12);
    end_at(3, 12);  // behind the limit: it belongs to nobody
    if (all_stop) limit_at(4, 14);
    on_script.upload(script.tokens);
    on_kept_script.upload(script.kept);
    upload_limits();
  }

  void upload_limits() {
    std::vector<std::int32_t> by_seat(kRequests + 1, 1);
    for (std::size_t r = 0; r < rows.size(); ++r) by_seat[seat(r)] = rows[r].limit;
    limits.upload(by_seat);
  }

  std::size_t seat(std::size_t r) const {
    return static_cast<std::size_t>(engine->cache().ledger().info(requests[r]).seat.value);
  }

  void place_input_rows() {
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const TestEngine::RowPointers of = engine->rows_of(LayerId(layer));
      for (const auto& [to, from, row_bytes] : {std::tuple{of.window, of.window_bank, 512 * 2},
                                                {of.csa, of.csa_bank, 2048 * 4},
                                                {of.indexer, of.indexer_bank, 512 * 4},
                                                {of.hca, of.hca_bank, 1024 * 4}}) {
        if (to != nullptr) test_backend().copy(to, from, shape.tokens * row_bytes, stream);
      }
    }
    stream.wait();
  }

  // In the place of the engine's sampler.
  void enqueue_lookup(const std::int32_t* table, std::int32_t count, const std::int32_t* row_of,
                      std::int64_t stride, std::int32_t padding, std::int32_t* to) {
    TranslatePicksParams p;
    p.tokens = count;
    p.k = 1;
    p.picks = engine->cache().device().views(kBuffer).positions;
    p.picks_stride = stride;
    p.token_batch_row = row_of;
    p.token_csa_length = widths.data();
    p.page_table = table;
    p.page_table_stride = kContext;
    p.entries_per_page = 1;
    p.locations = to;
    p.locations_stride = 1;
    p.padding_location = padding;
    test_backend().translate_picks(p, Pdl::kPrologue, stream);
  }

  bool counted() const { return tokens_per_row > 1; }

  void enqueue_step() {
    DeviceCache& device = engine->cache().device();
    engine->enqueue_body(shape, stream);
    enqueue_lookup(on_script.data(), shape.tokens, device.views(kBuffer).token_batch_row, 1,
                   kEnds[0], tokens.data());
    enqueue_lookup(on_kept_script.data(), kRows, batch_rows.data(), tokens_per_row, 0, kept.data());
    StopRowsParams p;
    p.rows = kRows;
    p.tokens_per_row = tokens_per_row;
    p.records = device.plan_buffer(kBuffer).rows;
    p.tokens = tokens.data();
    p.tokens_stride = tokens_per_row;
    p.end_tokens = ends.data();
    p.end_count = 2;
    p.length_limit = limits.data();
    p.kept = counted() ? kept.data() : nullptr;
    p.stop = stop.data();
    test_backend().stop_rows(p, Pdl::kPrologue, stream);
    device.enqueue_commit(kBuffer, p.kept, p.stop, stream);
  }

  GraphExec captured_step() {
    engine->cache().begin_padding_step(shape, kBuffer, stream);
    stream.wait();
    Capture capture(test_backend(), stream);
    enqueue_step();
    return capture.finish();
  }

  StepId begin(std::int32_t steps) {
    std::vector<BatchRow> batch;
    for (const RequestId request : requests) {
      engine->cache().ledger().reserve(request, steps * tokens_per_row).value();
      batch.push_back({request, tokens_per_row});
    }
    rows_stopped = 0;
    return engine->cache().begin_step(batch, shape, kBuffer, stream, steps);
  }

  // What one step should do to each batch row: how many of its tokens stay.
  std::vector<std::int32_t> advance() {
    std::vector<std::int32_t> kept_now;
    for (std::int32_t r = 0; r < kRequests; ++r) {
      Progress& row = rows[static_cast<std::size_t>(r)];
      rows_stopped += row.stopped ? 1 : 0;
      const std::size_t at = Script::at(r, row.length);
      const BatchRowRecord record{0, row.length, row.stopped ? 0 : tokens_per_row, 0};
      const std::int32_t accepted = counted() ? script.kept[at] : 1;
      const Stopped now = walked(record, accepted, script.tokens.data() + at, tokens_per_row,
                                 {kEnds[0], kEnds[1]}, row.limit);
      row.length += now.kept;
      row.stopped = row.stopped || now.stops;
      kept_now.push_back(now.kept);
    }
    return kept_now;
  }

  std::vector<std::byte> live_bytes(const Snapshot& memory, std::size_t r) const {
    const Ledger& ledger = engine->cache().ledger();
    return engine->live_bytes(memory, ledger.info(requests[r]).seat, ledger.pages_of(requests[r]),
                              rows[r].length);
  }

  void check_results(StepId id, const std::vector<std::int32_t>& before) {
    std::vector<RowResult> results(kRows);
    DeviceReport report{};
    engine->cache().device().results(kBuffer, results, stream);
    engine->cache().device().report(kBuffer, &report, stream);
    stream.wait();
    std::vector<Outcome> outcomes;
    std::int32_t lowest = DeviceReport::kNoSeat;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CAPTURE(r);
      CHECK(results[r].length == rows[r].length);
      CHECK(results[r].stopped == (rows[r].stopped ? 1 : 0));
      outcomes.push_back({results[r].length - before[r], results[r].stopped != 0});
      if (rows[r].stopped) lowest = std::min(lowest, static_cast<std::int32_t>(seat(r)));
    }
    CHECK(results.back().length == 0);
    CHECK(results.back().stopped == 0);
    CHECK(report.rows_stopped == rows_stopped);
    CHECK(report.rows_at_limit == 0);
    CHECK(report.rows_kept_wrong == 0);
    CHECK(report.padding_rows_kept == 0);
    CHECK(report.first_failing_seat == (rows_stopped > 0 ? lowest : DeviceReport::kNoSeat));
    engine->cache().ledger().settle(id, outcomes);
    engine->cache().ledger().check_invariants();
  }

  std::vector<std::int32_t> lengths() const {
    std::vector<std::int32_t> lengths;
    for (const Progress& row : rows) lengths.push_back(row.length);
    return lengths;
  }
};

// The same steps without the device deciding anything: one update each, a batch row that has
// stopped takes part with no token, and the counts come from the host.
struct Plain : Visit {
  using Visit::Visit;

  void step() {
    std::vector<BatchRow> batch;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      batch.push_back({requests[r], rows[r].stopped ? 0 : tokens_per_row});
      if (rows[r].stopped) continue;
      engine->cache().ledger().reserve(requests[r], tokens_per_row).value();
    }
    const StepId id = engine->cache().begin_step(batch, shape, kBuffer, stream);
    std::vector<std::int32_t> kept_now = advance();
    std::vector<Outcome> outcomes;
    for (const std::int32_t count : kept_now) outcomes.push_back({count, false});
    kept_now.push_back(0);
    kept.upload(kept_now);
    engine->enqueue_body(shape, stream);
    engine->cache().device().enqueue_commit(kBuffer, kept.data(), nullptr, stream);
    engine->cache().ledger().settle(id, outcomes);
  }
};

}  // namespace

TEST_CASE("rows of a captured visit stop at different steps, and none of their bytes changes") {
  for (const VisitCase& of : {VisitCase{1, true}, {3, false}, {3, true}}) {
    CAPTURE(of.tokens_per_row);
    CAPTURE(of.all_stop);
    Visit visit(of);
    const GraphExec step = visit.captured_step();
    const std::vector<std::int32_t> before = visit.lengths();
    const StepId id = visit.begin(kSteps);
    std::vector<std::int32_t> stopped_at;
    std::uint64_t memory_at_rest = 0;
    for (std::int32_t s = 0; s < kSteps; ++s) {
      CAPTURE(s);
      step.launch(visit.stream);
      visit.advance();
      const Snapshot memory = visit.engine->snapshot();
      bool at_rest = true;
      for (std::size_t r = 0; r < visit.rows.size(); ++r) {
        Progress& row = visit.rows[r];
        at_rest = at_rest && row.stopped;
        if (!row.stopped) continue;
        if (row.live.empty()) {
          row.live = visit.live_bytes(memory, r);
          stopped_at.push_back(s);
        }
        CHECK(visit.live_bytes(memory, r) == row.live);
      }
      if (!at_rest) continue;
      const std::uint64_t hash = visit.engine->memory_hash();
      if (memory_at_rest != 0) CHECK(hash == memory_at_rest);
      memory_at_rest = hash;
    }
    CHECK((memory_at_rest != 0) == of.all_stop);
    REQUIRE(stopped_at.size() == (of.all_stop ? 5u : 4u));
    CHECK(stopped_at.back() - stopped_at.front() >= 3);
    CHECK(stopped_at.back() < kSteps - 1);
    visit.check_results(id, before);
  }
}

TEST_CASE("a visit that stops itself leaves the bytes of plain steps, and a resumed row goes on") {
  for (const std::int32_t tokens_per_row : {1, 3}) {
    CAPTURE(tokens_per_row);
    Visit visit({tokens_per_row, false});
    Plain plain({tokens_per_row, false});
    const GraphExec step = visit.captured_step();
    for (const std::int32_t steps : {kSteps, 5}) {
      CAPTURE(steps);
      const std::vector<std::int32_t> before = visit.lengths();
      const StepId id = visit.begin(steps);
      for (std::int32_t s = 0; s < steps; ++s) {
        step.launch(visit.stream);
        visit.advance();
        plain.step();
      }
      REQUIRE(visit.lengths() == plain.lengths());
      const Snapshot memory = visit.engine->snapshot();
      const Snapshot plain_memory = plain.engine->snapshot();
      for (std::size_t r = 0; r < visit.rows.size(); ++r) {
        CAPTURE(r);
        CHECK(visit.live_bytes(memory, r) == plain.live_bytes(plain_memory, r));
      }
      visit.check_results(id, before);
      // The next visit: one row that has stopped goes on, the others stay as they are.
      visit.engine->cache().ledger().resume(visit.requests[1]);
      for (Visit* of : {&visit, static_cast<Visit*>(&plain)}) {
        of->rows[1].stopped = false;
        of->rows[1].limit += 9;
        of->upload_limits();
      }
    }
    CHECK(visit.rows[1].length > 118 + 5 + 7);
  }
}
