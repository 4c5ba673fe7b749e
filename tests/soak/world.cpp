// Banks, graphs and the engine's part of each step; what is read back goes over a stream of its
// own, so that reading waits for one visit and for nothing behind it.
#include "tests/soak/world.h"

#include <algorithm>
#include <cstddef>

namespace quire::soak {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

// The banks of all caches hold the same rows.
test::TestEngineOptions options_of(const Limits& limits, std::int64_t draft_layers) {
  test::TestEngineOptions options;
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, LayerKind::kHca,
                         LayerKind::kCsa};
  options.spec.draft_layers = draft_layers;
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

DraftPart captured_part(std::int32_t number, StepShape shape, std::int64_t draft_max) {
  // Of a ring without room for drafts a pass would take the oldest entry.
  const std::int32_t passes = draft_max == 0 ? 0 : shape.tokens_per_row;
  const DraftPart parts[kCapturedParts] = {
      {0, true, 0}, {1, true, shape.tokens_per_row - 1}, {2, true, passes}, {1, false, 0}};
  return parts[number];
}

Oracle::Oracle(Backend& backend) : engine_(backend, options_of(one_request(), 0)) {
  engine_.poison();
}

const std::vector<std::byte>& Oracle::bytes_of(std::int64_t content, LayerGroup group,
                                               std::int64_t tokens) {
  Groups& groups = known_[{content, tokens}];
  if (groups[0].empty()) {
    const RequestId request = engine_.admit(content, tokens);
    engine_.ragged_step({{request, static_cast<std::int32_t>(tokens)}});
    const auto snapshot = engine_.snapshot();
    const Ledger& ledger = engine_.cache().ledger();
    for (const LayerGroup of : {LayerGroup::kTarget, LayerGroup::kDraft}) {
      groups[static_cast<std::size_t>(of)] = engine_.live_bytes(
          snapshot, ledger.info(request).seat, ledger.pages_of(request), tokens, layers_of(of));
    }
    engine_.release(request);
  }
  return groups[static_cast<std::size_t>(group)];
}

World::World(Backend& backend, const Limits& limits)
    : engine_(backend, options_of(limits, kDraftLayers)),
      reader_(backend),
      visits_(backend, engine_.stream(), size(limits.plan_buffers), 0),
      results_(backend, engine_.stream(), size(limits.run_ahead_max + 2), 0),
      kept_(backend, engine_.stream(), size(limits.rows_max), 0),
      stop_(backend, engine_.stream(), size(limits.rows_max), 0),
      seen_(backend, engine_.stream(), size(limits.rows_max), 0),
      supplied_(backend, engine_.stream(), size(limits.rows_max), 0),
      lasting_(backend, engine_.stream(), size(limits.rows_max), 0) {
  QUIRE_CHECK(limits.seats_max <= kSeatsMost, "the soak has at most ", kSeatsMost, " seats");
  for (std::size_t i = 0; i < results_.size(); ++i) events_.emplace_back(backend);
  feed_.kept = kept_.data();
  feed_.stop = stop_.data();
  feed_.seen = seen_.data();
  feed_.supplied = supplied_.data();
  feed_.lasting = lasting_.data();
  feed_.table = cache().device().step_table();
  feed_.draft_max = limits.draft_max;
  feed_.bank_tokens = kContext;
  feed_.contents = static_cast<std::int32_t>(kContents);
  add_inputs();
  const auto most = static_cast<std::int32_t>(limits.rows_max);
  for (const std::int32_t rows : {(most + 1) / 2, most}) {
    for (std::int32_t tokens = 1; tokens <= limits.draft_max + 1;
         tokens += std::max(1, static_cast<std::int32_t>(limits.draft_max))) {
      shapes_.push_back(StepShape::decode(rows, tokens));
    }
  }
  for (std::int32_t buffer = 0; buffer < limits.plan_buffers; ++buffer) {
    capture(buffer);
  }
  engine_.poison();
}

void World::add_inputs() {
  const ModelSpec& spec = cache().device().spec();
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    Inputs& inputs = inputs_[static_cast<std::size_t>(spec.group_of(LayerId(layer)))];
    const auto add = [&](const std::byte* bank, std::byte* rows, std::int64_t row_bytes) {
      if (bank != nullptr) inputs.input[inputs.count++] = {bank, rows, row_bytes};
    };
    const auto rows = engine_.rows_of(LayerId(layer));
    add(rows.window_bank, rows.window, 512 * 2);
    add(rows.csa_bank, rows.csa, 2048 * 4);
    add(rows.indexer_bank, rows.indexer, 512 * 4);
    add(rows.hca_bank, rows.hca, 1024 * 4);
  }
}

void World::capture(std::int32_t buffer) {
  for (std::int32_t part = 0; part < kCapturedParts; ++part) {
    const auto step = [this, part](StepShape shape, PlanBufferId on, StreamView s) {
      enqueue_step({shape, on, s, {}}, captured_part(part, shape, limits().draft_max));
    };
    graphs_.push_back(
        std::make_unique<DecodeGraphs>(cache(), PlanBufferId(buffer), shapes_, step, stream()));
  }
}

StepShape World::captured_shape(std::int64_t rows, std::int32_t tokens_per_row,
                                PlanBufferId buffer) {
  return graphs_[size(buffer.value * kCapturedParts)]->shape_for(rows, tokens_per_row);
}

void World::start_visit(PlanBufferId buffer, const VisitInput& visit) {
  enqueue_visit(visit, visits_.data() + buffer.value, stream());
}

FeedParams World::feed_of(const Step& step, FeedPart part, std::int32_t number, bool counted) {
  const DeviceCache& device = cache().device();
  const Inputs& inputs = inputs_[part == FeedPart::kTarget ? 0 : 1];
  FeedParams feed = feed_;
  feed.part = part;
  feed.number = number;
  feed.counted = counted;
  feed.inputs = inputs.count;
  std::copy(std::begin(inputs.input), std::end(inputs.input), feed.input);
  feed.shape = part == FeedPart::kPass ? StepShape::decode(step.shape.rows, 1) : step.shape;
  feed.views = device.views(step.buffer);
  feed.header = device.plan_buffer(step.buffer).header;
  feed.visit = visits_.data() + step.buffer.value;
  return feed;
}

void World::enqueue_plan_and_appends(const Step& step, const PlanInputs& inputs,
                                     const FeedParams& feed) {
  DeviceCache& device = cache().device();
  const test::LayerRange layers = layers_of(inputs.group);
  for (std::int32_t plan = 0; plan < step.times.plans; ++plan) {
    device.enqueue_plan(step.buffer, step.on, inputs);
    enqueue_feed(feed, step.on);
    for (std::int32_t layer = layers.first; layer < layers.end; ++layer) {
      const auto rows = engine_.rows_of(LayerId(layer));
      AppendInputs from;
      from.window.data = rows.window;
      from.csa.data = rows.csa;
      from.indexer.data = rows.indexer;
      from.hca.data = rows.hca;
      device.append(LayerId(layer), step.buffer, from, step.on);
    }
  }
}

void World::enqueue_target(const Step& step) {
  enqueue_plan_and_appends(step, {}, feed_of(step, FeedPart::kTarget, 0, true));
  for (std::int32_t commit = 0; commit < step.times.commits; ++commit) {
    cache().device().enqueue_commit(step.buffer, kept_.data(), stop_.data(), step.on);
  }
}

void World::enqueue_extension(const Step& step, std::int32_t number, bool counted) {
  const FeedParams feed = feed_of(step, FeedPart::kExtension, number, counted);
  enqueue_supply(feed, step.on);
  PlanInputs inputs{.group = LayerGroup::kDraft};
  if (counted) inputs.row_tokens = supplied_.data();
  enqueue_plan_and_appends(step, inputs, feed);
  for (std::int32_t commit = 0; commit < step.times.commits; ++commit) {
    cache().device().enqueue_commit(step.buffer, counted ? nullptr : supplied_.data(), nullptr,
                                    step.on);
  }
}

void World::enqueue_pass(const Step& step, std::int32_t number) {
  const FeedParams feed = feed_of(step, FeedPart::kPass, number, true);
  enqueue_supply(feed, step.on);
  enqueue_plan_and_appends(
      step, {.group = LayerGroup::kDraft, .tokens_per_row = 1, .positions = supplied_.data()},
      feed);
}

void World::enqueue_step(const Step& step, const DraftPart& part) {
  enqueue_target(step);
  for (std::int32_t i = 0; i < part.extensions; ++i) enqueue_extension(step, i, part.counted);
  for (std::int32_t i = 0; i < part.passes; ++i) enqueue_pass(step, i);
}

void World::run(PlanBufferId buffer, StepShape shape, const DraftPart& part, const Times& times) {
  enqueue_step({shape, buffer, stream(), times}, part);
}

void World::replay(PlanBufferId buffer, StepShape shape, std::int32_t part) {
  graphs_[size(buffer.value * kCapturedParts + part)]->launch(shape, stream());
}

void World::replay_wrong(PlanBufferId buffer, StepShape shape, std::int32_t part) {
  graphs_[size(buffer.value * kCapturedParts + part)]->graph(shape).launch(stream());
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
  backend.copy(to + offsetof(VisitResult, length), table.length_of(LayerGroup::kTarget), bytes,
               stream());
  backend.copy(to + offsetof(VisitResult, draft_length), table.length_of(LayerGroup::kDraft), bytes,
               stream());
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
