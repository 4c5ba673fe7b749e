// One layer's `append`, driven with plans made by the rule alone (no ledger, no device cache): what
// is live in pages and seats must not depend on how a sequence was cut into steps.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/planner/plan_rule.h>
#include <quire/runtime/device_cache.h>

#include "tests/support/device_array.h"
#include "tests/support/plan_fixture.h"
#include "tests/support/test_backend.h"

using namespace quire;
using quire::test::DeviceArray;
using Bytes = std::vector<std::uint8_t>;

namespace {

constexpr std::int32_t kSeats = 3;
constexpr std::int32_t kPages = 6;
constexpr std::int32_t kPageEntries = 64;
constexpr std::int32_t kDraftMax = 5;
constexpr std::int32_t kStateTokens = 16;
constexpr std::int32_t kRingTokens = 192;
constexpr std::int32_t kPositions = 600;
constexpr std::int32_t kScratchPages = 32;

// Raw rows of one request: what any chunking is fed from.
struct Sequence {
  std::int32_t seat;
  std::vector<std::int32_t> cells;  // its page table
  std::int32_t tokens;
  std::vector<float> window, csa, indexer;  // [tokens, 512 | 2048 | 512]
};

// Mostly ordinary numbers; with `wild`, NaN of both kinds, infinities, -0 and subnormals as well.
std::vector<float> random_rows(std::mt19937& random, std::int64_t count, bool wild) {
  constexpr std::uint32_t kWild[] = {0x7F800001u, 0xFFC12345u, 0x7F800000u, 0xFF800000u,
                                     0x80000000u, 0x00000001u, 0x807FFFFFu, 0x7F7FFFFFu};
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (float& x : rows) {
    x = normal(random);
    const auto draw = static_cast<std::uint32_t>(random());
    if (wild && draw % 997 == 0) std::memcpy(&x, &kWild[(draw >> 16) % 8], sizeof x);
  }
  return rows;
}

Sequence random_sequence(std::mt19937& random, std::int32_t seat, std::vector<std::int32_t> cells,
                         std::int32_t tokens, bool wild) {
  return {seat, std::move(cells), tokens, random_rows(random, tokens * 512, wild),
          random_rows(random, tokens * 2048, wild), random_rows(random, tokens * 512, wild)};
}

struct Chunk {
  const Sequence* sequence;
  std::int32_t start;
  std::int32_t tokens;
};

template <class T>
void add_rows(std::vector<T>& to, const std::vector<T>& from, std::int32_t width, const Chunk& c) {
  const auto begin = from.begin() + c.start * width;
  to.insert(to.end(), begin, begin + c.tokens * width);
}

// The plan of one step as the planners make it.
struct Plan {
  StepShape shape;
  std::vector<BatchRowRecord> rows;
  std::vector<TokenRecord> tokens;
  std::vector<PlanRecord> csa_entries;
};

class Layer {
 public:
  explicit Layer(std::mt19937& random)
      : bias_(array(random_rows(random, 8 * 512, false))),
        indexer_bias_(array(random_rows(random, 8 * 128, false))),
        weight_(array(random_rows(random, 512, false))),
        rope_(backend_, stream_, kPositions * 64, 0) {
    std::vector<float> table(kPositions * 64);
    make_rope_table(RopeGroup::kCompressing, kPositions, RopeLayout::kInterleaved, table);
    rope_.upload(table);
  }

  void append(const std::vector<Chunk>& chunks, bool decode, std::int32_t padding = 0) {
    const Plan plan = plan_of(chunks, decode, padding);
    std::vector<float> window, csa, indexer;
    for (const Chunk& c : chunks) {
      add_rows(window, c.sequence->window, 512, c);
      add_rows(csa, c.sequence->csa, 2048, c);
      add_rows(indexer, c.sequence->indexer, 512, c);
    }
    const auto tokens = static_cast<std::size_t>(plan.shape.tokens);
    window.resize(tokens * 512, NAN);
    csa.resize(tokens * 2048, NAN);
    indexer.resize(tokens * 512, NAN);
    const DeviceArray<float> window_rows = array(window);
    const DeviceArray<float> csa_rows = array(csa);
    const DeviceArray<float> indexer_rows = array(indexer);
    const DeviceArray<BatchRowRecord> rows(backend_, stream_, plan.rows);
    const DeviceArray<TokenRecord> records(backend_, stream_, plan.tokens);
    const DeviceArray<PlanRecord> entries(backend_, stream_, plan.csa_entries);
    const std::vector<PlanHeader> headers{
        test::planned_header(plan.shape, plan.csa_entries.size())};
    const DeviceArray<PlanHeader> header(backend_, stream_, headers);

    AppendParams params = common_params();
    params.shape = plan.shape;
    params.planned_form = plan_form(plan.shape.tokens_per_row, LayerGroup::kTarget);
    params.header = header.data();
    params.rows = rows.data();
    params.tokens = records.data();
    params.csa_entries = entries.data();
    params.csa_entry_capacity = static_cast<std::int32_t>(plan.csa_entries.size());
    params.window.rows = {window_rows.data(), 512, ElementType::kFloat32};
    params.window.copy_older_window = true;
    params.csa.rows = {csa_rows.data(), 2048, ElementType::kFloat32};
    params.indexer.rows = {indexer_rows.data(), 512, ElementType::kFloat32};
    backend_.append(params, Pdl::kOff, stream_);
    stream_.wait();
  }

  // All that may still be read after `length` tokens (DESIGN 5.3).
  Bytes live(const Sequence& sequence, std::int32_t length) {
    Bytes bytes;
    Bytes pages = pages_.download();
    Bytes indexer_pages = indexer_pages_.download();
    Bytes ring = ring_.download();
    const auto add = [&](const void* data, std::size_t size) {
      const auto* from = static_cast<const std::uint8_t*>(data);
      bytes.insert(bytes.end(), from, from + size);
    };
    const auto add_main = [&](const EntryPool& pool, std::int64_t location) {
      add(pool.main_data(location), kMainDataBytes);
      add(pool.main_scales(location), kMainScaleBytes);
    };
    for (std::int32_t e = 0; e < length / 4; ++e) {
      const std::int64_t location = entry_location(sequence.cells.data(), kPageEntries, e);
      add_main(main_pool(pages.data()), location);
      const EntryPool pool = indexer_pool(indexer_pages.data());
      add(pool.indexer_values(location), kIndexerDim);
      add(pool.indexer_scale(location), kIndexerScaleBytes);
    }
    for (std::int32_t p = max_of(0, length - 128); p < length; ++p) {
      add_main(main_pool(ring.data()), ring_location(kGeometry, sequence.seat, p));
    }
    const std::vector<float> state = state_.download();
    const std::vector<float> indexer_state = indexer_state_.download();
    for (std::int32_t p = first_state_position(kCsaRule, length); p < length; ++p) {
      const std::int32_t row = sequence.seat * kStateTokens + p % kStateTokens;
      add(state.data() + row * 2048, 2048 * sizeof(float));
      add(indexer_state.data() + row * 512, 512 * sizeof(float));
    }
    return bytes;
  }

  // Everything, dead bytes included.
  std::vector<Bytes> memory() const {
    std::vector<Bytes> all{pages_.download(), indexer_pages_.download(), ring_.download(),
                           scratch_.download()};
    for (const std::vector<float>& state : {state_.download(), indexer_state_.download()}) {
      all.emplace_back(state.size() * 4);
      std::memcpy(all.back().data(), state.data(), state.size() * 4);
    }
    return all;
  }

  DeviceReport report() const { return report_.download()[0]; }
  Bytes scratch() const { return scratch_.download(); }
  Bytes ring() const { return ring_.download(); }
  static EntryPool main_pool(std::uint8_t* memory) {
    return make_entry_pool(reinterpret_cast<std::byte*>(memory), main_page_bytes(64), 64);
  }

  static constexpr PlanGeometry kGeometry{kRingTokens, kDraftMax, kPageEntries, 2, -1, -1, -1, -1};

  // Norm weights and table as the host has them.
  std::vector<float> weight() const { return weight_.download(); }
  std::vector<float> rope() const { return rope_.download(); }

 private:
  static EntryPool indexer_pool(std::uint8_t* memory) {
    return make_entry_pool(reinterpret_cast<std::byte*>(memory), indexer_page_bytes(64), 64);
  }

  DeviceArray<float> array(const std::vector<float>& values) {
    return DeviceArray<float>(backend_, stream_, values);
  }

  static Plan plan_of(const std::vector<Chunk>& chunks, bool decode, std::int32_t padding) {
    Plan plan;
    std::int32_t first = 0;
    const auto count = static_cast<std::int32_t>(chunks.size());
    for (std::int32_t r = 0; r < count; ++r) {
      const Chunk& c = chunks[static_cast<std::size_t>(r)];
      const BatchRowRecord row{c.sequence->seat, c.start, c.tokens, first};
      StepTable table;  // of no cells a seat: every seat's cells begin here
      table.page_table = const_cast<std::int32_t*>(c.sequence->cells.data());
      plan.rows.push_back(row);
      for (std::int32_t j = 0; j < c.tokens; ++j) {
        plan.tokens.push_back(plan_token(kGeometry, table, row, r, j));
        if (closes_entry(kCsaRule, c.start + j)) {
          plan.csa_entries.push_back(plan_record(kCsaRule, first + j, r, c.start, j));
        }
      }
      first += c.tokens;
    }
    const std::int32_t per_row = decode ? chunks.front().tokens : 1;
    for (std::int32_t k = 0; k < padding; ++k) {
      plan.rows.push_back({-1, 0, 0, first});
      plan.tokens.insert(plan.tokens.end(), static_cast<std::size_t>(per_row), inert_token());
      plan.csa_entries.push_back(kPaddingRecord);
      first += per_row;
    }
    plan.shape = decode ? StepShape::decode(count + padding, per_row)
                        : StepShape::ragged(count + padding, first);
    if (plan.csa_entries.empty()) plan.csa_entries.push_back(kPaddingRecord);
    return plan;
  }

  AppendParams common_params() {
    AppendParams params;
    params.geometry = kGeometry;
    params.rope = {rope_.data(), kPositions, RopeLayout::kInterleaved};
    params.report = report_.data();
    params.window.norm_weight = weight_.data();
    params.window.ring = main_pool(ring_.data());
    params.window.scratch = main_pool(scratch_.data());
    params.csa.bias = bias_.data();
    params.csa.norm_weight = weight_.data();
    params.csa.state = state_.data();
    params.csa.ring_tokens = kStateTokens;
    params.csa.pages = main_pool(pages_.data());
    params.indexer.bias = indexer_bias_.data();
    params.indexer.norm_weight = weight_.data();
    params.indexer.state = indexer_state_.data();
    params.indexer.ring_tokens = kStateTokens;
    params.indexer.pages = indexer_pool(indexer_pages_.data());
    return params;
  }

  static std::vector<DeviceReport> empty_report() {
    DeviceReport report{};
    report.first_failing_seat = DeviceReport::kNoSeat;
    return {report};
  }

  // What nobody may read is NaN.
  static constexpr auto kMainBytes = static_cast<std::size_t>(main_page_bytes(64));
  Backend& backend_ = test::test_backend();
  Stream stream_{backend_};
  DeviceArray<float> bias_, indexer_bias_, weight_, rope_;
  DeviceArray<std::uint8_t> pages_{backend_, stream_, kPages * kMainBytes, 0xFF};
  DeviceArray<std::uint8_t> indexer_pages_{
      backend_, stream_, static_cast<std::size_t>(kPages* indexer_page_bytes(64)), 0xFF};
  DeviceArray<std::uint8_t> ring_{backend_, stream_, kSeats * kRingTokens / 64 * kMainBytes, 0xFF};
  DeviceArray<std::uint8_t> scratch_{backend_, stream_, kScratchPages * kMainBytes, 0xFF};
  DeviceArray<float> state_{backend_, stream_, kSeats * kStateTokens * 2048, 0xFF};
  DeviceArray<float> indexer_state_{backend_, stream_, kSeats * kStateTokens * 512, 0xFF};
  DeviceArray<DeviceReport> report_{backend_, stream_, empty_report()};
};

// The whole sequence in one ragged step, into fresh memory.
Bytes one_prefill(const Sequence& sequence, std::uint32_t layer_seed) {
  std::mt19937 random(layer_seed);
  Layer layer(random);
  layer.append({{&sequence, 0, sequence.tokens}}, false);
  return layer.live(sequence, sequence.tokens);
}

std::int32_t random_chunk(std::mt19937& random, std::int32_t left) {
  const std::int32_t longest = random() % 4 == 0 ? 200 : 9;
  return min_of(left, 1 + static_cast<std::int32_t>(random() % static_cast<unsigned>(longest)));
}

}  // namespace

TEST_CASE("any chunking leaves the bytes of one prefill") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 24; ++round) {
    CAPTURE(round);
    const std::int32_t tokens =
        round < 12 ? 1 + round : 13 + static_cast<std::int32_t>(random() % 500);
    const Sequence sequence = random_sequence(random, 1, {3, 0, 5}, tokens, round % 2 == 1);
    const Bytes expected = one_prefill(sequence, seed);
    std::mt19937 same(seed);
    Layer layer(same);
    for (std::int32_t start = 0; start < tokens;) {
      const std::int32_t chunk = random_chunk(random, tokens - start);
      const bool decode = chunk <= kDraftMax + 1 && random() % 2 == 0;
      layer.append({{&sequence, start, chunk}}, decode);
      start += chunk;
    }
    CHECK(layer.live(sequence, tokens) == expected);
  }
}

TEST_CASE("any kept prefix of a short row leaves the state of that prefix") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  Sequence sequence = random_sequence(random, 0, {1}, 40, false);
  for (const bool decode : {true, false}) {
    for (std::int32_t start = 8; start < 16; ++start) {
      for (std::int32_t kept = 1; kept <= kDraftMax + 1; ++kept) {
        CAPTURE(decode);
        CAPTURE(start);
        CAPTURE(kept);
        std::mt19937 same(seed);
        Layer layer(same);
        layer.append({{&sequence, 0, start}}, false);
        // Six tokens are tried; those behind `kept` turn out to be others, so they run again.
        Sequence tried = sequence;
        for (std::int32_t i = (start + kept) * 2048; i < 40 * 2048; ++i) {
          tried.csa[static_cast<std::size_t>(i)] = 1e5f;
        }
        layer.append({{&tried, start, kDraftMax + 1}}, decode);
        for (std::int32_t p = start + kept; p < 24; ++p) {
          layer.append({{&sequence, p, 1}}, true);
        }
        Sequence prefix = sequence;
        prefix.tokens = 24;
        REQUIRE(layer.live(prefix, 24) == one_prefill(prefix, seed));
      }
    }
  }
}

TEST_CASE("batch mates and padding change nothing, in decode and in ragged steps") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  const Sequence a = random_sequence(random, 0, {2, 4}, 290, true);
  const Sequence b = random_sequence(random, 2, {5, 1}, 210, false);
  std::mt19937 same(seed);
  Layer layer(same);
  layer.append({{&b, 0, 5}, {&a, 0, 131}}, false, 2);  // a short row stands before a long one
  layer.append({{&a, 131, 2}, {&b, 5, 2}}, true, 3);
  layer.append({{&a, 133, 157}, {&b, 7, 202}}, false, 1);
  layer.append({{&b, 209, 1}}, true, 1);
  CHECK(layer.live(a, 290) == one_prefill(a, seed));
  CHECK(layer.live(b, 210) == one_prefill(b, seed));
}

TEST_CASE("the scratch holds a long row's entries and up to 127 before them") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  Layer layer(random);
  const Sequence sequence = random_sequence(random, 1, {0, 1, 2}, 400, false);
  layer.append({{&sequence, 0, 200}}, false);
  layer.append({{&sequence, 200, 200}}, false);

  const host::FloatEnvironment environment;
  const std::vector<float> weight = layer.weight();
  const std::vector<float> table = layer.rope();
  Bytes page(static_cast<std::size_t>(main_page_bytes(64)));
  const EntryPool expected = Layer::main_pool(page.data());
  Bytes scratch = layer.scratch();
  Bytes ring = layer.ring();
  const auto same_entry = [&](const EntryPool& pool, std::int64_t location) {
    return std::memcmp(pool.main_data(location), expected.main_data(0), kMainDataBytes) == 0 &&
           std::memcmp(pool.main_scales(location), expected.main_scales(0), kMainScaleBytes) == 0;
  };
  for (std::int32_t p = 200 - 127; p < 400; ++p) {
    CAPTURE(p);
    float entry[kHeadDim];
    std::memcpy(entry, sequence.window.data() + p * 512, sizeof entry);
    host::normalise(entry, kHeadDim, weight.data(), 1e-6f);
    host::rotate_tail(entry, kHeadDim, {table.data(), kPositions, RopeLayout::kInterleaved}, p);
    host::store_main_entry(entry, expected, 0, 1e-4f);
    CHECK(same_entry(Layer::main_pool(scratch.data()), scratch_location(0, 0, p - 200)));
    if (p < 400 - 128) continue;
    CHECK(same_entry(Layer::main_pool(ring.data()), ring_location(Layer::kGeometry, 1, p)));
  }
}

TEST_CASE("a step of padding alone writes nothing") {
  std::mt19937 random(7);
  Layer layer(random);
  const Sequence nothing{0, {0}, 0, {}, {}, {}};
  const std::vector<Bytes> before = layer.memory();
  layer.append({}, false, 5);
  layer.append({{&nothing, 0, 0}}, false, 3);
  CHECK(layer.memory() == before);
  CHECK(layer.report().nonfinite_tiles == 0);
  CHECK(layer.report().first_failing_seat == DeviceReport::kNoSeat);
}

TEST_CASE("non-finite tiles are counted with the lowest seat") {
  std::mt19937 random(11);
  Layer layer(random);
  Sequence fine = random_sequence(random, 0, {0}, 4, false);
  Sequence spoilt = random_sequence(random, 2, {1}, 4, false);
  spoilt.window[70] = NAN;                // the norm spreads it over the 7 tiles of its entry
  spoilt.csa[2048 + 512 + 3] = INFINITY;  // 1 / rms is 0: NaN at channel 3, 0 elsewhere
  spoilt.indexer[3 * 512 + 128] = NAN;    // an indexer entry counts once
  layer.append({{&fine, 0, 4}, {&spoilt, 0, 4}}, true);
  CHECK(layer.report().nonfinite_tiles == 7 + 1 + 1);
  CHECK(layer.report().first_failing_seat == 2);
}
