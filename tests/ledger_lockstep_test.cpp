// Two ledgers fed the same calls, one of which hears outcomes as late as it may: same answers,
// same refusals, same page ids, same update bytes, equal digests. FIELD_CASES O13.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

void expect(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

// What a call answered, refusals included, as something to compare and to print.
std::string answer_of(const std::function<std::string()>& call) {
  try {
    return call();
  } catch (const UsageError& error) {
    return std::string("UsageError: ") + error.what();
  }
}

template <class T>
std::string words(const OrShortfall<T>& answer) {
  if (!answer) return answer.shortfall().describe();
  if constexpr (std::is_integral_v<T>) {
    return "granted " + std::to_string(answer.value());
  } else {
    return "granted " + std::to_string(answer.value().index) + "." +
           std::to_string(answer.value().generation);
  }
}

class Lockstep {
 public:
  Lockstep(const Limits& limits, std::uint64_t seed)
      : limits_(limits), engine_(seed), early_(limits), late_(limits) {}

  // Everything around one step, and the step.
  void one_step() {
    for (int i = 0; i < 3; ++i) one_call_between();
    hear_late();
    prepare();
    if (chance(5)) abandon();
    hear_early();
    if (early_.usage().pages_free < limits_.pages / 4 && chance(30)) release();
  }

  StepId steps() const { return next_; }
  std::map<std::string, std::int64_t> counts;

 private:
  struct Prepared {
    StepId id;
    std::vector<Outcome> outcomes;
    bool early_knows = false;
  };

  std::int64_t in(std::int64_t least, std::int64_t most) {
    return least +
           static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(most - least + 1));
  }
  bool chance(std::int64_t percent) { return in(1, 100) <= percent; }
  RequestId any() { return live_[static_cast<std::size_t>(in(0, std::ssize(live_) - 1))]; }

  std::string both(const char* name, const std::function<std::string(Ledger&)>& call) {
    const std::string answer = answer_of([&] { return call(early_); });
    expect(answer == answer_of([&] { return call(late_); }), "the ledgers answer differently");
    expect(early_.digest() == late_.digest(), "the ledgers' digests differ");
    const bool refused = answer.starts_with("short of") || answer.starts_with("UsageError");
    ++counts[std::string(name) + (refused ? " refused" : "")];
    return answer;
  }

  void one_call_between() {
    const std::int64_t dice = in(1, 100);
    if (dice <= 20 || live_.empty()) {
      admit();
    } else if (dice <= 70) {
      const RequestId request = any();
      const std::int64_t tokens = chance(30) ? in(1, 700) : in(1, 8);
      both("reserve", [&](Ledger& l) { return words(l.reserve(request, tokens)); });
    } else if (dice <= 80) {
      release();
    } else if (dice <= 85) {
      const RequestId request = any();
      HoldId id;
      const std::string answer = both("hold", [&](Ledger& l) {
        const auto hold = l.hold(request);
        if (hold) id = hold.value();
        return words(hold);
      });
      if (answer.starts_with("granted")) holds_.push_back(id);
    } else if (dice <= 92 && !holds_.empty()) {
      const HoldId id = holds_.front();
      holds_.pop_front();
      both("drop", [&](Ledger& l) { return l.drop(id), std::string(); });
    } else if (dice <= 94) {
      const RequestId request = any();
      both("resume", [&](Ledger& l) { return l.resume(request), std::string(); });
    } else if (dice <= 96 && next_ > 0) {
      both("stale", [&](Ledger& l) { return l.release(RequestId{0, 0}), std::string(); });
    }
  }

  void admit() {
    const std::int64_t context = in(1, limits_.context_max);
    const std::int64_t promised = chance(60) ? 0 : in(0, context);
    RequestId id;
    const std::string answer = both("admit", [&](Ledger& l) {
      const auto request = l.admit(context, promised);
      if (request) id = request.value();
      return words(request);
    });
    if (answer.starts_with("granted")) live_.push_back(id);
  }

  void release() {
    if (live_.empty()) return;
    const RequestId request = any();
    both("release", [&](Ledger& l) { return l.release(request), std::string(); });
    std::erase(live_, request);
  }

  void prepare() {
    const bool decode = chance(60);
    const auto repeat = static_cast<std::int32_t>(decode ? in(1, limits_.repeat_max) : 1);
    const StepShape shape =
        decode ? StepShape::decode(static_cast<std::int32_t>(limits_.rows_max),
                                   static_cast<std::int32_t>(limits_.draft_max + 1))
               : StepShape::ragged(static_cast<std::int32_t>(limits_.rows_max),
                                   static_cast<std::int32_t>(limits_.tokens_max));
    std::vector<BatchRow> rows;
    std::shuffle(live_.begin(), live_.end(), engine_);
    for (const RequestId request : live_) {
      if (std::ssize(rows) == limits_.rows_max) break;
      const RequestInfo info = early_.info(request);
      const std::int64_t room = (info.secured_tokens - info.upper_tokens) / repeat;
      const std::int64_t most = std::min(room, decode ? limits_.draft_max + 1 : 200);
      const std::int64_t tokens = chance(1) ? most + 1 : most < 1 ? 0 : in(1, most);
      const std::int64_t left = info.secured_tokens - info.upper_tokens - tokens * repeat;
      const std::int64_t ahead = std::clamp<std::int64_t>(left, 0, limits_.draft_max + 1);
      rows.push_back({request, static_cast<std::int32_t>(tokens),
                      static_cast<std::int32_t>(chance(1) ? ahead + 1 : in(0, ahead))});
    }
    std::ranges::stable_partition(
        rows, [&](const BatchRow& row) { return row.tokens <= limits_.draft_max + 1; });
    bool prepared = false;
    both("prepare", [&](Ledger& l) {
      const StepUpdate& update = l.prepare(rows, shape, PlanBufferId(0), repeat);
      prepared = true;
      expect(update.id() == next_, "another id");
      const auto bytes = update.bytes();
      return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
    if (!prepared) return;
    Prepared step{next_++, {}, false};
    for (const BatchRow& row : rows) {
      const std::int32_t all = row.tokens * repeat;
      const bool runs_once = row.tokens > limits_.draft_max + 1;
      const auto part = static_cast<std::int32_t>(runs_once ? 0 : in(0, all));
      step.outcomes.push_back({chance(50) ? all : part, chance(5)});
    }
    unheard_.push_back(std::move(step));
  }

  void abandon() {
    if (unheard_.empty() || unheard_.back().id != next_ - 1 || unheard_.back().early_knows) return;
    if (chance(30)) release();
    const StepId id = unheard_.back().id;
    both("abandon", [&](Ledger& l) { return l.abandon(id), std::string(); });
    unheard_.pop_back();
    --next_;
  }

  void hear_early() {
    for (Prepared& step : unheard_) {
      if (step.early_knows || chance(40)) continue;
      early_.settle(step.id, step.outcomes);
      step.early_knows = true;
    }
  }

  // The outcome that the next prepare needs, and no other.
  void hear_late() {
    while (!unheard_.empty() && unheard_.front().id <= next_ - 1 - limits_.run_ahead_max) {
      Prepared& step = unheard_.front();
      if (!step.early_knows) early_.settle(step.id, step.outcomes);
      late_.settle(step.id, step.outcomes);
      unheard_.pop_front();
    }
  }

  const Limits limits_;
  std::mt19937_64 engine_;
  Ledger early_, late_;
  std::vector<RequestId> live_;
  std::deque<HoldId> holds_;
  std::deque<Prepared> unheard_;  // by the late one
  StepId next_ = 0;
};

// O13
TEST_CASE("two ledgers in lockstep for 100,000 steps, one of which hears outcomes late") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    const Limits limits{.seats_max = 6,
                        .pages = 20,
                        .rows_max = 5,
                        .tokens_max = 1000,
                        .context_max = 2000,
                        .draft_max = 3,
                        .repeat_max = 2,
                        .run_ahead_max = static_cast<std::int64_t>(seed) % 4,
                        .holds_max = 3};
    Lockstep lockstep(limits, seed);
    int rounds = 0;
    try {
      for (; lockstep.steps() < 25000 && rounds < 200000; ++rounds) lockstep.one_step();
    } catch (const std::exception& error) {
      FAIL("seed ", seed, ", round ", rounds, ", step ", lockstep.steps(), ": ", error.what());
    }
    CAPTURE(seed);
    CHECK(lockstep.steps() >= 25000);
    std::string text;
    for (const auto& [name, count] : lockstep.counts) {
      text += name + " " + std::to_string(count) + "; ";
    }
    MESSAGE("seed ", seed, ", calls: ", text);
    for (const char* name :
         {"admit", "admit refused", "reserve", "reserve refused", "prepare", "prepare refused",
          "abandon", "release", "hold", "hold refused", "drop", "stale refused", "resume"}) {
      CAPTURE(name);
      CHECK(lockstep.counts[name] >= 100);
    }
  }
}

}  // namespace
}  // namespace quire
