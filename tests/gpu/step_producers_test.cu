// Whole steps behind and between an engine's kernels: right bytes whatever those do about
// programmatic launch. What appends and commits read is poison until a kernel of the graph has
// written it, so that an append or a commit without its wait is seen (docs/PDL.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

#include "tests/support/sleep.cuh"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int32_t kTokens = 160;
constexpr PlanBufferId kBuffer(0);
constexpr std::int32_t kDraftMax = 2;
constexpr std::int32_t kRepeat = 10;

TestEngineOptions engine_options(Pdl pdl = Pdl::kPrologue) {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, LayerKind::kCsa};
  options.limits.seats_max = 8;
  options.limits.pages = 64;
  options.limits.rows_max = 8;
  options.limits.tokens_max = 1024;
  options.limits.context_max = 520;
  options.limits.run_ahead_max = 0;
  options.limits.draft_max = kDraftMax;
  options.limits.repeat_max = kRepeat;
  options.pdl = pdl;
  return options;
}

// How a kernel of the engine behaves under programmatic launch.
struct Manners {
  bool programmatic;
  bool trigger_first;  // before its wait, if it has one
  bool wait;
  int sleep_us;  // between trigger and wait
};

// Copies the input rows of this step out of the bank, as a GEMM's epilogue would write them.
struct ProducerParams {
  Manners manners;
  const std::int32_t* positions;        // [tokens]
  const std::int32_t* token_batch_row;  // [tokens]
  const std::byte* bank[4];
  std::byte* input[4];
  std::int64_t row_bytes[4];  // multiples of 16
};

// Of a short batch row's tokens, as many as its first position says: a verdict on drafts that the
// host knows too. A chunk of a prompt is kept whole.
constexpr std::int32_t kept_of(std::int32_t position, std::int32_t tokens) {
  const std::int32_t kept = 1 + position % (kDraftMax + 1);
  return tokens > kDraftMax + 1 || kept > tokens ? tokens : kept;
}

// Writes what the rows keep, as a sampler would.
struct KeeperParams {
  Manners manners;
  std::int32_t tokens;
  const std::int32_t* positions;        // [tokens]
  const std::int32_t* token_batch_row;  // [tokens]
  std::int32_t* kept;                   // [rows]
};

__device__ void behave(const Manners& manners) {
  if (manners.trigger_first) cuda::pdl_trigger();
  if (manners.sleep_us > 0) sleep_us(manners.sleep_us);
  if (manners.wait) cuda::pdl_wait();
  if (!manners.trigger_first) cuda::pdl_trigger();
}

__global__ void producer_kernel(const __grid_constant__ ProducerParams params) {
  behave(params.manners);
  const int token = static_cast<int>(blockIdx.x);
  const bool live = params.token_batch_row[token] >= 0;
  for (int part = 0; part < 4; ++part) {
    if (params.input[part] == nullptr) continue;
    const std::int64_t words = params.row_bytes[part] / 16;
    const auto* from =
        reinterpret_cast<const uint4*>(params.bank[part]) + params.positions[token] * words;
    auto* to = reinterpret_cast<uint4*>(params.input[part]) + token * words;
    const uint4 nan = make_uint4(0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu);
    for (std::int64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = live ? from[i] : nan;
  }
}

__global__ void keeper_kernel(const __grid_constant__ KeeperParams params) {
  behave(params.manners);
  const auto batch_row = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t first = -1, live = 0;
  for (std::int32_t token = 0; token < params.tokens; ++token) {
    if (params.token_batch_row[token] != batch_row) continue;
    if (live == 0) first = params.positions[token];
    ++live;
  }
  params.kept[batch_row] = live > 0 ? kept_of(first, live) : 0;
}

// Touches nothing of Quire's.
struct BystanderParams {
  Manners manners;
  std::uint32_t* word;
};

__global__ void bystander_kernel(const __grid_constant__ BystanderParams params) {
  behave(params.manners);
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.word += 1;
}

struct Between {
  const char* name;
  std::vector<Manners> bystanders;
};

constexpr Manners kPlain{false, false, false, 0};
constexpr Manners kPlainTriggersFirst{false, true, false, 0};
constexpr Manners kWaitsThenTriggers{true, false, true, 0};
constexpr Manners kTriggersSleepsWaits{true, true, true, 100};

// What one append of a layer is given.
struct Parts {
  bool window, compressors;
};
const std::vector<Parts> kTogether{{true, true}};
// A ragged step's first append of a layer begins with a kernel that copies older window entries:
// the second shows whether the compressors' own kernels wait.
const std::vector<Parts> kApart{{true, false}, {false, true}};

class PdlEngine {
 public:
  PdlEngine(Pdl pdl, const Manners& producer, const std::vector<Manners>& between,
            const std::vector<Parts>& appends)
      : engine_(test_backend(), engine_options(pdl)),
        word_(engine_.backend(), engine_.stream(), 1, 0),
        producer_(producer),
        between_(between),
        appends_(appends) {
    engine_.poison();
  }

  void enqueue_step(StepShape shape) {
    engine_.cache().device().enqueue_plan(kBuffer, engine_.stream());
    for (std::int32_t layer = 0; layer < 4; ++layer) {
      for (const Parts& parts : appends_) {
        const TestEngine::RowPointers rows = rows_of(LayerId(layer), parts);
        if (rows.window == nullptr && rows.csa == nullptr && rows.hca == nullptr) continue;
        bystanders();
        produce(rows, shape);
        append(LayerId(layer), rows);
        bystanders();
      }
    }
    keep(shape);
    engine_.enqueue_commit(engine_.stream());
  }

  GraphExec capture(StepShape shape) {
    engine_.cache().begin_padding_step(shape, kBuffer, engine_.stream());
    engine_.stream().wait();
    Capture capture(engine_.backend(), engine_.stream());
    enqueue_step(shape);
    return capture.finish();
  }

  // Feeds the first `tokens` of content 0 and gives its live bytes, `repeat` replays back to back.
  // What append and commit read is there only once the graph's own kernels have written it.
  std::vector<std::byte> generate(const GraphExec& graph, StepShape shape, std::int32_t tokens,
                                  std::int32_t repeat = 1) {
    Ledger& ledger = engine_.cache().ledger();
    const std::int32_t width = shape.is_decode() ? shape.tokens_per_row : shape.tokens;
    // A verify step near the end still needs room for tokens that are refused.
    const RequestId request = engine_.admit(0, tokens + 2 * kDraftMax);
    while (engine_.length(request) < tokens) {
      const auto length = static_cast<std::int32_t>(engine_.length(request));
      const std::int32_t given = std::min(width, tokens - length);
      const std::int32_t times = width == 1 ? std::min(repeat, tokens - length) : 1;
      ledger.reserve(request, given * times).value();
      const StepId id = engine_.cache().begin_step(std::vector<BatchRow>{{request, given}}, shape,
                                                   kBuffer, engine_.stream(), times);
      engine_.poison_inputs();
      for (std::int32_t i = 0; i < times; ++i) graph.launch(engine_.stream());
      replays_ += times;
      const std::int32_t kept = times == 1 ? kept_of(length, given) : times;
      engine_.finish(id, std::vector<StepRow>{{request, given, kept}});
    }
    const std::vector<std::byte> bytes = engine_.live_bytes(request);
    engine_.poison_and_release(request);
    return bytes;
  }

  int replays() const { return replays_; }

 private:
  void bystanders() {
    for (const Manners& manners : between_) {
      cuda::launch(bystander_kernel, dim3(2), dim3(64), 0, engine_.stream().view().cuda(),
                   manners.programmatic, BystanderParams{manners, word_.data()});
    }
  }

  TestEngine::RowPointers rows_of(LayerId layer, const Parts& parts) {
    TestEngine::RowPointers rows = engine_.rows_of(layer);
    if (!parts.window) rows.window = nullptr;
    if (!parts.compressors) rows.csa = rows.indexer = rows.hca = nullptr;
    return rows;
  }

  void append(LayerId layer, const TestEngine::RowPointers& rows) {
    AppendInputs inputs;
    inputs.window.data = rows.window;
    inputs.csa.data = rows.csa;
    inputs.indexer.data = rows.indexer;
    inputs.hca.data = rows.hca;
    engine_.cache().device().append(layer, kBuffer, inputs, engine_.stream(),
                                    {engine_.options().pdl});
  }

  void produce(const TestEngine::RowPointers& rows, StepShape shape) {
    const PlanViews& views = engine_.cache().device().views(kBuffer);
    const ProducerParams params{producer_,
                                views.positions,
                                views.token_batch_row,
                                {rows.window_bank, rows.csa_bank, rows.indexer_bank, rows.hca_bank},
                                {rows.window, rows.csa, rows.indexer, rows.hca},
                                {1024, 8192, 2048, 4096}};
    cuda::launch(producer_kernel, dim3(static_cast<unsigned>(shape.tokens)), dim3(128), 0,
                 engine_.stream().view().cuda(), producer_.programmatic, params);
  }

  void keep(StepShape shape) {
    const PlanViews& views = engine_.cache().device().views(kBuffer);
    const KeeperParams params{producer_, shape.tokens, views.positions, views.token_batch_row,
                              engine_.kept()};
    cuda::launch(keeper_kernel, dim3(1), dim3(static_cast<unsigned>(shape.rows)), 0,
                 engine_.stream().view().cuda(), producer_.programmatic, params);
  }

  TestEngine engine_;
  DeviceArray<std::uint32_t> word_;
  Manners producer_;
  std::vector<Manners> between_;
  std::vector<Parts> appends_;
  int replays_ = 0;
};

// P12
TEST_CASE("bytes are right whatever an engine's kernels do between ours, in all PDL modes") {
  const Between cases[] = {
      {"nothing", {}},
      {"a plain kernel", {kPlain}},
      {"a plain kernel that triggers at once", {kPlainTriggersFirst}},
      {"wait, then trigger", {kWaitsThenTriggers}},
      {"trigger, sleep 100 us, wait", {kTriggersSleepsWaits}},
      {"two that trigger, sleep and wait", {kTriggersSleepsWaits, kTriggersSleepsWaits}},
  };
  TestEngine reference(test_backend(), engine_options());
  const auto expected = one_shot(reference, 0, kTokens);
  for (const StepShape shape :
       {StepShape::decode(4), StepShape::decode(4, kDraftMax + 1), StepShape::ragged(4, 37)}) {
    for (const Between& between : cases) {
      for (const Manners& producer : {kPlain, kWaitsThenTriggers, kTriggersSleepsWaits}) {
        for (const Pdl pdl : {Pdl::kOff, Pdl::kWaitOnly, Pdl::kPrologue}) {
          CAPTURE(shape.tokens_per_row);  // 0 is ragged
          CAPTURE(between.name);
          CAPTURE(producer.sleep_us);
          CAPTURE(static_cast<int>(pdl));
          PdlEngine run(pdl, producer, between.bystanders, kTogether);
          const bool same = run.generate(run.capture(shape), shape, kTokens) == expected;
          CHECK(same);
          if (!between.bystanders.empty()) continue;
          PdlEngine apart(pdl, producer, {}, kApart);
          const bool apart_same = apart.generate(apart.capture(shape), shape, kTokens) == expected;
          CHECK(apart_same);
        }
      }
    }
  }
}

// P11
TEST_CASE("10,000 replays, ten at a time without the host, are bit-identical") {
  PdlEngine run(Pdl::kPrologue, kWaitsThenTriggers, {}, kTogether);
  const StepShape shape = StepShape::decode(4);
  TestEngine reference(test_backend(), engine_options());
  const auto expected = one_shot(reference, 0, 500);
  const GraphExec graph = run.capture(shape);
  while (run.replays() < 10'000) {
    CAPTURE(run.replays());
    const bool same = run.generate(graph, shape, 500, kRepeat) == expected;
    REQUIRE(same);
  }
}

}  // namespace
