// Layer groups through a cache: a model of target layers and draft layers of all three kinds, whose
// lengths move apart, extensions by counts on the device, draft passes at supplied positions,
// visits of K steps replayed from one graph. What is live in each group at its length is compared,
// by memcmp, with a run that never drafts (tests/support/group_engine.h). Runs on test_backend().
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/support/field_stories.h"
#include "tests/support/group_engine.h"
#include "tests/support/owned_ranges.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int32_t kDraftMax = 3;
constexpr LayerGroup kTarget = LayerGroup::kTarget;
constexpr LayerGroup kDraft = LayerGroup::kDraft;

TestEngineOptions options_of(std::int64_t context) {
  TestEngineOptions options = small_engine(3, context);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca,
                         LayerKind::kCsa,     LayerKind::kHca, LayerKind::kSliding};
  options.spec.draft_layers = 3;
  options.limits.rows_max = 4;  // one is padding, at least
  options.limits.draft_max = kDraftMax;
  options.limits.repeat_max = 16;
  options.contents = 2;
  return options;
}

const std::vector<LiveBook>& books() {
  static const std::vector<LiveBook> both = [] {
    TestEngineOptions options = options_of(440);
    options.spec.draft_layers = 0;
    std::vector<LiveBook> made;
    for (std::int64_t content = 0; content < 2; ++content) made.emplace_back(options, content);
    return made;
  }();
  return both;
}

GroupEngine make_engine(std::int64_t context = 440) { return GroupEngine(options_of(context)); }

// Counts from `least` on, another for every step.
std::vector<std::int32_t> random_kept(std::uint32_t seed, std::int32_t least, std::int32_t most) {
  std::vector<std::int32_t> kept;
  for (std::uint32_t i = 0; i < 16; ++i) {
    const std::uint32_t dice = hash32(seed * 64 + i) % static_cast<std::uint32_t>(most - least + 1);
    kept.push_back(least + static_cast<std::int32_t>(dice));
  }
  return kept;
}

std::vector<std::byte> image_of(GroupEngine& world) {
  Snapshot snapshot = world.engine().snapshot();
  std::vector<std::byte> image = std::move(snapshot.pages);
  image.insert(image.end(), snapshot.seats.begin(), snapshot.seats.end());
  const auto table = world.device().step_table_memory();
  const auto copy = fetch(world.engine(), table.data(), static_cast<std::int64_t>(table.size()));
  image.insert(image.end(), copy.begin(), copy.end());
  return image;
}

// Seat and pages of a request, all layers.
std::vector<std::byte> owned_bytes(GroupEngine& world, RequestId request) {
  const Snapshot snapshot = world.engine().snapshot();
  std::vector<std::byte> bytes =
      cut(snapshot.seats, seat_ranges(world.device(), world.seat_of(request)));
  for (const PageId page : world.ledger().pages_of(request)) {
    const auto of_page = cut(snapshot.pages, page_ranges(world.device(), page));
    bytes.insert(bytes.end(), of_page.begin(), of_page.end());
  }
  return bytes;
}

std::vector<std::byte> window_entry(GroupEngine& world, const Snapshot& snapshot, RequestId request,
                                    LayerId layer, std::int64_t position) {
  const DeviceCache& device = world.device();
  const EntryPool ring = device.window_ring(layer);
  const std::int64_t location = world.seat_of(request).value * device.window_ring_tokens() +
                                position % device.window_ring_tokens();
  const auto copied = [&](const std::byte* at) {
    return snapshot.seats.data() + (at - device.seats_memory().data());
  };
  std::vector<std::byte> entry(kMainDataBytes + kMainScaleBytes);
  std::copy_n(copied(ring.main_data(location)), kMainDataBytes, entry.data());
  std::copy_n(copied(ring.main_scales(location)), kMainScaleBytes, entry.data() + kMainDataBytes);
  return entry;
}

// The bytes of the two images may differ in nothing but what a token at `position` of this request
// writes in the draft layers.
void allow_writes(GroupEngine& world, RequestId request, std::int64_t position, Snapshot& before,
                  const Snapshot& after) {
  DeviceCache& device = world.device();
  const std::int64_t seat = world.seat_of(request).value;
  const auto pages = world.ledger().pages_of(request);
  const auto allow = [](std::vector<std::byte>& to, const std::vector<std::byte>& from,
                        std::int64_t at, std::int64_t bytes) {
    std::copy_n(from.begin() + at, bytes, to.begin() + at);
  };
  const auto allow_seat = [&](const void* at, std::int64_t bytes) {
    allow(before.seats, after.seats,
          static_cast<const std::byte*>(at) - device.seats_memory().data(), bytes);
  };
  const auto allow_page = [&](const std::byte* at, std::int64_t bytes) {
    allow(before.pages, after.pages, at - device.pages_memory().data(), bytes);
  };
  for (std::int32_t i = 3; i < 6; ++i) {
    const LayerId layer(i);
    const std::int64_t in_ring =
        seat * device.window_ring_tokens() + position % device.window_ring_tokens();
    allow_seat(device.window_ring(layer).main_data(in_ring), kMainDataBytes);
    allow_seat(device.window_ring(layer).main_scales(in_ring), kMainScaleBytes);
    const auto page = static_cast<std::size_t>(position / 256);
    if (device.spec().layers[static_cast<std::size_t>(i)] == LayerKind::kCsa) {
      const std::int64_t row =
          seat * device.csa_ring_tokens() + position % device.csa_ring_tokens();
      allow_seat(device.csa_state(layer) + row * 2048, 2048 * 4);
      allow_seat(device.indexer_state(layer) + row * 512, 512 * 4);
      if (position % 4 != 3) continue;
      const std::int64_t entry = pages[page].value * std::int64_t{64} + position % 256 / 4;
      allow_page(device.csa_pages(layer).main_data(entry), kMainDataBytes);
      allow_page(device.csa_pages(layer).main_scales(entry), kMainScaleBytes);
      allow_page(device.indexer_pages(layer).indexer_values(entry), kIndexerDim);
      allow_page(device.indexer_pages(layer).indexer_scale(entry), kIndexerScaleBytes);
    } else if (device.spec().layers[static_cast<std::size_t>(i)] == LayerKind::kHca) {
      const std::int64_t bank = seat * device.hca_banks() + (position + 1) % device.hca_banks();
      if (position % 128 != 127) allow_seat(device.hca_state(layer) + bank * 1536, 1536 * 4);
      if (position % 128 != 127) continue;
      const std::int64_t entry = pages[page].value * std::int64_t{2} + position % 256 / 128;
      allow_page(device.hca_pages(layer).main_data(entry), kMainDataBytes);
      allow_page(device.hca_pages(layer).main_scales(entry), kMainScaleBytes);
    }
  }
}

}  // namespace

// P14
TEST_CASE("visits of K steps with drafts leave in both groups what a plain run leaves") {
  GroupEngine world = make_engine();
  std::vector<RequestId> requests;
  for (const std::int32_t tokens : {190, 121, 0}) {
    requests.push_back(world.admit(std::ssize(requests) % 2, tokens));
  }
  std::uint32_t turn = 0;
  for (const VisitShape& shape : std::vector<VisitShape>{
           {3, 1}, {3, 4}, {3, 16}, {0, 1}, {0, 16}, {1, 4}, {2, 16}, {3, 4}, {3, 16}}) {
    CAPTURE(turn);
    CAPTURE(shape.drafts);
    CAPTURE(shape.steps);
    std::rotate(requests.begin(), requests.begin() + 1, requests.end());  // change places
    std::vector<VisitRow> rows;
    for (const RequestId request : requests) {
      const std::int32_t least = shape.drafts == 0 ? 1 : request.index == 1 ? 0 : 1;
      rows.push_back({request, random_kept(++turn, least, shape.drafts + 1)});
    }
    if (shape.steps == 4) rows.pop_back();  // two rows are padding
    if (turn == 9) rows[1].stop_step = 6;
    world.visit(rows, shape);
    for (const RequestId request : requests) world.check_live(request, books());
    if (turn == 9) {
      CHECK(world.of(rows[1].request).stopped);
      CHECK(world.of(rows[1].request).draft == world.of(rows[1].request).target);
    }
    if (turn == 15) {  // it was in two visits, inert
      for (const RequestId request : requests) world.ledger().resume(request);
      for (const RequestId request : requests) world.of(request).stopped = false;
    }
  }
  const auto passed_a_page = [&](RequestId request) { return world.of(request).target > 256; };
  CHECK(std::any_of(requests.begin(), requests.end(), passed_a_page));
}

// S6
TEST_CASE("draft passes write beyond the group's length and nowhere else") {
  // Lengths at whose passes entries and pages end.
  for (const std::int32_t tokens : {5, 125, 126, 254, 130}) {
    CAPTURE(tokens);
    GroupEngine world = make_engine();
    world.engine().poison();
    const std::vector<VisitRow> rows{{world.admit(0, tokens), {2}}, {world.admit(1, 40), {2}}};
    const StepId id = world.begin(rows, {kDraftMax, 1});
    const auto steps = world.foretell(rows, {kDraftMax, 1});
    world.bring_numbers(0);
    world.bring_rows(rows, steps[0], kDraftMax);
    world.enqueue_verify();
    world.enqueue_extend();
    for (std::int32_t pass = 0; pass < kDraftMax; ++pass) {
      CAPTURE(pass);
      Snapshot before = world.engine().snapshot();
      world.enqueue_pass(kDraftMax, pass);
      const Snapshot after = world.engine().snapshot();
      CHECK(std::memcmp(before.seats.data(), after.seats.data(), after.seats.size()) != 0);
      for (const VisitRow& row : rows) {
        const std::int64_t position = world.of(row.request).draft + pass;
        allow_writes(world, row.request, position, before, after);
      }
      CHECK(before.seats == after.seats);
      CHECK(before.pages == after.pages);
    }
    for (const VisitRow& row : rows) world.check_live(row.request, books());
    world.ledger().settle(id, std::vector<Outcome>{{2, false}, {2, false}});
  }
}

TEST_CASE("the draft group may stay behind and catch up, or be planned from where it stands") {
  GroupEngine world = make_engine();
  const RequestId request = world.admit(0, 120);
  const auto verify = [&](std::int32_t kept) {
    const std::vector<VisitRow> rows{{request, {kept}}};
    GroupEngine::Sequence& sequence = world.of(request);
    const std::int64_t draft = sequence.draft;
    const StepId id = world.begin(rows, {kDraftMax, 1});
    const auto steps = world.foretell(rows, {kDraftMax, 1});
    world.bring_numbers(0);
    world.bring_rows(rows, steps[0], kDraftMax);
    world.enqueue_verify();
    sequence.draft = draft;  // it was not extended
    world.ledger().settle(id, std::vector<Outcome>{{kept, false}});
    world.stream().wait();
    world.check_live(request, books());
  };
  for (const std::int32_t kept : {3, 2, 4}) verify(kept);
  CHECK(world.of(request).target == 129);
  CHECK(world.of(request).draft == 120);
  // Each extension goes on from where the one before has ended.
  for (const std::int32_t count : {4, 1, 4}) {
    verify(1);
    world.bring_extension({request}, {count});
    world.enqueue_extend();
    world.of(request).draft += count;
    world.stream().wait();
    world.check_live(request, books());
  }
  CHECK(world.of(request).target == 132);
  CHECK(world.of(request).draft == 129);
  CHECK(report_of(world.engine()).first_failing_seat == DeviceReport::kNoSeat);
}

TEST_CASE("a row that stops in the middle of a visit writes nothing from the next step on") {
  GroupEngine world = make_engine();
  const std::vector<VisitRow> rows{{world.admit(0, 100), {2, 1, 4}, 1},
                                   {world.admit(1, 122), {3, 4}, 4},
                                   {world.admit(0, 0), {4, 3, 1}, 2}};
  std::vector<std::vector<std::byte>> at_stop(3);
  std::vector<std::byte> all_stopped;
  world.visit(rows, {kDraftMax, 8}, [&](std::int32_t step) {
    for (std::size_t r = 0; r < 3; ++r) {
      if (rows[r].stop_step == step) at_stop[r] = owned_bytes(world, rows[r].request);
      if (rows[r].stop_step >= step) continue;
      CAPTURE(step);
      CAPTURE(r);
      CHECK(owned_bytes(world, rows[r].request) == at_stop[r]);
    }
    if (step == 4) all_stopped = image_of(world);
    if (step > 4) CHECK(image_of(world) == all_stopped);  // whole, the step table too
  });
  CHECK(!all_stopped.empty());
  for (const VisitRow& row : rows) world.check_live(row.request, books());
  // Nor in the next visit, which does not know it; that the limits are others is its update's
  // doing.
  const Snapshot stopped = world.engine().snapshot();
  world.visit(rows, {kDraftMax, 4});
  CHECK(world.engine().snapshot().pages == stopped.pages);
  CHECK(world.engine().snapshot().seats == stopped.seats);
}

TEST_CASE(
    "the next visit is prepared while one runs, from upper lengths; rows go on from their own") {
  TestEngineOptions options = options_of(440);
  options.limits.run_ahead_max = 1;
  GroupEngine world(options);
  const std::vector<VisitRow> rows{{world.admit(0, 118), {2, 4, 1}},
                                   {world.admit(1, 40), {3}, 2},  // stops in the first visit
                                   {world.admit(1, 250), {1, 4}}};
  constexpr std::int32_t kSteps = 4;
  const VisitShape visit{kDraftMax, kSteps};
  const GraphExec& graph = world.graph_of(kDraftMax);
  graph.launch(world.stream());  // of padding only: a first launch may wait
  const auto steps = world.foretell(rows, {kDraftMax, 2 * kSteps});
  std::vector<DeviceArray<std::byte>> made;  // one by one its rows would fill the stream's queue
  for (const auto& step : steps) made.push_back(world.make_rows(rows, step, kDraftMax));
  std::vector<StepId> ids;
  {
    Held held(world.stream());  // all of it is in flight at once
    for (std::int32_t k = 0; k < 2 * kSteps; ++k) {
      if (k % kSteps == 0) ids.push_back(world.begin(rows, visit));
      world.bring_numbers(k);
      world.bring_made(made[static_cast<std::size_t>(k)], kDraftMax);
      graph.launch(world.stream());
    }
    REQUIRE(held.resume() == "");
  }
  world.check_results(rows);
  for (const VisitRow& row : rows) world.check_live(row.request, books());
  for (std::size_t v = 0; v < 2; ++v) {
    std::vector<Outcome> outcomes(rows.size());
    for (std::size_t k = v * kSteps; k < (v + 1) * kSteps; ++k) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        if (steps[k][r].lives) outcomes[r].kept_tokens += steps[k][r].kept;
        outcomes[r].stopped |= steps[k][r].stops || !steps[k][r].lives;
      }
    }
    world.ledger().settle(ids[v], outcomes);
  }
  world.visit({rows[2], rows[0]}, visit);  // what was secured and not reached has come back
  for (const VisitRow& row : rows) world.check_live(row.request, books());
  world.ledger().check_invariants();
}

TEST_CASE("a lookahead gives the last draft passes of a visit room, without it they are inert") {
  constexpr std::int32_t kDrafts = 5;  // so that the passes close an entry in a page of their own
  TestEngineOptions options = options_of(440);
  options.limits.draft_max = kDrafts;
  options.limits.tokens_max = 900;
  for (const bool looks_ahead : {true, false}) {
    CAPTURE(looks_ahead);
    GroupEngine world(options);
    world.engine().poison();
    const RequestId request = world.admit(0, 256 - 4 * (kDrafts + 1));
    const std::vector<VisitRow> rows{{request, {kDrafts + 1}}};  // all of them are accepted
    world.visit(rows, {kDrafts, 4, looks_ahead});
    REQUIRE(world.of(request).target == 256);
    CHECK(report_of(world.engine()).rows_at_limit == (looks_ahead ? 0 : kDrafts));
    CHECK(report_of(world.engine()).rows_wrong_positions == 0);
    CHECK(world.ledger().pages_of(request).size() == (looks_ahead ? 2 : 1));
    const Snapshot snapshot = world.engine().snapshot();
    for (std::int64_t p = 256; p < 256 + kDrafts; ++p) {
      CAPTURE(p);
      const auto entry = window_entry(world, snapshot, request, LayerId(5), p);
      CHECK(books()[1].has(5, Piece::kWindow, p, entry.data()) == looks_ahead);  // of the drafts
    }
    if (looks_ahead) {
      const EntryPool entries = world.device().csa_pages(LayerId(3));
      const std::byte* at = entries.main_data(world.ledger().pages_of(request)[1].value * 64LL);
      const std::byte* first = snapshot.pages.data() + (at - world.device().pages_memory().data());
      CHECK(std::count(first, first + kMainDataBytes, std::byte{0xFF}) < kMainDataBytes);  // poison
    }
    world.check_live(request, books());
    world.visit(rows, {kDrafts, 16});  // what stood there is overwritten
    world.check_live(request, books());
    CHECK(report_of(world.engine()).first_failing_seat == DeviceReport::kNoSeat);
  }
}

TEST_CASE("a new owner of a seat starts both groups at 0 and sees nothing of the former") {
  GroupEngine world = make_engine();
  const RequestId first = world.admit(0, 140);
  world.visit({{first, {3}}}, {kDraftMax, 4});
  const std::int32_t seat = world.seat_of(first).value;
  world.release(first);
  const RequestId second = world.admit(1, 0);
  REQUIRE(world.seat_of(second).value == seat);
  const std::vector<VisitRow> rows{{second, {2, 4}}};
  const StepId id = world.begin(rows, {kDraftMax, 4});
  CHECK(world.length_on_device(second, kTarget) == 0);
  CHECK(world.length_on_device(second, kDraft) == 0);
  world.ledger().settle(id, std::vector<Outcome>{{0, false}});
  world.visit(rows, {kDraftMax, 4});
  CHECK(world.of(second).draft == 12);
  world.check_live(second, books());
}

TEST_CASE("one replay too many writes nothing in either group and is reported") {
  GroupEngine world = make_engine();
  const std::vector<VisitRow> rows{{world.admit(0, 100), {2}}, {world.admit(1, 126), {4}}};
  world.visit(rows, {kDraftMax, 4});
  const auto image = image_of(world);
  const DeviceReport before = report_of(world.engine());
  world.bring_numbers(0);
  world.graph_of(kDraftMax).launch(world.stream());
  CHECK(image_of(world) == image);
  const DeviceReport after = report_of(world.engine());
  CHECK(before.rows_out_of_steps == 0);
  CHECK(after.rows_out_of_steps == 2);  // by the verify plan
  CHECK(after.first_failing_seat == 0);
  world.check_results(rows);
}
