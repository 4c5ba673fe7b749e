// Generation with drafts, with many steps a visit, and with both, one visit ahead and with batch
// rows that change places: tokens and live cache bytes of the target and the draft layers are those
// of a run without drafts, one step at a time. --requests=200 runs as many as the project promises.
#include <doctest/doctest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "tests/support/faulty_backend.h"
#include "tests/support/test_backend.h"
#include "tests/support/tiny_v4_visits.h"

namespace {

using namespace quire;
using namespace quire::serving;
using namespace quire::serving::test;
using quire::test::FaultyBackend;
using quire::test::Random;
using quire::test::test_backend;
using quire::test::test_option;
using quire::test::Verb;

ModelSpec spec_with(LayerKind draft) {
  return {.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, draft},
          .draft_layers = 1};
}

constexpr std::int32_t kOutputMax = 40;
constexpr std::int32_t kPromptMax = 256;

// Most prompts are short. The others generate across the end of an HCA entry and of the window, or
// of a page.
std::vector<VisitRequest> make_requests(std::int64_t count, std::uint32_t seed) {
  Random random(seed);
  std::vector<VisitRequest> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t prompt = i % 16 == 15 ? 240 + random.below(17)
                                : i % 4 == 3 ? 110 + random.below(20)
                                             : 1 + random.below(20);
    const std::int32_t output = 1 + random.below(kOutputMax);
    requests.push_back({1000u + static_cast<std::uint32_t>(i), prompt, prompt + output});
  }
  return requests;
}

VisitOptions plain_run() {
  VisitOptions options;
  options.ahead = false;
  return options;
}

struct Run {
  std::vector<VisitedRequest> made;
  VisitCounts counts;
};

Run serve(Backend& backend, const ModelSpec& spec, const TinyV4Config& config,
          const std::vector<VisitRequest>& requests, const VisitOptions& options,
          const std::vector<VisitedRequest>* truth = nullptr) {
  Visits engine(backend, spec, config, kPromptMax + kOutputMax, options);
  Run run{engine.serve(requests, truth), {}};
  run.counts = engine.counts();
  return run;
}

std::string text_of(const VisitCounts& counts) {
  std::string text =
      concat(counts.visits, " visits, ", counts.rows, " batch rows, ", counts.rows_ahead,
             " ahead, ", counts.rows_moved, " moved, ", counts.rows_found_stopped,
             " found stopped, ", counts.tokens, " tokens; rows by tokens kept:");
  for (const auto& [kept, rows] : counts.kept) text += concat(" ", kept, ": ", rows);
  return text;
}

void check_same(const std::vector<VisitRequest>& requests, const Run& plain, const Run& run) {
  REQUIRE(run.made.size() == plain.made.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    const VisitedRequest& expected = plain.made[i];
    const VisitedRequest& found = run.made[i];
    CHECK(found.length == expected.length);
    CHECK(found.same_tokens(expected, requests[i].prompt_tokens));
    REQUIRE(found.layers.size() == expected.layers.size());
    for (std::size_t layer = 0; layer < expected.layers.size(); ++layer) {
      CAPTURE(layer);
      REQUIRE(found.layers[layer].size() == expected.layers[layer].size());
      CHECK(std::memcmp(found.layers[layer].data(), expected.layers[layer].data(),
                        expected.layers[layer].size()) == 0);
    }
  }
}

// What the plain run must have been like, for its comparisons to say something.
void check_telling(const std::vector<VisitRequest>& requests, const Run& plain) {
  std::set<std::int32_t> tokens;
  std::int64_t ended_early = 0, bytes = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const VisitedRequest& made = plain.made[i];
    REQUIRE(made.length >= requests[i].prompt_tokens);
    REQUIRE(made.length <= requests[i].tokens_max);
    if (made.length < requests[i].tokens_max) ++ended_early;
    tokens.insert(made.tokens.begin() + requests[i].prompt_tokens, made.tokens.end());
    for (const auto& layer : made.layers) bytes += static_cast<std::int64_t>(layer.size());
  }
  MESSAGE("plain: ", text_of(plain.counts), "; ", tokens.size(), " different tokens, ", ended_early,
          " of ", requests.size(), " requests met their end token, ", bytes, " live bytes");
  CHECK(tokens.size() > 30);  // a model in a rut proves little
  CHECK(ended_early > 0);
  CHECK(ended_early < static_cast<std::int64_t>(requests.size()));
  CHECK(plain.counts.kept.rbegin()->first == 1);  // 0: prompts with an end token behind them
}

TinyV4Config drafting_from_truth(std::uint32_t seed) {
  TinyV4Config config = tiny_config();
  config.drafts_from_truth = {.on = true, .wrong = 0.3f, .seed = seed};
  return config;
}

// O7
TEST_CASE("drafts, many steps a visit, and both, give the tokens and the bytes of the plain run") {
  const auto count = test_option("requests", 32);
  const auto seed = static_cast<std::uint32_t>(test_option("seed", 1));
  MESSAGE(count, " requests, seed ", seed);
  const std::vector<VisitRequest> requests = make_requests(count, seed);
  const ModelSpec spec = spec_with(LayerKind::kCsa);
  Backend& backend = test_backend();
  const Run plain = serve(backend, spec, tiny_config(), requests, plain_run());
  check_telling(requests, plain);

  struct Case {
    std::int32_t drafts, steps;
    bool truth;
  };
  for (const Case& c : {Case{0, 1, false}, Case{1, 1, true}, Case{2, 1, true}, Case{3, 1, true},
                        Case{4, 1, true}, Case{0, 4, false}, Case{0, 16, false}, Case{4, 4, true},
                        Case{2, 16, true}, Case{3, 4, false}}) {
    CAPTURE(c.drafts);
    CAPTURE(c.steps);
    CAPTURE(c.truth);
    VisitOptions options;
    options.drafts = c.drafts;
    options.steps = c.steps;
    options.seed = seed + 7;
    const Run run = serve(backend, spec, c.truth ? drafting_from_truth(seed + 3) : tiny_config(),
                          requests, options, c.truth ? &plain.made : nullptr);
    MESSAGE(c.drafts, " drafts, ", c.steps, " steps: ", text_of(run.counts));
    check_same(requests, plain, run);
    CHECK(run.counts.rows_ahead > 0);
    CHECK(run.counts.rows_moved > run.counts.rows / 3);
    if (c.steps > 1) CHECK(run.counts.rows_found_stopped > 0);
    // None by a step of a row that had stopped, else any number up to all that were drafted.
    if (c.steps == 1) CHECK(run.counts.kept.size() == static_cast<std::size_t>(c.drafts) + 2);
  }
}

TEST_CASE("draft layers of every kind hold what they hold without drafts") {
  const std::vector<VisitRequest> requests = make_requests(16, 5);
  for (const LayerKind kind : {LayerKind::kSliding, LayerKind::kHca}) {
    CAPTURE(name_of(kind));
    const Run plain = serve(test_backend(), spec_with(kind), tiny_config(), requests, plain_run());
    VisitOptions options;
    options.drafts = 3;
    options.steps = 3;
    const Run run = serve(test_backend(), spec_with(kind), drafting_from_truth(8), requests,
                          options, &plain.made);
    check_same(requests, plain, run);
    CHECK(run.counts.kept.rbegin()->first > 6);
  }
}

// The only test in which later draft passes read what earlier ones wrote.
TEST_CASE("what the draft layers draft behind a prefix depends on the prefix alone") {
  const std::vector<VisitRequest> requests = make_requests(16, 6);
  const ModelSpec spec = spec_with(LayerKind::kCsa);
  VisitOptions options = plain_run();
  options.keep_drafted = true;
  options.drafts = 4;
  const Run first = serve(test_backend(), spec, tiny_config(), requests, options);
  for (const auto& [drafts, steps] : {std::pair{4, 3}, std::pair{4, 1}, std::pair{2, 1}}) {
    CAPTURE(drafts);
    CAPTURE(steps);
    options.drafts = drafts;
    options.steps = steps;
    const Run run =
        serve(test_backend(), spec, drafting_from_truth(4), requests, options, &first.made);
    std::int64_t compared = 0;
    std::set<std::int32_t> tokens;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CAPTURE(i);
      for (const auto& [length, drafted] : run.made[i].drafted) {
        const auto other = first.made[i].drafted.find(length);
        if (other == first.made[i].drafted.end()) continue;
        CAPTURE(length);
        CHECK(std::equal(drafted.begin(), drafted.end(), other->second.begin()));
        tokens.insert(drafted.begin(), drafted.end());
        ++compared;
      }
    }
    MESSAGE(drafts, " drafts, ", steps, " steps: ", compared, " prefixes, ", tokens.size(),
            " different drafts; ", text_of(run.counts));
    CHECK(compared > 40);
    CHECK(tokens.size() > 30);
    CHECK(run.counts.kept.rbegin()->first > 1);
  }
}

// Nothing but a Backend calls CUDA for the library, and what the model launches is in the graph: so
// these are all the calls that a visit makes.
TEST_CASE("a visit of K steps is one update, K replays, one event and two copies, and no wait") {
  const std::vector<VisitRequest> requests = make_requests(12, 9);
  for (const std::int32_t steps : {1, 4, 16}) {
    for (const std::int32_t drafts : {0, 2}) {
      CAPTURE(steps);
      CAPTURE(drafts);
      FaultyBackend counting(test_backend());
      const std::map<Verb, std::int64_t> expected{
          {Verb::kUpdate, 1}, {Verb::kGraph, steps}, {Verb::kOrder, 1}, {Verb::kMemory, 2}};
      std::map<Verb, std::int64_t> before;
      std::int64_t visits = 0;
      VisitOptions options;
      options.drafts = drafts;
      options.steps = steps;
      options.on_visit = [&](bool begins) {
        std::map<Verb, std::int64_t> calls = counting.calls();
        if (begins) {
          before = calls;
          return;
        }
        for (const auto& [verb, count] : before) calls[verb] -= count;
        std::erase_if(calls, [](const auto& entry) { return entry.second == 0; });
        CHECK(calls == expected);
        ++visits;
      };
      serve(counting, spec_with(LayerKind::kSliding), tiny_config(), requests, options);
      CHECK(visits > 2);
    }
  }
}

}  // namespace
