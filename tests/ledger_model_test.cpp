// The ledger against a naive model under random calls with a printed seed: the model foretells
// every answer, a simulated device carries the updates out late (tests/support/ledger_model.h).
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/runtime/base/errors.h>

#include "tests/support/ledger_model.h"

namespace quire {
namespace {

using namespace test;  // NOLINT: the model's words

// Random calls, each made of the ledger and foretold by the model.
class Harness : public LedgerModel {
 public:
  Harness(const Limits& limits, std::uint64_t seed) : LedgerModel(limits, seed), ledger_(limits) {}

  void one_call() {
    const std::int64_t dice = random_.in(1, 1000);
    if (dice <= 90)
      admit();
    else if (dice <= 300)
      reserve();
    else if (dice <= 560)
      prepare();
    else if (dice <= 700)
      run_oldest();
    else if (dice <= 780)
      settle_some();
    else if (dice <= 830)
      abandon();
    else if (dice <= 900)
      release();
    else if (dice <= 925)
      hold_request();
    else if (dice <= 945)
      hold_pages();
    else if (dice <= 980)
      drop();
    else if (dice <= 990)
      resume();
    else if (dice <= 994)
      padding();
    else if (dice <= 998)
      wrong_calls();
    else if (random_.chance(30))
      sink();
    else if (random_.chance(30))
      reset();
    compare(ledger_);
  }

 private:
  // Makes the call, which must throw UsageError exactly where the model says so, and then, or where
  // it answers with a shortfall, must have changed nothing.
  void guarded(const char* name, bool wrong, const std::function<bool()>& call) {
    const std::uint64_t before = ledger_.digest();
    bool threw = false;
    bool granted = false;
    try {
      granted = call();
    } catch (const UsageError&) {
      threw = true;
    }
    ++counts[std::string(name) + (threw ? " wrong" : granted ? " granted" : " short")];
    expect(threw == wrong, threw ? "an error where none was due" : "no error where one was due");
    expect(granted || ledger_.digest() == before, "a refused call has changed something");
  }
  static void expect_shortfall(const Shortfall& s, Resource what, std::int64_t needed,
                               std::int64_t free, std::int64_t held) {
    expect(s.what == what && s.needed == needed && s.free == free && s.held == held,
           "another shortfall than predicted");
  }

  void admit() {
    const std::int64_t context = random_.in(-1, limits_.context_max + 1);
    const std::int64_t promised = random_.chance(50) ? 0 : random_.in(-1, context + 1);
    const bool wrong = context < 1 || context > limits_.context_max || promised < 0 ||
                       promised > context || cells(context) > usable();
    guarded("admit", wrong, [&] {
      const auto answer = ledger_.admit(context, promised);
      if (free_seats_.empty()) {
        expect(!answer, "a seat that is not there");
        expect_shortfall(answer.shortfall(), Resource::kSeats, 1, 0, seats_held());
      } else if (cells(promised) > unpromised()) {
        expect(!answer, "a promise of pages that are not there");
        expect_shortfall(answer.shortfall(), Resource::kPages, cells(promised), unpromised(),
                         pages_held());
      } else {
        expect(bool(answer), "admit refused what fits");
        const RequestId id = answer.value();
        expect(free_seats_.erase(id.index) == 1, "a seat that was not free");
        expect(std::ranges::count(former_, id) == 0, "a handle was given twice");
        live_[id.index] =
            ModelRequest{.id = id, .context_max = context, .promised = cells(promised)};
      }
      return bool(answer);
    });
  }

  void reserve() {
    ModelRequest* r = any_live();
    if (r == nullptr) return;
    const std::int64_t room = r->context_max - upper(*r);
    std::int64_t tokens = random_.tokens(room);
    if (random_.chance(10)) tokens = ledger_.tokens_that_fit(r->id) + random_.in(0, 1);
    if (random_.chance(3)) tokens = random_.in(-1, 0);
    if (random_.chance(3)) tokens = room + 1;
    const std::int64_t target = std::max(r->secured, upper(*r) + tokens);
    const bool wrong = tokens < 1 || tokens > room || cells(target) > usable();
    guarded("reserve", wrong, [&] {
      const bool must_fit = tokens <= ledger_.tokens_that_fit(r->id);
      const auto answer = ledger_.reserve(r->id, tokens);
      expect(bool(answer) == must_fit, "tokens_that_fit and reserve differ");
      const auto owned = static_cast<std::int64_t>(r->pages.size());
      const std::int64_t needed = std::max<std::int64_t>(0, cells(target) - owned);
      const std::int64_t free = promise_left(*r) + unpromised();
      if (needed > free) {
        expect(!answer, "reserve granted pages that are not there");
        expect_shortfall(answer.shortfall(), Resource::kPages, needed, free, pages_held());
        return false;
      }
      expect(bool(answer) && answer.value() == needed, "reserve gave another number of pages");
      r->secured = target;
      const auto pages = ledger_.pages_of(r->id);
      expect(pages.size() == r->pages.size() + size(needed),
             "pages_of has another number of pages");
      for (std::size_t i = r->pages.size(); i < pages.size(); ++i) {
        expect(free_pages_.erase(pages[i].value) == 1, "a page was given that was not free");
        r->pages.push_back(pages[i].value);
      }
      return true;
    });
  }

  std::vector<BatchRow> some_rows(StepShape shape, std::int32_t repeat) {
    std::vector<BatchRow> rows;
    for (auto& [seat, r] : live_) {
      if (static_cast<std::int64_t>(rows.size()) >= shape.rows || !random_.chance(70)) continue;
      const std::int64_t room = (r.secured - upper(r)) / repeat;
      const std::int64_t most = shape.is_decode()
                                    ? std::min<std::int64_t>(room, shape.tokens_per_row)
                                    : std::min<std::int64_t>(room, shape.tokens / shape.rows);
      const std::int64_t tokens = most < 1 ? 0 : random_.tokens(most);
      rows.push_back({r.id, static_cast<std::int32_t>(tokens)});
      const std::int64_t left = r.secured - upper(r) - tokens * repeat;
      if (left > 0 && random_.chance(60)) {
        rows.back().lookahead_tokens = static_cast<std::int32_t>(
            random_.chance(50) ? std::min(left, limits_.draft_max + 1)
                               : random_.in(0, std::min(left, limits_.draft_max + 1)));
      }
    }
    for (std::size_t i = rows.size(); i > 1; --i) {
      std::swap(rows[i - 1], rows[size(random_.in(0, static_cast<std::int64_t>(i) - 1))]);
    }
    if (!shape.is_decode() && random_.chance(90)) {
      std::ranges::stable_partition(
          rows, [&](const BatchRow& row) { return row.tokens <= limits_.draft_max + 1; });
    }
    if (rows.empty()) return rows;
    BatchRow& one = rows[size(random_.in(0, static_cast<std::int64_t>(rows.size()) - 1))];
    if (random_.chance(3)) one.tokens += static_cast<std::int32_t>(random_.in(-2, 300));
    if (random_.chance(3)) one.lookahead_tokens += static_cast<std::int32_t>(random_.in(-2, 3));
    if (random_.chance(2) && !former_.empty()) one.request = former_.back();
    if (random_.chance(2)) rows.push_back(BatchRow(one));
    return rows;
  }

  bool rows_are_wrong(const std::vector<BatchRow>& rows, StepShape shape, std::int32_t repeat) {
    std::set<std::int32_t> named;
    std::int64_t sum = 0;
    bool longer = false;
    for (const BatchRow& row : rows) {
      if (!is_live(row.request) || !named.insert(row.request.index).second) return true;
      const ModelRequest& r = live_.at(row.request.index);
      if (row.tokens < 0 || row.lookahead_tokens < 0) return true;
      if (row.lookahead_tokens > limits_.draft_max + 1) return true;
      if (upper(r) + row.tokens * repeat + row.lookahead_tokens > r.secured) return true;
      if (shape.is_decode() && row.tokens > shape.tokens_per_row) return true;
      const bool is_long = row.tokens > limits_.draft_max + 1;
      if (!shape.is_decode() && is_long && repeat > 1) return true;
      if (!shape.is_decode() && longer && !is_long && row.tokens > 0) return true;
      longer |= is_long;
      sum += row.tokens;
    }
    return sum > shape.tokens || static_cast<std::int64_t>(rows.size()) > shape.rows;
  }

  void prepare() {
    const bool decode = random_.chance(50);
    const auto rows_room = static_cast<std::int32_t>(random_.in(1, limits_.rows_max));
    const std::int64_t most_per_row =
        std::min(limits_.draft_max + 1, limits_.tokens_max / rows_room);
    const StepShape shape =
        decode
            ? StepShape::decode(rows_room, static_cast<std::int32_t>(random_.in(1, most_per_row)))
            : StepShape::ragged(rows_room, static_cast<std::int32_t>(limits_.tokens_max));
    const auto repeat = static_cast<std::int32_t>(
        decode || random_.chance(5) ? random_.in(1, limits_.repeat_max) : 1);
    const std::vector<BatchRow> rows = some_rows(shape, repeat);
    const StepId due = next_ - 1 - limits_.run_ahead_max;
    const bool due_now = !uncounted_.empty() && uncounted_.front().id == due;
    if (due_now && !uncounted_.front().settled && random_.chance(95)) {
      while (!uncounted_.front().ran) run_oldest();
      settle(uncounted_.front());
    }
    const bool unsettled = due_now && !uncounted_.front().settled;
    guarded("prepare", unsettled || rows_are_wrong(rows, shape, repeat), [&] {
      const PlanBufferId buffer(static_cast<std::int32_t>(random_.in(0, 1)));
      const StepUpdate& update = ledger_.prepare(rows, shape, buffer, repeat);
      expect(update.id() == next_ && update.plan_buffer() == buffer && update.shape() == shape &&
                 update.header().repeat == repeat,
             "another header than asked for");
      if (due_now) count_oldest();
      note_step(rows, repeat, update);
      return true;
    });
  }

  void settle(ModelStep& step) {
    guarded("settle", false, [&] {
      ledger_.settle(step.id, step.outcomes);
      return true;
    });
    step.settled = true;
  }
  void settle_some() {
    for (ModelStep& step : uncounted_) {
      if (!step.ran || step.settled || !random_.chance(60)) continue;
      const std::uint64_t before = ledger_.digest();
      settle(step);
      expect(ledger_.digest() == before, "an outcome counted before it was due");
      return;
    }
  }

  void abandon() {
    const StepId id = random_.chance(90) ? next_ - 1 : random_.in(-1, next_);
    const bool possible = id == next_ - 1 && !uncounted_.empty() && uncounted_.back().id == id &&
                          !uncounted_.back().settled;
    if (possible && uncounted_.back().ran) return;  // the engine's promise
    guarded("abandon", !possible, [&] {
      ledger_.abandon(id);
      const ModelStep step = std::move(uncounted_.back());
      uncounted_.pop_back();
      --next_;
      shadow_ = step.before;
      for (const ModelRow& row : step.rows) {
        unknown_.insert(row.request.index);
        if (!is_live(row.request)) continue;
        ModelRequest& r = live_.at(row.request.index);
        r.new_owner |= (row.flags & BatchRowUpdate::kNewOwner) != 0;
        r.resume |= (row.flags & BatchRowUpdate::kResume) != 0;
        r.lookahead = row.lookahead_before;
      }
      for (const LimitUpdate& l : step.update.lowered_limits()) unknown_.insert(l.seat);
      return true;
    });
  }

  void release() {
    ModelRequest* r = any_live();
    if (r == nullptr) return;
    const ModelRequest gone = *r;
    guarded("release", false, [&] {
      ledger_.release(gone.id);
      return true;
    });
    live_.erase(gone.id.index);
    former_.push_back(gone.id);
    for (const std::int32_t page : gone.pages) {
      if (!page_is_held(page)) free_pages_.insert(page);
    }
    if (!seat_is_held(gone.id.index)) free_seats_.insert(gone.id.index);
  }

  void note_hold(const OrShortfall<HoldId>& answer, std::int32_t seat, std::vector<PageId> pages) {
    if (static_cast<std::int64_t>(holds_.size()) == limits_.holds_max) {
      expect(!answer, "a hold that is not there");
      expect_shortfall(answer.shortfall(), Resource::kHolds, 1, 0, 0);
      return;
    }
    expect(bool(answer) && holds_.count(answer.value()) == 0, "a hold was refused or given twice");
    holds_[answer.value()] = {seat, std::move(pages)};
  }
  void hold_request() {
    ModelRequest* r = any_live();
    if (r == nullptr) return;
    guarded("hold", false, [&] {
      const auto answer = ledger_.hold(r->id);
      std::vector<PageId> pages;
      for (const std::int32_t page : r->pages) pages.emplace_back(page);
      note_hold(answer, r->id.index, pages);
      return bool(answer);
    });
  }
  void hold_pages() {
    std::vector<PageId> pages;
    bool wrong = false;
    std::set<std::int32_t> named;
    for (std::int64_t i = random_.in(0, 3); i > 0; --i) {
      std::int32_t page = static_cast<std::int32_t>(random_.in(-1, limits_.pages));
      for (int t = 0; t < 20 && !page_is_owned(page) && !page_is_held(page); ++t) {
        page = static_cast<std::int32_t>(random_.in(0, limits_.pages - 1));
      }
      pages.emplace_back(page);
      wrong |= !named.insert(page).second || (!page_is_owned(page) && !page_is_held(page));
    }
    guarded("hold pages", wrong, [&] {
      const auto answer = ledger_.hold(pages);
      note_hold(answer, -1, pages);
      return bool(answer);
    });
  }
  void drop() {
    if (holds_.empty()) return;
    auto at = holds_.begin();
    std::advance(at, random_.in(0, static_cast<std::int64_t>(holds_.size()) - 1));
    const auto [id, hold] = *at;
    guarded("drop", false, [&] {
      ledger_.drop(id);
      return true;
    });
    holds_.erase(at);
    for (const PageId page : hold.pages) {
      if (!page_is_held(page.value) && !page_is_owned(page.value)) free_pages_.insert(page.value);
    }
    if (hold.seat >= 0 && !seat_is_held(hold.seat) && !live_.count(hold.seat)) {
      free_seats_.insert(hold.seat);
    }
    guarded("drop", true, [&] {
      ledger_.drop(id);
      return true;
    });
  }

  void resume() {
    ModelRequest* r = any_live();
    if (r == nullptr) return;
    ledger_.resume(r->id);
    r->resume = true;
  }
  void padding() {
    const std::uint64_t before = ledger_.digest();
    const StepUpdate& update = ledger_.padding_update(StepShape::decode(2), PlanBufferId(0));
    expect(update.id() == kPaddingStep && update.bytes().size() == sizeof(StepUpdateHeader),
           "a padding update that is not empty");
    expect(ledger_.digest() == before, "a padding update changed the ledger");
  }
  void sink() {
    guarded("sink", sink_ >= 0, [&] {
      const auto answer = ledger_.reserve_sink();
      expect(bool(answer) == (unpromised() >= 1), "the sink");
      if (!answer) {
        expect_shortfall(answer.shortfall(), Resource::kPages, 1, unpromised(), pages_held());
        return false;
      }
      sink_ = answer.value().value;
      expect(free_pages_.erase(sink_) == 1, "the sink was not free");
      return true;
    });
  }
  void wrong_calls() {
    if (!former_.empty()) {
      const RequestId stale =
          former_[size(random_.in(0, static_cast<std::int64_t>(former_.size()) - 1))];
      guarded("stale", true, [&] { return ledger_.release(stale), true; });
      guarded("stale", true, [&] { return bool(ledger_.reserve(stale, 1)); });
      guarded("stale", true, [&] { return bool(ledger_.hold(stale)); });
      guarded("stale", true, [&] { return ledger_.resume(stale), true; });
    }
    guarded("settle", true, [&] { return ledger_.settle(next_, {}), true; });
    for (const ModelStep& step : uncounted_) {
      std::vector<Outcome> outcomes(step.rows.size() + 1);
      guarded("settle", true, [&] { return ledger_.settle(step.id, outcomes), true; });
    }
  }
  void reset() {
    for (const auto& [seat, r] : live_) former_.push_back(r.id);
    ledger_.reset();
    clear_model();
    ++counts["reset"];
  }

  Ledger ledger_;
};

TEST_CASE("the ledger does what a naive model says, and a device under it stays within bounds") {
  constexpr int kCalls = 20000;
  std::map<std::string, int> counts;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    const auto few = static_cast<std::int64_t>(seed % 4);
    const Limits limits{.seats_max = 5,
                        .pages = 8 + 5 * few,
                        .rows_max = 4,
                        .tokens_max = 900,
                        .context_max = 1500,
                        .draft_max = seed > 6 ? 220 : few,  // a lookahead of a page, almost
                        .repeat_max = 3,
                        .run_ahead_max = few,
                        .plan_buffers = 2,
                        .holds_max = 3};
    Harness harness(limits, seed);
    for (int call = 0; call < kCalls; ++call) {
      try {
        harness.one_call();
      } catch (const std::exception& error) {
        FAIL("seed ", seed, ", call ", call, ": ", error.what());
      }
    }
    for (const auto& [name, count] : harness.counts) counts[name] += count;
  }
  std::string text;
  for (const auto& [name, count] : counts) text += name + " " + std::to_string(count) + "; ";
  MESSAGE("seeds 1 to 8, answers: ", text);
  for (const char* name :
       {"admit granted",    "admit short",   "admit wrong",     "reserve granted",
        "reserve short",    "reserve wrong", "prepare granted", "prepare wrong",
        "settle granted",   "settle wrong",  "abandon granted", "abandon wrong",
        "release granted",  "hold granted",  "hold short",      "hold pages granted",
        "hold pages wrong", "drop granted",  "drop wrong",      "sink wrong",
        "stale wrong",      "reset",         "page given back", "limit lowered",
        "lookahead"}) {
    CAPTURE(name);
    CHECK(counts[name] >= 10);  // the test reaches what it is for
  }
  CHECK(counts["sink granted"] >= 4);  // at most one a seed: it stays
}

}  // namespace
}  // namespace quire
