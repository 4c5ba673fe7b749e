// What do drafts, and visits of many steps, do to the decode throughput of a whole serving loop?
// 64 requests with short prompts generate to their end in the loop of examples/server.h: admission,
// one prefill, visits of K replays of one graph, one visit ahead of what the host has heard. The
// stand-in model's rows cost little; its layers are the first of V4-Flash, and a fixed share of its
// drafts is right. A figure is the time of one run divided by its output tokens.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"
#include "benchmarks/support/timing.h"
#include "examples/server.h"

namespace {

using namespace quire;
using namespace quire::bench;
using serving::Server;
using serving::ServerOptions;
using serving::ServerStatistics;
using serving::TraceRequest;

constexpr std::int64_t kBatch = 64;
constexpr std::int64_t kPromptTokens = 16;
constexpr std::int64_t kOutputTokens = 1024;
constexpr std::int64_t kLayers = 8;
constexpr float kAcceptance = 0.7f;
constexpr int kRuns = 7;

ServerOptions server_options(std::int32_t steps, std::int32_t drafts) {
  const ModelSpec flash = ModelSpec::deepseek_v4_flash();
  ServerOptions options;
  options.spec = flash.slice(0, kLayers);
  if (drafts > 0) {
    options.spec.mtp_layers = flash.mtp_layers;
    options.spec = options.spec.with_mtp_layers();
  }
  options.steps_per_visit = steps;
  options.drafts = drafts;
  options.draft_acceptance = kAcceptance;
  Limits& limits = options.limits;
  limits.seats_max = limits.rows_max = kBatch;
  limits.tokens_max = kBatch * kPromptTokens;
  limits.context_max = kPromptTokens + kOutputTokens;
  limits.plan_buffers = 2;
  limits.pages =
      kBatch * ceil_div(limits.context_max + serving::tokens_beyond(options), kPageTokens);
  return options;
}

Figure measure(Backend& backend, std::int32_t steps, std::int32_t drafts) {
  Server server(backend, server_options(steps, drafts));
  const std::vector<TraceRequest> requests(kBatch, {kPromptTokens, kOutputTokens});
  std::vector<double> seconds, waited;
  double accepted = 0;
  for (int run = -1; run < kRuns; ++run) {  // the first warms up
    const auto start = std::chrono::steady_clock::now();
    const ServerStatistics statistics = server.run(requests, [](const ServerStatistics&) {});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    QUIRE_CHECK(statistics.output_tokens == kBatch * kOutputTokens, "the benchmark generated ",
                statistics.output_tokens, " tokens in place of ", kBatch * kOutputTokens);
    if (run < 0) continue;
    seconds.push_back(took.count() / static_cast<double>(statistics.output_tokens));
    waited.push_back(std::chrono::duration<double>(statistics.host_waited) / took);
    accepted = statistics.drafts_accepted();
  }
  char note[96];
  std::snprintf(note, sizeof note, "%.2f drafts accepted; the host waits %.0f %% of the time",
                accepted, 100 * distribution_of(waited).median);
  return {concat("decode, ", drafts, " drafts"),
          "steps a visit",
          steps,
          distribution_of(seconds),
          {},
          {},
          {},
          note};
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu("bench_serving", "the time of an output token over steps a visit and drafts",
                    argc, argv, [](Report& report, Backend& backend, const Stream&) {
                      for (const std::int32_t drafts : {0, 1, 2, 4}) {
                        for (const std::int32_t steps : {1, 4, 16}) {
                          report.add(measure(backend, steps, drafts));
                        }
                      }
                      report.note(concat(kBatch, " requests of ", kPromptTokens, " and ",
                                         kOutputTokens, " tokens, the first ", kLayers,
                                         " layers of V4-Flash, its MTP layer with drafts"));
                    });
}
