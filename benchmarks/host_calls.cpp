// What does a step cost the host, and does that depend on how long the contexts are?
//
// A decode batch: reserve, prepare, apply and settle for 1, 64 and 256 requests that already hold
// 1 Ki, 64 Ki or 1 Mi tokens, at mixed phases of their pages. Each step is timed on its own, parts
// as counters; what the device still has to do is waited for between them. The cold form finds what
// other work leaves of the CPU's inner caches. Beside it: admission and release, and the questions
// that a scheduler asks.
//   --backend=cuda|host|idle   idle does nothing, so that a machine without a GPU measures the
//                              library's own part of apply; default: cuda where a device is
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/owners.h>

#include "tests/support/idle_backend.h"

namespace {

using namespace quire;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kSteps = 2000;  // of one sample
constexpr std::int64_t kColdSteps = 50;
constexpr std::size_t kEvictingBytes = 8 << 20;
constexpr int kSamples = 30;
constexpr std::int64_t kChunk = 16384;
constexpr PlanBufferId kBuffer(0);

Limits limits_for(std::int64_t rows, std::int64_t context) {
  Limits limits;
  limits.seats_max = limits.rows_max = rows;
  limits.tokens_max = kChunk;
  limits.context_max = context + kPageTokens + kSteps;
  limits.pages = rows * limits.cells_max();
  return limits;
}

// One sliding layer: the pages of other layers would cost memory, and the host nothing.
class Engine {
 public:
  Engine(Backend& backend, std::int64_t rows, std::int64_t context)
      : cache_(backend, ModelSpec{{LayerKind::kSliding}}, limits_for(rows, context)),
        stream_(backend),
        shape_(StepShape::decode(static_cast<std::int32_t>(rows))),
        outcomes_(static_cast<std::size_t>(rows), Outcome{1, false}) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t phase = i * 37 % kPageTokens;
      rows_.push_back({admit_with(context + phase), 1});
    }
    stream_.wait();
  }

  struct Times {
    double reserve, prepare, apply, settle;  // seconds
  };

  Times step() {
    Ledger& ledger = cache_.ledger();
    const Clock::time_point start = Clock::now();
    for (const BatchRow& row : rows_) (void)ledger.reserve(row.request, 1).value();
    const Clock::time_point reserved = Clock::now();
    const StepUpdate& update = ledger.prepare(rows_, shape_, kBuffer);
    const Clock::time_point prepared = Clock::now();
    cache_.device().apply(update, stream_);
    const Clock::time_point applied = Clock::now();
    ledger.settle(update.id(), outcomes_);
    const Clock::time_point settled = Clock::now();
    stream_.wait();
    const auto seconds = [](Clock::duration time) {
      return std::chrono::duration<double>(time).count();
    };
    return {seconds(reserved - start), seconds(prepared - reserved), seconds(applied - prepared),
            seconds(settled - applied)};
  }

 private:
  RequestId admit_with(std::int64_t tokens) {
    Ledger& ledger = cache_.ledger();
    const RequestId request = ledger.admit(ledger.limits().context_max, 0).value();
    (void)ledger.reserve(request, tokens).value();
    for (std::int64_t done = 0; done < tokens;) {
      const auto chunk = static_cast<std::int32_t>(std::min(kChunk, tokens - done));
      const BatchRow row{request, chunk};
      const StepUpdate& update = ledger.prepare({&row, 1}, StepShape::ragged(1, chunk), kBuffer);
      cache_.device().apply(update, stream_);
      const Outcome all{chunk, false};
      ledger.settle(update.id(), {&all, 1});
      done += chunk;
    }
    return request;
  }

  CacheManager cache_;
  Stream stream_;
  StepShape shape_;
  std::vector<BatchRow> rows_;
  std::vector<Outcome> outcomes_;
};

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

void decode_step(benchmark::State& state, Backend& backend, bool cold) {
  Engine engine(backend, state.range(0), state.range(1));
  std::vector<std::uint8_t> other_work(cold ? kEvictingBytes : 0);
  Engine::Times sum{};
  std::vector<double> steps;
  for (auto _ : state) {
    std::fill(other_work.begin(), other_work.end(), std::uint8_t{1});
    benchmark::ClobberMemory();
    const Engine::Times times = engine.step();
    steps.push_back(times.prepare + times.apply + times.settle);  // reserve is shown beside
    state.SetIterationTime(steps.back());
    sum.reserve += times.reserve;
    sum.prepare += times.prepare;
    sum.apply += times.apply;
    sum.settle += times.settle;
  }
  const auto microseconds = [](double seconds) {
    return benchmark::Counter(seconds * 1e6, benchmark::Counter::kAvgIterations);
  };
  state.counters["median_us"] = quantile(steps, 0.5) * 1e6;  // not moved by a preempted step
  state.counters["reserve_us"] = microseconds(sum.reserve);
  state.counters["prepare_us"] = microseconds(sum.prepare);
  state.counters["apply_us"] = microseconds(sum.apply);
  state.counters["settle_us"] = microseconds(sum.settle);
}

// From admission to release of a request that owns pages for the whole context.
void admit_reserve_release(benchmark::State& state) {
  const std::int64_t context = state.range(0);
  Ledger ledger(limits_for(64, context));
  for (auto _ : state) {
    const RequestId request = ledger.admit(context, 0).value();
    (void)ledger.reserve(request, context).value();
    ledger.release(request);
  }
}

void ask(benchmark::State& state) {
  Ledger ledger(limits_for(256, state.range(0)));
  const RequestId request = ledger.admit(state.range(0), state.range(0)).value();
  (void)ledger.reserve(request, state.range(0)).value();
  for (auto _ : state) {
    benchmark::DoNotOptimize(ledger.headroom());
    benchmark::DoNotOptimize(ledger.tokens_that_fit(request));
    benchmark::DoNotOptimize(ledger.usage());
  }
}

void report_samples(benchmark::internal::Benchmark* question) {
  question->Unit(benchmark::kMicrosecond)
      ->Repetitions(kSamples)
      ->ReportAggregatesOnly(true)
      ->ComputeStatistics("p10", [](const std::vector<double>& v) { return quantile(v, 0.1); })
      ->ComputeStatistics("p90", [](const std::vector<double>& v) { return quantile(v, 0.9); });
}

void register_questions(Backend& backend) {
  const std::vector<std::int64_t> contexts{1 << 10, 1 << 16, 1 << 20};
  for (const bool cold : {false, true}) {
    auto* step = benchmark::RegisterBenchmark(
        cold ? "decode_step_cold" : "decode_step",
        [&backend, cold](benchmark::State& state) { decode_step(state, backend, cold); });
    const std::vector<std::int64_t> rows =
        cold ? std::vector<std::int64_t>{256} : std::vector<std::int64_t>{1, 64, 256};
    step->ArgNames({"rows", "context"})->ArgsProduct({rows, contexts});
    step->UseManualTime()->Iterations(cold ? kColdSteps : kSteps);
    report_samples(step);
  }
  for (auto* question :
       {benchmark::RegisterBenchmark("admit_reserve_release", admit_reserve_release),
        benchmark::RegisterBenchmark("headroom_fit_usage", ask)}) {
    question->ArgName("context")->ArgsProduct({contexts})->MinTime(0.01);
    report_samples(question);
  }
}

std::unique_ptr<Backend> make_backend(const std::string& name) {
  if (name == "idle") return std::make_unique<test::IdleBackend>();
  if (name == "host") return make_host_backend();
  if (name == "cuda") return make_cuda_backend();
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  std::string name = cuda_device_count() > 0 ? "cuda" : "idle";
  constexpr std::string_view option = "--backend=";
  char** end = std::remove_if(argv + 1, argv + argc, [&](const char* argument) {
    const std::string_view text(argument);
    if (!text.starts_with(option)) return false;
    name = text.substr(option.size());
    return true;
  });
  argc = static_cast<int>(end - argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const std::unique_ptr<Backend> backend = make_backend(name);
  if (backend == nullptr) {
    std::fprintf(stderr, "--backend=%s; supported: cuda, host, idle\n", name.c_str());
    return 1;
  }
  benchmark::AddCustomContext("backend", name);
  register_questions(*backend);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
