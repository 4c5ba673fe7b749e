// The serving loop of the example, whole: admission, chunked prefill, replayed decode, preemption,
// verification of every request; in visits of one step and of many, with drafts and without.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <quire/runtime/base/errors.h>

#include "examples/server.h"
#include "examples/workload.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using namespace quire::serving;

ServerOptions small_server() {
  ServerOptions options;
  options.spec.layers = {LayerKind::kCsa, LayerKind::kHca};
  options.limits.seats_max = 8;
  options.limits.rows_max = 8;
  options.limits.tokens_max = 256;
  options.limits.context_max = 1024;
  options.limits.plan_buffers = 2;
  options.verify = 100;
  return options;
}

TEST_CASE("a synthetic workload is served to its end with every request verified") {
  ServerOptions options = small_server();
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.context_max = 3200;
  options.limits.pages = 40;
  Server server(test::test_backend(), options);
  WorkloadOptions workload;
  workload.seed = 3;
  const auto requests = load_workload(workload, [](const std::string&) {});
  const ServerStatistics statistics = server.run(requests, [](const ServerStatistics&) {});
  CHECK(statistics.requests_finished == 24);
  CHECK(statistics.requests_verified == 24);
  CHECK(statistics.decode_steps > 0);
  CHECK(statistics.admissions_delayed > 0);
}

TEST_CASE("a server that promises prompts only preempts, and every request is still right") {
  ServerOptions options = small_server();
  options.limits.pages = 7;
  options.promise = Promise::kPrompt;
  Server server(test::test_backend(), options);
  const std::vector<TraceRequest> requests(10, {200, 150});
  const ServerStatistics statistics = server.run(requests, [](const ServerStatistics&) {});
  CHECK(statistics.requests_finished == 10);
  CHECK(statistics.requests_verified == 10);
  CHECK(statistics.preemptions > 0);
}

struct VisitCase {
  std::int32_t steps, drafts;
};

// The layers, and a layer of `draft` that drafts for them.
ServerOptions visiting_server(const VisitCase& c, LayerKind draft) {
  ServerOptions options = small_server();
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  if (c.drafts > 0) {
    options.spec.mtp_layers = {draft};
    options.spec = options.spec.with_mtp_layers();
  }
  options.steps_per_visit = c.steps;
  options.drafts = c.drafts;
  options.limits.pages = 40;
  return options;
}

// Outputs end anywhere in a visit and in a step; some requests are shorter than a visit, and one is
// all prompt.
std::vector<TraceRequest> requests_of_all_lengths() {
  std::vector<TraceRequest> requests;
  for (std::int64_t i = 0; i < 20; ++i) requests.push_back({3 + 17 * i % 150, 1 + 13 * i % 90});
  requests.push_back({40, 0});
  return requests;
}

void check_all_served(const ServerStatistics& statistics,
                      const std::vector<TraceRequest>& requests) {
  std::int64_t output = 0;
  for (const TraceRequest& request : requests) output += request.output_tokens;
  const auto count = static_cast<std::int64_t>(requests.size());
  CHECK(statistics.requests_finished == count);
  CHECK(statistics.requests_verified == count);
  CHECK(statistics.output_tokens == output);  // nobody generates beyond its end
}

TEST_CASE("visits of many steps, drafts, and both serve every request right to its last token") {
  const std::vector<TraceRequest> requests = requests_of_all_lengths();
  for (const VisitCase& c : {VisitCase{4, 0}, VisitCase{16, 0}, VisitCase{1, 2}, VisitCase{1, 4},
                             VisitCase{4, 2}, VisitCase{16, 2}, VisitCase{16, 1}}) {
    CAPTURE(c.steps);
    CAPTURE(c.drafts);
    for (const LayerKind draft : {LayerKind::kSliding, LayerKind::kCsa}) {
      Server server(test::test_backend(), visiting_server(c, draft));
      const ServerStatistics statistics = server.run(requests, [](const ServerStatistics&) {});
      check_all_served(statistics, requests);
      CHECK(statistics.decode_steps == c.steps * statistics.decode_visits);
      // Of right drafts all are kept, but behind the last token.
      const double accepted = statistics.drafts_accepted();
      CHECK(accepted >= (c.drafts > 0 ? 0.4 : 0.0));
      CHECK(accepted <= (c.drafts > 0 ? 0.75 + 0.5 * (c.drafts - 1) : 0.0));
      if (c.drafts == 0) break;  // the draft layer is not there
    }
  }
}

TEST_CASE("a share of right drafts of none or all is none or all accepted") {
  const std::vector<TraceRequest> requests(6, {20, 81});  // 81 tokens in 27 steps of 3
  for (const float share : {0.0f, 1.0f}) {
    ServerOptions options = visiting_server({4, 2}, LayerKind::kSliding);
    options.draft_acceptance = share;
    Server server(test::test_backend(), options);
    const ServerStatistics statistics = server.run(requests, [](const ServerStatistics&) {});
    check_all_served(statistics, requests);
    CHECK(statistics.drafts_accepted() == (share == 1.0f ? 2.0 : 0.0));
  }
}

TEST_CASE("with visits ahead and drafts a server still preempts, and every request is right") {
  ServerOptions options = visiting_server({4, 2}, LayerKind::kCsa);
  options.limits.pages = 7;
  options.promise = Promise::kPrompt;
  Server server(test::test_backend(), options);
  const std::vector<TraceRequest> requests(10, {200, 150});
  const ServerStatistics statistics = server.run(requests, [](const ServerStatistics&) {});
  CHECK(statistics.requests_verified == 10);
  CHECK(statistics.preemptions > 0);
}

TEST_CASE("tiny_v4 with its own drafts and many steps a visit generates what it generates alone") {
  ServerOptions options = visiting_server({4, 2}, LayerKind::kCsa);
  options.model = ModelKind::kTinyV4;
  options.tiny_v4.hidden = 64;
  options.tiny_v4.heads = 1;
  options.tiny_v4.indexer_heads = 1;
  options.tiny_v4.vocabulary = 128;
  Server server(test::test_backend(), options);
  std::vector<TraceRequest> requests = requests_of_all_lengths();
  requests.erase(requests.begin(), requests.begin() + 11);
  check_all_served(server.run(requests, [](const ServerStatistics&) {}), requests);
}

TEST_CASE("a visit of no steps, and drafts that nobody can make, are refused by name") {
  const auto refusal = [](const ServerOptions& options) -> std::string {
    try {
      const Server server(test::test_backend(), options);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  const ServerOptions good = visiting_server({1, 2}, LayerKind::kSliding);
  CHECK(refusal(good).empty());
  ServerOptions bad = good;
  bad.steps_per_visit = 0;
  CHECK(refusal(bad).find("steps_per_visit is 0") != std::string::npos);
  bad = good;
  bad.drafts = -1;
  CHECK(refusal(bad).find("drafts is -1") != std::string::npos);
  bad = good;
  bad.draft_acceptance = 1.5f;
  CHECK(refusal(bad).find("draft_acceptance is 1.5") != std::string::npos);
  bad = good;
  bad.model = ModelKind::kTinyV4;
  bad.spec = ModelSpec{{LayerKind::kSliding}};
  CHECK(refusal(bad).find("no draft layer") != std::string::npos);
}

// O10
TEST_CASE("a request that can never fit is an error at once") {
  ServerOptions options = small_server();
  options.limits.pages = 3;
  options.limits.context_max = 700;
  Server server(test::test_backend(), options);
  CHECK_THROWS_AS(server.run({{600, 200}}, [](const ServerStatistics&) {}), UsageError);
}

}  // namespace
