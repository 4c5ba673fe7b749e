// The parts of an append one by one: alone, one after another in any order, with rows that lie
// apart; and what is counted where the plan is missing. Every live byte belongs to one part.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <quire/planner/plan_rule.h>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr LayerId kLayer(0);
constexpr std::int32_t kContext = 420;

// Parts of a layer, as bits.
constexpr unsigned kWindow = 1;
constexpr unsigned kCsa = 2;
constexpr unsigned kIndexer = 4;
constexpr unsigned kHca = 8;

unsigned parts_of(LayerKind kind) {
  return kind == LayerKind::kCsa   ? kWindow | kCsa | kIndexer
         : kind == LayerKind::kHca ? kWindow | kHca
                                   : kWindow;
}

TestEngineOptions engine_of(LayerKind kind, ElementType type) {
  TestEngineOptions options = small_engine(2, kContext);
  options.spec.layers = {kind};
  options.limits.draft_max = 2;
  options.compressor_rows = type;
  options.window_rows = type;
  options.style = RowStyle::kRare;
  return options;
}

// The part that each byte of TestEngine::live_bytes belongs to.
std::vector<unsigned> owners(LayerKind kind, std::int64_t length) {
  std::vector<unsigned> owner;
  const auto add = [&](unsigned part, std::int64_t bytes) {
    owner.insert(owner.end(), static_cast<std::size_t>(bytes), part);
  };
  constexpr std::int64_t kMain = kMainDataBytes + kMainScaleBytes;
  add(kWindow, std::min<std::int64_t>(length, 128) * kMain);
  if (kind == LayerKind::kHca) {
    add(kHca, length / 128 * kMain);
    if (length % 128 != 0) add(kHca, kHcaBankFloats * 4);
  }
  if (kind == LayerKind::kCsa) {
    for (std::int64_t e = 0; e < length / 4; ++e) {
      add(kCsa, kMain);
      add(kIndexer, kIndexerDim + kIndexerScaleBytes);
    }
    const std::int64_t rows =
        length - first_state_position(kCsaRule, static_cast<std::int32_t>(length));
    add(kCsa, rows * 4 * kHeadDim * 4);
    add(kIndexer, rows * 4 * kIndexerDim * 4);
  }
  return owner;
}

// Of one part of an append: where its rows are, with what stride (0: dense).
struct Rows {
  unsigned part;
  std::byte* data;
  std::int64_t width;
};

std::vector<Rows> rows_of(TestEngine& engine) {
  const TestEngine::RowPointers rows = engine.rows_of(kLayer);
  return {{kWindow, rows.window, kHeadDim},
          {kCsa, rows.csa, 4 * kHeadDim},
          {kIndexer, rows.indexer, 4 * kIndexerDim},
          {kHca, rows.hca, 2 * kHeadDim}};
}

AppendInputs::Rows& input_of(AppendInputs& inputs, unsigned part) {
  return part == kWindow    ? inputs.window
         : part == kCsa     ? inputs.csa
         : part == kIndexer ? inputs.indexer
                            : inputs.hca;
}

// An append of the parts in `mask`.
void append(TestEngine& engine, unsigned mask) {
  AppendInputs inputs;
  for (const Rows& rows : rows_of(engine)) {
    if ((mask & rows.part) != 0) input_of(inputs, rows.part).data = rows.data;
  }
  engine.cache().device().append(kLayer, kBuffer, inputs, engine.stream());
}

// Length after run().
constexpr std::int32_t kLength = 385;

// A request of kLength tokens in steps of every sort; `body(shape)` appends. Its live bytes.
template <class Body>
std::vector<std::byte> run(TestEngine& engine, const Body& body) {
  const RequestId request = engine.admit(0, kContext);
  const auto step = [&](std::int32_t tokens, std::int32_t kept, StepShape shape) {
    const std::vector<StepRow> rows{{request, tokens, kept}};
    const StepId id = engine.begin(rows, shape);
    engine.cache().device().enqueue_plan(kBuffer, engine.stream());
    body(shape);
    engine.enqueue_commit(engine.stream());
    engine.finish(id, rows);
  };
  const auto ragged = [&](std::int32_t tokens, std::int32_t kept = -1) {
    step(tokens, kept, StepShape::ragged(2, tokens + 5));
  };
  const auto decode = [&](std::int32_t tokens, std::int32_t kept) {
    step(tokens, kept, StepShape::decode(2, 3));
  };
  ragged(2);
  for (int i = 0; i < 5; ++i) decode(1 + i % 3, (i + 1) % 3);
  ragged(150);
  ragged(3, 1);
  for (int i = 0; i < 9; ++i) decode(3, i % 3 + 1);
  ragged(100);
  while (engine.length(request) % 128 != 127) decode(1, 1);
  decode(2, 2);
  REQUIRE(engine.length(request) == kLength);
  auto bytes = engine.live_bytes(request);
  engine.release(request);
  return bytes;
}

std::vector<std::byte> run_whole(LayerKind kind, ElementType type) {
  const std::unique_ptr<Backend> host = make_host_backend();
  TestEngine engine(*host, engine_of(kind, type));
  engine.poison();
  return run(engine, [&](StepShape) { append(engine, parts_of(kind)); });
}

constexpr LayerKind kKinds[] = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
constexpr ElementType kTypes[] = {ElementType::kFloat32, ElementType::kBfloat16};

TEST_CASE("parts given alone write their own bytes and leave those of the others") {
  for (const LayerKind kind : kKinds) {
    for (const ElementType type : kTypes) {
      const std::vector<std::byte> whole = run_whole(kind, type);
      for (unsigned mask = 1; mask <= parts_of(kind); ++mask) {
        if ((mask & ~parts_of(kind)) != 0) continue;
        CAPTURE(name_of(kind));
        CAPTURE(static_cast<int>(type));
        CAPTURE(mask);
        TestEngine engine(test_backend(), engine_of(kind, type));
        engine.poison();
        const std::vector<std::byte> bytes = run(engine, [&](StepShape) { append(engine, mask); });
        const std::vector<unsigned> owner = owners(kind, kLength);
        REQUIRE(bytes.size() == whole.size());
        REQUIRE(owner.size() == whole.size());
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          const bool given = (owner[i] & mask) != 0;
          if (bytes[i] != (given ? whole[i] : std::byte{0xFF})) ++wrong;
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("parts given one after another, in any order, leave the bytes of one append") {
  for (const LayerKind kind : {LayerKind::kCsa, LayerKind::kHca}) {
    const std::vector<std::byte> whole = run_whole(kind, ElementType::kBfloat16);
    std::vector<unsigned> order;
    for (unsigned part = 1; part <= kHca; part *= 2) {
      if ((part & parts_of(kind)) != 0) order.push_back(part);
    }
    do {
      CAPTURE(name_of(kind));
      CAPTURE(order.front());
      CAPTURE(order.back());
      TestEngine engine(test_backend(), engine_of(kind, ElementType::kBfloat16));
      engine.poison();
      const bool same = run(engine, [&](StepShape) {
                          for (const unsigned part : order) append(engine, part);
                        }) == whole;
      CHECK(same);
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_CASE("rows may lie apart by any multiple of 16 bytes") {
  for (const LayerKind kind : kKinds) {
    for (const ElementType type : kTypes) {
      CAPTURE(name_of(kind));
      CAPTURE(static_cast<int>(type));
      const std::vector<std::byte> whole = run_whole(kind, type);
      const TestEngineOptions options = engine_of(kind, type);
      TestEngine engine(test_backend(), options);
      engine.poison();
      const std::int64_t size = bytes_of(type);
      // Rows of NaN with those of the step among them; each begins 16 bytes off a line.
      const auto padding_of = [](const Rows& rows) { return std::int64_t{16 * (1 + rows.part)}; };
      std::vector<std::unique_ptr<DeviceArray<std::byte>>> wide;
      for (const Rows& rows : rows_of(engine)) {
        const std::int64_t bytes =
            16 + options.limits.tokens_max * (rows.width * size + padding_of(rows));
        wide.push_back(std::make_unique<DeviceArray<std::byte>>(
            engine.backend(), engine.stream(), static_cast<std::size_t>(bytes), 0xFF));
      }
      const bool same = run(engine, [&](StepShape shape) {
                          AppendInputs inputs;
                          const std::vector<Rows> parts = rows_of(engine);
                          for (std::size_t i = 0; i < parts.size(); ++i) {
                            const Rows& rows = parts[i];
                            if (rows.data == nullptr) continue;
                            const std::int64_t stride = rows.width * size + padding_of(rows);
                            for (std::int64_t t = 0; t < shape.tokens; ++t) {
                              engine.backend().copy(wide[i]->data() + 16 + t * stride,
                                                    rows.data + t * rows.width * size,
                                                    rows.width * size, engine.stream());
                            }
                            input_of(inputs, rows.part) = {wide[i]->data() + 16, stride / size};
                          }
                          engine.cache().device().append(kLayer, kBuffer, inputs, engine.stream());
                        }) == whole;
      CHECK(same);
    }
  }
}

// Each append of a step whose update was not planned counts once and writes nothing.
void check_unplanned(LayerKind kind, StepShape shape, std::int32_t row_tokens) {
  TestEngineOptions options = engine_of(kind, ElementType::kBfloat16);
  options.limits.rows_max = 300;
  options.limits.tokens_max = 900;
  TestEngine engine(test_backend(), options);
  engine.poison();
  const RequestId request = engine.admit(0, kContext);
  engine.ragged_step({{request, 130}});
  // The shape is known, so that only the device can see that its plan is missing.
  const std::vector<StepRow> rows{{request, row_tokens}};
  static_cast<void>(engine.begin(rows, shape));
  {
    Capture dropped(engine.backend(), engine.stream());
    engine.cache().device().enqueue_plan(kBuffer, engine.stream());
  }
  const std::uint64_t before = engine.memory_hash();
  std::int32_t appends = 0;
  for (unsigned mask = shape.is_decode() ? 1 : 0; mask <= parts_of(kind); ++mask) {
    if ((mask & ~parts_of(kind)) != 0) continue;
    append(engine, mask);
    ++appends;
    DeviceReport report{};
    engine.cache().device().report(kBuffer, &report, engine.stream());
    engine.stream().wait();
    CAPTURE(mask);
    CHECK(report.appends_unplanned == appends);
    CHECK(report.nonfinite_tiles == 0);
  }
  CHECK(engine.memory_hash() == before);
}

TEST_CASE("an append without its plan is counted once, whatever parts it has") {
  for (const LayerKind kind : kKinds) {
    CAPTURE(name_of(kind));
    check_unplanned(kind, StepShape::decode(2), 1);
    check_unplanned(kind, StepShape::decode(2, 3), 3);
    check_unplanned(kind, StepShape::decode(300), 1);
    check_unplanned(kind, StepShape::ragged(3, 200), 190);
  }
}

}  // namespace
