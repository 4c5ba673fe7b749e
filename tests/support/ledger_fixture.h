// A small ledger and short forms of its calls, for the tests of its rules.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/runtime/base/errors.h>

namespace quire::test {

inline constexpr PlanBufferId kBuffer(0);

inline Limits small_limits() {
  return {.seats_max = 4,
          .pages = 12,
          .rows_max = 4,
          .tokens_max = 1200,
          .context_max = 1024,
          .draft_max = 2,
          .repeat_max = 4,
          .run_ahead_max = 1,
          .plan_buffers = 2,
          .holds_max = 2};
}

// Rows that may keep a part of many tokens: whole pages come back at once.
inline Limits long_draft_limits() {
  Limits limits = small_limits();
  limits.draft_max = 1023;
  return limits;
}

// `call` must throw a UsageError whose text contains `part`, and change nothing.
inline void check_refused(Ledger& ledger, const std::string& part,
                          const std::function<void()>& call) {
  const std::uint64_t before = ledger.digest();
  std::string text = "(nothing was thrown)";
  try {
    call();
  } catch (const UsageError& error) {
    text = error.what();
  }
  CAPTURE(text);
  CHECK(text.find(part) != std::string::npos);
  CHECK(ledger.digest() == before);
  ledger.check_invariants();
}

inline RequestId admit_with(Ledger& ledger, std::int64_t tokens) {
  const RequestId request = ledger.admit(1024, 0).value();
  if (tokens > 0) REQUIRE(ledger.reserve(request, tokens));
  return request;
}

inline const StepUpdate& prepare(Ledger& ledger, std::vector<BatchRow> rows,
                                 std::int32_t repeat = 1) {
  return ledger.prepare(rows, StepShape::ragged(4, 1200), kBuffer, repeat);
}

inline void settle(Ledger& ledger, StepId id, const std::vector<Outcome>& outcomes) {
  ledger.settle(id, outcomes);
}

}  // namespace quire::test
