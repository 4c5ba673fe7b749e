// A small engine around tiny_v4 that goes away for whole visits: it prepares a visit of K steps,
// replays the captured step K times, and hears what became of it while the next visit runs. Its
// batch rows stand in another order in each visit, some requests sit a visit out, others join.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/decode_graphs.h>

#include "examples/live_bytes.h"
#include "examples/pinned_memory.h"
#include "examples/tiny_v4.h"
#include "tests/support/three_ways.h"

namespace quire::serving::test {

inline TinyV4Config tiny_config() {
  TinyV4Config config;
  config.hidden = 64;
  config.heads = 1;
  config.indexer_heads = 1;
  config.vocabulary = 128;
  config.end_token = 11;
  return config;
}

struct VisitRequest {
  std::uint32_t seed;
  std::int32_t prompt_tokens;
  std::int32_t tokens_max;
};

// What became of it, as the cache and the model hold it when it has stopped.
struct VisitedRequest {
  std::int32_t length = 0;
  std::vector<std::int32_t> tokens;            // by position, to the one behind the length
  std::vector<std::vector<std::byte>> layers;  // live bytes
  // By length, if asked for: what was drafted to stand behind the next token.
  std::map<std::int32_t, std::vector<std::int32_t>> drafted;

  // That of the prompt follows from its seed.
  bool same_tokens(const VisitedRequest& other, std::int32_t prompt_tokens) const {
    const auto from = static_cast<std::size_t>(prompt_tokens);
    return length == other.length &&
           std::equal(tokens.begin() + static_cast<std::ptrdiff_t>(from), tokens.end(),
                      other.tokens.begin() + static_cast<std::ptrdiff_t>(from), other.tokens.end());
  }
};

struct VisitOptions {
  std::int32_t drafts = 0;  // of one batch row in one step, at most
  std::int32_t steps = 1;   // of one visit
  bool ahead = true;        // the next visit is launched before this one is heard of; rows shuffled
  std::uint32_t seed = 1;   // of the order of the batch rows
  bool keep_drafted = false;                  // only where no visit is ahead
  std::function<void(bool begins)> on_visit;  // around what a visit enqueues
};

struct VisitCounts {
  std::int64_t visits = 0, rows = 0, tokens = 0, rows_moved = 0, rows_ahead = 0;
  std::int64_t rows_found_stopped = 0;        // by steps, behind the one that stopped them
  std::map<std::int32_t, std::int64_t> kept;  // rows by tokens that a whole visit kept
};

class Visits {
 public:
  static constexpr std::int64_t kRowsMax = 8;

  Visits(Backend& backend, const ModelSpec& spec, const TinyV4Config& config,
         std::int32_t tokens_max, const VisitOptions& options)
      : backend_(backend),
        options_(options),
        heard_(backend, kHeard * kHeardBytes),
        random_(options.seed),
        stream_(backend),
        cache_(backend, spec, limits_of(tokens_max, options)),
        model_(backend, spec, cache_.device().limits(), stream_, config),
        graphs_([&] {
          model_.bind(cache_.device());
          const std::vector<StepShape> shapes{shape_of(kRowsMax), shape_of(3)};
          return DecodeGraphs(
              cache_, kDecode, shapes,
              [this](StepShape shape, PlanBufferId buffer, StreamView on) {
                model_.enqueue_step(cache_.device(), buffer, shape, on);
              },
              stream_);
        }()) {
    for (std::int64_t i = 0; i < kHeard; ++i) events_.emplace_back(backend);
  }

  // Where a check has thrown, visits are in flight.
  ~Visits() {
    try {
      stream_.wait();
    } catch (...) {
    }
  }

  // Serves all requests to their end. `truth` is what they will generate, if it is known.
  std::vector<VisitedRequest> serve(std::span<const VisitRequest> requests,
                                    const std::vector<VisitedRequest>* truth = nullptr) {
    requests_ = requests;
    truth_ = truth;
    made_.assign(requests.size(), {});
    while (next_ < requests.size() || !live_.empty()) {
      prefill(admit());
      if (!visit()) hear_oldest();
      while (pending_.size() > (options_.ahead ? 1u : 0u)) hear_oldest();
    }
    while (!pending_.empty()) hear_oldest();
    cache_.ledger().check_invariants();
    CHECK(cache_.ledger().usage().pages_free == cache_.ledger().usage().pages_total);
    return made_;
  }

  const VisitCounts& counts() const { return counts_; }

 private:
  static constexpr PlanBufferId kDecode{0}, kPrefill{1};
  static constexpr std::int64_t kPrefillTokens = 320;
  static constexpr std::int64_t kHeard = 4;  // places for what visits in flight leave

  struct Live {
    std::size_t number;
    RequestId id;
    SeatId seat;
    std::int32_t length = 0;  // as heard
    std::size_t row = 0;      // of the newest visit
    bool stopped = false;
  };
  struct Heard {
    DeviceReport report;
    RowResult results[kRowsMax];
  };
  static constexpr std::int64_t kHeardBytes = sizeof(Heard);
  struct Visit {
    StepId id;
    std::vector<std::shared_ptr<Live>> rows;
    std::int64_t place;
  };

  std::int32_t tokens_per_row() const { return options_.drafts + 1; }
  StepShape shape_of(std::int64_t rows) const {
    return StepShape::decode(static_cast<std::int32_t>(rows), tokens_per_row());
  }
  std::int32_t lookahead() const { return std::max(options_.drafts - 1, 0); }
  std::int32_t tokens_of_visit() const { return options_.steps * tokens_per_row(); }

  // Of the visits whose outcome does not count yet none may run into the request's limit, though
  // each is prepared as if all drafts before it were kept.
  static Limits limits_of(std::int32_t tokens_max, const VisitOptions& options) {
    Limits limits;
    limits.seats_max = kRowsMax + 2;
    limits.rows_max = kRowsMax;
    limits.draft_max = options.drafts;
    limits.repeat_max = options.steps;
    limits.run_ahead_max = 2;  // a visit, and the prefill of new requests behind it
    limits.plan_buffers = 2;
    limits.tokens_max = kPrefillTokens;
    limits.context_max = tokens_max +
                         (limits.run_ahead_max + 2) * options.steps * (options.drafts + 1) +
                         options.drafts;
    limits.pages = limits.seats_max * limits.cells_max();
    return limits;
  }

  // New requests as long as there are seats.
  std::vector<std::shared_ptr<Live>> admit() {
    std::vector<std::shared_ptr<Live>> admitted;
    const Limits& limits = cache_.device().limits();
    while (next_ < requests_.size() && cache_.ledger().headroom().seats > 0) {
      const VisitRequest& request = requests_[next_];
      const RequestId id = cache_.ledger().admit(limits.context_max, limits.context_max).value();
      const SeatId seat = cache_.ledger().info(id).seat;
      model_.begin_request(seat, {request.seed, request.prompt_tokens, request.tokens_max},
                           stream_);
      if (truth_ != nullptr) model_.set_truth(seat, (*truth_)[next_].tokens, stream_);
      admitted.push_back(std::make_shared<Live>(Live{next_++, id, seat}));
    }
    return admitted;
  }

  // Whole prompts, as many as one step holds; short ones come first.
  void prefill(std::vector<std::shared_ptr<Live>> admitted) {
    const auto prompt = [&](const std::shared_ptr<Live>& live) {
      return requests_[live->number].prompt_tokens;
    };
    std::sort(admitted.begin(), admitted.end(),
              [&](const auto& a, const auto& b) { return prompt(a) < prompt(b); });
    for (std::size_t from = 0; from < admitted.size();) {
      std::vector<BatchRow> rows;
      std::vector<Outcome> outcomes;
      std::int32_t tokens = 0;
      for (; from < admitted.size() && rows.size() < static_cast<std::size_t>(kRowsMax) &&
             tokens + prompt(admitted[from]) <= kPrefillTokens;
           ++from) {
        Live& live = *admitted[from];
        live.length = prompt(admitted[from]);
        cache_.ledger().reserve(live.id, live.length).value();
        rows.push_back({live.id, live.length});
        outcomes.push_back({live.length, false});
        tokens += live.length;
        live_.push_back(admitted[from]);
      }
      hear_what_counts();
      const StepShape shape = StepShape::ragged(static_cast<std::int32_t>(rows.size()), tokens);
      const StepId id = begin(rows, shape, kPrefill, 1);
      model_.enqueue_step(cache_.device(), kPrefill, shape, stream_);
      cache_.ledger().settle(id, outcomes);
    }
  }

  // An outcome is heard before the step is prepared from which on it counts.
  void hear_what_counts() {
    while (!pending_.empty() &&
           pending_.front().id + cache_.device().limits().run_ahead_max < next_id_) {
      hear_oldest();
    }
  }

  StepId begin(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
               std::int32_t steps) {
    next_id_ = cache_.begin_step(rows, shape, buffer, stream_, steps) + 1;
    return next_id_ - 1;
  }

  std::vector<std::shared_ptr<Live>> choose_rows() {
    std::vector<std::shared_ptr<Live>> rows = live_;
    if (options_.ahead) {
      for (std::size_t i = rows.size(); i > 1; --i) {
        std::swap(rows[i - 1], rows[static_cast<std::size_t>(random_.below(static_cast<int>(i)))]);
      }
      if (random_.below(4) == 0 && rows.size() > 1) rows.pop_back();
    }
    rows.resize(std::min(rows.size(), static_cast<std::size_t>(kRowsMax)));
    return rows;
  }

  bool visit() {
    hear_what_counts();
    const std::vector<std::shared_ptr<Live>> chosen = choose_rows();
    if (chosen.empty()) return false;
    std::vector<BatchRow> rows;
    for (std::size_t r = 0; r < chosen.size(); ++r) {
      cache_.ledger().reserve(chosen[r]->id, tokens_of_visit() + lookahead()).value();
      rows.push_back({chosen[r]->id, tokens_per_row(), lookahead()});
      if (chosen[r]->row != r) ++counts_.rows_moved;
      chosen[r]->row = r;
    }
    const StepShape shape =
        graphs_.shape_for(static_cast<std::int64_t>(rows.size()), tokens_per_row());
    const std::int64_t place = counts_.visits % kHeard;
    if (!pending_.empty()) counts_.rows_ahead += static_cast<std::int64_t>(rows.size());
    if (options_.on_visit) options_.on_visit(true);
    const StepId id = begin(rows, shape, kDecode, options_.steps);
    for (std::int32_t step = 0; step < options_.steps; ++step) graphs_.launch(shape, stream_);
    cache_.device().results(kDecode, std::span(heard(place).results, rows.size()), stream_);
    cache_.device().report(kDecode, &heard(place).report, stream_);
    events_[static_cast<std::size_t>(place)].record(stream_);
    if (options_.on_visit) options_.on_visit(false);
    pending_.push_back({id, chosen, place});
    ++counts_.visits;
    return true;
  }

  Heard& heard(std::int64_t place) {
    return *reinterpret_cast<Heard*>(heard_.data() + place * kHeardBytes);
  }

  void hear_oldest() {
    if (pending_.empty()) return;
    const Visit visit = pending_.front();
    pending_.pop_front();
    events_[static_cast<std::size_t>(visit.place)].wait();
    const Heard& now = heard(visit.place);
    std::vector<Outcome> outcomes;
    for (std::size_t r = 0; r < visit.rows.size(); ++r) {
      Live& live = *visit.rows[r];
      const std::int32_t kept = now.results[r].length - live.length;
      outcomes.push_back({kept, now.results[r].stopped != 0});
      live.length += kept;
      ++counts_.rows;
      counts_.tokens += kept;
      ++counts_.kept[kept];
    }
    cache_.ledger().settle(visit.id, outcomes);
    check_report(now.report);
    for (std::size_t r = 0; r < visit.rows.size(); ++r) {
      Live& live = *visit.rows[r];
      if (outcomes[r].stopped) {
        if (!live.stopped) finish(live);
      } else if (options_.keep_drafted) {
        keep_drafted(live);
      }
    }
  }

  void keep_drafted(const Live& live) {
    const TinyV4Drafts& drafts = model_.arrays().drafts;
    std::int32_t count = 0;
    backend_.copy(&count, drafts.seat_count + live.seat.value, sizeof count, stream_);
    const auto by_position = model_.wait_for_tokens(drafts.drafted, live.seat, stream_);
    REQUIRE(count == options_.drafts);
    const auto first = by_position.begin() + live.length + 1;
    made_[live.number].drafted[live.length].assign(first, first + count);
  }

  void check_report(const DeviceReport& report) {
    counts_.rows_found_stopped += report.rows_stopped;
    DeviceReport expected{};
    expected.rows_stopped = report.rows_stopped;
    expected.first_failing_seat = report.first_failing_seat;
    REQUIRE(std::memcmp(&report, &expected, sizeof report) == 0);  // it may never come to an end
  }

  // Steps in flight find the row stopped and leave all this alone.
  void finish(Live& live) {
    live.stopped = true;
    VisitedRequest& made = made_[live.number];
    made.length = live.length;
    made.tokens = model_.wait_for_tokens(model_.arrays().history, live.seat, stream_);
    made.tokens.resize(static_cast<std::size_t>(live.length + 1));
    const DeviceCache& device = cache_.device();
    const StepTable& table = device.step_table();
    for (std::int32_t group = 0; group < table.groups; ++group) {
      CAPTURE(name_of(static_cast<LayerGroup>(group)));
      std::int32_t length = -1;
      backend_.copy(&length, table.length_of(static_cast<LayerGroup>(group)) + live.seat.value,
                    sizeof length, stream_);
      stream_.wait();
      CHECK(length == live.length);
    }
    const CachedRequest cached{device, live.seat, cache_.ledger().pages_of(live.id), live.length};
    for (std::size_t i = 0; i < device.spec().layers.size(); ++i) {
      made.layers.push_back(
          wait_for_live_bytes(cached, LayerId(static_cast<std::int32_t>(i)), stream_));
    }
    cache_.ledger().release(live.id);
    std::erase_if(live_, [&](const auto& other) { return other->number == live.number; });
  }

  Backend& backend_;
  VisitOptions options_;
  PinnedMemory heard_;
  quire::test::Random random_;
  Stream stream_;
  CacheManager cache_;
  TinyV4 model_;
  DecodeGraphs graphs_;
  std::vector<Event> events_;
  std::span<const VisitRequest> requests_;
  const std::vector<VisitedRequest>* truth_ = nullptr;
  std::vector<VisitedRequest> made_;
  std::size_t next_ = 0;  // request to be admitted
  StepId next_id_ = 0;
  std::vector<std::shared_ptr<Live>> live_;
  std::deque<Visit> pending_;
  VisitCounts counts_;
};

}  // namespace quire::serving::test
