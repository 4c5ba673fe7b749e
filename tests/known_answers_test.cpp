// The known answers that a cache compares when it is opened.
#include <doctest/doctest.h>

#include <set>
#include <vector>

#include <quire/kernels/known_answers.h>

#include "tests/support/test_backend.h"

using namespace quire;

TEST_CASE("the host's known answers have the recorded digest") {
  const std::vector<std::uint32_t> answers = host::known_answers();
  REQUIRE(answers.size() == kKnownAnswers);
  CHECK(known_answers_digest(answers.data(), kKnownAnswers) == kKnownAnswersDigest);
}

TEST_CASE("the machine under test gives the host's known answers") {
  const std::vector<std::uint32_t> host = host::known_answers();
  const std::vector<std::uint32_t> there = test::test_backend().wait_for_known_answers();
  REQUIRE(there.size() == host.size());
  for (std::size_t i = 0; i < host.size(); ++i) {
    CAPTURE(i);
    CHECK(there[i] == host[i]);
  }
}

TEST_CASE("each of the sixteen kinds of known answers takes many values") {
  const std::vector<std::uint32_t> answers = host::known_answers();
  for (std::size_t kind = 0; kind < 16; ++kind) {
    CAPTURE(kind);
    std::set<std::uint32_t> values;
    for (std::size_t i = kind; i < answers.size(); i += 16) values.insert(answers[i]);
    CHECK(values.size() >= 30);
  }
}
