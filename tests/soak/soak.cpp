// A random engine against a naive model of the cache, on either backend, for as long as asked:
// lives of `kLifeSteps` steps, each from an empty cache, each with a seed of its own. A life
// depends on the seed and its number alone, so `--from` continues a run, or repeats a failure,
// without what came before. Memory, poisoned in between, and captured graphs stay, one set for each
// set of limits.
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <quire/runtime/base/errors.h>

#include "tests/soak/engine.h"

namespace quire::soak {
namespace {

constexpr std::int64_t kLifeSteps = 200;
constexpr int kSkipped = 77;  // SKIP_RETURN_CODE of CTest

struct Options {
  std::string backend = "host";
  std::uint64_t seed = 1;
  double seconds = 60;
  std::int64_t steps = -1;
  std::int64_t from = 0;
};

// Pages are few but in the last; all drafts, repeats and distances of the host occur.
std::vector<Limits> all_limits() {
  const auto make = [](std::int64_t seats, std::int64_t pages, std::int64_t rows,
                       std::int64_t tokens, std::int64_t drafts, std::int64_t repeats,
                       std::int64_t ahead, std::int64_t holds) {
    return Limits{.seats_max = seats,
                  .pages = pages,
                  .rows_max = rows,
                  .tokens_max = tokens,
                  .context_max = kContext,
                  .draft_max = drafts,
                  .repeat_max = repeats,
                  .run_ahead_max = ahead,
                  .plan_buffers = 2,
                  .holds_max = holds};
  };
  return {make(8, 8, 8, 400, 4, 4, 1, 3),   make(5, 6, 4, 300, 0, 16, 2, 2),
          make(12, 10, 6, 200, 2, 3, 0, 4), make(4, 4, 4, 640, 3, 8, 1, 2),
          make(6, 7, 3, 257, 1, 6, 3, 1),   make(7, 24, 7, 500, 4, 16, 1, 3)};
}

std::string text_of(const Counts& counts) {
  std::string text;
  for (const auto& [name, count] : counts) text += concat("  ", name, ": ", count, "\n");
  return text;
}

// A soak that does not reach what it is for has shown nothing.
constexpr const char* kMustOccur[] = {
    "admissions",
    "admissions after preemption",
    "preemptions",
    "cancels",
    "finished",
    "releases with steps in flight",
    "resumes",
    "holds",
    "comparisons",
    "comparisons of held requests after release",
    "shortfalls of admit",
    "shortfalls of reserve",
    "shortfalls of hold",
    "rows with refused drafts",
    "rows with wrong counts",
    "draft plans",
    "draft extensions",
    "draft passes",
    "draft rows extended",
    "draft rows passed",
    "draft rows behind",
    "draft rows kept from getting ahead",
    "draft rows at a limit",
    "draft rows with wrong counts",
    "draft rows with wrong positions",
    "draft tokens kept",
    "draft comparisons",
    "comparisons with drafts behind",
    "steps without a draft plan",
    "rows stopped, inert",
    "replays",
    "eager runs",
    "runs beyond the first of a visit",
    "runs too many",
    "graphs of the wrong shape",
    "padding steps",
    "abandoned steps",
    "decode visits",
    "ragged visits",
    "visits with padding rows",
    "step tables compared",
    "resets",
};

void check_reached(const Counts& counts) {
  for (const char* name : kMustOccur) {
    const auto found = counts.find(name);
    QUIRE_CHECK(found != counts.end() && found->second > 0, "nothing was counted as: ", name);
  }
}

class Soak {
 public:
  Soak(Backend& backend, const Options& options)
      : options_(options), backend_(backend), oracle_(backend), step_(options.from) {
    step_ -= step_ % kLifeSteps;
    first_ = step_;
  }

  void run() {
    const auto start = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    const auto goes_on = [&] {
      const bool enough = options_.steps >= 0 && step_ - first_ >= options_.steps;
      return !enough && seconds() < options_.seconds;
    };
    std::printf("soak: %s, seed %llu, from step %lld\n", options_.backend.c_str(), seed(),
                number(first_));
    std::fflush(stdout);  // also of a run that crashes
    while (goes_on()) {
      life_ = step_;
      live(goes_on);
    }
    std::printf(
        "%ssoak: %s, seed %llu, steps %lld to %lld in %.1f s; continue with --seed %llu "
        "--from %lld\n",
        text_of(counts_).c_str(), options_.backend.c_str(), seed(), number(first_), number(step_),
        seconds(), seed(), number(step_ - step_ % kLifeSteps));
    if (step_ - first_ < 10 * kLifeSteps) {
      std::printf("soak: coverage not checked: fewer than %lld steps\n", number(10 * kLifeSteps));
      return;
    }
    check_reached(counts_);
  }

  void print_failure(const char* what) const {
    std::printf(
        "%ssoak FAILED: %s, seed %llu, step %lld, after %lld steps: %s\n"
        "repeat with --seed %llu --from %lld --steps %lld\n",
        text_of(counts_).c_str(), options_.backend.c_str(), seed(), number(step_),
        number(step_ - first_), what, seed(), number(life_), number(kLifeSteps));
  }

 private:
  static long long number(std::int64_t value) { return value; }
  unsigned long long seed() const { return options_.seed; }

  template <class GoesOn>
  void live(GoesOn& goes_on) {
    const std::int64_t life = step_ / kLifeSteps;
    const auto kinds = all_limits();
    const std::size_t kind = static_cast<std::size_t>(life) % kinds.size();
    auto& world = worlds_[kind];
    if (world == nullptr) world = std::make_unique<World>(backend_, kinds[kind]);
    const std::uint64_t seed_of_life = options_.seed * 1000003 + static_cast<std::uint64_t>(life);
    Engine engine(*world, oracle_, counts_, seed_of_life);
    for (std::int64_t i = 0; i < kLifeSteps && goes_on(); ++i, ++step_) engine.one_step();
    engine.finish();
  }

  Options options_;
  Backend& backend_;
  Oracle oracle_;
  Counts counts_;
  std::map<std::size_t, std::unique_ptr<World>> worlds_;
  std::int64_t step_;
  std::int64_t first_ = 0;
  std::int64_t life_ = 0;
};

int run(const Options& options) {
  const bool cuda = options.backend == "cuda";
  if (cuda && cuda_device_count() == 0) {
    const char* required = std::getenv("QUIRE_REQUIRE_GPU");
    const bool fails = required != nullptr && std::string_view(required) == "1";
    std::puts(fails ? "FAILED: QUIRE_REQUIRE_GPU=1, but no CUDA device was found"
                    : "SKIPPED: no CUDA device");
    return fails ? 1 : kSkipped;
  }
  const auto backend = cuda ? make_cuda_backend() : make_host_backend();
  Soak soak(*backend, options);
  try {
    soak.run();
    return 0;
  } catch (const std::exception& error) {
    soak.print_failure(error.what());
    return 1;
  }
}

}  // namespace
}  // namespace quire::soak

int main(int argc, char** argv) {
  quire::soak::Options options;
  CLI::App app("A random engine against a naive model of the cache.");
  app.add_option("--backend", options.backend)->check(CLI::IsMember({"host", "cuda"}));
  app.add_option("--seed", options.seed);
  app.add_option("--seconds", options.seconds, "stop after so long");
  app.add_option("--steps", options.steps, "stop after so many steps");
  app.add_option("--from", options.from, "continue at the life that holds this step");
  CLI11_PARSE(app, argc, argv);
  return quire::soak::run(options);
}
