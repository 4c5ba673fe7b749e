// The engine's calls between steps.
#include "tests/soak/engine.h"

#include <algorithm>
#include <utility>

namespace quire::soak {

using test::expect;
using test::size;

Engine::Engine(World& world, Oracle& oracle, Counts& counts, std::uint64_t seed)
    : world_(world),
      oracle_(oracle),
      counts_(counts),
      random_(seed),
      model_(world.limits(), kTargetLayers, kDraftLayers) {
  personality_ = in(0, 2);
}

void Engine::one_step() {
  for (std::int64_t calls = in(0, 3); calls > 0; --calls) call_between();
  if (chance(3)) padding_visit();
  if (chance(4)) prepare_and_abandon();
  visit();
  ledger().check_invariants();
  check_pages();
  check_addresses();
  if (chance(12)) compare_some(2);
  if (chance(5)) compare_table();
}

void Engine::call_between() {
  const std::int64_t dice = in(1, 100);
  if (dice <= 45 || live_.empty()) {
    admit();
  } else if (dice <= 70) {
    finish_stopped();
  } else if (dice <= 71 + 3 * personality_) {
    release(any_live(), "cancels");
  } else if (dice <= 88) {
    hold();
  } else {
    drop();
  }
}

Job Engine::new_job() {
  Job job;
  job.content = static_cast<std::int32_t>(in(0, kContents - 1));
  constexpr std::int64_t kEdges[] = {1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 512, kContext};
  job.goal = chance(40) ? kEdges[size(in(0, std::ssize(kEdges) - 1))] : in(1, kContext);
  job.context_max = chance(50) ? job.goal : in(job.goal, kContext);
  return job;
}

void Engine::admit() {
  const bool again = !waiting_.empty();
  const Job job = again ? waiting_.front() : new_job();
  const std::int64_t promised = chance(60) ? 0 : in(0, job.context_max);
  const auto answer = ledger().admit(job.context_max, promised);
  if (!answer) {
    ++counts_["shortfalls of admit"];
    return;
  }
  if (again) waiting_.pop_front();
  ++counts_[again ? "admissions after preemption" : "admissions"];
  live_.push_back({answer.value(), job});
}

void Engine::release(std::size_t at, const char* why) {
  const Live gone = live_[at];
  const bool in_flight = std::ranges::any_of(visits_, [&](const Visit& visit) {
    return !visit.settled && std::ranges::any_of(visit.rows, [&](const VisitRow& row) {
      return row.request == gone.id;
    });
  });
  if (in_flight) ++counts_["releases with steps in flight"];
  const auto pages = ledger().pages_of(gone.id);
  for (HoldRecord& hold : holds_) {
    if (hold.request != gone.id) continue;
    // Readable is what it owns now, as far as the hold had it.
    const bool seen = !visits_.empty() && ledger().info(gone.id).upper_tokens > 0;
    hold.final_lengths = seen ? model_.lengths(gone.id.index) : Lengths{};
    const bool whole = std::ranges::equal(
        std::span(hold.pages).first(std::min(hold.pages.size(), pages.size())), pages);
    if (!whole) hold.final_lengths = Lengths{};
  }
  ledger().release(gone.id);
  live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(at));
  ++counts_[why];
}

// The pages of another go to who needs them, at once, whatever is in flight.
void Engine::preempt_for(const Batch& batch, RequestId needy) {
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < live_.size(); ++i) {
    const bool used = std::ranges::any_of(
        batch.rows, [&](const BatchRow& row) { return row.request == live_[i].id; });
    if (live_[i].id != needy && !used) others.push_back(i);
  }
  if (others.empty()) return;
  const std::size_t victim = others[size(in(0, std::ssize(others) - 1))];
  waiting_.push_back(live_[victim].job);
  release(victim, "preemptions");
}

// Requests of which the engine has heard that they stopped.
void Engine::finish_stopped() {
  for (std::size_t i = live_.size(); i-- > 0;) {
    const RequestInfo info = ledger().info(live_[i].id);
    if (!info.stopped) continue;
    if (chance(25)) {
      ledger().resume(live_[i].id);
      ++counts_["resumes"];
    } else if (chance(70)) {
      if (chance(20)) {
        const auto snapshot = world_.wait_for_snapshot();
        compare(snapshot, live_[i].id.index, ledger().pages_of(live_[i].id),
                model_.lengths(live_[i].id.index), live_[i].job.content, "a finished request");
      }
      release(i, "finished");
    }
  }
}

void Engine::hold() {
  if (live_.empty()) return;
  const std::size_t at = any_live();
  const Live owner = live_[at];
  const auto pages = ledger().pages_of(owner.id);
  HoldRecord record{.id = {},
                    .request = owner.id,
                    .pages = {pages.begin(), pages.end()},
                    .job = owner.job,
                    .with_seat = chance(70)};
  const auto answer = record.with_seat ? ledger().hold(owner.id) : ledger().hold(record.pages);
  if (!answer) {
    ++counts_["shortfalls of hold"];
    return;
  }
  record.id = answer.value();
  holds_.push_back(std::move(record));
  ++counts_["holds"];
  if (chance(40)) release(at, "cancels");
}

void Engine::drop() {
  if (holds_.empty()) return;
  const std::size_t at = size(in(0, std::ssize(holds_) - 1));
  const HoldRecord record = holds_[at];
  const Lengths readable = record.final_lengths.value_or(Lengths{});
  if (record.with_seat && readable.target > 0 && chance(60)) {
    const auto snapshot = world_.wait_for_snapshot();
    compare(snapshot, record.request.index, record.pages, readable, record.job.content,
            "a held request");
    ++counts_["comparisons of held requests after release"];
  }
  ledger().drop(record.id);
  holds_.erase(holds_.begin() + static_cast<std::ptrdiff_t>(at));
}

// A page has one owner, and none beside its hold once that owner is gone.
void Engine::check_pages() {
  std::vector<const char*> owner(size(world_.limits().pages), nullptr);
  for (const Live& live : live_) {
    for (const PageId page : ledger().pages_of(live.id)) {
      expect(owner[size(page.value)] == nullptr, "two requests own one page");
      owner[size(page.value)] = "a request";
    }
  }
  for (const HoldRecord& hold : holds_) {
    if (!hold.final_lengths.has_value()) continue;
    for (const PageId page : hold.pages) {
      expect(owner[size(page.value)] == nullptr, "a held page was given to another");
    }
  }
}

// Once all updates are carried out, each seat reaches its own pages as far as its upper length and
// what its draft passes look ahead.
void Engine::check_addresses() {
  std::vector<std::int64_t> limit(size(world_.limits().seats_max), 0);
  for (const Live& live : live_) {
    const auto pages = ledger().pages_of(live.id);
    limit[size(live.id.index)] = ledger().info(live.id).upper_tokens + live.lookahead;
    for (std::int64_t cell = 0; cell * kPageTokens < limit[size(live.id.index)]; ++cell) {
      expect(model_.device().table[size(live.id.index)][size(cell)] == pages[size(cell)].value,
             "the updates name another page than the ledger");
    }
  }
  expect(limit == model_.device().limit,
         "the updates set another limit than upper length and lookahead");
}

void Engine::finish() {
  compare_some(std::ssize(live_));
  compare_table();
  for (std::int64_t i = in(0, 2); i > 0; --i) visit();  // in flight when all is forgotten
  world_.reset();
  ++counts_["resets"];
}

}  // namespace quire::soak
