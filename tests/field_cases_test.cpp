// Failures that users of other systems met, as small stories on a backend: what was fed in there is
// fed in here, and the bytes must be right. Those of planning alone are in planner_test and
// plan_records_test, of addresses in addresses_test, of ownership in ledger_field_cases_test, of
// repeated steps and of reuse in field_cases_reuse_test.
#include <doctest/doctest.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <span>
#include <vector>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "tests/support/device_array.h"
#include "tests/support/field_stories.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr LayerId kFirstLayer(0);
constexpr LayerId kSecondLayer(1);

// --- Planning and padding ---

// P4
TEST_CASE("a graph captured while plan A is applied replays plans B, C and D right") {
  TestEngineOptions options = small_engine(4, 64);
  options.contents = 3;
  TestEngine engine(test_backend(), options);
  std::vector<RequestId> requests;
  for (std::int64_t content = 0; content < 3; ++content) {
    requests.push_back(engine.admit(content, 64));
    engine.ragged_step({{requests.back(), static_cast<std::int32_t>(5 + 3 * content)}});
  }
  const StepShape shape = StepShape::decode(4);
  const std::vector<StepRow> plan_a{{requests[0]}, {requests[1]}};
  const StepId id = engine.begin(plan_a, shape);
  Capture capture(test_backend(), engine.stream());
  engine.enqueue_body(shape, engine.stream());
  engine.enqueue_commit(engine.stream());
  const GraphExec graph = capture.finish();
  graph.launch(engine.stream());
  engine.finish(id, plan_a);

  for (int round = 0; round < 6; ++round) {
    for (const std::vector<std::size_t>& who :
         {std::vector<std::size_t>{2}, {1, 2, 0}, {2, 0}, {0, 1, 2}}) {
      std::vector<StepRow> rows;
      for (const std::size_t i : who) rows.push_back({requests[i]});
      engine.launch_step(graph, rows, shape);
    }
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    const bool same = engine.live_bytes(requests[i]) ==
                      alone(options, static_cast<std::int64_t>(i), engine.length(requests[i]));
    CHECK(same);
  }
}

// P5, O6, O12
TEST_CASE("steps prepared ahead while step N is held back: each sees its own table") {
  TestEngineOptions options = small_engine(2, 512);
  options.limits.pages = 3;  // so that the second request's page is the third's as well
  options.limits.run_ahead_max = 3;
  options.contents = 3;
  TestEngine engine(test_backend(), options);
  const RequestId a = engine.admit(0, 300);
  const RequestId b = engine.admit(1, 20);
  engine.ragged_step({{a, 254}});
  engine.ragged_step({{b, 7}});
  engine.stream().wait();
  const PageId page_of_b = engine.cache().ledger().pages_of(b)[0];
  const SeatId seat_of_b = engine.cache().ledger().info(b).seat;
  std::vector<std::byte> bytes_of_b(1);
  RequestId c;
  {
    Held held(engine.stream());
    const StepShape shape = StepShape::decode(2);
    run_ahead(engine, {{{a}, 0}, {{b}, 1}}, shape);
    run_ahead(engine, {{{b}, 1}, {{a}, 0}}, shape);
    engine.release(b);
    c = engine.admit(2, 20);
    run_ahead(engine, {{{c}, 2}, {{a}, 0}}, shape);  // a's first token on its second page
    run_ahead(engine, {{{a}, 0}, {{c}, 2}}, shape);
    REQUIRE(held.resume() == "");
  }
  engine.stream().wait();
  CHECK(engine.cache().ledger().pages_of(c)[0] == page_of_b);
  CHECK(engine.cache().ledger().info(c).seat == seat_of_b);
  REQUIRE(engine.length(a) == 258);
  REQUIRE(engine.length(c) == 2);
  for (int i = 0; i < 6; ++i) engine.ragged_step({{a, 1}, {c, 1}});
  const bool a_same = engine.live_bytes(a) == alone(options, 0, 264);
  const bool c_same = engine.live_bytes(c) == alone(options, 2, 8);
  CHECK(a_same);
  CHECK(c_same);
}

// P14
TEST_CASE("kept counts of step N are not read in the row order of step N + 1") {
  TestEngineOptions options = small_engine(2, 64);
  options.limits.draft_max = 3;
  options.limits.run_ahead_max = 3;
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  const RequestId a = engine.admit(0, 64);
  const RequestId b = engine.admit(1, 64);
  engine.ragged_step({{a, 6}, {b, 9}});
  // Kept of a and of b, step by step; rows change places after each.
  const std::vector<std::pair<std::int32_t, std::int32_t>> kept{{1, 4}, {3, 1}, {4, 2}, {2, 3}};
  std::vector<DeviceArray<std::int32_t>> arrays;
  for (std::size_t n = 0; n < kept.size(); ++n) {
    const auto [of_a, of_b] = kept[n];
    const std::vector<std::int32_t> in_row_order =
        n % 2 == 0 ? std::vector{of_a, of_b} : std::vector{of_b, of_a};
    arrays.emplace_back(test_backend(), engine.stream(),
                        std::span<const std::int32_t>(in_row_order));
  }
  {
    Held held(engine.stream());
    for (std::size_t n = 0; n < kept.size(); ++n) {
      std::vector<AheadRow> rows{{{a, 4, kept[n].first}, 0}, {{b, 4, kept[n].second}, 1}};
      if (n % 2 == 1) std::swap(rows[0], rows[1]);
      run_ahead(engine, rows, StepShape::decode(2, 4), arrays[n].data());
    }
    REQUIRE(held.resume() == "");
  }
  engine.stream().wait();
  REQUIRE(engine.length(a) == 6 + 10);
  REQUIRE(engine.length(b) == 9 + 10);
  const bool a_same = engine.live_bytes(a) == alone(options, 0, 16);
  const bool b_same = engine.live_bytes(b) == alone(options, 1, 19);
  CHECK(a_same);
  CHECK(b_same);
}

// P6, P7
TEST_CASE("padding rows full of NaN change no byte, with page 0 and seat 0 in use") {
  const TestEngineOptions options = small_engine(8, 64);
  const auto run = [&](StepShape ragged, StepShape decode) {
    TestEngine engine(test_backend(), options);
    const RequestId request = engine.admit(0, 64);
    engine.step(std::vector<StepRow>{{request, 11}}, ragged);
    for (int i = 0; i < 14; ++i) engine.replay_step(std::vector<StepRow>{{request, 1}}, decode);
    REQUIRE(engine.cache().ledger().pages_of(request)[0] == PageId(0));
    REQUIRE(engine.cache().ledger().info(request).seat == SeatId(0));
    return engine.memory_hash();
  };
  const std::uint64_t exact = run(StepShape::ragged(1, 11), StepShape::decode(1));
  CHECK(run(StepShape::ragged(8, 64), StepShape::decode(8)) == exact);
}

// P7, S7
TEST_CASE("with a sink, padding rows full of NaN leave the sink as it was") {
  TestEngineOptions options = small_engine(4, 64);
  TestEngine engine(test_backend(), options);
  const PageId sink = engine.cache().reserve_sink().value();
  const DeviceCache& device = engine.cache().device();
  const auto sink_bytes = [&] {
    auto bytes = fetch(engine, device.csa_pages(kFirstLayer).page_of(sink.value * 64), 37440);
    const auto more = fetch(engine, device.hca_pages(kSecondLayer).page_of(sink.value * 2), 1728);
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  };
  const auto before = sink_bytes();
  const RequestId request = engine.admit(0, 64);
  engine.step(std::vector<StepRow>{{request, 9}}, StepShape::ragged(4, 40));
  for (int i = 0; i < 8; ++i) {
    engine.step(std::vector<StepRow>{{request, 1}}, StepShape::decode(4));
  }
  const bool untouched = sink_bytes() == before;
  CHECK(untouched);
  CHECK(before == std::vector<std::byte>(before.size()));  // finite: all zero
}

// --- Compressor state ---

// S3
TEST_CASE("chunks longer than every ring read what they need before they overwrite it") {
  TestEngineOptions options = small_engine(8, 1100);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.tokens_max = 8 * 1100;
  TestEngine engine(test_backend(), options);
  engine.poison();
  const std::vector<std::vector<std::int32_t>> chunkings{
      random_chunks(3, 1100, 7), {1100},       {1, 1024, 75}, {1024, 76},
      {76, 1024},                {130, 970},   {1023, 77},    {5, 3, 700, 129, 263}};
  std::vector<RequestId> requests;
  for (std::size_t i = 0; i < chunkings.size(); ++i) requests.push_back(engine.admit(0, 1100));
  for (std::size_t at = 0;; ++at) {
    std::vector<StepRow> rows;
    for (std::size_t i = 0; i < chunkings.size(); ++i) {
      if (at < chunkings[i].size()) rows.push_back({requests[i], chunkings[i][at]});
    }
    if (rows.empty()) break;
    engine.ragged_step(rows);
  }
  const Snapshot snapshot = engine.snapshot();
  const auto expected = engine.live_bytes(snapshot, requests[0]);
  for (std::size_t i = 1; i < requests.size(); ++i) {
    CAPTURE(i);
    const bool same = engine.live_bytes(snapshot, requests[i]) == expected;
    CHECK(same);
  }
}

// S4
TEST_CASE("two requests that share a prefix share no state") {
  TestEngineOptions options = small_engine(2, 200);
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  TestEngine other(test_backend(), options);
  // The first 101 rows of content 1 become those of content 0, in both engines.
  for (TestEngine* each : {&engine, &other}) {
    for (const LayerId layer : {kFirstLayer, kSecondLayer}) {
      const auto rows = each->rows_of(layer);
      const auto share = [&](const std::byte* bank, std::int64_t row_bytes) {
        if (bank == nullptr) return;
        const auto prefix = fetch(*each, bank, 101 * row_bytes);
        patch<std::byte>(*each, bank + each->options().bank_tokens * row_bytes, prefix);
      };
      share(rows.window_bank, 512 * 2);
      share(rows.csa_bank, 2048 * 4);
      share(rows.indexer_bank, 512 * 4);
      share(rows.hca_bank, 1024 * 4);
    }
  }
  const RequestId a = engine.admit(0, 200);
  const RequestId b = engine.admit(1, 200);
  engine.ragged_step({{a, 99}});
  engine.ragged_step({{b, 98}});
  for (int i = 0; i < 40; ++i) {
    engine.replay_step(std::vector<StepRow>{{b, 1}, {a, 1}}, StepShape::decode(2));
  }
  const auto expected = [&](std::int64_t content, std::int64_t tokens) {
    const RequestId request = other.admit(content, tokens);
    other.ragged_step({{request, static_cast<std::int32_t>(tokens)}});
    auto bytes = other.live_bytes(request);
    other.release(request);
    return bytes;
  };
  const bool a_same = engine.live_bytes(a) == expected(0, 139);
  const bool b_same = engine.live_bytes(b) == expected(1, 138);
  const bool differ = engine.live_bytes(a) != expected(1, 139);
  CHECK(a_same);
  CHECK(b_same);
  CHECK(differ);
}

// S5
TEST_CASE("a seat whose former owner was NaN throughout shows nothing of it to the next") {
  TestEngineOptions options = small_engine(1, 300);
  options.limits.draft_max = 2;
  options.contents = 2;
  TestEngine engine(test_backend(), options);
  for (const LayerId layer : {kFirstLayer, kSecondLayer}) {
    const auto rows = engine.rows_of(layer);
    const auto spoil = [&](const std::byte* bank, std::int64_t row_bytes) {
      if (bank == nullptr) return;
      const std::int64_t bytes = engine.options().bank_tokens * row_bytes;
      engine.backend().fill(const_cast<std::byte*>(bank) + bytes, 0xFF, bytes, engine.stream());
    };
    spoil(rows.window_bank, 512 * 2);
    spoil(rows.csa_bank, 2048 * 4);
    spoil(rows.indexer_bank, 512 * 4);
    spoil(rows.hca_bank, 1024 * 4);
  }
  for (const std::int32_t owned : {3, 131, 259}) {
    CAPTURE(owned);
    const RequestId former = engine.admit(1, 300);
    engine.ragged_step({{former, owned}});
    for (int i = 0; i < 3; ++i) {
      engine.step(std::vector<StepRow>{{former, 3}}, StepShape::decode(1, 3));
    }
    engine.release(former);
    const RequestId next = engine.admit(0, 300);
    engine.ragged_step({{next, 2}});
    for (int i = 0; i < 45; ++i) {
      engine.step(std::vector<StepRow>{{next, 3}}, StepShape::decode(1, 3));
    }
    const bool same = engine.live_bytes(next) == alone(options, 0, 137);
    CHECK(same);
    engine.release(next);
  }
}

// S9
TEST_CASE("a NaN in one score, quiet or signalling, makes its stored entry NaN as a whole") {
  const TestEngineOptions options = small_engine(1, 260);
  for (const std::uint32_t nan : {0x7FC00000u, 0x7F800001u, 0xFFC12345u}) {
    CAPTURE(nan);
    const auto run = [&](bool spoilt) {
      TestEngine engine(test_backend(), options);
      const auto csa = engine.rows_of(kFirstLayer);
      const auto hca = engine.rows_of(kSecondLayer);
      if (spoilt) {
        const std::uint32_t value[1] = {nan};
        // Score (not overlap) of one channel: token 5 belongs to CSA entry 1, 130 to HCA entry 1.
        patch<std::uint32_t>(engine, csa.csa_bank + (5 * 2048 + 3 * 512 + 7) * 4, value);
        patch<std::uint32_t>(engine, csa.indexer_bank + (5 * 512 + 3 * 128 + 7) * 4, value);
        patch<std::uint32_t>(engine, hca.hca_bank + (130 * 1024 + 512 + 7) * 4, value);
      }
      const RequestId request = engine.admit(0, 260);
      engine.ragged_step({{request, 256}});
      const DeviceCache& device = engine.cache().device();
      std::vector<std::vector<std::byte>> entries;
      for (std::int64_t e = 0; e < 3; ++e) {
        const EntryPool main = device.csa_pages(kFirstLayer);
        const EntryPool keys = device.indexer_pages(kFirstLayer);
        entries.push_back(fetch(engine, main.main_data(e), 576));
        entries.push_back(fetch(engine, main.main_scales(e), 8));
        entries.push_back(fetch(engine, keys.indexer_values(e), 128));
        entries.push_back(fetch(engine, keys.indexer_scale(e), 4));
      }
      for (std::int64_t e = 0; e < 2; ++e) {
        const EntryPool pool = device.hca_pages(kSecondLayer);
        entries.push_back(fetch(engine, pool.main_data(e), 576));
        entries.push_back(fetch(engine, pool.main_scales(e), 8));
      }
      return entries;
    };
    const auto clean = run(false);
    const auto spoilt = run(true);
    std::vector<std::byte> nan_data(576, std::byte{0x7F});  // e4m3, then bf16 0x7FFF
    for (std::size_t i = 448; i < 576; i += 2) nan_data[i] = std::byte{0xFF};
    std::vector<std::byte> floor_scales(8, std::byte{105});  // nothing in the tile but the floor
    floor_scales[7] = std::byte{0};
    const float floor_scale = 1e-4f * 0x1.24924ap-9f;
    std::vector<std::byte> key_scale(4);
    std::memcpy(key_scale.data(), &floor_scale, 4);
    for (std::size_t i = 0; i < clean.size(); ++i) {
      CAPTURE(i);
      if (i == 4 || i == 14) {
        CHECK(spoilt[i] == nan_data);
      } else if (i == 5 || i == 15) {
        CHECK(spoilt[i] == floor_scales);
      } else if (i == 6) {
        CHECK(spoilt[i] == std::vector<std::byte>(128, std::byte{0x7F}));
      } else if (i == 7) {
        CHECK(spoilt[i] == key_scale);
      } else {
        CHECK(spoilt[i] == clean[i]);
      }
    }
  }
}

// --- Graphs and pools ---

// G2, G3
TEST_CASE("a clear between steps in flight erases what came before it and nothing that follows") {
  TestEngineOptions options = small_engine(2, 64);
  options.contents = 2;
  options.limits.run_ahead_max = 3;
  const StepShape shape = StepShape::decode(2);
  const auto steps = [&](TestEngine& engine, std::int64_t requests, int count) {
    std::vector<AheadRow> rows;
    for (std::int64_t content = 0; content < requests; ++content) {
      rows.push_back({{engine.admit(content, 64)}, content});
    }
    for (int i = 0; i < count; ++i) run_ahead(engine, rows, shape);
  };
  TestEngine fresh(test_backend(), options);
  steps(fresh, 1, 5);
  const std::uint64_t expected = fresh.memory_hash();

  TestEngine engine(test_backend(), options);
  for (int round = 0; round < 20; ++round) {
    {
      Held held(engine.stream());
      steps(engine, 2, 13);  // more of everything than what follows overwrites
      engine.cache().reset(engine.stream());
      steps(engine, 1, 5);
      REQUIRE(held.resume() == "");
    }
    REQUIRE(engine.memory_hash() == expected);
    engine.cache().reset(engine.stream());
  }
}

// G1, G2
TEST_CASE("a graph captured before a reset replays the same bytes after it") {
  TestEngineOptions options = small_engine(2, 64);
  TestEngine engine(test_backend(), options);
  const std::byte* pages = engine.cache().device().pages_memory().data();
  const auto run = [&] {
    const RequestId request = engine.admit(0, 64);
    engine.ragged_step({{request, 3}});
    for (int i = 0; i < 20; ++i) {
      engine.replay_step(std::vector<StepRow>{{request, 1}}, StepShape::decode(2));
    }
    return engine.live_bytes(request);
  };
  const auto first = run();
  engine.cache().reset(engine.stream());
  const auto second = run();
  CHECK(engine.cache().device().pages_memory().data() == pages);
  const bool same = first == second && first == alone(options, 0, 23);
  CHECK(same);
}

// A thread as another library may leave it: subnormals flushed, rounding upwards.
void make_foreign() {
  std::fesetround(FE_UPWARD);
#ifdef __SSE__
  _mm_setcsr(_mm_getcsr() | 0x8040u);
#endif
}

// G8
TEST_CASE("threads with flush-to-zero and another rounding mode give the same bytes") {
  TestEngineOptions options = small_engine(2, 200);
  options.style = RowStyle::kNasty;  // subnormals among the rows
  const auto run = [&](bool foreign) {
    std::fenv_t saved;
    std::fegetenv(&saved);
    if (foreign) make_foreign();
    std::vector<std::byte> bytes;
    {
      TestEngine engine(test_backend(), options);
      if (foreign && engine.stream().view().is_host()) {
        engine.stream().view().host()->enqueue(make_foreign);  // the worker is a thread as well
      }
      const RequestId request = engine.admit(0, 200);
      engine.ragged_step({{request, 131}});
      for (int i = 0; i < 10; ++i) {
        engine.replay_step(std::vector<StepRow>{{request, 1}}, StepShape::decode(2));
      }
      bytes = engine.live_bytes(request);
    }
    std::fesetenv(&saved);
    return bytes;
  };
  const bool same = run(false) == run(true);
  CHECK(same);
}

}  // namespace
