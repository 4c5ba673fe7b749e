#include "examples/server.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include <quire/runtime/base/errors.h>

#include "examples/stand_in_math.h"
#include "examples/stand_in_model.h"

namespace quire::serving {
namespace {

constexpr PlanBufferId kDecodeBuffer(0);
constexpr PlanBufferId kPrefillBuffer(1);

std::unique_ptr<ServingModel> make_model(Backend& backend, const ServerOptions& options,
                                         Stream& stream) {
  if (options.model == ModelKind::kTinyV4) {
    return std::make_unique<TinyV4>(backend, options.spec, options.limits, stream, options.tiny_v4);
  }
  return std::make_unique<StandInModel>(backend, options.spec, options.limits, stream,
                                        options.draft_acceptance);
}

std::int64_t heard_bytes(const Limits& limits) {
  return std::int64_t{sizeof(DeviceReport)} +
         round_up<std::int64_t>(limits.rows_max * std::int64_t{sizeof(RowResult)},
                                alignof(DeviceReport));
}

// Drafts that draft passes write behind what the last verified step can keep.
std::int32_t lookahead_of(const ServerOptions& options) { return std::max(options.drafts - 1, 0); }

ServerOptions with_visits(ServerOptions options) {
  QUIRE_CHECK(options.steps_per_visit >= 1, "steps_per_visit is ", options.steps_per_visit,
              "; it is at least 1");
  QUIRE_CHECK(options.drafts >= 0, "drafts is ", options.drafts, "; it is at least 0");
  QUIRE_CHECK(options.draft_acceptance >= 0.0f && options.draft_acceptance <= 1.0f,
              "draft_acceptance is ", options.draft_acceptance, "; it is a share, from 0 to 1");
  QUIRE_CHECK(
      options.drafts == 0 || options.model == ModelKind::kStandIn || options.spec.draft_layers > 0,
      "drafts is ", options.drafts, ", but the model has no draft layer to make them");
  Limits& limits = options.limits;
  limits.draft_max = std::max<std::int64_t>(limits.draft_max, options.drafts);
  limits.repeat_max = std::max<std::int64_t>(limits.repeat_max, options.steps_per_visit);
  limits.tokens_max = std::max(limits.tokens_max, limits.rows_max * (options.drafts + 1));
  limits.context_max += tokens_beyond(options);
  if (options.chunk_tokens == 0) options.chunk_tokens = limits.tokens_max;
  return options;
}

bool is_only_stopped_rows(const DeviceReport& report) {
  DeviceReport expected{};
  expected.rows_stopped = report.rows_stopped;
  expected.first_failing_seat = report.first_failing_seat;
  return std::memcmp(&report, &expected, sizeof(report)) == 0;
}

}  // namespace

// A visit secures K x (d + 1) tokens beyond the upper length, which lets every visit whose outcome
// does not count yet (run_ahead_max + 1 of them) keep as much. It is prepared only if those that
// keep one token a step, the least there is, would leave a token to generate.
std::int64_t tokens_beyond(const ServerOptions& options) {
  const std::int64_t steps = options.steps_per_visit;
  const std::int64_t visits = options.limits.run_ahead_max + 1;
  return (visits + 1) * steps * (options.drafts + 1) - visits * steps - 1 + lookahead_of(options);
}

Server::Server(Backend& backend, const ServerOptions& options)
    : backend_(&backend),
      options_(with_visits(options)),
      stream_(backend),
      cache_(backend, options_.spec, options_.limits),
      model_(make_model(backend, options_, stream_)),
      graphs_([&] {
        model_->bind(cache_.device());
        return DecodeGraphs(
            cache_, kDecodeBuffer, decode_shapes(),
            [this](StepShape shape, PlanBufferId buffer, StreamView stream) {
              model_->enqueue_step(cache_.device(), buffer, shape, stream);
            },
            stream_);
      }()),
      heard_(backend, (options_.limits.run_ahead_max + 1) * heard_bytes(options_.limits)) {
  for (std::int64_t i = 0; i <= options_.limits.run_ahead_max; ++i) events_.emplace_back(backend);
}

Server::~Server() {
  try {
    stream_.wait();  // what steps in flight read and write goes with the members
  } catch (...) {    // the error that ends the server has been told
  }
}

std::vector<StepShape> Server::decode_shapes() const {
  const std::int64_t most = std::min(options_.limits.rows_max, options_.limits.seats_max);
  std::vector<StepShape> shapes;
  const auto add = [&](std::int64_t rows) {
    shapes.push_back(StepShape::decode(static_cast<std::int32_t>(rows), tokens_per_row()));
  };
  for (std::int64_t rows = 1; rows < most; rows *= 2) add(rows);
  add(most);
  return shapes;
}

ServerStatistics Server::run(const std::vector<TraceRequest>& requests,
                             const std::function<void(const ServerStatistics&)>& progress) {
  statistics_ = {};
  last_token_.assign(requests.size(), {});
  has_token_.assign(requests.size(), false);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    waiting_.push_back({number, mix(options_.seed + static_cast<std::uint32_t>(i)), requests[i]});
  }
  const auto count = static_cast<std::int64_t>(requests.size());
  verify_every_ = options_.verify > 0 ? std::max<std::int64_t>(1, count / options_.verify) : 0;

  auto reported = Clock::now();
  while (!waiting_.empty() || !running_.empty()) {
    admit_waiting();
    const bool prefilled = prefill_step();
    const bool decoded = decode_visit();
    if (!prefilled && !decoded && !pending_.empty()) settle_oldest();
    retire_finished();
    if (Clock::now() - reported > std::chrono::seconds(1)) {
      reported = Clock::now();
      progress(statistics_);
    }
  }
  while (!pending_.empty()) settle_oldest();
  stream_.wait();
  cache_.ledger().check_invariants();
  return statistics_;
}

void Server::admit_waiting() {
  while (!waiting_.empty()) {
    Request& request = waiting_.front();
    const std::int64_t context_max = request.total() + tokens_beyond(options_);
    const std::int64_t promised =
        options_.promise == Promise::kWhole ? context_max : request.lengths.prompt_tokens;
    const auto admitted = cache_.ledger().admit(context_max, promised);
    if (!admitted) {
      QUIRE_CHECK(!running_.empty(), "request ", request.number, " does not fit into an empty ",
                  "cache: ", admitted.shortfall().describe());
      ++statistics_.admissions_delayed;
      return;
    }
    request.id = admitted.value();
    model_->begin_request(cache_.ledger().info(request.id).seat,
                          {request.seed, request.lengths.prompt_tokens, request.total()}, stream_);
    last_token_[static_cast<std::size_t>(request.number)] = Clock::now();
    has_token_[static_cast<std::size_t>(request.number)] = false;
    running_.push_back(std::make_shared<Request>(request));
    waiting_.pop_front();
    const Usage usage = cache_.ledger().usage();
    statistics_.seats_peak = std::max(statistics_.seats_peak, usage.seats_owned);
  }
}

bool Server::prefill_step() {
  std::vector<BatchRow> rows;
  std::vector<RequestPointer> prefilled;
  std::int64_t room = options_.chunk_tokens;
  for (const RequestPointer& request : running_) {
    if (!request->prefilling()) continue;
    if (room == 0 || static_cast<std::int64_t>(rows.size()) == options_.limits.rows_max) break;
    const std::int64_t tokens = std::min(room, request->lengths.prompt_tokens - request->tokens);
    if (!secure(*request, tokens)) break;  // decoding goes on and frees pages
    rows.push_back({request->id, static_cast<std::int32_t>(tokens)});
    request->tokens += tokens;
    if (!request->prefilling()) prefilled.push_back(request);
    room -= tokens;
    statistics_.prompt_tokens += tokens;
  }
  if (rows.empty()) return false;
  // Chunks no longer than a verified step read the window ring and come first.
  std::stable_partition(rows.begin(), rows.end(), [&](const BatchRow& row) {
    return row.tokens <= options_.limits.draft_max + 1;
  });
  const auto shape = StepShape::ragged(static_cast<int>(rows.size()),
                                       static_cast<int>(options_.chunk_tokens - room));
  begin(rows, shape, kPrefillBuffer, std::move(prefilled));
  // Nothing in a prefill depends on the device: what was prepared for a live request is kept.
  for (const BatchRow& row : rows) pending_.back().outcomes.push_back({row.tokens, false});
  model_->enqueue_step(cache_.device(), kPrefillBuffer, shape, stream_);
  events_[pending_.back().place].record(stream_);
  ++statistics_.prefill_steps;
  return true;
}

// Whether the visits ahead leave it anything to generate, if they keep one token a step.
bool Server::decodes_next(const Request& request) const {
  return !request.prefilling() && !request.stopped &&
         request.tokens + request.visits_ahead * options_.steps_per_visit < request.total();
}

bool Server::decode_visit() {
  const std::int32_t lookahead = lookahead_of(options_);
  const std::int64_t tokens = options_.steps_per_visit * tokens_per_row() + lookahead;
  // Securing may preempt, and so take from `running_`: rows are collected afterwards.
  for (std::size_t i = 0; i < running_.size();) {
    if (!decodes_next(*running_[i]) || secure(*running_[i], tokens)) {
      ++i;
    } else {
      preempt_youngest();
    }
  }
  std::vector<BatchRow> rows;
  std::vector<RequestPointer> decoded;
  for (const RequestPointer& request : running_) {
    if (!decodes_next(*request)) continue;
    if (static_cast<std::int64_t>(rows.size()) == options_.limits.rows_max) break;
    rows.push_back({request->id, tokens_per_row(), lookahead});
    decoded.push_back(request);
    ++request->visits_ahead;
  }
  if (rows.empty()) return false;
  const StepShape shape =
      graphs_.shape_for(static_cast<std::int64_t>(rows.size()), tokens_per_row());
  begin(rows, shape, kDecodeBuffer, std::move(decoded));
  launch_visit(shape, rows.size());
  return true;
}

// The host's part of all K steps: one launch each, and one place to hear of them.
void Server::launch_visit(StepShape shape, std::size_t rows) {
  const std::int64_t steps = options_.steps_per_visit;
  for (std::int64_t step = 0; step < steps; ++step) graphs_.launch(shape, stream_);
  PendingStep& visit = pending_.back();
  const Heard heard = heard_at(visit.place);
  cache_.device().results(kDecodeBuffer, heard.results.first(rows), stream_);
  cache_.device().report(kDecodeBuffer, heard.report, stream_);
  events_[visit.place].record(stream_);
  ++statistics_.decode_visits;
  statistics_.decode_steps += steps;
  statistics_.replays_by_rows[shape.rows] += steps;
  statistics_.padded_rows += steps * (shape.rows - static_cast<std::int64_t>(rows));
}

bool Server::secure(const Request& request, std::int64_t tokens) {
  const bool fits = static_cast<bool>(cache_.ledger().reserve(request.id, tokens));
  statistics_.pages_peak = std::max(statistics_.pages_peak, cache_.ledger().usage().pages_owned);
  return fits;
}

// Its pages are free at once, though steps that touch them are in flight: the stream orders reuse.
void Server::preempt_youngest() {
  const Request& victim = *running_.back();
  cache_.ledger().release(victim.id);
  waiting_.push_front({victim.number, victim.seed, victim.lengths});
  running_.pop_back();
  ++statistics_.preemptions;
}

void Server::begin(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
                   std::vector<RequestPointer> requests) {
  while (static_cast<std::int64_t>(pending_.size()) > options_.limits.run_ahead_max) {
    settle_oldest();
  }
  const StepId id = cache_.begin_step(rows, shape, buffer, stream_,
                                      shape.is_decode() ? options_.steps_per_visit : 1);
  pending_.push_back({id, {}, std::move(requests), shape.is_decode(), next_place_});
  next_place_ = (next_place_ + 1) % events_.size();
}

Server::Heard Server::heard_at(std::size_t place) const {
  const Limits& limits = options_.limits;
  std::byte* const at = heard_.data() + static_cast<std::int64_t>(place) * heard_bytes(limits);
  return {reinterpret_cast<DeviceReport*>(at),
          {reinterpret_cast<RowResult*>(at + sizeof(DeviceReport)),
           static_cast<std::size_t>(limits.rows_max)}};
}

void Server::settle_oldest() {
  PendingStep step = std::move(pending_.front());
  pending_.pop_front();
  const Clock::time_point waits = Clock::now();
  events_[step.place].wait();  // an engine reads its tokens here
  const Clock::time_point now = Clock::now();
  statistics_.host_waited += now - waits;
  if (step.decodes) {
    hear_visit(step, now);
  } else {
    for (const RequestPointer& request : step.requests) count_latency(*request, 1, now);
  }
  cache_.ledger().settle(step.id, step.outcomes);
}

void Server::hear_visit(PendingStep& visit, Clock::time_point now) {
  const Heard heard = heard_at(visit.place);
  if (!is_only_stopped_rows(*heard.report)) {
    const DeviceReport& report = *heard.report;
    throw Error(concat(
        "decode visit ", visit.id, ": the device reports rows at their limit ",
        report.rows_at_limit, ", out of steps ", report.rows_out_of_steps, ", of a wrong shape ",
        report.rows_wrong_shape, ", wrongly kept ", report.rows_kept_wrong, ", at wrong positions ",
        report.rows_wrong_positions, ", of wrong counts ", report.rows_wrong_tokens,
        ", of former owners ", report.rows_of_former_owners, ", appends without a plan ",
        report.appends_unplanned, ", commits without a plan ", report.commits_unplanned,
        ", tiles that are not finite ", report.nonfinite_tiles));
  }
  for (std::size_t r = 0; r < visit.requests.size(); ++r) {
    Request& request = *visit.requests[r];
    const RowResult& result = heard.results[r];
    const std::int64_t kept = result.length - request.tokens;
    // What is prepared ahead, and how much is secured, counts on a token a step.
    if (kept < options_.steps_per_visit && result.stopped == 0) {
      throw Error(concat("decode visit ", visit.id, ": request ", request.number, " kept ", kept,
                         " tokens in ", options_.steps_per_visit, " steps"));
    }
    visit.outcomes.push_back({static_cast<std::int32_t>(kept), result.stopped != 0});
    request.tokens = result.length;
    request.stopped = result.stopped != 0;
    --request.visits_ahead;
    statistics_.output_tokens += kept;
    count_latency(request, kept, now);
  }
  statistics_.decoded_rows +=
      options_.steps_per_visit * static_cast<std::int64_t>(visit.requests.size()) -
      heard.report->rows_stopped;
}

void Server::count_latency(const Request& request, std::int64_t tokens, Clock::time_point now) {
  if (tokens == 0) return;
  const auto number = static_cast<std::size_t>(request.number);
  Latencies& latencies = has_token_[number] ? statistics_.next_token : statistics_.first_token;
  latencies.add((now - last_token_[number]) / tokens);
  last_token_[number] = now;
  has_token_[number] = true;
}

void Server::retire_finished() {
  std::erase_if(running_, [&](const RequestPointer& request) {
    if (!request->finished()) return false;
    if (verified(*request)) wait_to_verify(*request);
    cache_.ledger().release(request->id);
    ++statistics_.requests_finished;
    return true;
  });
}

// Visits in flight find it stopped and leave its bytes alone.
void Server::wait_to_verify(const Request& request) {
  stream_.wait();
  statistics_.bytes_verified += model_->wait_to_verify(
      cache_.device(), stream_,
      {request.number, request.seed, request.lengths.prompt_tokens, request.tokens,
       cache_.ledger().info(request.id).seat, cache_.ledger().pages_of(request.id)});
  ++statistics_.requests_verified;
}

bool Server::verified(const Request& request) const {
  return verify_every_ > 0 && request.number % verify_every_ == 0 &&
         statistics_.requests_verified < options_.verify;
}

}  // namespace quire::serving
