#include "examples/server.h"

#include <algorithm>
#include <chrono>

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
    return std::make_unique<TinyV4>(backend, options.spec, options.limits, stream,
                                    options.tiny_v4);
  }
  return std::make_unique<StandInModel>(backend, options.spec, options.limits, stream);
}

}  // namespace

Server::Server(Backend& backend, const ServerOptions& options)
    : backend_(&backend),
      options_(options),
      stream_(backend),
      cache_(backend, options.spec, options.limits),
      model_(make_model(backend, options, stream_)),
      graphs_([&] {
        model_->bind(cache_.device());
        return DecodeGraphs(
            cache_, kDecodeBuffer, decode_shapes(),
            [this](StepShape shape, PlanBufferId buffer, StreamView stream) {
              model_->enqueue_step(cache_.device(), buffer, shape, stream);
            },
            stream_);
      }()) {
  if (options_.chunk_tokens == 0) options_.chunk_tokens = options_.limits.tokens_max;
}

std::vector<StepShape> Server::decode_shapes() const {
  const std::int64_t most = std::min(options_.limits.rows_max, options_.limits.seats_max);
  std::vector<StepShape> shapes;
  std::int64_t rows = 1;
  for (; rows < most; rows *= 2) shapes.push_back(StepShape::decode(static_cast<int>(rows)));
  shapes.push_back(StepShape::decode(static_cast<int>(most)));
  return shapes;
}

ServerStatistics Server::run(const std::vector<TraceRequest>& requests,
                             const std::function<void(const ServerStatistics&)>& progress) {
  statistics_ = {};
  last_token_.assign(requests.size(), {});
  has_token_.assign(requests.size(), false);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    waiting_.push_back(
        {number, mix(options_.seed + static_cast<std::uint32_t>(i)), requests[i], {}, 0});
  }
  const auto count = static_cast<std::int64_t>(requests.size());
  verify_every_ = options_.verify > 0 ? std::max<std::int64_t>(1, count / options_.verify) : 0;

  auto reported = Clock::now();
  while (!waiting_.empty() || !running_.empty()) {
    admit_waiting();
    prefill_step();
    decode_step();
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
    const std::int64_t promised = options_.promise == Promise::kWhole
                                      ? request.total()
                                      : request.lengths.prompt_tokens;
    const auto admitted = cache_.ledger().admit(request.total(), promised);
    if (!admitted) {
      QUIRE_CHECK(!running_.empty(), "request ", request.number, " does not fit into an empty ",
                  "cache: ", admitted.shortfall().describe());
      ++statistics_.admissions_delayed;
      return;
    }
    request.id = admitted.value();
    model_->begin_request(cache_.ledger().info(request.id).seat, request.seed,
                         request.lengths.prompt_tokens, stream_);
    last_token_[static_cast<std::size_t>(request.number)] = Clock::now();
    has_token_[static_cast<std::size_t>(request.number)] = false;
    running_.push_back(request);
    waiting_.pop_front();
    const Usage usage = cache_.ledger().usage();
    statistics_.seats_peak = std::max(statistics_.seats_peak, usage.seats_owned);
  }
}

void Server::prefill_step() {
  std::vector<BatchRow> rows;
  std::vector<std::int64_t> tokens_of;
  std::int64_t room = options_.chunk_tokens;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = running_[i];
    if (!request.prefilling()) continue;
    if (room == 0 || static_cast<std::int64_t>(rows.size()) == options_.limits.rows_max) break;
    const std::int64_t tokens =
        std::min(room, request.lengths.prompt_tokens - request.tokens);
    if (!secure(request, tokens)) break;  // decoding goes on and frees pages
    rows.push_back({request.id, static_cast<std::int32_t>(tokens)});
    request.tokens += tokens;
    if (!request.prefilling()) tokens_of.push_back(request.number);
    room -= tokens;
    statistics_.prompt_tokens += tokens;
  }
  if (rows.empty()) return;
  // One-token chunks read the window ring and come first.
  std::stable_partition(rows.begin(), rows.end(), [&](const BatchRow& row) {
    return row.tokens <= options_.limits.draft_max + 1;
  });
  const auto shape =
      StepShape::ragged(static_cast<int>(rows.size()),
                        static_cast<int>(options_.chunk_tokens - room));
  begin(rows, shape, kPrefillBuffer, std::move(tokens_of));
  model_->enqueue_step(cache_.device(), kPrefillBuffer, shape, stream_);
  pending_.back().done.record(stream_);
  ++statistics_.prefill_steps;
}

void Server::decode_step() {
  // Securing may preempt, and so take from `running_`: rows are collected afterwards.
  for (std::size_t i = 0; i < running_.size();) {
    if (running_[i].prefilling() || running_[i].finished() || secure(running_[i], 1)) {
      ++i;
    } else {
      preempt_youngest();
    }
  }
  std::vector<BatchRow> rows;
  std::vector<std::int64_t> tokens_of;
  for (Request& request : running_) {
    if (request.prefilling() || request.finished()) continue;
    if (static_cast<std::int64_t>(rows.size()) == options_.limits.rows_max) break;
    rows.push_back({request.id, 1});
    tokens_of.push_back(request.number);
    ++request.tokens;
    ++statistics_.output_tokens;
  }
  if (rows.empty()) return;
  const StepShape shape = graphs_.shape_for(static_cast<std::int64_t>(rows.size()));
  begin(rows, shape, kDecodeBuffer, std::move(tokens_of));
  graphs_.launch(shape, stream_);
  pending_.back().done.record(stream_);
  ++statistics_.decode_steps;
  ++statistics_.replays_by_rows[shape.rows];
  statistics_.padded_rows += shape.rows - static_cast<std::int64_t>(rows.size());
}

bool Server::secure(Request& request, std::int64_t tokens) {
  const bool fits = static_cast<bool>(cache_.ledger().reserve(request.id, tokens));
  statistics_.pages_peak = std::max(statistics_.pages_peak, cache_.ledger().usage().pages_owned);
  return fits;
}

// Its pages are free at once, though steps that touch them are in flight: the stream orders reuse.
void Server::preempt_youngest() {
  Request victim = running_.back();
  running_.pop_back();
  cache_.ledger().release(victim.id);
  victim.tokens = 0;
  waiting_.push_front(victim);
  ++statistics_.preemptions;
}

void Server::begin(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
                   std::vector<std::int64_t> tokens_of) {
  while (static_cast<std::int64_t>(pending_.size()) > options_.limits.run_ahead_max) {
    settle_oldest();
  }
  const StepId id = cache_.begin_step(rows, shape, buffer, stream_);
  PendingStep step{id, {}, std::move(tokens_of), Event(*backend_)};
  for (const BatchRow& row : rows) step.outcomes.push_back({row.tokens, false});
  pending_.push_back(std::move(step));
}

void Server::settle_oldest() {
  pending_.front().done.wait();  // an engine reads its tokens here
  cache_.ledger().settle(pending_.front().id, pending_.front().outcomes);
  const Clock::time_point now = Clock::now();
  for (const std::int64_t number : pending_.front().tokens_of) {
    const auto request = static_cast<std::size_t>(number);
    Latencies& latencies =
        has_token_[request] ? statistics_.next_token : statistics_.first_token;
    latencies.add(now - last_token_[request]);
    last_token_[request] = now;
    has_token_[request] = true;
  }
  pending_.pop_front();
}

void Server::retire_finished() {
  for (std::size_t i = 0; i < running_.size();) {
    if (!running_[i].finished()) {
      ++i;
      continue;
    }
    const Request& request = running_[i];
    if (verified(request)) {
      stream_.wait();
      const RequestInfo info = cache_.ledger().info(request.id);
      statistics_.bytes_verified += model_->wait_to_verify(
          cache_.device(), stream_,
          {request.number, request.seed, request.lengths.prompt_tokens, request.total(),
           info.seat, cache_.ledger().pages_of(request.id)});
      ++statistics_.requests_verified;
    }
    cache_.ledger().release(request.id);
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    ++statistics_.requests_finished;
  }
}

bool Server::verified(const Request& request) const {
  return verify_every_ > 0 && request.number % verify_every_ == 0 &&
         statistics_.requests_verified < options_.verify;
}

}  // namespace quire::serving
