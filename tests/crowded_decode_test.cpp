// Decode steps of more tokens than any GPU has multiprocessors: more blocks than run at once, by
// kernels of their own. Every request must hold the bytes of one chunk on the host.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int32_t kContext = 150;
constexpr std::int64_t kContents = 3;

TestEngineOptions crowd(std::int64_t seats, std::int64_t draft_max, ElementType type,
                        BiasOrder order = BiasOrder::kKernel) {
  TestEngineOptions options = small_engine(seats, kContext);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.draft_max = draft_max;
  options.limits.tokens_max = 2400;
  options.contents = kContents;
  options.style = RowStyle::kRare;
  options.compressor_rows = type;
  options.window_rows = type;
  options.bias_order = order;
  return options;
}

// Of the newest step.
std::int64_t nonfinite_tiles(TestEngine& engine) {
  DeviceReport report{};
  engine.cache().device().report(PlanBufferId(0), &report, engine.stream());
  engine.stream().wait();
  return report.nonfinite_tiles;
}

// A content's first tokens, prefilled alone in one chunk on the host.
class OneShots {
 public:
  explicit OneShots(TestEngineOptions options)
      : backend_(make_host_backend()), engine_(*backend_, alone(options)) {
    engine_.poison();
  }

  struct Known {
    std::vector<std::byte> bytes;
    std::int64_t tiles = 0;  // that are not finite
  };

  const Known& of(std::int64_t content, std::int32_t tokens) {
    Known& known = known_[{content, tokens}];
    if (known.bytes.empty()) {
      known.bytes = one_shot(engine_, content, tokens);
      known.tiles = nonfinite_tiles(engine_);
    }
    return known;
  }

 private:
  static TestEngineOptions alone(TestEngineOptions options) {
    options.limits.seats_max = options.limits.rows_max = options.limits.pages = 1;
    options.limits.tokens_max = kContext;
    return options;
  }

  std::unique_ptr<Backend> backend_;
  TestEngine engine_;
  std::map<std::pair<std::int64_t, std::int32_t>, Known> known_;
};

struct Member {
  std::int64_t content;
  RequestId request;
};

// Lengths before the decode steps: none, in the first window, shortly before an HCA window ends,
// any.
std::int32_t first_length(std::uint32_t i) {
  switch (i % 4) {
    case 0:
      return static_cast<std::int32_t>(114 + i / 4 % 14);
    case 1:
      return static_cast<std::int32_t>(i / 4 % 4);
    default:
      return static_cast<std::int32_t>(hash32(i) % 128);
  }
}

struct Crowd {
  std::vector<Member> members;
  std::int64_t tiles = 0;  // of all steps
};

// Admits a request a seat, and prefills them a few at a time.
Crowd admit_all(TestEngine& engine) {
  Crowd crowd;
  std::vector<Member>& members = crowd.members;
  std::vector<StepRow> rows;
  const auto seats = static_cast<std::uint32_t>(engine.options().limits.seats_max);
  for (std::uint32_t i = 0; i < seats; ++i) {
    const auto content = static_cast<std::int64_t>(i % kContents);
    members.push_back({content, engine.admit(content, kContext)});
    rows.push_back({members.back().request, first_length(i)});
    if (rows.size() == 16 || i + 1 == seats) {
      engine.ragged_step(std::exchange(rows, {}));
      crowd.tiles += nonfinite_tiles(engine);
    }
  }
  return crowd;
}

void check_all(TestEngine& engine, const std::vector<Member>& members, OneShots& expected) {
  const Snapshot snapshot = engine.snapshot();
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    const auto length = static_cast<std::int32_t>(engine.length(member.request));
    CAPTURE(i);
    CAPTURE(length);
    if (length == 0) continue;
    const bool same =
        engine.live_bytes(snapshot, member.request) == expected.of(member.content, length).bytes;
    REQUIRE(same);
  }
}

TEST_CASE("a decode step of 300 requests leaves the bytes of each alone, on the host") {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kBfloat16}) {
    CAPTURE(static_cast<int>(type));
    const TestEngineOptions options = crowd(
        300, 0, type, type == ElementType::kFloat32 ? BiasOrder::kKernel : BiasOrder::kCheckpoint);
    OneShots expected(options);
    TestEngine engine(test_backend(), options);
    engine.poison();
    auto [members, tiles] = admit_all(engine);
    for (int step = 0; step < 12; ++step) {
      // Other rows from step to step: nothing indexed by batch row outlives its step.
      std::rotate(members.begin(), members.begin() + 37, members.end());
      std::vector<StepRow> rows;
      for (const Member& member : members) rows.push_back({member.request});
      step % 2 == 0 ? engine.step(rows, StepShape::decode(300))
                    : engine.replay_step(rows, StepShape::decode(300));
      tiles += nonfinite_tiles(engine);
      if (step % 6 == 5) check_all(engine, members, expected);
    }
    // Each tile was counted once, in whatever step and by whatever kernel.
    std::int64_t expected_tiles = 0;
    for (const Member& member : members) {
      const auto length = static_cast<std::int32_t>(engine.length(member.request));
      expected_tiles += expected.of(member.content, length).tiles;
    }
    CHECK(tiles == expected_tiles);
    CHECK(tiles > 0);
  }
}

TEST_CASE("of 80 requests with up to four drafts each, any prefix is kept, on the host") {
  constexpr std::uint32_t kSeed = 20270114;
  MESSAGE("seed " << kSeed);
  struct Case {
    std::int32_t seats, draft_max;
    ElementType type;
  };
  const Case cases[] = {{80, 4, ElementType::kFloat32},
                        {80, 4, ElementType::kBfloat16},
                        {100, 3, ElementType::kFloat32},
                        {140, 2, ElementType::kBfloat16},
                        {200, 1, ElementType::kFloat32}};
  for (const Case& c : cases) {
    CAPTURE(c.draft_max);
    const TestEngineOptions options = crowd(c.seats, c.draft_max, c.type);
    OneShots expected(options);
    TestEngine engine(test_backend(), options);
    engine.poison();
    std::vector<Member> members = admit_all(engine).members;
    // Four requests rest, and as many batch rows are padding.
    const StepShape shape = StepShape::decode(c.seats, c.draft_max + 1);
    for (std::uint32_t step = 0; step < 12; ++step) {
      std::rotate(members.begin(), members.begin() + 13, members.end());
      std::vector<StepRow> rows;
      for (std::size_t i = 0; i + 4 < members.size(); ++i) {
        const std::uint32_t dice = hash32(kSeed + step * 4096 + static_cast<std::uint32_t>(i));
        const std::int64_t room = kContext - engine.length(members[i].request);
        const auto tokens = static_cast<std::int32_t>(
            std::min<std::int64_t>(room, dice % static_cast<std::uint32_t>(c.draft_max + 2)));
        rows.push_back(
            {members[i].request, tokens,
             static_cast<std::int32_t>(dice / 64 % static_cast<std::uint32_t>(tokens + 1))});
      }
      step % 2 == 0 ? engine.step(rows, shape, Run::kTwiceBeforeCommit)
                    : engine.replay_step(rows, shape);
      if (step % 4 == 3) check_all(engine, members, expected);
    }
  }
}

}  // namespace
