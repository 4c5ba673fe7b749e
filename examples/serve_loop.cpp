// serve_loop: runs requests of a trace, or made-up ones, through Quire and prints a table.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <string>

#include <quire/runtime/base/errors.h>
#include <CLI/CLI.hpp>

#include "examples/server.h"

namespace {

using quire::concat;
using namespace quire::serving;

struct Settings {
  WorkloadOptions workload;
  ServerOptions server;
  std::string backend = "auto";
  std::string layers;  // empty: the default
  bool acceptance_given = false;
};

quire::ModelSpec parse_layers(const std::string& text) {
  const std::string supported = "sch";
  quire::ModelSpec spec;
  for (const char letter : text) {
    QUIRE_CHECK(supported.find(letter) != std::string::npos, "layers '", text, "': '",
                std::string(1, letter), "' is no layer; supported: '", supported,
                "' (s sliding, c csa, h hca)");
    spec.layers.push_back(letter == 's'   ? quire::LayerKind::kSliding
                          : letter == 'c' ? quire::LayerKind::kCsa
                                          : quire::LayerKind::kHca);
  }
  return spec;
}

void add_visit_options(CLI::App& app, ServerOptions& server) {
  app.add_option("--steps-per-visit", server.steps_per_visit,
                 "Decode steps between two times that the host hears of them")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--drafts", server.drafts,
                 "Draft tokens of a batch row in a step; adds an MTP layer, sliding")
      ->check(CLI::Range(0, 16))
      ->capture_default_str();
  app.add_option("--draft-acceptance", server.draft_acceptance,
                 "Share of the drafts that are right, of the stand-in model")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

void add_options(CLI::App& app, Settings& settings) {
  quire::Limits& limits = settings.server.limits;
  limits.seats_max = 32;
  limits.rows_max = 32;
  settings.server.chunk_tokens = 2048;
  settings.server.verify = 4;
  const CLI::Range positive(std::int64_t{1}, std::int64_t{1} << 40);
  const CLI::Range not_negative(std::int64_t{0}, std::int64_t{1} << 40);

  app.add_option(
         "--model", settings.server.model,
         "stand_in: rows are hashes, costs nothing; tiny_v4: a decoder that reads the pages")
      ->transform(CLI::CheckedTransformer(std::map<std::string, ModelKind>{
          {"stand_in", ModelKind::kStandIn}, {"tiny_v4", ModelKind::kTinyV4}}))
      ->option_text("{stand_in,tiny_v4} [stand_in]");
  app.add_option("--trace", settings.workload.trace,
                 "Trace: .jsonl (Mooncake) or .csv (Azure); none: a synthetic workload");
  app.add_option("--requests", settings.workload.requests, "Requests to serve")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--scale", settings.workload.scale, "Divide lengths by this")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--seed", settings.workload.seed, "Seed of lengths and prompts")
      ->capture_default_str();
  app.add_option("--on-bad-line", settings.workload.on_bad_line, "A malformed trace line")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, BadLine>{{"stop", BadLine::kStop}, {"skip", BadLine::kSkip}}))
      ->option_text("{stop,skip} [stop]");
  app.add_option("--verify", settings.server.verify,
                 "Requests to verify, at most: byte for byte, and tiny_v4's tokens")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option("--backend", settings.backend, "auto: CUDA where a device is")
      ->check(CLI::IsMember({"auto", "host", "cuda"}))
      ->capture_default_str();
  app.add_option("--layers", settings.layers,
                 "One letter a layer: s sliding, c csa, h hca [sscccc; tiny_v4: schc]");
  app.add_option("--seats", limits.seats_max, "Live requests at once")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--pages", limits.pages, "Pages of 256 tokens; 0: as many as all seats need")
      ->check(not_negative);
  app.add_option("--rows", limits.rows_max, "Batch rows of one step")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--chunk", settings.server.chunk_tokens, "Prompt tokens of one prefill step")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--promise", settings.server.promise, "Pages set aside at admission")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Promise>{{"whole", Promise::kWhole}, {"prompt", Promise::kPrompt}}))
      ->option_text("{whole,prompt} [whole]");
  add_visit_options(app, settings.server);
}

// The longest request decides the context; without --pages the seats' average need decides the
// rest.
void size_limits(ServerOptions& server, const std::vector<TraceRequest>& requests) {
  quire::Limits& limits = server.limits;
  const std::int64_t beyond = tokens_beyond(server);
  std::int64_t longest = 0;
  std::int64_t sum_pages = 0;
  for (const TraceRequest& request : requests) {
    const std::int64_t tokens = request.prompt_tokens + request.output_tokens;
    longest = std::max(longest, tokens);
    sum_pages += quire::ceil_div(tokens + beyond, quire::kPageTokens);
  }
  limits.context_max = longest;
  limits.plan_buffers = 2;
  if (limits.pages == 0) {
    const auto count = static_cast<std::int64_t>(requests.size());
    const std::int64_t average = quire::ceil_div(sum_pages, count);
    limits.pages = std::max(quire::ceil_div(longest + beyond, quire::kPageTokens),
                            std::min(limits.seats_max, count) * average);
  }
}

int serve(Settings& settings) {
  const auto requests = load_workload(settings.workload, [](const std::string& text) {
    std::fprintf(stderr, "serve_loop: %s\n", text.c_str());
  });
  const bool tiny_v4 = settings.server.model == ModelKind::kTinyV4;
  QUIRE_CHECK(!tiny_v4 || !settings.acceptance_given,
              "--draft-acceptance: tiny_v4 makes its own drafts; supported: --model stand_in");
  if (settings.layers.empty()) settings.layers = tiny_v4 ? "schc" : "sscccc";
  settings.server.spec = parse_layers(settings.layers);
  if (settings.server.drafts > 0) {
    settings.server.spec.mtp_layers = {quire::LayerKind::kSliding};
    settings.server.spec = settings.server.spec.with_mtp_layers();
  }
  settings.server.limits.tokens_max =
      std::max(settings.server.chunk_tokens, settings.server.limits.rows_max);
  size_limits(settings.server, requests);
  const std::unique_ptr<quire::Backend> backend =
      settings.backend == "host"   ? quire::make_host_backend()
      : settings.backend == "cuda" ? quire::make_cuda_backend()
                                   : quire::make_default_backend();
  const bool cuda = backend->kind() == quire::BackendKind::kCuda;
  std::printf("serve_loop: %zu requests, %s, layers %s%s, %s backend\n", requests.size(),
              tiny_v4 ? "tiny_v4" : "stand-in model", settings.layers.c_str(),
              settings.server.drafts > 0 ? " and MTP" : "", cuda ? "cuda" : "host");
  std::fflush(stdout);

  Server server(*backend, settings.server);
  const auto start = std::chrono::steady_clock::now();
  ServerStatistics statistics;
  {
    ProgressBar bar(static_cast<std::int64_t>(requests.size()));
    statistics = server.run(requests, [&](const ServerStatistics& s) { bar.show(s); });
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::fputs(
      table_of(statistics, settings.server.limits, server.cache().device().bytes(), seconds.count())
          .c_str(),
      stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Serves requests of a trace with Quire owning the KV cache.");
  Settings settings;
  try {
    add_options(app, settings);
    app.parse(argc, argv);
    settings.server.seed = settings.workload.seed;
    settings.acceptance_given = app.count("--draft-acceptance") > 0;
    return serve(settings);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve_loop: %s\n", error.what());
    return 1;
  }
}
