// Failures that users of other systems met when steps repeat, run twice, or are in flight while
// their requests go: small stories on a backend, to the byte (docs/RELIABILITY.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "tests/support/device_array.h"
#include "tests/support/field_stories.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);

// A step of plan, appends and a commit that keeps all, as a graph.
GraphExec capture_step(TestEngine& engine, StepShape shape, const std::uint8_t* stop = nullptr) {
  engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
  engine.stream().wait();
  Capture capture(engine.backend(), engine.stream());
  engine.enqueue_body(shape, engine.stream());
  engine.cache().device().enqueue_commit(kBuffer, nullptr, stop, engine.stream());
  return capture.finish();
}

bool equal(const Snapshot& a, const Snapshot& b) {
  return a.pages == b.pages && a.seats == b.seats;
}

// P9. With 8 drafts the CSA rings have no token to spare, with 63 the window rings have one.
TEST_CASE("rows of more than four drafts fit the ring: any kept prefix has a plain run's bytes") {
  constexpr std::uint32_t kSeed = 9;
  MESSAGE("seed " << kSeed);
  for (const std::int32_t draft_max : {5, 8, 13, 63}) {
    CAPTURE(draft_max);
    const std::int32_t context = 300 + 5 * draft_max;
    TestEngineOptions options = small_engine(2, context);
    options.limits.draft_max = draft_max;
    TestEngine engine(test_backend(), options);
    engine.poison();
    const RequestId drafted = engine.admit(0, context);
    std::uint32_t dice = kSeed;
    while (engine.length(drafted) + draft_max + 1 <= context) {
      dice = hash32(dice + 1);
      const auto tokens =
          static_cast<std::int32_t>(1 + dice % (static_cast<unsigned>(draft_max) + 1));
      const auto kept = static_cast<std::int32_t>(dice / 64 % (static_cast<unsigned>(tokens) + 1));
      engine.step(std::vector<StepRow>{{drafted, tokens, kept}},
                  StepShape::decode(1, draft_max + 1));
      const auto length = static_cast<std::int32_t>(engine.length(drafted));
      CAPTURE(length);
      if (length == 0) continue;
      const bool same = engine.live_bytes(drafted) == one_shot(engine, 0, length);
      REQUIRE(same);
    }
  }
}

// One token's rows, read where they lie in the banks.
AppendInputs inputs_in_bank(TestEngine& engine, LayerId layer, std::int64_t at) {
  const auto rows = engine.rows_of(layer);
  AppendInputs inputs;
  inputs.window.data = rows.window_bank + at * 512 * 2;
  if (rows.csa_bank != nullptr) {
    inputs.csa.data = rows.csa_bank + at * 2048 * 4;
    inputs.indexer.data = rows.indexer_bank + at * 512 * 4;
  } else {
    inputs.hca.data = rows.hca_bank + at * 1024 * 4;
  }
  return inputs;
}

// P13
TEST_CASE("two micro-batches in two plan buffers, one of them planned twice, advance once each") {
  TestEngineOptions options = small_engine(2, 300);
  options.limits.plan_buffers = 2;
  options.limits.run_ahead_max = 1;
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  DeviceCache& device = engine.cache().device();
  const PlanBufferId buffers[2] = {PlanBufferId(0), PlanBufferId(1)};
  const RequestId requests[2] = {engine.admit(0, 300), engine.admit(1, 300)};
  engine.ragged_step({{requests[0], 3}, {requests[1], 120}});
  // The one input row of a micro-batch is read where it lies in the bank.
  const auto append = [&](LayerId layer, std::int64_t batch) {
    const std::int64_t at = batch * engine.options().bank_tokens + engine.length(requests[batch]);
    const AppendInputs inputs = inputs_in_bank(engine, layer, at);
    device.append(layer, buffers[batch], inputs, engine.stream());
  };
  for (int turn = 0; turn < 140; ++turn) {
    StepId ids[2];
    for (std::size_t i = 0; i < 2; ++i) {
      engine.cache().ledger().reserve(requests[i], 1).value();
      const BatchRow row{requests[i], 1};
      ids[i] =
          engine.cache().begin_step({&row, 1}, StepShape::decode(1), buffers[i], engine.stream());
    }
    for (const std::size_t i : {0u, 1u, 0u}) device.enqueue_plan(buffers[i], engine.stream());
    for (const std::int32_t layer : {0, 1}) {
      for (const std::int64_t batch : {0, 1}) append(LayerId(layer), batch);
    }
    for (const std::size_t i : {1u, 0u}) {
      device.enqueue_commit(buffers[i], nullptr, nullptr, engine.stream());
    }
    for (std::size_t i = 0; i < 2; ++i) {
      engine.finish(ids[i], std::vector<StepRow>{{requests[i], 1}});
    }
  }
  const bool first_same = engine.live_bytes(requests[0]) == alone(options, 0, 143);
  const bool second_same = engine.live_bytes(requests[1]) == alone(options, 1, 260);
  CHECK(first_same);
  CHECK(second_same);
}

TEST_CASE("a step that waits in its plan buffer does not write for who owns its seat by then") {
  TestEngineOptions options = small_engine(1, 300);
  options.limits.plan_buffers = 2;
  options.limits.run_ahead_max = 1;
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  DeviceCache& device = engine.cache().device();
  Ledger& ledger = engine.cache().ledger();
  const RequestId former = engine.admit(0, 300);
  engine.ragged_step({{former, 7}});
  ledger.reserve(former, 1).value();
  const BatchRow row{former, 1};
  const StepId waiting =
      engine.cache().begin_step({&row, 1}, StepShape::decode(1), PlanBufferId(1), engine.stream());
  ledger.release(former);
  const RequestId owner = engine.admit(1, 300);  // the same seat
  engine.ragged_step({{owner, 121}});

  device.enqueue_plan(PlanBufferId(1), engine.stream());
  for (const std::int32_t layer : {0, 1}) {
    const AppendInputs inputs = inputs_in_bank(engine, LayerId(layer), 0);  // of the other content
    device.append(LayerId(layer), PlanBufferId(1), inputs, engine.stream());
  }
  device.enqueue_commit(PlanBufferId(1), nullptr, nullptr, engine.stream());
  DeviceReport report{};
  device.report(PlanBufferId(1), &report, engine.stream());
  engine.stream().wait();
  CHECK(report.rows_of_former_owners == 1);
  const Outcome nothing{};
  ledger.settle(waiting, {&nothing, 1});
  engine.ragged_step({{owner, 1}});
  CHECK(engine.live_bytes(owner) == alone(options, 1, 122));
}

// O6
TEST_CASE("a slow reader beside the stream finds what it holds until it drops the hold") {
  TestEngineOptions options = small_engine(2, 256);
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  Ledger& ledger = engine.cache().ledger();
  const RequestId a = engine.admit(0, 256);
  engine.ragged_step({{a, 256}});
  const PageId page_of_a = ledger.pages_of(a)[0];
  const EntryPool pool = engine.cache().device().csa_pages(LayerId(0));
  const std::byte* place = pool.page_of(std::int64_t{page_of_a.value} * 64);
  const std::int64_t page_bytes = 64 * (kMainDataBytes + kMainScaleBytes);
  const std::vector<std::byte> expected = fetch(engine, place, page_bytes);

  Stream reader(test_backend());
  // On the device: a copy to ordinary host memory would wait.
  DeviceArray<std::byte> read(test_backend(), reader, expected.size(), 0xFF);
  const HoldId hold = ledger.hold(a).value();
  {
    Held held(reader);
    test_backend().copy(read.data(), place, page_bytes, reader);
    engine.release(a);
    const RequestId b = engine.admit(1, 256);
    CHECK(ledger.pages_of(b).empty());
    engine.ragged_step({{b, 256}});
    CHECK(ledger.pages_of(b)[0] != page_of_a);
    CHECK_FALSE(ledger.admit(256, 0));  // the seat is held as well
    engine.stream().wait();
    engine.release(b);
    REQUIRE(held.resume() == "");
  }
  const bool same = read.download() == expected;
  CHECK(same);
  ledger.drop(hold);
  const RequestId c = engine.admit(1, 256);
  const RequestId d = engine.admit(1, 256);
  engine.ragged_step({{c, 200}, {d, 150}});
  const bool reused = ledger.pages_of(c)[0] == page_of_a || ledger.pages_of(d)[0] == page_of_a;
  CHECK(reused);
  const bool c_same = engine.live_bytes(c) == alone(options, 1, 200);
  const bool d_same = engine.live_bytes(d) == alone(options, 1, 150);
  CHECK(c_same);
  CHECK(d_same);
}

// O7
TEST_CASE("a row that stops itself inside a device loop of eight steps writes nothing more") {
  TestEngineOptions options = small_engine(2, 300);
  options.limits.repeat_max = 8;
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  TestEngine one_by_one(test_backend(), options);
  const StepShape shape = StepShape::decode(2);
  DeviceArray<std::uint8_t> stop(test_backend(), engine.stream(), 2, 0);
  const std::vector<std::uint8_t> flags{0, 1, 0, 0};
  for (std::int32_t stops_at = 0; stops_at < 8; ++stops_at) {
    CAPTURE(stops_at);
    std::vector<AheadRow> rows;
    std::vector<StepRow> plain;
    for (TestEngine* each : {&engine, &one_by_one}) {
      each->cache().reset(each->stream());
      rows = {{{each->admit(0, 300)}, 0}, {{each->admit(1, 300)}, 1}};
      plain = step_rows_of(rows);
      plain[0].tokens = 121;  // the loop closes CSA entries of both and an HCA entry of each
      plain[1].tokens = 125;
      each->ragged_step(plain);
      plain = step_rows_of(rows);
    }
    const GraphExec graph = capture_step(engine, shape, stop.data());
    for (const bool knows : {false, true}) {  // the second visit still names the stopped row
      const std::vector<BatchRow> batch = batch_of(engine, rows, 8);
      const StepId id = engine.cache().begin_step(batch, shape, kBuffer, engine.stream(), 8);
      for (std::int32_t run = 0; run < 8; ++run) {
        copy_rows(engine, rows, shape, run);
        const std::uint8_t* now = flags.data() + (run == stops_at && !knows ? 0 : 2);
        test_backend().copy(stop.data(), now, 2, engine.stream());
        graph.launch(engine.stream());
      }
      CHECK(report_of(engine).rows_stopped == (knows ? 8 : 7 - stops_at));
      const std::int32_t kept = knows ? 0 : stops_at + 1;
      engine.finish(
          id, std::vector<StepRow>{{rows[0].row.request, 1, 8}, {rows[1].row.request, 1, kept}});
      for (std::int32_t run = 0; run < 8; ++run) {
        const std::vector<StepRow> both = plain;
        const std::vector<StepRow> first{plain[0]};
        one_by_one.step(run < kept ? both : first, shape);
      }
      const bool same = equal(engine.snapshot(), one_by_one.snapshot());
      CHECK(same);
    }
  }
}

// O12
TEST_CASE("a request released between its update and its launch harms neither mate nor successor") {
  TestEngineOptions options = small_engine(2, 256);
  options.limits.run_ahead_max = 40;
  options.contents = 3;
  TestEngine engine(test_backend(), options);
  Ledger& ledger = engine.cache().ledger();
  const StepShape shape = StepShape::decode(2);
  const RequestId a = engine.admit(0, 256);
  const RequestId mate = engine.admit(1, 256);
  engine.ragged_step({{a, 127}, {mate, 63}});
  const PageId page_of_a = ledger.pages_of(a)[0];
  RequestId next;
  {
    Held held(engine.stream());
    const std::vector<AheadRow> rows{{{a}, 0}, {{mate}, 1}};
    const std::vector<BatchRow> batch = batch_of(engine, rows);
    const StepId id = engine.cache().begin_step(batch, shape, kBuffer, engine.stream());
    copy_rows(engine, rows, shape);
    engine.release(a);
    next = engine.admit(2, 256);
    REQUIRE(next.index == a.index);
    engine.enqueue_body(shape, engine.stream());  // a's last token, into what is next's
    engine.cache().device().enqueue_commit(kBuffer, nullptr, nullptr, engine.stream());
    for (int i = 0; i < 30; ++i) run_ahead(engine, {{{next}, 2}}, shape);
    ledger.settle(id, std::vector<Outcome>{{1, false}, {1, false}});
    REQUIRE(held.resume() == "");
  }
  CHECK(ledger.pages_of(next)[0] == page_of_a);
  const bool next_same = engine.live_bytes(next) == alone(options, 2, 30);
  const bool mate_same = engine.live_bytes(engine.snapshot(), ledger.info(mate).seat,
                                           ledger.pages_of(mate), 64) == alone(options, 1, 64);
  CHECK(next_same);
  CHECK(mate_same);
}

// O14
TEST_CASE("replays beyond what was prepared, and rows at their limit, write nothing anywhere") {
  TestEngineOptions options = small_engine(2, 512);
  options.limits.repeat_max = 4;
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  const StepShape shape = StepShape::decode(2);
  const std::vector<AheadRow> rows{{{engine.admit(0, 512)}, 0}, {{engine.admit(1, 512)}, 1}};
  engine.ragged_step({{rows[0].row.request, 253}, {rows[1].row.request, 10}});
  const GraphExec graph = capture_step(engine, shape);
  const std::vector<BatchRow> batch = batch_of(engine, rows, 3);
  const StepId id = engine.cache().begin_step(batch, shape, kBuffer, engine.stream(), 3);
  const auto replay = [&](std::int32_t run) {
    copy_rows(engine, rows, shape, run);
    graph.launch(engine.stream());
  };
  for (std::int32_t run = 0; run < 3; ++run) replay(run);
  // The first request's only page is full now; the next cell of its table names nobody's page.
  REQUIRE(engine.cache().ledger().pages_of(rows[0].row.request).size() == 1);
  const std::uint64_t prepared = engine.memory_hash();
  for (std::int32_t run = 3; run < 7; ++run) replay(run);
  CHECK(engine.memory_hash() == prepared);
  CHECK(report_of(engine).rows_out_of_steps == 8);
  engine.finish(id, std::vector<StepRow>{{rows[0].row.request, 1, 3}, {rows[1].row.request, 1, 3}});

  // Steps are left, but one row's limit is its length, the other's one token away.
  StepUpdate update(options.limits);
  update.start(id + 1, kBuffer, shape, 4);
  update.add(BatchRowUpdate{rows[0].row.request.index, 1, 256, 0});
  update.add(BatchRowUpdate{rows[1].row.request.index, 1, 14, 0});
  update.seal();
  engine.cache().device().apply(update, engine.stream());
  replay(0);
  const std::uint64_t at_limit = engine.memory_hash();
  for (std::int32_t run = 1; run < 4; ++run) replay(run);
  CHECK(engine.memory_hash() == at_limit);
  CHECK(report_of(engine).rows_at_limit == 4 + 3);
  for (const auto& [row, length] : {std::pair(rows[0], 256), std::pair(rows[1], 14)}) {
    const Ledger& ledger = engine.cache().ledger();
    const bool same = engine.live_bytes(engine.snapshot(), ledger.info(row.row.request).seat,
                                        ledger.pages_of(row.row.request),
                                        length) == alone(options, row.content, length);
    CHECK(same);
  }
}

// G7
TEST_CASE("an engine that owns the capture cuts it in pieces, with its own work between ours") {
  TestEngineOptions options = small_engine(2, 200);
  TestEngine engine(test_backend(), options);
  engine.poison();
  Backend& backend = test_backend();
  const StepShape shape = StepShape::decode(2);
  DeviceArray<std::uint32_t> scratch(backend, engine.stream(), 64, 0);
  std::vector<GraphExec> pieces;
  const auto piece = [&](const auto& body) {
    Capture capture(backend, engine.stream());
    body();
    pieces.push_back(capture.finish());
  };
  engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
  engine.stream().wait();
  int host_calls = 0;
  piece([&] {
    backend.fill(scratch.data(), 1, 64, engine.stream());
    engine.cache().device().enqueue_plan(kBuffer, engine.stream());
    backend.copy(scratch.data() + 32, scratch.data(), 64, engine.stream());
    engine.enqueue_append(LayerId(0), shape, engine.stream());
  });
  piece([&] {
    const StreamView stream = engine.stream();
    if (stream.is_host()) stream.host()->enqueue([&host_calls] { ++host_calls; });
    engine.enqueue_append(LayerId(1), shape, engine.stream());
    backend.fill(scratch.data(), 2, 64, engine.stream());
  });
  piece([&] { engine.enqueue_commit(engine.stream()); });
  const RequestId request = engine.admit(0, 200);
  const std::vector<StepRow> rows{{request, 1}};
  for (int i = 0; i < 140; ++i) {
    const StepId id = engine.begin(rows, shape);
    for (const GraphExec& graph : pieces) graph.launch(engine.stream());
    engine.finish(id, rows);
  }
  const bool same = engine.live_bytes(request) == alone(options, 0, 140);
  CHECK(same);
  CHECK(host_calls == (engine.stream().view().is_host() ? 140 : 0));
}

}  // namespace
