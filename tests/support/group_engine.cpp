// See group_engine.h.
#include "tests/support/group_engine.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/support/field_stories.h"

namespace quire::test {
namespace {

constexpr PlanBufferId kBuffer(0);
constexpr LayerGroup kTarget = LayerGroup::kTarget;
constexpr LayerGroup kDraft = LayerGroup::kDraft;

// bf16 window rows, fp32 compressor rows.
constexpr std::int64_t kWindowRowBytes = 512 * 2;
constexpr std::int64_t kCsaRowBytes = 2048 * 4;
constexpr std::int64_t kIndexerRowBytes = 512 * 4;
constexpr std::int64_t kHcaRowBytes = 1024 * 4;

std::string difference_of(const DeviceReport& report, const DeviceReport& expected) {
  const auto text = [](const DeviceReport& r) {
    return concat("at limit ", r.rows_at_limit, ", stopped ", r.rows_stopped, ", out of steps ",
                  r.rows_out_of_steps, ", wrong shape ", r.rows_wrong_shape, ", kept wrong ",
                  r.rows_kept_wrong, ", not finite ", r.nonfinite_tiles, ", seat ",
                  r.first_failing_seat, ", unplanned ", r.appends_unplanned, ", wrong positions ",
                  r.rows_wrong_positions, ", wrong tokens ", r.rows_wrong_tokens, ", padding kept ",
                  r.padding_rows_kept, ", commits unplanned ", r.commits_unplanned);
  };
  if (std::memcmp(&report, &expected, sizeof report) == 0) return "";
  return concat(text(report), "; expected ", text(expected));
}

}  // namespace

GroupEngine::GroupEngine(const TestEngineOptions& options)
    : engine_(test_backend(), options),
      rows_(static_cast<std::int32_t>(options.limits.rows_max)),
      numbers_per_step_(rows_ * (2 + static_cast<std::int32_t>(options.limits.draft_max))),
      told_numbers_(test_backend(), engine_.stream(), told_steps() * numbers_size(), 0),
      told_stops_(test_backend(), engine_.stream(), told_steps() * rows_size(), 0),
      numbers_(test_backend(), engine_.stream(), numbers_size(), 0),
      stops_(test_backend(), engine_.stream(), rows_size(), 0) {
  for (std::size_t i = 0; i < options.spec.layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    const auto at = engine_.rows_of(layer);
    const auto add = [&](std::byte* rows, const std::byte* bank, std::int64_t row_bytes) {
      if (rows != nullptr) inputs_.push_back({options.spec.group_of(layer), rows, bank, row_bytes});
    };
    add(at.window, at.window_bank, kWindowRowBytes);
    add(at.csa, at.csa_bank, kCsaRowBytes);
    add(at.indexer, at.indexer_bank, kIndexerRowBytes);
    add(at.hca, at.hca_bank, kHcaRowBytes);
  }
}

std::size_t GroupEngine::told_steps() const {
  return static_cast<std::size_t>(engine_.options().limits.repeat_max);
}

RequestId GroupEngine::admit(std::int64_t content, std::int32_t tokens) {
  const RequestId request = engine_.admit(content, engine_.options().limits.context_max);
  sequences_[request.index] = {content, 0, 0, false};
  if (tokens == 0) return request;
  const std::vector<StepRow> rows{{request, tokens}};
  const StepId id = engine_.begin(rows, StepShape::ragged(1, tokens));
  for (const LayerGroup group : {kTarget, kDraft}) {
    if (group == kDraft && device().spec().draft_layers == 0) continue;
    device().enqueue_plan(kBuffer, stream(), {.group = group});
    append(group, 0);
    device().enqueue_commit(kBuffer, nullptr, nullptr, stream());
  }
  engine_.finish(id, rows);
  sequences_[request.index] = {content, tokens, tokens, false};
  return request;
}

void GroupEngine::release(RequestId request) {
  ledger().release(request);
  sequences_.erase(request.index);
}

// --- A step in its parts ---

void GroupEngine::append(LayerGroup group, std::int64_t first_row) {
  const ModelSpec& spec = device().spec();
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerId layer(static_cast<std::int32_t>(i));
    if (spec.group_of(layer) != group) continue;
    const auto at = engine_.rows_of(layer);
    const auto rows = [&](std::byte* data, std::int64_t row_bytes) {
      return AppendInputs::Rows{data == nullptr ? nullptr : data + first_row * row_bytes, 0};
    };
    const AppendInputs inputs{rows(at.window, kWindowRowBytes), rows(at.csa, kCsaRowBytes),
                              rows(at.indexer, kIndexerRowBytes), rows(at.hca, kHcaRowBytes)};
    device().append(layer, kBuffer, inputs, stream());
  }
}

void GroupEngine::enqueue_verify() {
  device().enqueue_plan(kBuffer, stream());
  append(kTarget, 0);
  device().enqueue_commit(kBuffer, numbers_.data(), stops_.data(), stream());
}

void GroupEngine::enqueue_extend() {
  device().enqueue_plan(kBuffer, stream(), {.group = kDraft, .row_tokens = numbers_.data()});
  append(kDraft, 0);
  device().enqueue_commit(kBuffer, nullptr, nullptr, stream());
}

void GroupEngine::enqueue_pass(std::int32_t drafts, std::int32_t pass) {
  const std::int32_t* positions = numbers_.data() + (1 + pass) * rows_;
  device().enqueue_plan(kBuffer, stream(),
                        {.group = kDraft, .tokens_per_row = 1, .positions = positions});
  append(kDraft, pass_rows(drafts, pass));
}

const GraphExec& GroupEngine::graph_of(std::int32_t drafts) {
  const auto found = graphs_.find(drafts);
  if (found != graphs_.end()) return found->second;
  engine_.cache().begin_padding_step(shape(drafts), kBuffer, stream());
  stream().wait();
  Capture capture(engine_.backend(), stream());
  enqueue_verify();
  enqueue_extend();
  for (std::int32_t pass = 0; pass < drafts; ++pass) enqueue_pass(drafts, pass);
  return graphs_.emplace(drafts, capture.finish()).first->second;
}

// --- A visit ---

StepId GroupEngine::begin(const std::vector<VisitRow>& rows, const VisitShape& visit) {
  std::vector<BatchRow> batch;
  const std::int32_t ahead = visit.looks_ahead ? visit.drafts : 0;
  for (const VisitRow& row : rows) {
    const std::int32_t tokens = visit.drafts + 1;
    ledger().reserve(row.request, tokens * visit.steps + ahead).value();
    batch.push_back({row.request, tokens, ahead});
  }
  return engine_.cache().begin_step(batch, shape(visit.drafts), kBuffer, stream(), visit.steps);
}

GroupEngine::Steps GroupEngine::foretell(const std::vector<VisitRow>& rows,
                                         const VisitShape& visit) {
  Steps steps;
  for (std::int32_t k = 0; k < visit.steps; ++k) {
    std::vector<Told> step;
    for (const VisitRow& row : rows) {
      Sequence& sequence = of(row.request);
      Told told{!sequence.stopped, k == row.stop_step, sequence.target, sequence.draft};
      told.kept = row.kept[static_cast<std::size_t>(k) % row.kept.size()];
      if (told.lives) {  // also in the step that stops it
        sequence.target += told.kept;
        sequence.draft += told.kept;
      }
      sequence.stopped |= told.stops;
      step.push_back(told);
    }
    steps.push_back(std::move(step));
  }
  tell(steps, visit.drafts);
  return steps;
}

// Kept counts and positions of passes, step behind step. Padding keeps nothing.
void GroupEngine::tell(const Steps& steps, std::int32_t drafts) {
  std::vector<std::int32_t> numbers(steps.size() * numbers_size(), 0);
  std::vector<std::uint8_t> stops(steps.size() * rows_size(), 0);
  for (std::size_t k = 0; k < steps.size(); ++k) {
    std::int32_t* of_step = numbers.data() + k * numbers_size();
    for (std::size_t r = 0; r < steps[k].size(); ++r) {
      const Told& told = steps[k][r];
      of_step[r] = told.lives ? told.kept : 1;  // of a stopped row, passed over
      stops[k * rows_size() + r] = told.stops ? 1 : 0;
      for (std::int32_t pass = 0; pass < drafts; ++pass) {
        of_step[static_cast<std::size_t>((1 + pass) * rows_) + r] =
            static_cast<std::int32_t>(told.draft_start) + told.kept + pass;
      }
    }
  }
  told_numbers_.upload(numbers);
  told_stops_.upload(stops);
}

void GroupEngine::bring_numbers(std::int32_t step) {
  Backend& backend = engine_.backend();
  const std::int64_t at = std::int64_t{step} * numbers_per_step_;
  backend.copy(numbers_.data(), told_numbers_.data() + at, std::int64_t{numbers_per_step_} * 4,
               stream());
  backend.copy(stops_.data(), told_stops_.data() + std::int64_t{step} * rows_, rows_, stream());
}

void GroupEngine::bring_rows(const std::vector<VisitRow>& rows, const std::vector<Told>& step,
                             std::int32_t drafts) {
  const std::int64_t count = pass_rows(drafts, drafts);
  for (const Input& input : inputs_) {
    engine_.backend().fill(input.rows, 0xFF, count * input.row_bytes, stream());
  }
  const std::int64_t tokens = drafts + 1;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const Told& told = step[r];
    if (!told.lives) continue;
    const std::int64_t own = of(rows[r].request).content;
    const std::int64_t other = (own + 1) % engine_.options().contents;
    const std::int64_t to = static_cast<std::int64_t>(r) * tokens;
    put(kTarget, to, own, told.start, told.kept);
    put(kTarget, to + told.kept, other, told.start + told.kept, tokens - told.kept);
    put(kDraft, to, own, told.draft_start, told.kept);
    for (std::int32_t pass = 0; pass < drafts; ++pass) {
      put(kDraft, pass_rows(drafts, pass) + static_cast<std::int64_t>(r), other,
          told.draft_start + told.kept + pass, 1);
    }
  }
}

DeviceArray<std::byte> GroupEngine::make_rows(const std::vector<VisitRow>& rows,
                                              const std::vector<Told>& step, std::int32_t drafts) {
  bring_rows(rows, step, drafts);
  const std::int64_t count = pass_rows(drafts, drafts);
  std::int64_t bytes = 0;
  for (const Input& input : inputs_) bytes += count * input.row_bytes;
  DeviceArray<std::byte> made(engine_.backend(), stream(), static_cast<std::size_t>(bytes), 0);
  std::byte* to = made.data();
  for (const Input& input : inputs_) {
    engine_.backend().copy(to, input.rows, count * input.row_bytes, stream());
    to += count * input.row_bytes;
  }
  stream().wait();
  return made;
}

void GroupEngine::bring_made(const DeviceArray<std::byte>& made, std::int32_t drafts) {
  const std::int64_t count = pass_rows(drafts, drafts);
  const std::byte* from = made.data();
  for (const Input& input : inputs_) {
    engine_.backend().copy(input.rows, from, count * input.row_bytes, stream());
    from += count * input.row_bytes;
  }
}

void GroupEngine::bring_extension(const std::vector<RequestId>& requests,
                                  const std::vector<std::int32_t>& counts) {
  numbers_.upload(counts);
  const std::int64_t tokens = engine_.options().limits.draft_max + 1;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const Sequence& sequence = of(requests[r]);
    put(kDraft, static_cast<std::int64_t>(r) * tokens, sequence.content, sequence.draft, counts[r]);
  }
}

void GroupEngine::put(LayerGroup group, std::int64_t to_row, std::int64_t content,
                      std::int64_t position, std::int64_t tokens) {
  if (tokens == 0) return;
  const std::int64_t from = content * engine_.options().bank_tokens + position;
  for (const Input& input : inputs_) {
    if (input.group != group) continue;
    engine_.backend().copy(input.rows + to_row * input.row_bytes,
                           input.bank + from * input.row_bytes, tokens * input.row_bytes, stream());
  }
}

void GroupEngine::visit(const std::vector<VisitRow>& rows, const VisitShape& visit,
                        const std::function<void(std::int32_t)>& after_step) {
  const GraphExec& graph = graph_of(visit.drafts);
  const StepId id = begin(rows, visit);
  std::vector<std::int64_t> before;
  for (const VisitRow& row : rows) before.push_back(of(row.request).target);
  const Steps steps = foretell(rows, visit);
  for (std::int32_t k = 0; k < visit.steps; ++k) {
    bring_numbers(k);
    bring_rows(rows, steps[static_cast<std::size_t>(k)], visit.drafts);
    graph.launch(stream());
    if (after_step) after_step(k);
  }
  check_results(rows);
  if (visit.looks_ahead) check_report(rows, steps);
  std::vector<Outcome> outcomes;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const Sequence& sequence = of(rows[r].request);
    outcomes.push_back({static_cast<std::int32_t>(sequence.target - before[r]), sequence.stopped});
  }
  ledger().settle(id, outcomes);
}

// --- What must hold ---

void GroupEngine::check_results(const std::vector<VisitRow>& rows) {
  std::vector<RowResult> results(rows_size());
  device().results(kBuffer, results, stream());
  stream().wait();
  for (std::size_t r = 0; r < rows_size(); ++r) {
    CAPTURE(r);
    const Sequence sequence = r < rows.size() ? of(rows[r].request) : Sequence{};
    CHECK(results[r].length == sequence.target);
    CHECK(results[r].stopped == (sequence.stopped ? 1 : 0));
  }
}

// Rows are reported in each verify plan that finds them stopped, and by nothing else.
void GroupEngine::check_report(const std::vector<VisitRow>& rows, const Steps& steps) {
  DeviceReport expected{};
  expected.first_failing_seat = DeviceReport::kNoSeat;
  for (const std::vector<Told>& step : steps) {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (step[r].lives) continue;
      ++expected.rows_stopped;
      expected.first_failing_seat =
          std::min(expected.first_failing_seat, seat_of(rows[r].request).value);
    }
  }
  CHECK(difference_of(report_of(engine_), expected) == "");
}

void GroupEngine::check_live(RequestId request, const std::vector<LiveBook>& books) {
  const Snapshot snapshot = engine_.snapshot();
  for (const LayerGroup group : {kTarget, kDraft}) {
    CAPTURE(quire::name_of(group));
    const std::int64_t length = of(request).length(group);
    CAPTURE(length);
    CHECK(length_on_device(request, group) == length);
    REQUIRE(wrong_live_bytes(snapshot, request, group, books) == "");
  }
}

std::int32_t GroupEngine::length_on_device(RequestId request, LayerGroup group) {
  std::int32_t length = -1;
  const std::int32_t* at = device().step_table().length_of(group) + seat_of(request).value;
  engine_.backend().copy(&length, at, sizeof length, stream());
  stream().wait();
  return length;
}

// Of the layers of one group.
std::string GroupEngine::wrong_live_bytes(const Snapshot& snapshot, RequestId request,
                                          LayerGroup group, const std::vector<LiveBook>& books) {
  const ModelSpec& spec = device().spec();
  const std::int64_t length = of(request).length(group);
  const std::vector<std::byte> live =
      engine_.live_bytes(snapshot, seat_of(request), ledger().pages_of(request), length);
  const LiveBook& book = books[static_cast<std::size_t>(of(request).content)];
  const std::byte* at = live.data();
  for (const Pieces& run : live_pieces(spec, length)) {
    const bool in_group = spec.group_of(LayerId(static_cast<std::int32_t>(run.layer))) == group;
    for (std::int64_t i = run.first; i < run.first + run.count; ++i) {
      if (in_group && !book.has(run.layer, run.piece, i, at)) {
        return concat(name_of(run.piece), " ", i, " of layer ", run.layer);
      }
      at += bytes_of(run.piece);
    }
  }
  return "";
}

}  // namespace quire::test
