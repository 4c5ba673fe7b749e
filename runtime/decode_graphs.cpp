// Captures a ladder of decode shapes around the engine's callback, and finds the one to replay.
#include <quire/runtime/base/errors.h>
#include <quire/runtime/decode_graphs.h>

#include <algorithm>
#include <string>
#include <utility>

namespace quire {
namespace {

std::string text_of(StepShape shape) { return concat(shape.rows, " x ", shape.tokens_per_row); }

// Largest first: the memory that a capture needs is then claimed once.
std::vector<StepShape> in_capture_order(std::span<const StepShape> shapes) {
  std::vector<StepShape> order(shapes.begin(), shapes.end());
  for (const StepShape& shape : order) {
    QUIRE_CHECK(shape.is_decode(), "DecodeGraphs: the shape of ", shape.rows, " batch rows and ",
                shape.tokens, " tokens is ragged; supported: decode shapes");
  }
  std::stable_sort(order.begin(), order.end(), [](const StepShape& a, const StepShape& b) {
    return a.tokens != b.tokens ? a.tokens > b.tokens : a.rows > b.rows;
  });
  order.erase(std::unique(order.begin(), order.end()), order.end());
  return order;
}

}  // namespace

DecodeGraphs::DecodeGraphs(CacheManager& cache, PlanBufferId buffer,
                           std::span<const StepShape> shapes, Step step, StreamView stream)
    : cache_(&cache), buffer_(buffer) {
  QUIRE_CHECK(!shapes.empty(), "DecodeGraphs was given no shape to capture");
  QUIRE_CHECK(step != nullptr, "DecodeGraphs was given no step to capture");
  Backend& backend = cache.device().backend();
  for (const StepShape& shape : in_capture_order(shapes)) {
    cache.begin_padding_step(shape, buffer, stream);
    step(shape, buffer, stream);  // loads what the engine's part loads at its first launch
    backend.wait(stream);
    Capture capture(backend, stream);
    step(shape, buffer, stream);
    entries_.push_back({shape, capture.finish()});
    if (const Logger* log = cache.device().options().log) {
      log->log(LogLevel::kDebug, concat("captured the decode step of ", text_of(shape)));
    }
  }
}

StepShape DecodeGraphs::shape_for(std::int64_t rows, std::int32_t tokens_per_row) const {
  QUIRE_CHECK(rows > 0 && tokens_per_row > 0, "DecodeGraphs::shape_for: ", rows, " batch rows of ",
              tokens_per_row, " tokens; both must be positive");
  // Entries stand largest first, so the last that has room is the smallest.
  const auto found = std::find_if(entries_.rbegin(), entries_.rend(), [&](const Entry& entry) {
    return entry.shape.rows >= rows && entry.shape.tokens_per_row >= tokens_per_row;
  });
  if (found != entries_.rend()) return found->shape;
  std::string captured;
  for (const Entry& entry : entries_) captured += concat(" ", text_of(entry.shape));
  throw UsageError(concat("DecodeGraphs: no captured shape has room for ", rows, " batch rows of ",
                          tokens_per_row, " tokens; captured (rows x tokens):", captured));
}

const GraphExec& DecodeGraphs::graph(StepShape shape) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.shape == shape; });
  QUIRE_CHECK(found != entries_.end(), "DecodeGraphs: the shape ", text_of(shape), " (",
              shape.tokens, " tokens) is not captured");
  return found->graph;
}

void DecodeGraphs::launch(StepShape shape, StreamView stream) const {
  const GraphExec& captured = graph(shape);
  const auto applied = cache_->device().applied_shape(buffer_);
  QUIRE_CHECK(applied.has_value(), "DecodeGraphs::launch: no update was applied to plan buffer ",
              buffer_.value, " since the cache was cleared");
  QUIRE_CHECK(*applied == shape, "DecodeGraphs::launch: the graph of shape ", text_of(shape),
              " was asked for, but the update applied last has the shape ", text_of(*applied), " (",
              applied->tokens, " tokens)");
  captured.launch(stream);
}

}  // namespace quire
