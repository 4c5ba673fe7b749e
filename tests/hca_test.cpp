// HCA layers by themselves: entries against Transformers' compressor and against a softmax in
// float64, banks byte for byte, and what a former owner left in a seat never shows. That chunks,
// batches and drafts change nothing is in invariance_test.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/planner/plan_rule.h>

#include "tests/support/device_array.h"
#include "tests/support/npy.h"
#include "tests/support/plan_fixture.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

using namespace quire;
using namespace quire::test;

namespace {

constexpr std::int32_t kDraftMax = 2;
constexpr std::int32_t kBanks = kDraftMax + 2;
constexpr std::int32_t kSeats = 2;
constexpr std::int32_t kPageEntries = 2;
constexpr std::int32_t kPages = 4;
constexpr auto kBankFloats = static_cast<std::size_t>(kHcaBankFloats);
constexpr PlanGeometry kGeometry{192, kDraftMax, 64, kPageEntries, -1, -1, -1, -1};

// What one layer folds: rows, bias and weights of one request.
struct Sequence {
  std::int32_t tokens;
  std::vector<float> rows, bias, weight;  // [tokens, 1024], [128, 512], [512]
  std::vector<float> rope;                // [tokens, 64], interleaved
};

// One request in seat 1 of a layer whose memory is NaN at first, driven by plans of the rule alone.
class Layer {
 public:
  explicit Layer(const Sequence& sequence, std::uint8_t fill = 0xFF)
      : sequence_(sequence),
        bias_(backend_, stream_, sequence.bias),
        weight_(backend_, stream_, sequence.weight),
        rope_(backend_, stream_, sequence.rope),
        state_(backend_, stream_, kSeats * kBanks * kBankFloats, fill),
        pages_(backend_, stream_, kPages * kPageBytes, fill) {}

  // Appends the next `tokens`, of which `kept` stay.
  void append(std::int32_t tokens, bool decode, std::int32_t kept = -1) {
    const BatchRowRecord row{kSeat, length_, tokens, 0};
    StepTable table;
    table.page_table = const_cast<std::int32_t*>(kCells);
    std::vector<TokenRecord> records;
    std::vector<PlanRecord> plan;
    for (std::int32_t j = 0; j < tokens; ++j) {
      records.push_back(plan_token(kGeometry, table, row, 0, j));
      if (closes_entry(kHcaRule, length_ + j)) {
        plan.push_back(plan_record(kHcaRule, j, 0, length_, j));
      }
    }
    plan.push_back(kPaddingRecord);
    const std::vector<BatchRowRecord> row_records{row};
    const auto first = sequence_.rows.begin() + std::int64_t{length_} * 1024;
    const std::vector<float> input(first, first + std::int64_t{tokens} * 1024);
    const StepShape shape = decode ? StepShape::decode(1, tokens) : StepShape::ragged(1, tokens);
    // Behind the last entry is padding.
    const std::vector<PlanHeader> headers{planned_header(shape, 0, plan.size() - 1)};
    const DeviceArray<PlanHeader> header_there(backend_, stream_, headers);
    const DeviceArray<BatchRowRecord> rows_there(backend_, stream_, row_records);
    const DeviceArray<TokenRecord> tokens_there(backend_, stream_, records);
    const DeviceArray<PlanRecord> plan_there(backend_, stream_, plan);
    const DeviceArray<float> input_there(backend_, stream_, input);

    AppendParams params;
    params.shape = shape;
    params.planned_form = plan_form(shape.tokens_per_row, LayerGroup::kTarget);
    params.header = header_there.data();
    params.geometry = kGeometry;
    params.rows = rows_there.data();
    params.tokens = tokens_there.data();
    params.hca_entries = plan_there.data();
    params.hca_entry_capacity = static_cast<std::int32_t>(plan.size());
    params.hca.rows = {input_there.data(), 1024, ElementType::kFloat32};
    params.hca.bias = bias_.data();
    params.hca.norm_weight = weight_.data();
    params.hca.state = state_.data();
    params.hca.banks = kBanks;
    params.hca.pages = pool(pages_.data());
    params.rope = {rope_.data(), sequence_.tokens, RopeLayout::kInterleaved};
    backend_.append(params, Pdl::kOff, stream_);
    stream_.wait();
    length_ += kept < 0 ? tokens : kept;
  }

  std::vector<std::byte> pages() const { return pages_.download(); }

  // [3, 512] of bank `position` mod banks.
  std::vector<float> bank(std::int32_t position) const {
    const std::vector<float> all = state_.download();
    const auto from = all.begin() + std::ptrdiff_t{kSeat * kBanks + position % kBanks} *
                                        static_cast<std::ptrdiff_t>(kBankFloats);
    return {from, from + static_cast<std::ptrdiff_t>(kBankFloats)};
  }

  static EntryPool pool(std::byte* pages) {
    return make_entry_pool(pages, main_page_bytes(kPageEntries), kPageEntries);
  }
  static std::int64_t location(std::int32_t e) { return entry_location(kCells, kPageEntries, e); }

  static constexpr auto kPageBytes = static_cast<std::size_t>(main_page_bytes(kPageEntries));

 private:
  static constexpr std::int32_t kSeat = 1;
  static constexpr std::int32_t kCells[3] = {2, 0, 3};

  const Sequence& sequence_;
  std::int32_t length_ = 0;
  Backend& backend_ = test_backend();
  Stream stream_{backend_};
  DeviceArray<float> bias_, weight_, rope_, state_;
  DeviceArray<std::byte> pages_;
};

// --- What the specification says, on the host ---

// Channel by channel, over the tokens of [begin, end), of which the first begins a window.
std::vector<exact::Fold> fold_span(const Sequence& sequence, std::int32_t begin, std::int32_t end) {
  const host::FloatEnvironment environment;
  std::vector<exact::Fold> folds(512);
  for (std::size_t c = 0; c < 512; ++c) {
    for (std::int32_t p = begin; p < end; ++p) {
      const float* row = sequence.rows.data() + p * 1024 + c;
      const float* bias = sequence.bias.data() + (p - begin) * 512 + c;
      const float score = exact::add(row[512], bias[0]);
      folds[c] =
          p == begin ? exact::fold_first(score, row[0]) : exact::fold_next(folds[c], score, row[0]);
    }
  }
  return folds;
}

std::vector<float> pooled_entry(const Sequence& sequence, std::int32_t e) {
  const host::FloatEnvironment environment;
  std::vector<float> entry;
  for (const exact::Fold& fold : fold_span(sequence, 128 * e, 128 * e + 128)) {
    entry.push_back(exact::fold_entry(fold));
  }
  return entry;
}

// RoPE at the first token of the window.
std::vector<float> finished_entry(const Sequence& sequence, std::int32_t e) {
  const host::FloatEnvironment environment;
  std::vector<float> entry = pooled_entry(sequence, e);
  host::normalise(entry.data(), 512, sequence.weight.data(), 1e-6f);
  host::rotate_tail(entry.data(), 512,
                    {sequence.rope.data(), sequence.tokens, RopeLayout::kInterleaved}, 128 * e);
  return entry;
}

// Pages of a layer that was NaN and now holds the first `entries`.
std::vector<std::byte> expected_pages(const Sequence& sequence, std::int32_t entries) {
  const host::FloatEnvironment environment;
  std::vector<std::byte> pages(kPages * Layer::kPageBytes, std::byte{0xFF});
  for (std::int32_t e = 0; e < entries; ++e) {
    host::store_main_entry(finished_entry(sequence, e).data(), Layer::pool(pages.data()),
                           Layer::location(e), 1e-4f);
  }
  return pages;
}

bool holds_fold(const std::vector<float>& bank, const std::vector<exact::Fold>& folds) {
  bool same = true;
  for (std::size_t c = 0; c < 512; ++c) {
    const auto is = [&](std::size_t part, float x) {
      return exact::bits(bank[part * 512 + c]) == (exact::is_nan(x) ? 0x7FFFFFFFu : exact::bits(x));
    };
    same = same && is(0, folds[c].m) && is(1, folds[c].z) && is(2, folds[c].a);
  }
  return same;
}

int count_far(const std::vector<float>& got, const float* expected) {
  int far = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    far += std::abs(got[i] - expected[i]) <= 1e-5f ? 0 : 1;  // a NaN is far
  }
  return far;
}

Sequence random_sequence(std::uint32_t seed, std::int32_t tokens, float score_spread) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Sequence sequence;
  sequence.tokens = tokens;
  sequence.rows.resize(static_cast<std::size_t>(tokens) * 1024);
  for (std::size_t i = 0; i < sequence.rows.size(); ++i) {
    sequence.rows[i] = normal(random) * (i % 1024 < 512 ? 1.0f : score_spread);
  }
  const auto fill = [&](std::vector<float>& values, std::size_t count) {
    values.resize(count);
    for (float& x : values) x = normal(random);
  };
  fill(sequence.bias, 128 * 512);
  fill(sequence.weight, 512);
  sequence.rope.resize(static_cast<std::size_t>(tokens * kRopeDim));
  make_rope_table(RopeGroup::kCompressing, tokens, RopeLayout::kInterleaved, sequence.rope);
  return sequence;
}

// In the second window every position takes its turn as something that is no number, in one channel
// or another. Its entry is all NaN, as the norm spreads it; those beside it are not.
void plant_specials(Sequence& sequence) {
  constexpr std::uint32_t kSpecials[] = {0x7F800001u, 0xFFC12345u, 0x7F800000u, 0xFF800000u,
                                         0x80000000u, 0x00000001u, 0xFF923456u};
  std::size_t n = 0;
  for (std::size_t i = 128 * 1024; i < 256 * 1024; i += 97) {
    std::memcpy(&sequence.rows[i], &kSpecials[n++ % std::size(kSpecials)], 4);
  }
}

// --- Transformers ---

Sequence golden_sequence(const std::filesystem::path& folder) {
  const auto file = [&](const char* name) { return read_npy<float>(folder / name); };
  Sequence sequence;
  sequence.tokens = read_json(folder / "meta.json")["tokens"];
  sequence.rows = file("kv_score_input.npy").values;
  sequence.bias = file("score_bias.npy").values;
  sequence.weight = file("norm_weight.npy").values;
  // The table with what is known of it: positions of entries; the rest would ruin a result.
  sequence.rope.assign(static_cast<std::size_t>(sequence.tokens * kRopeDim), 1e30f);
  const Npy<float> cos = file("cos.npy");
  const Npy<float> sin = file("sin.npy");
  for (std::size_t e = 0; e < cos.dim(0); ++e) {
    for (std::size_t i = 0; i < 32; ++i) {
      sequence.rope[128 * e * 64 + 2 * i] = cos.row(e)[i];
      sequence.rope[128 * e * 64 + 2 * i + 1] = sin.row(e)[i];
    }
  }
  return sequence;
}

}  // namespace

TEST_CASE("HCA entries agree with the Transformers compressor") {
  const std::filesystem::path folder = goldens() / "hf_hca_compressor";
  const Sequence sequence = golden_sequence(folder);
  const Npy<float> pooled = read_npy<float>(folder / "pooled.npy");
  const Npy<float> compressed = read_npy<float>(folder / "compressed.npy");
  REQUIRE(pooled.dim(0) == 2);
  for (std::int32_t e = 0; e < 2; ++e) {
    CHECK(count_far(pooled_entry(sequence, e), pooled.row(static_cast<std::size_t>(e))) == 0);
    CHECK(count_far(finished_entry(sequence, e), compressed.row(static_cast<std::size_t>(e))) == 0);
  }
  // What is appended is the quantised final entry, byte for byte.
  const std::vector<std::byte> expected = expected_pages(sequence, 2);
  Layer prefilled(sequence);
  prefilled.append(sequence.tokens, false);
  CHECK(prefilled.pages() == expected);
  Layer decoded(sequence);
  for (std::int32_t p = 0; p < sequence.tokens; ++p) decoded.append(1, true);
  CHECK(decoded.pages() == expected);
}

TEST_CASE("the fold agrees with a softmax of two passes in float64") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  for (const float spread : {0.0f, 1.0f, 2.0f, 30.0f}) {
    CAPTURE(spread);
    const Sequence sequence = random_sequence(seed, 512, spread);
    for (std::int32_t e = 0; e < 4; ++e) {
      std::vector<float> expected(512);
      for (std::size_t c = 0; c < 512; ++c) {
        const float* value = sequence.rows.data() + e * 128 * 1024 + c;
        const float* bias = sequence.bias.data() + c;
        const auto score = [&](std::int32_t i) {
          return static_cast<double>(value[i * 1024 + 512]) + static_cast<double>(bias[i * 512]);
        };
        double most = score(0);
        for (std::int32_t i = 1; i < 128; ++i) most = std::max(most, score(i));
        double z = 0;
        double a = 0;
        for (std::int32_t i = 0; i < 128; ++i) {
          z += std::exp(score(i) - most);
          a += std::exp(score(i) - most) * static_cast<double>(value[i * 1024]);
        }
        expected[c] = static_cast<float>(a / z);
      }
      CHECK(count_far(pooled_entry(sequence, e), expected.data()) == 0);
    }
  }
}

TEST_CASE("entries and every kept fold are those of the specification, specials included") {
  const auto seed = static_cast<std::uint32_t>(std::random_device{}());
  CAPTURE(seed);
  std::mt19937 random(seed);
  Sequence sequence = random_sequence(seed, 400, 2.0f);
  plant_specials(sequence);
  for (const int how : {0, 1, 2}) {  // decode with drafts, short ragged rows, longer ones
    CAPTURE(how);
    Layer layer(sequence);
    std::int32_t length = 0;
    while (length < 390) {
      const auto below = [&](std::int32_t end) {
        return static_cast<std::int32_t>(random() % static_cast<unsigned>(end));
      };
      const std::int32_t tokens = min_of(400 - length, 1 + below(how == 2 ? 200 : kDraftMax + 1));
      const bool is_short = tokens <= kDraftMax + 1;
      const std::int32_t kept = is_short ? below(tokens + 1) : tokens;
      layer.append(tokens, how == 0, kept);
      // A short row keeps any prefix: the fold of each is there.
      for (std::int32_t n = is_short ? 1 : tokens; n <= tokens; ++n) {
        const std::int32_t end = length + n;
        CAPTURE(end);
        if (end % 128 == 0) continue;
        const bool same = holds_fold(layer.bank(end), fold_span(sequence, end / 128 * 128, end));
        REQUIRE(same);
      }
      length += kept;
    }
    layer.append(400 - length, false);
    const bool same = layer.pages() == expected_pages(sequence, 3);
    CHECK(same);
  }
}

TEST_CASE("a fold that begins on bytes of a former owner shows none of them") {
  const Sequence sequence = random_sequence(3, 260, 2.0f);
  const auto run = [&](std::uint8_t fill, bool decode) {
    Layer layer(sequence, fill);
    std::vector<std::vector<float>> banks;
    for (std::int32_t p = 0; p < 260;) {
      const std::int32_t tokens = decode ? 1 : min_of(p % 5 == 0 ? 1 : 100, 260 - p);
      layer.append(tokens, decode);
      p += tokens;
      if (p % 128 != 0) banks.push_back(layer.bank(p));
    }
    return banks;
  };
  for (const bool decode : {true, false}) {
    const auto clean = run(0x00, decode);
    const bool same_as_nan = clean == run(0xFF, decode);
    const bool same_as_huge = clean == run(0x7F, decode);
    CHECK(same_as_nan);
    CHECK(same_as_huge);
  }
}

// A live row that holds no number; what its seat keeps must not reach the next request.
TEST_CASE("a request in the seat of one whose folds were NaN has the bytes of one that was alone") {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kHca};
  options.limits.seats_max = 1;
  options.limits.pages = 2;
  options.limits.rows_max = 1;
  options.limits.tokens_max = 512;
  options.limits.context_max = 300;
  options.limits.draft_max = 1;
  options.limits.run_ahead_max = 0;
  options.contents = 2;
  TestEngine reused(test_backend(), options);
  TestEngine fresh(test_backend(), options);
  for (const std::int32_t former : {1, 77, 127, 128, 200}) {
    CAPTURE(former);
    reused.poison();  // as if every row of the former owner had been NaN, everywhere
    const RequestId first = reused.admit(1, 300);
    reused.ragged_step({{first, former}});
    reused.poison();
    reused.release(first);
    for (const bool decode : {true, false}) {
      CAPTURE(decode);
      const auto run = [&](TestEngine& engine) {
        const RequestId request = engine.admit(0, 300);
        if (decode) {
          const std::vector<StepRow> row{{request, 1}};
          for (int p = 0; p < 150; ++p) engine.step(row, StepShape::decode(1));
        } else {
          engine.ragged_step({{request, 150}});
        }
        auto bytes = engine.live_bytes(request);
        engine.release(request);
        return bytes;
      };
      const bool same = run(reused) == run(fresh);
      CHECK(same);
    }
  }
}
