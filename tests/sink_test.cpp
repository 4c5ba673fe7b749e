// The sink page: padding has a location that exists, and nobody's entries are there.
#include <doctest/doctest.h>

#include <vector>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

// S7, O2
TEST_CASE("with a sink, views of padding show its entry 0, and no request ever owns its page") {
  TestEngineOptions options;
  options.limits.seats_max = 5;
  options.limits.pages = 5;
  options.limits.rows_max = 4;
  options.limits.tokens_max = 1024;
  options.limits.context_max = 256;
  options.limits.run_ahead_max = 0;
  TestEngine engine(test_backend(), options);
  const PageId sink = engine.cache().reserve_sink().value();
  CHECK_THROWS_AS(static_cast<void>(engine.cache().reserve_sink()), UsageError);

  // Every page but the sink is owned; the fifth request finds none, though a seat is free.
  std::vector<RequestId> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(engine.admit(0, 256));
  const auto fifth = engine.cache().ledger().admit(256, 256);
  REQUIRE_FALSE(fifth);
  CHECK(fifth.shortfall().what == Resource::kPages);
  CHECK(engine.cache().ledger().usage().seats_free == 1);
  std::vector<StepRow> rows;
  for (const RequestId request : requests) rows.push_back({request, 255});
  engine.ragged_step(rows);
  for (const RequestId request : requests) {
    for (const PageId page : engine.cache().ledger().pages_of(request)) CHECK(page != sink);
  }
  const auto before = engine.snapshot().pages;

  engine.cache().begin_padding_step(StepShape::decode(4), PlanBufferId(0), engine.stream());
  engine.enqueue_body(StepShape::decode(4), engine.stream());
  std::vector<std::int64_t> shown(4);
  engine.backend().copy(shown.data(),
                        engine.cache().device().views(PlanBufferId(0)).csa_locations,
                        4 * sizeof(std::int64_t), engine.stream());
  engine.stream().wait();
  for (const std::int64_t location : shown) CHECK(location == std::int64_t{sink.value} * 64);
  const bool untouched = engine.snapshot().pages == before;
  CHECK(untouched);
}

TEST_CASE("a sink page that does not exist is refused") {
  TestEngineOptions options;
  options.limits.seats_max = 1;
  options.limits.pages = 1;
  options.limits.rows_max = 1;
  options.limits.tokens_max = 64;
  options.limits.context_max = 64;
  TestEngine engine(test_backend(), options);
  CHECK_THROWS_AS(engine.cache().device().use_sink(PageId(1)), UsageError);
  CHECK_THROWS_AS(engine.cache().device().use_sink(PageId()), UsageError);
}

}  // namespace
