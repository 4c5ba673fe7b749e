// What the decoder of the example reads: its attention and its picks against float64 over the same
// bytes of the pages.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/support/test_backend.h"
#include "tests/support/tiny_v4_decoder.h"

namespace {

using namespace quire;
using namespace quire::serving;
using namespace quire::serving::test;
using quire::test::test_backend;

// The regions of a cache, copied to the host once.
struct Bytes {
  Bytes(Decoder& decoder) : device(decoder.cache.device()) {
    for (const auto& [from, to] :
         {std::pair(device.pages_memory(), &pages), std::pair(device.seats_memory(), &seats)}) {
      to->resize(from.size());
      if (from.empty()) continue;
      decoder.backend.copy(to->data(), from.data(), static_cast<std::int64_t>(from.size()),
                           decoder.stream);
    }
    decoder.stream.wait();
  }
  EntryPool in_pages(EntryPool pool) const {
    pool.base = const_cast<std::byte*>(pages.data()) + (pool.base - device.pages_memory().data());
    return pool;
  }
  EntryPool in_seats(EntryPool pool) const {
    pool.base = const_cast<std::byte*>(seats.data()) + (pool.base - device.seats_memory().data());
    return pool;
  }

  const DeviceCache& device;
  std::vector<std::byte> pages, seats;
};

double decode_e4m3(std::byte code) {
  const auto u = static_cast<int>(code);
  const int exponent = u >> 3 & 15;
  const int mantissa = u & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (u & 0x80) != 0 ? -magnitude : magnitude;
}

std::vector<double> decode_main(const EntryPool& pool, std::int64_t at) {
  std::vector<double> entry;
  for (std::int64_t c = 0; c < 448; ++c) {
    const auto byte = static_cast<int>(pool.main_scales(at)[c / 64]);
    entry.push_back(std::ldexp(decode_e4m3(pool.main_data(at)[c]), byte - 127));
  }
  for (std::int64_t c = 0; c < 64; ++c) {
    std::uint16_t half;
    std::memcpy(&half, pool.main_data(at) + 448 + 2 * c, 2);
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    entry.push_back(value);
  }
  return entry;
}

// The newest token of a request in the only layer of the decoder, which was input row `row`.
class Reference {
 public:
  Reference(Decoder& decoder, const Live& live, std::int64_t row)
      : decoder_(decoder), bytes_(decoder), live_(live), config_(decoder.model.config()) {
    const TinyV4Arrays& arrays = decoder.model.arrays();
    low = decoder.fetch(arrays.q_low + row * config_.q_rank, config_.q_rank);
    projection = decoder.fetch(decoder.model.weights().layers[0].queries,
                               config_.q_rank * config_.query_width(kind()));
    queries = decoder.fetch(arrays.queries + row * config_.query_stride(), config_.query_stride());
    attended =
        decoder.fetch(arrays.attended + row * config_.attended_width(), config_.attended_width());
    weights = decoder.fetch(
        arrays.projected + row * config_.projected_stride() + config_.head_weights_at(),
        config_.indexer_heads);
    const auto raw =
        decoder.fetch(reinterpret_cast<const float*>(arrays.picks) + row * config_.index_topk,
                      config_.index_topk);
    picks.resize(raw.size());
    std::memcpy(picks.data(), raw.data(), raw.size() * sizeof(float));
    sinks = decoder.fetch(decoder.model.weights().layers[0].sinks, config_.heads);
    const auto group = kind() == LayerKind::kSliding ? 0u : 1u;
    rope = decoder.fetch(decoder.model.weights().rope[group].values + (live.length - 1) * kRopeDim,
                         kRopeDim);
  }

  LayerKind kind() const { return bytes_.device.spec().layers[0]; }

  std::int64_t location(std::int64_t entry, std::int64_t per_page) const {
    const auto pages = decoder_.cache.ledger().pages_of(live_.id);
    return pages[static_cast<std::size_t>(entry / per_page)].value * per_page + entry % per_page;
  }

  std::vector<std::vector<double>> entries() const {
    std::vector<std::vector<double>> list;
    const EntryPool ring = bytes_.in_seats(bytes_.device.window_ring(LayerId(0)));
    const std::int64_t ring_tokens = bytes_.device.window_ring_tokens();
    const std::int64_t first = decoder_.seat_of(live_.id).value * ring_tokens;
    for (std::int64_t p = std::max(0, live_.length - 128); p < live_.length; ++p) {
      list.push_back(decode_main(ring, first + p % ring_tokens));
    }
    if (kind() == LayerKind::kCsa) {
      const EntryPool pool = bytes_.in_pages(bytes_.device.csa_pages(LayerId(0)));
      for (const std::int32_t pick : picks) {
        if (pick >= 0) list.push_back(decode_main(pool, location(pick, 64)));
      }
    } else if (kind() == LayerKind::kHca) {
      const EntryPool pool = bytes_.in_pages(bytes_.device.hca_pages(LayerId(0)));
      for (std::int64_t e = 0; e < live_.length / 128; ++e) {
        list.push_back(decode_main(pool, location(e, 2)));
      }
    }
    return list;
  }

  // One head, de-rotated at the position of the query.
  std::vector<double> attend(std::int64_t head,
                             const std::vector<std::vector<double>>& list) const {
    const auto q = [&](std::size_t c) {
      return static_cast<double>(queries[static_cast<std::size_t>(head) * 512 + c]);
    };
    std::vector<double> scores;
    double most = sinks[static_cast<std::size_t>(head)];
    for (const auto& entry : list) {
      double score = 0;
      for (std::size_t c = 0; c < 512; ++c) score += q(c) * entry[c];
      scores.push_back(score / std::sqrt(512.0));
      most = std::max(most, scores.back());
    }
    double sum = std::exp(sinks[static_cast<std::size_t>(head)] - most);
    std::vector<double> out(512, 0.0);
    for (std::size_t i = 0; i < list.size(); ++i) {
      const double weight = std::exp(scores[i] - most);
      sum += weight;
      for (std::size_t c = 0; c < 512; ++c) out[c] += weight * list[i][c];
    }
    for (double& value : out) value /= sum;
    for (std::size_t i = 0; i < 64; i += 2) {
      const double cos = rope[i], sin = rope[i + 1], x = out[448 + i], y = out[449 + i];
      out[448 + i] = x * cos + y * sin;
      out[449 + i] = y * cos - x * sin;
    }
    return out;
  }

  // Both kinds of queries, from the low-rank row that they are projected from: heads normed and
  // rotated; those of the indexer rotated and taken through the Hadamard matrix.
  std::vector<double> expected_queries() const {
    const auto width = static_cast<std::size_t>(config_.query_width(kind()));
    std::vector<double> expected(width, 0.0);
    for (std::size_t k = 0; k < low.size(); ++k) {
      for (std::size_t n = 0; n < width; ++n) {
        expected[n] += static_cast<double>(low[k]) * projection[k * width + n];
      }
    }
    const auto rotate = [&](double* tail) {
      for (std::size_t i = 0; i < 64; i += 2) {
        const double x = tail[i], y = tail[i + 1];
        tail[i] = x * rope[i] - y * rope[i + 1];
        tail[i + 1] = x * rope[i + 1] + y * rope[i];
      }
    };
    const auto main_width = static_cast<std::size_t>(config_.attended_width());
    for (std::size_t at = 0; at < main_width; at += 512) {
      double squares = 0;
      for (std::size_t c = 0; c < 512; ++c) squares += expected[at + c] * expected[at + c];
      for (std::size_t c = 0; c < 512; ++c) expected[at + c] *= 3 / std::sqrt(squares / 512 + 1e-6);
      rotate(&expected[at + 448]);
    }
    for (std::size_t at = main_width; at < width; at += 128) {
      rotate(&expected[at + 64]);
      const std::vector<double> before(&expected[at], &expected[at] + 128);
      for (std::size_t i = 0; i < 128; ++i) {
        expected[at + i] = 0;
        for (std::size_t j = 0; j < 128; ++j) {
          const bool minus = std::popcount(i & j) % 2 == 1;  // natural order
          expected[at + i] += (minus ? -before[j] : before[j]) / std::sqrt(128.0);
        }
      }
    }
    return expected;
  }

  std::vector<double> index_scores() const {
    const EntryPool pool = bytes_.in_pages(bytes_.device.indexer_pages(LayerId(0)));
    std::vector<double> scores;
    for (std::int64_t e = 0; e < live_.length / 4; ++e) {
      const std::int64_t at = location(e, 64);
      float scale;
      std::memcpy(&scale, pool.indexer_scale(at), 4);
      double score = 0;
      for (std::int32_t h = 0; h < config_.indexer_heads; ++h) {
        double product = 0;
        for (std::int64_t c = 0; c < 128; ++c) {
          const auto at_q = static_cast<std::size_t>(config_.attended_width() + h * 128 + c);
          product += static_cast<double>(queries[at_q]) * decode_e4m3(pool.indexer_values(at)[c]) *
                     static_cast<double>(scale);
        }
        score += static_cast<double>(weights[static_cast<std::size_t>(h)]) * std::max(product, 0.0);
      }
      scores.push_back(score);
    }
    return scores;
  }

  std::vector<float> low, projection, queries, attended, weights, sinks, rope;
  std::vector<std::int32_t> picks;

 private:
  Decoder& decoder_;
  Bytes bytes_;
  const Live& live_;
  TinyV4Config config_;
};

// The tolerances of FlashMLA's tests (SPEC 7).
void check_attention(const Reference& reference, std::int32_t heads) {
  const auto list = reference.entries();
  for (std::int32_t h = 0; h < heads; ++h) {
    const std::vector<double> expected = reference.attend(h, list);
    double xy = 0, xx = 0, yy = 0, worst = 0;
    bool close = true;
    for (std::size_t c = 0; c < 512; ++c) {
      const double x = reference.attended[static_cast<std::size_t>(h) * 512 + c];
      const double y = expected[c];
      const double off = std::abs(x - y);
      close = close && (off < 1e-3 || off < 2.01 / 128 * std::abs(y));
      worst = std::max(worst, off);
      xy += x * y;
      xx += x * x;
      yy += y * y;
    }
    CAPTURE(h);
    CAPTURE(worst);
    CHECK(close);
    CHECK(1 - 2 * xy / (xx + yy) < 5e-6);
    CHECK(worst < 2e-5);  // fp32 does better than those
    CHECK(yy > 0.1);
  }
}

void check_queries(const Reference& reference) {
  double worst = 0;
  const std::vector<double> expected = reference.expected_queries();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, std::abs(expected[i] - reference.queries[i]));
  }
  CHECK(worst < 1e-4);
}

// Returns whether the last pick and a refused entry had the same score, of zero.
bool check_picks(const Reference& reference, std::int32_t topk) {
  const std::vector<double> scores = reference.index_scores();
  const auto count = std::min<std::size_t>(scores.size(), static_cast<std::size_t>(topk));
  std::vector<bool> picked(scores.size(), false);
  std::int32_t before = -1;
  double least = INFINITY;
  std::int32_t last_zero = -1;
  for (std::size_t k = 0; k < reference.picks.size(); ++k) {
    const std::int32_t pick = reference.picks[k];
    if (k >= count) {
      CHECK(pick == -1);
      continue;
    }
    REQUIRE(pick > before);
    REQUIRE(static_cast<std::size_t>(pick) < scores.size());
    before = pick;
    const double score = scores[static_cast<std::size_t>(pick)];
    picked[static_cast<std::size_t>(pick)] = true;
    least = std::min(least, score);
    if (score == 0) last_zero = pick;
  }
  bool tie = false;
  for (std::size_t e = 0; e < scores.size(); ++e) {
    if (picked[e]) continue;
    CHECK(scores[e] <= least + 1e-4);
    if (scores[e] != 0 || last_zero < 0) continue;
    tie = true;
    CHECK(static_cast<std::int32_t>(e) > last_zero);
  }
  return tie;
}

TEST_CASE("attention over the pages agrees with float64 attention over the same bytes") {
  bool tie = false;
  for (const LayerKind kind : {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca}) {
    Decoder decoder(test_backend(), {kind}, 640);
    const TinyV4Config& config = decoder.model.config();
    for (const std::int32_t prompt : {1, 4, 130, 255, 290, 480, 519, 600}) {
      CAPTURE(name_of(kind));
      CAPTURE(prompt);
      Live live = decoder.admit(prompt);
      // In two chunks, so that the second reads positions before it; then decode steps, whose only
      // token is input row 0 and reads the ring.
      const std::int32_t second = (prompt + 2) / 3;
      if (second < prompt) decoder.prefill(live, prompt - second);
      decoder.prefill(live, second);
      std::int64_t row = second - 1;
      for (int i = 0; i < 4; ++i, row = 0) {
        const Reference reference(decoder, live, row);
        check_queries(reference);
        check_attention(reference, config.heads);
        if (kind == LayerKind::kCsa && check_picks(reference, config.index_topk)) tie = true;
        decoder.step({&live}, {1}, StepShape::decode(1));
      }
      decoder.cache.ledger().release(live.id);
    }
  }
  CHECK(tie);  // else nothing was said about ties
}

}  // namespace
