// Banks, graphs and the engine's part of each step; what is read back goes over a stream of its own,
// so that reading waits for one visit and for nothing behind it.
#include "tests/soak/world.h"

#include <algorithm>
#include <cstddef>

namespace quire::soak {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

// The banks of all caches hold the same rows.
test::TestEngineOptions options_of(const Limits& limits) {
  test::TestEngineOptions options;
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits = limits;
  options.contents = kContents;
  options.bank_tokens = kContext;
  return options;
}

Limits one_request() {
  Limits limits;
  limits.seats_max = limits.rows_max = 1;
  limits.tokens_max = limits.context_max = kContext;
  limits.pages = limits.cells_max();
  limits.run_ahead_max = 0;
  return limits;
}

}  // namespace

Oracle::Oracle(Backend& backend) : engine_(backend, options_of(one_request())) { engine_.poison(); }

const std::vector<std::byte>& Oracle::bytes_of(std::int64_t content, std::int64_t tokens) {
  auto& bytes = known_[{content, tokens}];
  if (bytes.empty()) bytes = one_shot(engine_, content, static_cast<std::int32_t>(tokens));
  return bytes;
}

World::World(Backend& backend, const Limits& limits)
    : engine_(backend, options_of(limits)),
      reader_(backend),
      visits_(backend, engine_.stream(), size(limits.plan_buffers), 0),
      results_(backend, engine_.stream(), size(limits.run_ahead_max + 2), 0),
      kept_(backend, engine_.stream(), size(limits.rows_max), 0),
      stop_(backend, engine_.stream(), size(limits.rows_max), 0) {
  QUIRE_CHECK(limits.seats_max <= kSeatsMost, "the soak has at most ", kSeatsMost, " seats");
  for (std::size_t i = 0; i < results_.size(); ++i) events_.emplace_back(backend);
  feed_.kept = kept_.data();
  feed_.stop = stop_.data();
  feed_.draft_max = limits.draft_max;
  feed_.bank_tokens = kContext;
  feed_.contents = static_cast<std::int32_t>(kContents);
  const auto add = [&](const std::byte* bank, std::byte* rows, std::int64_t row_bytes) {
    if (bank != nullptr) feed_.input[feed_.inputs++] = {bank, rows, row_bytes};
  };
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const auto rows = engine_.rows_of(LayerId(layer));
    add(rows.window_bank, rows.window, 512 * 2);
    add(rows.csa_bank, rows.csa, 2048 * 4);
    add(rows.indexer_bank, rows.indexer, 512 * 4);
    add(rows.hca_bank, rows.hca, 1024 * 4);
  }
  const auto most = static_cast<std::int32_t>(limits.rows_max);
  for (const std::int32_t rows : {(most + 1) / 2, most}) {
    for (std::int32_t tokens = 1; tokens <= limits.draft_max + 1;
         tokens += std::max(1, static_cast<std::int32_t>(limits.draft_max))) {
      shapes_.push_back(StepShape::decode(rows, tokens));
    }
  }
  for (std::int32_t buffer = 0; buffer < limits.plan_buffers; ++buffer) {
    graphs_.push_back(std::make_unique<DecodeGraphs>(
        cache(), PlanBufferId(buffer), shapes_,
        [this](StepShape shape, PlanBufferId on, StreamView s) { enqueue_step(shape, on, s); },
        stream()));
  }
  engine_.poison();
}

StepShape World::captured_shape(std::int64_t rows, std::int32_t tokens_per_row,
                                PlanBufferId buffer) {
  return graphs_[size(buffer.value)]->shape_for(rows, tokens_per_row);
}

void World::start_visit(PlanBufferId buffer, const VisitInput& visit) {
  enqueue_visit(visit, visits_.data() + buffer.value, stream());
}

void World::enqueue_appends(StepShape shape, PlanBufferId buffer, StreamView on) {
  DeviceCache& device = cache().device();
  device.enqueue_plan(buffer, on);
  FeedParams feed = feed_;
  feed.shape = shape;
  feed.views = device.views(buffer);
  feed.header = device.plan_buffer(buffer).header;
  feed.visit = visits_.data() + buffer.value;
  enqueue_feed(feed, on);
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const auto rows = engine_.rows_of(LayerId(layer));
    AppendInputs inputs;
    inputs.window.data = rows.window;
    inputs.csa.data = rows.csa;
    inputs.indexer.data = rows.indexer;
    inputs.hca.data = rows.hca;
    device.append(LayerId(layer), buffer, inputs, on);
  }
}

void World::enqueue_step(StepShape shape, PlanBufferId buffer, StreamView on) {
  enqueue_appends(shape, buffer, on);
  cache().device().enqueue_commit(buffer, kept_.data(), stop_.data(), on);
}

void World::run(PlanBufferId buffer, StepShape shape, Run how) {
  if (how == Run::kReplay) return graphs_[size(buffer.value)]->launch(shape, stream());
  if (how == Run::kEagerPlannedTwice) enqueue_appends(shape, buffer, stream());
  enqueue_step(shape, buffer, stream());
  if (how == Run::kEagerCommittedTwice) {
    cache().device().enqueue_commit(buffer, kept_.data(), stop_.data(), stream());
  }
}

void World::replay_graph(PlanBufferId buffer, StepShape graph) {
  graphs_[size(buffer.value)]->graph(graph).launch(stream());
}

void World::keep_result(StepId id, PlanBufferId buffer) {
  const std::size_t at = size(id) % results_.size();
  Backend& backend = engine_.backend();
  const DeviceCache& device = cache().device();
  const StepTable& table = device.step_table();
  const std::int64_t bytes = limits().seats_max * std::int64_t{sizeof(std::int32_t)};
  auto* to = reinterpret_cast<std::byte*>(results_.data() + at);
  backend.copy(to + offsetof(VisitResult, report), device.plan_buffer(buffer).report,
               sizeof(DeviceReport), stream());
  backend.copy(to + offsetof(VisitResult, length), table.length, bytes, stream());
  backend.copy(to + offsetof(VisitResult, stopped), table.stopped, bytes, stream());
  events_[at].record(stream());
}

VisitResult World::wait_for_result(StepId id) {
  const std::size_t at = size(id) % results_.size();
  events_[at].join_into(reader_);
  VisitResult result{};
  engine_.backend().copy(&result, results_.data() + at, sizeof result, reader_);
  reader_.wait();
  return result;
}

std::vector<std::int32_t> World::wait_for_words(const std::int32_t* from, std::int64_t count) {
  std::vector<std::int32_t> words(size(count));
  engine_.backend().copy(words.data(), from, count * std::int64_t{sizeof(std::int32_t)}, stream());
  engine_.stream().wait();
  return words;
}

void World::reset() {
  cache().reset(stream());
  engine_.poison();
}

}  // namespace quire::soak
