// The host form of the engine's part, and the choice between the two.
#include "tests/soak/feed.h"

#include <cstring>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>

namespace quire::soak {
namespace {

void supply(const FeedParams& params) {
  for (std::int32_t r = 0; r < params.shape.rows; ++r) supply_row(params, r);
}

void feed(const FeedParams& params) {
  for (std::int32_t i = 0; i < params.inputs; ++i) {
    const FeedInput& input = params.input[i];
    for (std::int32_t t = 0; t < params.shape.tokens; ++t) {
      const std::byte* from = source_of(params, input, t);
      std::byte* to = input.rows + t * input.row_bytes;
      const auto bytes = static_cast<std::size_t>(input.row_bytes);
      if (from != nullptr) {
        std::memcpy(to, from, bytes);
      } else {
        std::memset(to, 0xFF, bytes);
      }
    }
  }
  if (params.part != FeedPart::kTarget) return;
  for (std::int32_t r = 0; r < params.shape.rows; ++r) sample_into(params, r);
}

}  // namespace

void enqueue_visit(const VisitInput& visit, VisitInput* to, StreamView stream) {
  if (!stream.is_host()) return visit_on_cuda(visit, to, stream);
  stream.host()->enqueue([visit, to] { *to = visit; });
}

void enqueue_supply(const FeedParams& params, StreamView stream) {
  if (!stream.is_host()) return supply_on_cuda(params, stream);
  stream.host()->enqueue([params] { supply(params); });
}

void enqueue_feed(const FeedParams& params, StreamView stream) {
  if (!stream.is_host()) return feed_on_cuda(params, stream);
  stream.host()->enqueue([params] { feed(params); });
}

#ifndef QUIRE_WITH_CUDA
void visit_on_cuda(const VisitInput&, VisitInput*, StreamView) {
  throw UsageError("the soak was built without CUDA");
}
void supply_on_cuda(const FeedParams&, StreamView) {
  throw UsageError("the soak was built without CUDA");
}
void feed_on_cuda(const FeedParams&, StreamView) {
  throw UsageError("the soak was built without CUDA");
}
#endif

}  // namespace quire::soak
