// A naive model of the ledger, of sets and maps, in which every figure is worked out from scratch;
// and a simulated device that carries updates out, runs the steps, and lets no row write beyond its
// limit, into a page that is not its own, or into another's. Failures throw std::logic_error.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <quire/cache/ledger.h>

namespace quire::test {

inline constexpr std::int32_t kHugePage = 0x7fff0000;

inline std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

inline void expect(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t in(std::int64_t least, std::int64_t most) {
    return least +
           static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(most - least + 1));
  }
  bool chance(std::int64_t percent) { return in(1, 100) <= percent; }
  // Around page edges more often than elsewhere.
  std::int64_t tokens(std::int64_t most) {
    constexpr std::array<std::int64_t, 7> edges{1, 2, 255, 256, 257, 512, 513};
    const std::int64_t edge = edges[size(in(0, 6))];
    return chance(50) && edge <= most ? edge : in(1, std::max<std::int64_t>(1, most));
  }

 private:
  std::mt19937_64 engine_;
};

// What an update changes on a device, and what the steps' commits do there.
struct Device {
  explicit Device(const Limits& limits)
      : length(size(limits.seats_max)),
        limit(size(limits.seats_max)),
        stopped(size(limits.seats_max)),
        table(size(limits.seats_max),
              std::vector<std::int32_t>(size(limits.cells_max()), kHugePage)) {}

  void apply(const StepUpdate& update) {
    for (const BatchRowUpdate& row : update.batch_rows()) {
      const std::size_t seat = size(row.seat);
      if (row.flags & BatchRowUpdate::kNewOwner) length[seat] = stopped[seat] = 0;
      if (row.flags & BatchRowUpdate::kResume) stopped[seat] = 0;
      limit[seat] = row.limit;
    }
    for (const CellUpdate& cell : update.cells())
      table[size(cell.seat)][size(cell.cell)] = cell.page;
    for (const LimitUpdate& lowered : update.lowered_limits()) {
      limit[size(lowered.seat)] = lowered.limit;
    }
  }

  std::vector<std::int64_t> length, limit;
  std::vector<int> stopped;
  std::vector<std::vector<std::int32_t>> table;
};

struct ModelRequest {
  RequestId id;
  std::int64_t context_max = 0, promised = 0, settled = 0, secured = 0;
  std::vector<std::int32_t> pages{};
  bool new_owner = true, resume = false, stopped = false;
  std::int32_t lookahead = 0;  // of the newest step that names it
};

struct ModelRow {
  RequestId request;
  std::int32_t tokens = 0;  // over all runs
  std::uint32_t flags = 0;
  std::vector<std::int32_t> pages;  // that it owned when the step was prepared
  std::int32_t lookahead = 0, lookahead_before = 0;
  std::int64_t length_after = -1;  // on the device, once it ran
};

struct ModelStep {
  StepId id;
  StepUpdate update;
  Device before;  // what the device will be in front of this update, lengths aside
  std::vector<ModelRow> rows{};
  bool ran = false, settled = false;
  std::vector<Outcome> outcomes{};
};

struct ModelHold {
  std::int32_t seat;
  std::vector<PageId> pages;
};
class LedgerModel {
 public:
  LedgerModel(const Limits& limits, std::uint64_t seed)
      : limits_(limits), random_(seed), shadow_(limits), device_(limits) {
    clear_model();
  }

  std::map<std::string, int> counts;  // of events, to see that a test reaches them

 protected:
  // Derived figures, from scratch each time.
  std::int64_t upper(const ModelRequest& r) const {
    std::int64_t tokens = r.settled;
    for (const ModelStep& step : uncounted_) {
      for (const ModelRow& row : step.rows) tokens += row.request == r.id ? row.tokens : 0;
    }
    return tokens;
  }
  std::int64_t promise_left(const ModelRequest& r) const {
    return std::max<std::int64_t>(0, r.promised - static_cast<std::int64_t>(r.pages.size()));
  }
  std::int64_t unpromised() const {
    std::int64_t pages = static_cast<std::int64_t>(free_pages_.size());
    for (const auto& [seat, r] : live_) pages -= promise_left(r);
    return pages;
  }
  bool page_is_held(std::int32_t page) const {
    return std::any_of(holds_.begin(), holds_.end(), [&](const auto& hold) {
      return std::ranges::count(hold.second.pages, PageId(page)) > 0;
    });
  }
  bool seat_is_held(std::int32_t seat) const {
    return std::any_of(holds_.begin(), holds_.end(),
                       [&](const auto& hold) { return hold.second.seat == seat; });
  }
  bool page_is_owned(std::int32_t page) const {
    return std::any_of(live_.begin(), live_.end(), [&](const auto& entry) {
      return std::ranges::count(entry.second.pages, page) > 0;
    });
  }
  std::int64_t pages_held() const {
    std::int64_t held = 0;
    for (std::int32_t p = 0; p < limits_.pages; ++p) held += page_is_held(p) && !page_is_owned(p);
    return held;
  }
  std::int64_t seats_held() const {
    std::int64_t held = 0;
    for (std::int32_t s = 0; s < limits_.seats_max; ++s) held += seat_is_held(s) && !live_.count(s);
    return held;
  }
  static std::int64_t cells(std::int64_t tokens) { return (tokens + 255) / 256; }
  std::int64_t usable() const { return limits_.pages - (sink_ >= 0 ? 1 : 0); }

  ModelRequest* any_live() {
    if (live_.empty()) return nullptr;
    auto at = live_.begin();
    std::advance(at, random_.in(0, static_cast<std::int64_t>(live_.size()) - 1));
    return &at->second;
  }
  bool is_live(RequestId id) const {
    const auto at = live_.find(id.index);
    return at != live_.end() && at->second.id == id;
  }

  void clear_model() {
    live_.clear();
    holds_.clear();
    uncounted_.clear();
    unknown_.clear();
    free_pages_.clear();
    free_seats_.clear();
    for (std::int32_t p = 0; p < limits_.pages; ++p) free_pages_.insert(p);
    for (std::int32_t s = 0; s < limits_.seats_max; ++s) free_seats_.insert(s);
    free_pages_.erase(sink_);  // the sink stays
    next_ = 0;
    shadow_ = device_ = Device(limits_);
  }

  void count_oldest() {
    const ModelStep& step = uncounted_.front();
    for (std::size_t i = 0; i < step.rows.size(); ++i) {
      if (!is_live(step.rows[i].request)) continue;
      ModelRequest& r = live_.at(step.rows[i].request.index);
      r.settled += step.outcomes[i].kept_tokens;
      r.secured -= step.rows[i].tokens - step.outcomes[i].kept_tokens;
      r.stopped = step.outcomes[i].stopped;
      expect(r.settled == step.rows[i].length_after, "settled differs from the device's length");
      while (static_cast<std::int64_t>(r.pages.size()) > cells(r.secured) &&
             !page_is_held(r.pages.back())) {
        free_pages_.insert(r.pages.back());
        r.pages.pop_back();
        ++counts["page given back"];
      }
    }
    uncounted_.pop_front();
  }

  // The update must make of the device before it what the model says, and name each thing once.
  void note_step(const std::vector<BatchRow>& rows, std::int32_t repeat, const StepUpdate& update) {
    ModelStep step{
        .id = next_, .update = StepUpdate::from_bytes(update.bytes()), .before = shadow_};
    expect(update.batch_rows().size() == rows.size(), "another number of batch rows");
    std::set<std::int32_t> named;
    std::map<std::int32_t, std::int64_t> upper_before;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      ModelRequest& r = live_.at(rows[i].request.index);
      upper_before[r.id.index] = upper(r);
      const std::uint32_t flags = (r.new_owner ? BatchRowUpdate::kNewOwner : 0U) |
                                  (r.resume ? BatchRowUpdate::kResume : 0U);
      step.rows.push_back(
          {r.id, rows[i].tokens * repeat, flags, r.pages, rows[i].lookahead_tokens, r.lookahead});
      const BatchRowUpdate& row = update.batch_rows()[i];
      expect(row.seat == r.id.index && row.tokens == rows[i].tokens && row.flags == flags,
             "another batch row than asked for");
      r.new_owner = r.resume = false;
      r.lookahead = rows[i].lookahead_tokens;
      counts["lookahead"] += r.lookahead > 0;
      named.insert(row.seat);
    }
    uncounted_.push_back(std::move(step));
    ++next_;
    std::set<std::int32_t> to_lower;
    for (std::int32_t seat = 0; seat < limits_.seats_max; ++seat) {
      const bool differs = unknown_.count(seat) > 0 || shadow_.limit[size(seat)] != wanted(seat);
      if (differs && !named.count(seat)) to_lower.insert(seat);
    }
    unknown_.clear();
    for (const LimitUpdate& lowered : update.lowered_limits()) {
      expect(to_lower.erase(lowered.seat) == 1, "a limit was sent that is known or named");
      ++counts["limit lowered"];
    }
    expect(to_lower.empty(), "a limit was not lowered");
    std::set<std::pair<std::int32_t, std::int32_t>> sent;
    for (const CellUpdate& cell : update.cells()) {
      expect(named.count(cell.seat) && cell.cell < cells(wanted(cell.seat)), "a cell of nobody");
      expect(sent.insert({cell.seat, cell.cell}).second, "a cell was sent twice");
      // So that its page may be zeroed on the way.
      expect(cell.cell * 256 >= upper_before.at(cell.seat), "a cell names a page with entries");
    }
    expect(static_cast<std::int64_t>(sent.size()) <= limits_.update_cells_max(), "too many cells");
    shadow_.apply(update);
    check_shadow();
  }
  std::int64_t wanted(std::int32_t seat) const {
    return live_.count(seat) ? upper(live_.at(seat)) + live_.at(seat).lookahead : 0;
  }

  // Once all updates are carried out: each seat reaches its own pages and no others.
  void check_shadow() const {
    std::set<std::int32_t> writable;
    for (std::int32_t seat = 0; seat < limits_.seats_max; ++seat) {
      const std::int64_t limit = shadow_.limit[size(seat)];
      expect(limit == wanted(seat), "a limit on the device is not upper length and lookahead");
      for (std::int64_t cell = 0; cell < cells(limit); ++cell) {
        const std::int32_t page = shadow_.table[size(seat)][size(cell)];
        expect(page == live_.at(seat).pages[size(cell)], "a table cell is not the ledger's page");
        expect(writable.insert(page).second, "two seats can write one page");
      }
    }
  }

  void run_oldest() {
    const auto at = std::ranges::find_if(uncounted_, [](const ModelStep& s) { return !s.ran; });
    if (at == uncounted_.end()) return;
    ModelStep& step = *at;
    device_.apply(step.update);
    step.outcomes.assign(step.rows.size(), Outcome{});
    for (std::int32_t run = 0; run < step.update.header().repeat; ++run) {
      for (std::size_t i = 0; i < step.rows.size(); ++i) {
        run_row(step.rows[i], step.update.batch_rows()[i], step.outcomes[i]);
      }
    }
    step.ran = true;
  }
  void run_row(ModelRow& row, const BatchRowUpdate& planned, Outcome& outcome) {
    const std::size_t seat = size(planned.seat);
    std::int64_t& length = device_.length[seat];
    if (device_.stopped[seat] == 0 && planned.tokens > 0) {
      expect(length + planned.tokens <= device_.limit[seat], "a row would pass its limit");
      for (std::int64_t cell = length / 256; cell < cells(length + planned.tokens); ++cell) {
        expect(device_.table[seat][size(cell)] == row.pages[size(cell)],
               "a row would write into a page that is not its own");
      }
      const bool runs_once = planned.tokens > limits_.draft_max + 1;
      const std::int64_t kept =
          runs_once || random_.chance(60) ? planned.tokens : random_.in(0, planned.tokens);
      length += kept;
      outcome.kept_tokens += static_cast<std::int32_t>(kept);
      // Draft passes behind the run.
      expect(length + row.lookahead <= device_.limit[seat], "a draft pass would pass the limit");
      for (std::int64_t cell = length / 256; cell < cells(length + row.lookahead); ++cell) {
        expect(device_.table[seat][size(cell)] == row.pages[size(cell)],
               "a draft pass would write into a page that is not its own");
      }
      device_.stopped[seat] = random_.chance(4) ? 1 : 0;
    }
    outcome.stopped = device_.stopped[seat] != 0;
    row.length_after = length;
  }

  void compare(const Ledger& ledger) const {
    ledger.check_invariants();
    const Usage u = ledger.usage();
    std::int64_t owned = 0;
    std::int64_t promised = 0;
    for (const auto& [seat, r] : live_) {
      owned += static_cast<std::int64_t>(r.pages.size());
      promised += promise_left(r);
      const RequestInfo info = ledger.info(r.id);
      expect(info.seat == SeatId(seat) && info.settled_tokens == r.settled &&
                 info.upper_tokens == upper(r) && info.secured_tokens == r.secured &&
                 info.context_max_tokens == r.context_max && info.stopped == r.stopped &&
                 info.pages_owned == static_cast<std::int64_t>(r.pages.size()) &&
                 info.pages_promised == promise_left(r),
             "info differs from the model");
      expect(std::ranges::equal(ledger.pages_of(r.id), r.pages, {}, &PageId::value),
             "pages_of differs from the model");
    }
    const auto free = static_cast<std::int64_t>(free_pages_.size());
    expect(u.pages_free == free && u.pages_owned == owned && u.pages_held == pages_held() &&
               u.pages_promised == promised && u.pages_sink == (sink_ >= 0) &&
               u.pages_total == u.pages_free + u.pages_owned + u.pages_held + u.pages_sink,
           "usage of pages differs from the model");
    const auto seats_free = static_cast<std::int64_t>(free_seats_.size());
    const auto seats_owned = static_cast<std::int64_t>(live_.size());
    expect(u.seats_free == seats_free && u.seats_owned == seats_owned &&
               u.seats_held == seats_held() &&
               u.seats_total == u.seats_free + u.seats_owned + u.seats_held,
           "usage of seats differs from the model");
    expect(ledger.headroom().pages == unpromised() && ledger.headroom().seats == seats_free,
           "headroom differs from the model");
  }

  const Limits limits_;
  Random random_;
  std::map<std::int32_t, ModelRequest> live_;  // by seat
  std::vector<RequestId> former_;
  std::map<HoldId, ModelHold> holds_;
  std::deque<ModelStep> uncounted_;
  std::set<std::int32_t> free_pages_, free_seats_;
  std::set<std::int32_t> unknown_;  // seats that only an abandoned update has told
  std::int32_t sink_ = -1;
  StepId next_ = 0;
  Device shadow_;  // all updates carried out
  Device device_;  // those of the steps that ran
};

}  // namespace quire::test
