// The serving loop of the example, whole: admission, chunked prefill, replayed decode, preemption,
// verification of every request.
#include <doctest/doctest.h>

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

// O10
TEST_CASE("a request that can never fit is an error at once") {
  ServerOptions options = small_server();
  options.limits.pages = 3;
  options.limits.context_max = 700;
  Server server(test::test_backend(), options);
  CHECK_THROWS_AS(server.run({{600, 200}}, [](const ServerStatistics&) {}), UsageError);
}

}  // namespace
