// A model of the example and its cache, and the steps of a small engine: for tests that look at
// what one request generates, and at what its attention has read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/decode_graphs.h>

#include "examples/tiny_v4.h"

namespace quire::serving::test {

inline constexpr PlanBufferId kBuffer(0);
inline TinyV4Config small_config() {
  TinyV4Config config;
  config.hidden = 64;
  config.heads = 2;
  config.indexer_heads = 2;
  config.vocabulary = 256;
  return config;
}

// What one request generated: token by token, and the logits that each was the largest of.
struct Generation {
  std::vector<std::int32_t> tokens;
  std::vector<std::vector<float>> logits;

  bool same_bits(const Generation& other) const {
    if (tokens != other.tokens || logits.size() != other.logits.size()) return false;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (std::memcmp(logits[i].data(), other.logits[i].data(), logits[i].size() * sizeof(float)) !=
          0) {
        return false;
      }
    }
    return true;
  }
};

inline Limits small_limits(std::int64_t context) {
  Limits limits;
  limits.seats_max = 20;
  limits.rows_max = 20;
  limits.tokens_max = std::max<std::int64_t>(context, 256);
  limits.context_max = context;
  limits.pages = limits.seats_max * limits.cells_max();
  return limits;
}

struct Live {
  RequestId id;
  std::int32_t prompt;
  std::int32_t length = 0;
  Generation made;
};

// A model and its cache, and the steps of a small engine.
class Decoder {
 public:
  Decoder(Backend& on, std::vector<LayerKind> layers, std::int64_t context,
          const TinyV4Config& config = small_config())
      : backend(on),
        stream(on),
        cache(on, ModelSpec{.layers = layers}, small_limits(context)),
        model(on, ModelSpec{.layers = layers}, small_limits(context), stream, config) {
    model.bind(cache.device());
  }

  static std::uint32_t seed_of(std::int32_t prompt) {
    return 77u + static_cast<std::uint32_t>(prompt);
  }

  Live admit(std::int32_t prompt) {
    const std::int64_t most = cache.device().limits().context_max;
    const RequestId id = cache.ledger().admit(most, most).value();
    model.begin_request(seat_of(id), {seed_of(prompt), prompt}, stream);
    return {id, prompt, 0, {}};
  }
  SeatId seat_of(RequestId id) const { return cache.ledger().info(id).seat; }

  // One step of `tokens[i]` further tokens of each request; what comes after a whole prompt is
  // kept.
  void step(std::vector<Live*> rows, const std::vector<std::int32_t>& tokens, StepShape shape,
            const DecodeGraphs* graphs = nullptr) {
    std::vector<BatchRow> batch;
    std::vector<Outcome> outcomes;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      cache.ledger().reserve(rows[r]->id, tokens[r]).value();
      batch.push_back({rows[r]->id, tokens[r]});
      outcomes.push_back({tokens[r], false});
    }
    const StepId id = cache.begin_step(batch, shape, kBuffer, stream);
    if (graphs != nullptr) {
      graphs->launch(shape, stream);
    } else {
      model.enqueue_step(cache.device(), kBuffer, shape, stream);
    }
    stream.wait();
    cache.ledger().settle(id, outcomes);
    std::int32_t input_row = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      Live& live = *rows[r];
      live.length += tokens[r];
      input_row += tokens[r];
      if (live.length >= live.prompt) keep(live, input_row - 1);
    }
  }

  void prefill(Live& live, std::int32_t tokens) {
    step({&live}, {tokens}, StepShape::ragged(1, tokens));
  }

  std::vector<float> fetch(const float* from, std::int64_t count) {
    std::vector<float> to(static_cast<std::size_t>(count));
    backend.copy(to.data(), from, count * std::int64_t{4}, stream);
    stream.wait();
    return to;
  }

  std::vector<float> logits_of(std::int64_t input_row) {
    const std::int64_t width = model.config().vocabulary;
    return fetch(model.arrays().logits + input_row * width, width);
  }

  Backend& backend;
  Stream stream;
  CacheManager cache;
  TinyV4 model;

 private:
  void keep(Live& live, std::int64_t input_row) {
    live.made.logits.push_back(logits_of(input_row));
    const auto tokens = model.wait_for_tokens(model.arrays().history, seat_of(live.id), stream);
    live.made.tokens.push_back(tokens[static_cast<std::size_t>(live.length)]);
  }
};

}  // namespace quire::serving::test
