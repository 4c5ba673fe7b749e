// One result (DESIGN 5.3): the live bytes of a request depend on its rows, weights and tables alone,
// whatever the chunking, the batch mates, the order of pages, eager or replayed.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>

#include <quire/runtime/decode_graphs.h>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

// Runs one request per chunking, all in the same batches; every one must hold `expected`.
void check_chunkings(TestEngine& engine, const std::vector<std::vector<std::int32_t>>& chunkings,
                     std::int32_t tokens, const std::vector<std::byte>& expected) {
  const auto seats = static_cast<std::size_t>(engine.options().limits.seats_max);
  for (std::size_t first = 0; first < chunkings.size(); first += seats) {
    const std::size_t count = std::min(seats, chunkings.size() - first);
    std::vector<RequestId> requests;
    for (std::size_t i = 0; i < count; ++i) requests.push_back(engine.admit(0, tokens));
    for (std::size_t at = 0;; ++at) {
      std::vector<StepRow> rows;
      std::int64_t room = engine.options().limits.tokens_max;
      for (std::size_t i = 0; i < count; ++i) {
        const auto& chunks = chunkings[first + i];
        if (at < chunks.size()) {
          rows.push_back({requests[i], chunks[at]});
          room -= chunks[at];
        }
      }
      if (rows.empty()) break;
      REQUIRE(room >= 0);
      engine.ragged_step(rows);
    }
    const Snapshot snapshot = engine.snapshot();
    for (std::size_t i = 0; i < count; ++i) {
      CAPTURE(first + i);
      CAPTURE(tokens);
      const bool same = engine.live_bytes(snapshot, requests[i]) == expected;
      REQUIRE(same);
      engine.poison_and_release(requests[i]);
    }
  }
}

TEST_CASE("every chunking of lengths 1 to 12 gives the same bytes") {
  TestEngineOptions options = small_engine(64, 16);
  options.limits.tokens_max = 64 * 16;
  TestEngine engine(test_backend(), options);
  engine.poison();
  int checked = 0;
  for (std::int32_t tokens = 1; tokens <= 12; ++tokens) {
    const auto expected = one_shot(engine, 0, tokens);
    std::vector<std::vector<std::int32_t>> chunkings;
    for (std::uint32_t cuts = 0; cuts < (1u << (tokens - 1)); ++cuts) {
      std::vector<std::int32_t> chunks{1};
      for (std::int32_t i = 0; i + 1 < tokens; ++i) {
        if ((cuts >> i & 1u) != 0) chunks.push_back(0);
        ++chunks.back();
      }
      chunkings.push_back(chunks);
    }
    check_chunkings(engine, chunkings, tokens, expected);
    checked += static_cast<int>(chunkings.size());
  }
  CHECK(checked == 4095);
}

TEST_CASE("200 seeded chunkings of each length 13 to 40 give the same bytes") {
  constexpr std::uint32_t kSeed = 20261130;
  MESSAGE("seed " << kSeed);
  TestEngineOptions options = small_engine(100, 40);
  options.limits.tokens_max = 100 * 40;
  TestEngine engine(test_backend(), options);
  engine.poison();
  for (std::int32_t tokens = 13; tokens <= 40; ++tokens) {
    const auto expected = one_shot(engine, 0, tokens);
    std::vector<std::vector<std::int32_t>> chunkings;
    for (std::uint32_t i = 0; i < 200; ++i) {
      chunkings.push_back(random_chunks(kSeed + i * 64 + static_cast<std::uint32_t>(tokens),
                                        tokens, i % 2 == 0 ? 6 : tokens));
    }
    check_chunkings(engine, chunkings, tokens, expected);
  }
}

// S3
TEST_CASE("200 seeded chunkings of each length 500 to 520 give the same bytes") {
  constexpr std::uint32_t kSeed = 7;
  MESSAGE("seed " << kSeed);
  TestEngineOptions options = small_engine(50, 520);
  options.limits.tokens_max = 50 * 520;
  options.spec.layers = {LayerKind::kCsa};
  TestEngine engine(test_backend(), options);
  engine.poison();
  for (std::int32_t tokens = 500; tokens <= 520; ++tokens) {
    const auto expected = one_shot(engine, 0, tokens);
    std::vector<std::vector<std::int32_t>> chunkings;
    for (std::uint32_t i = 0; i < 200; ++i) {
      constexpr std::int32_t kMost[4] = {40, 130, 260, 520};
      chunkings.push_back(random_chunks(kSeed + i * 1024 + static_cast<std::uint32_t>(tokens),
                                        tokens, kMost[i % 4]));
    }
    check_chunkings(engine, chunkings, tokens, expected);
  }
}

// Where an HCA window ends, an entry is stored and the fold begins anew.
TEST_CASE("60 seeded chunkings of lengths around the ends of HCA windows give the same bytes") {
  constexpr std::uint32_t kSeed = 128;
  MESSAGE("seed " << kSeed);
  TestEngineOptions options = small_engine(60, 520);
  options.limits.tokens_max = 60 * 520;
  options.limits.draft_max = 3;
  options.spec.layers = {LayerKind::kHca};
  TestEngine engine(test_backend(), options);
  engine.poison();
  for (const std::int32_t tokens :
       {126, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 520}) {
    const auto expected = one_shot(engine, 0, tokens);
    std::vector<std::vector<std::int32_t>> chunkings;
    for (std::uint32_t i = 0; i < 60; ++i) {
      constexpr std::int32_t kMost[4] = {6, 40, 130, 300};
      chunkings.push_back(random_chunks(kSeed + i * 1024 + static_cast<std::uint32_t>(tokens),
                                        tokens, kMost[i % 4]));
    }
    check_chunkings(engine, chunkings, tokens, expected);
  }
}

// S1, S2: the overlap half in decode; the first window.
TEST_CASE("decode one by one equals one prefill at every length from 1 to 520") {
  TestEngineOptions options = small_engine(4, 520);
  options.limits.draft_max = 0;
  TestEngine engine(test_backend(), options);
  engine.poison();
  const RequestId decoded = engine.admit(0, 520);
  for (std::int32_t tokens = 1; tokens <= 520; ++tokens) {
    CAPTURE(tokens);
    engine.replay_step(std::vector<StepRow>{{decoded, 1}}, StepShape::decode(2));
    const bool same = engine.live_bytes(decoded) == one_shot(engine, 0, tokens);
    REQUIRE(same);
  }
}

// P3: some rows have no token at all.
TEST_CASE("a batch of one and a batch of many give the same bytes, in mixed steps too") {
  constexpr std::int64_t kRequests = 24;
  constexpr std::uint32_t kSeed = 99;
  MESSAGE("seed " << kSeed);
  TestEngineOptions options = small_engine(kRequests, 300);
  options.contents = kRequests;
  options.limits.tokens_max = 4096;
  TestEngine many(test_backend(), options);
  many.poison();
  std::vector<RequestId> requests;
  std::vector<std::int32_t> lengths;
  for (std::int64_t i = 0; i < kRequests; ++i) {
    requests.push_back(many.admit(i, 300));
    lengths.push_back(static_cast<std::int32_t>(
        1 + hash32(kSeed + static_cast<std::uint32_t>(i)) % 280));
  }
  // Each step some rows decode, some prefill, some rest, some have no token at all.
  for (std::uint32_t turn = 0;; ++turn) {
    std::vector<StepRow> rows;
    std::int64_t left = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto remaining =
          static_cast<std::int32_t>(lengths[i] - many.length(requests[i]));
      left += remaining;
      const std::uint32_t dice = hash32(kSeed + turn * 977 + static_cast<std::uint32_t>(i));
      if (dice % 4 == 0) continue;
      const std::int32_t wanted =
          dice % 4 == 1 ? 1 : static_cast<std::int32_t>(dice / 4 % 150);
      rows.push_back({requests[i], std::min(remaining, wanted)});
    }
    if (left == 0) break;
    if (!rows.empty()) many.ragged_step(rows);
  }
  const Snapshot snapshot = many.snapshot();
  TestEngine alone(test_backend(), options);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    const bool same = many.live_bytes(snapshot, requests[i]) ==
                      one_shot(alone, static_cast<std::int64_t>(i), lengths[i]);
    CHECK(same);
  }
}

TEST_CASE("eager, replayed, and replayed after other data give the same bytes") {
  TestEngineOptions options = small_engine(8, 200);
  options.contents = 8;
  TestEngine engine(test_backend(), options);
  engine.poison();
  const StepShape shape = StepShape::decode(8);
  const auto decode = [&](std::int64_t first_content, bool replayed) {
    std::vector<StepRow> rows;
    for (std::int64_t i = 0; i < 5; ++i) rows.push_back({engine.admit(first_content + i % 3, 200)});
    for (int step = 0; step < 140; ++step) {
      // Rows change places from step to step: nothing indexed by batch row outlives its step.
      std::rotate(rows.begin(), rows.begin() + 1, rows.end());
      replayed ? engine.replay_step(rows, shape) : engine.step(rows, shape);
    }
    const Snapshot snapshot = engine.snapshot();
    std::vector<std::vector<std::byte>> bytes;
    for (const StepRow& row : rows) {
      bytes.push_back(engine.live_bytes(snapshot, row.request));
      engine.poison_and_release(row.request);
    }
    return bytes;
  };
  const auto eager = decode(0, false);
  const auto replayed = decode(0, true);
  const auto other = decode(4, true);
  const auto again = decode(0, true);
  const bool replay_equal = eager == replayed;
  const bool again_equal = eager == again;
  CHECK(replay_equal);
  CHECK(again_equal);
  CHECK_FALSE(eager == other);
}

// S8, P13: planning is pure and a decode step may run again; a second commit changes nothing.
TEST_CASE("a decode step run twice before its commit, or committed twice, gives the same bytes") {
  for (const std::int64_t draft_max : {0, 3}) {
    TestEngineOptions options = small_engine(4, 200);
    options.limits.draft_max = draft_max;
    TestEngine engine(test_backend(), options);
    engine.poison();
    const auto width = static_cast<std::int32_t>(draft_max + 1);
    const auto run = [&](Run how) {
      const RequestId request = engine.admit(0, 200);
      const StepShape shape = StepShape::decode(2, width);
      while (engine.length(request) + width <= 200) {
        engine.step(std::vector<StepRow>{{request, width}}, shape, how);
      }
      auto bytes = engine.live_bytes(request);
      engine.poison_and_release(request);
      return bytes;
    };
    const auto once = run(Run::kOnce);
    const bool twice_equal = once == run(Run::kTwiceBeforeCommit);
    const bool commits_equal = once == run(Run::kCommitTwice);
    CHECK(twice_equal);
    CHECK(commits_equal);
  }
}

// P14
TEST_CASE("any accepted prefix of drafted tokens leaves the bytes of a run that never drafted") {
  constexpr std::uint32_t kSeed = 5;
  MESSAGE("seed " << kSeed);
  TestEngineOptions options = small_engine(4, 400);
  options.limits.draft_max = 4;
  TestEngine engine(test_backend(), options);
  engine.poison();
  const RequestId drafted = engine.admit(0, 400);
  const RequestId mate = engine.admit(0, 400);
  std::uint32_t dice = kSeed;
  for (int turn = 0; engine.length(drafted) + 5 <= 400; ++turn) {
    dice = hash32(dice + 1);
    const auto tokens = static_cast<std::int32_t>(1 + dice % 5);
    const auto kept = static_cast<std::int32_t>(dice / 8 % static_cast<std::uint32_t>(tokens + 1));
    const StepRow row{drafted, tokens, kept};
    if (turn % 3 == 0 && engine.length(mate) + 40 <= 400) {
      engine.ragged_step({row, {mate, 40}});  // a verify row beside a chunk
    } else {
      engine.step(std::vector<StepRow>{row}, StepShape::decode(2, 5));
    }
    const auto length = static_cast<std::int32_t>(engine.length(drafted));
    CAPTURE(length);
    if (length == 0) continue;
    const bool same = engine.live_bytes(drafted) == one_shot(engine, 0, length);
    REQUIRE(same);
  }
}

// S9
TEST_CASE("host and this backend hold the same bytes, also of NaN, infinities, -0 and subnormals") {
  const auto host = make_host_backend();
  for (const RowStyle style : {RowStyle::kPlain, RowStyle::kRare, RowStyle::kNasty}) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kBfloat16}) {
      for (const bool normed : {false, true}) {
        TestEngineOptions options = small_engine(8, 400);
        options.style = style;
        options.compressor_rows = type;
        options.window_rows = type;
        options.window_normed = normed;
        options.bias_order = normed ? BiasOrder::kCheckpoint : BiasOrder::kKernel;
        options.contents = 4;
        options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
        const auto run = [&](Backend& backend) {
          TestEngine engine(backend, options);
          std::vector<std::vector<std::byte>> bytes;
          std::vector<StepRow> rows;
          for (std::int64_t content = 0; content < 4; ++content) {
            rows.push_back({engine.admit(content, 400), static_cast<std::int32_t>(
                                                            90 + 70 * content)});
          }
          engine.ragged_step(rows);
          for (StepRow& row : rows) row.tokens = 1;
          for (int i = 0; i < 40; ++i) engine.replay_step(rows, StepShape::decode(8));
          const Snapshot snapshot = engine.snapshot();
          for (const StepRow& row : rows) {
            bytes.push_back(engine.live_bytes(snapshot, row.request));
          }
          return bytes;
        };
        const bool same = run(*host) == run(test_backend());
        CHECK(same);
      }
    }
  }
}

TEST_CASE("the 43 layers of V4-Flash: one chunk, many, and replayed decode steps agree") {
  TestEngineOptions options = small_engine(2, 146);
  options.spec.layers.assign(2, LayerKind::kSliding);
  for (int i = 0; i < 41; ++i) {
    options.spec.layers.push_back(i % 2 == 0 ? LayerKind::kCsa : LayerKind::kHca);
  }
  REQUIRE(options.spec.count(LayerKind::kCsa) == 21);
  REQUIRE(options.spec.count(LayerKind::kHca) == 20);
  options.limits.draft_max = 1;
  options.limits.tokens_max = 160;
  TestEngine engine(test_backend(), options);
  engine.poison();
  const auto expected = one_shot(engine, 0, 146);
  for (const bool replayed : {false, true}) {
    CAPTURE(replayed);
    const RequestId request = engine.admit(0, 146);
    for (const std::int32_t chunk : {1, 60, 2, 77}) engine.ragged_step({{request, chunk}});
    for (int i = 0; i < 6; ++i) {
      const std::vector<StepRow> rows{{request, 1}};
      replayed ? engine.replay_step(rows, StepShape::decode(2))
               : engine.step(rows, StepShape::decode(2), Run::kTwiceBeforeCommit);
    }
    const bool same = engine.live_bytes(request) == expected;
    CHECK(same);
    engine.poison_and_release(request);
  }
}

TEST_CASE("a hash of pages, seats and step table is the same before and after warm-up and capture") {
  TestEngineOptions options = small_engine(8, 200);
  TestEngine engine(test_backend(), options);
  const RequestId request = engine.admit(0, 200);
  engine.ragged_step({{request, 77}});
  const std::uint64_t before = engine.memory_hash();
  const StepShape shapes[] = {StepShape::decode(1), StepShape::decode(4), StepShape::decode(8)};
  const DecodeGraphs graphs(
      engine.cache(), PlanBufferId(0), shapes,
      [&](StepShape shape, PlanBufferId, StreamView stream) {
        engine.enqueue_body(shape, stream);
        engine.enqueue_commit(stream);
      },
      engine.stream());
  engine.cache().begin_padding_step(shapes[2], PlanBufferId(0), engine.stream());
  graphs.launch(shapes[2], engine.stream());
  CHECK(engine.memory_hash() == before);
}

}  // namespace
