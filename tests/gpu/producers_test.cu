// Every single operation behind a kernel that lets it go at once, sleeps 100 us and only then
// writes what the operation reads, or reads what it writes (tests/support/slow_predecessor.cuh). An
// operation that is launched with the programmatic attribute and does not wait works on stale
// bytes, or stores while an older kernel still reads. Of steps: step_producers_test.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <quire/kernels/fp8.h>
#include <quire/kernels/params.h>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

#include "tests/support/slow_predecessor.cuh"
#include "tests/support/test_backend.h"
#include "tests/support/three_ways.h"

namespace {

using namespace quire;
using test::check_waits;
using test::kernels_may_overlap;
using test::kModes;
using test::kReplays;
using test::Random;
using test::random_values;
using test::Scene;
using test::test_backend;
using test::Wrong;

using Bytes = std::vector<std::byte>;

// Numbers from -4 to 4.
Bytes numbers(Random& random, std::int64_t count, ElementType type) {
  const auto size = static_cast<std::size_t>(bytes_of(type));
  Bytes bytes(static_cast<std::size_t>(count) * size);
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    const float number = static_cast<float>(random.below(1 << 16) - (1 << 15)) / (1 << 13);
    const std::uint16_t half = exact::to_bf16(number);
    std::memcpy(&bytes[at], size == 4 ? static_cast<const void*>(&number) : &half, size);
  }
  return bytes;
}

// Locations of either width as they lie in memory.
Bytes in_width(const std::vector<std::int64_t>& values, bool wide) {
  const std::vector<std::int32_t> narrow(values.begin(), values.end());
  const auto bytes = wide ? std::as_bytes(std::span(values)) : std::as_bytes(std::span(narrow));
  return {bytes.begin(), bytes.end()};
}

// --- What these tests can see ---

struct Words {
  const std::int32_t* from;
  std::int32_t* to;
  bool waits;
};

__global__ void copy_word(const __grid_constant__ Words words) {
  if (words.waits) cuda::pdl_wait();
  *words.to = *words.from;
}

TEST_CASE(
    "behind the slow kernel one that does not wait is wrong each time, one that does is not") {
  if (!kernels_may_overlap()) {
    MESSAGE("SKIPPED: nothing overlaps");
    return;
  }
  for (const bool waits : {false, true}) {
    Scene scene;
    const Words words{scene.reads(std::vector<std::int32_t>{7}, 0), scene.writes<std::int32_t>(1),
                      waits};
    for (const Pdl pdl : kModes) {
      CAPTURE(waits);
      CAPTURE(static_cast<int>(pdl));
      const Wrong wrong = scene.replay(pdl, [&](Pdl mode) {
        cuda::launch(copy_word, dim3(1), dim3(1), 0, scene.stream().view().cuda(),
                     mode != Pdl::kOff, words);
      });
      const int expected = waits || pdl == Pdl::kOff ? 0 : kReplays;
      CHECK(wrong.results == expected);
      CHECK(wrong.early_stores == expected);
    }
  }
}

// --- The c4 compressor ---

struct C4Kind {
  C4StateMode mode;
  ElementType type, output_type;
  std::int32_t d;
};

constexpr ElementType kFp32 = ElementType::kFloat32;
constexpr ElementType kBf16 = ElementType::kBfloat16;
constexpr C4Kind kC4Kinds[] = {{C4StateMode::kRing, kFp32, kBf16, 512},
                               {C4StateMode::kRing, kBf16, kFp32, 128},
                               {C4StateMode::kPageAligned, kFp32, kFp32, 128},
                               {C4StateMode::kPageAligned, kBf16, kBf16, 512}};

// Rings and pages from 1 on: 0, which stale indices name, is nobody's.
constexpr std::int32_t kC4PagesEach = 4;
std::int32_t c4_page(std::int32_t row, std::int32_t logical) {
  return 1 + row * kC4PagesEach + logical;
}

// What decode and prefill share.
template <class Params>
Params c4_params(Scene& scene, Random& random, const C4Kind& kind, std::int32_t rows,
                 std::int32_t tokens) {
  const bool ring = kind.mode == C4StateMode::kRing;
  const std::int64_t state_rows =
      ring ? (rows + 1) * kC4RingTokens : c4_page(rows, 0) * kC4PageTokens;
  Params params;
  params.mode = kind.mode;
  params.type = kind.type;
  params.output_type = kind.output_type;
  params.head_dim = kind.d;
  params.state = scene.updates(numbers(random, state_rows * 4 * kind.d, kind.type), 0xFF);
  params.input = scene.reads(numbers(random, std::int64_t{4} * tokens * kind.d, kind.type), 0xFF);
  return params;
}

template <class Params>
void add_entries(Params& params, Scene& scene, Random& random, const C4Kind& kind,
                 std::int32_t rows) {
  const auto values = static_cast<std::size_t>(rows) * static_cast<std::size_t>(kind.d);
  params.bias = scene.reads(numbers(random, 8 * kind.d, kind.type), 0xFF);
  params.output =
      scene.writes<std::byte>(values * static_cast<std::size_t>(bytes_of(kind.output_type)));
}

TEST_CASE("c4 in decode waits for rows, lengths, indices, state and bias, and stores after it") {
  constexpr std::int32_t kRows = 17;  // of 0 to 16 tokens
  for (const C4Kind& kind : kC4Kinds) {
    CAPTURE(kind.d);
    CAPTURE(static_cast<int>(kind.mode));
    Random random(1);
    Scene scene;
    auto params = c4_params<CompressC4DecodeParams>(scene, random, kind, kRows, kRows);
    add_entries(params, scene, random, kind, kRows);
    params.batch = kRows;
    const bool ring = kind.mode == C4StateMode::kRing;
    std::vector<std::int32_t> lengths, indices, previous;
    for (std::int32_t r = 0; r < kRows; ++r) {
      const std::int32_t window = std::max(r - 1, 0) / kC4PageTokens;
      lengths.push_back(r);
      indices.push_back(ring ? r + 1 : c4_page(r, window));
      previous.push_back(c4_page(r, std::max(window - 1, 0)));
    }
    params.seq_lens = scene.reads(lengths, 0);
    params.indices = scene.reads(indices, 0);
    if (!ring) params.previous_pages = scene.reads(previous, 0);
    check_waits(scene,
                [&](Pdl pdl) { test_backend().compress_c4_decode(params, pdl, scene.stream()); });
  }
}

// Batch rows of 9 tokens behind 5: each closes two entries that read state, and overwrites it.
void check_c4_prefill(const C4Kind& kind, std::int32_t rows, bool entries) {
  constexpr std::int32_t kBefore = 5, kEach = 9;
  CAPTURE(kind.d);
  CAPTURE(static_cast<int>(kind.mode));
  Random random(2);
  Scene scene;
  auto params = c4_params<CompressC4PrefillParams>(scene, random, kind, rows, rows * kEach);
  std::vector<PlanRecord> compress, write;
  std::vector<std::int32_t> indices;
  std::vector<C4PageBundle> bundles;
  for (std::int32_t r = 0; r < rows; ++r) {
    const auto record = [&](std::int32_t row, std::int32_t j) {
      return plan_record(kCsaRule, row * kEach + j, row, kBefore, j);
    };
    // The last row's state first: stored too early, it meets the entries that are pooled last.
    const std::int32_t from_behind = rows - 1 - r;
    for (std::int32_t j = 0; j < kEach; ++j) {
      const std::int32_t p = kBefore + j;
      if (closes_entry(kCsaRule, p)) compress.push_back(record(r, j));
      if (write_index(kCsaRule, kBefore, kEach, p) >= 0) write.push_back(record(from_behind, j));
    }
    const auto [logical, last] = c4_logical_pages(kBefore, kEach);
    indices.push_back(kind.mode == C4StateMode::kRing ? r + 1 : c4_page(r, last));
    bundles.push_back({c4_page(r, logical.load_first_page), c4_page(r, logical.load_second_page),
                       c4_page(r, logical.write_first_page), logical.last_position});
  }
  for (auto* list : {&compress, &write}) list->push_back(kPaddingRecord);
  if (entries) {
    add_entries(params, scene, random, kind, rows * kEach);
    params.compress = scene.reads(compress, 0xFF);
    params.compress_capacity = std::ssize(compress);
  }
  params.write = scene.reads(write, 0xFF);
  params.write_capacity = std::ssize(write);
  params.indices = scene.reads(indices, 0);
  if (kind.mode == C4StateMode::kPageAligned) params.bundles = scene.reads(bundles, 0);
  check_waits(scene,
              [&](Pdl pdl) { test_backend().compress_c4_prefill(params, pdl, scene.stream()); });
}

TEST_CASE("c4 in prefill waits for rows, records, indices, state and bias, and stores after it") {
  for (const C4Kind& kind : kC4Kinds) check_c4_prefill(kind, 12, true);
}

TEST_CASE("c4 in prefill without entries: the state's kernel waits as well") {
  for (const C4Kind& kind : kC4Kinds) check_c4_prefill(kind, 12, false);
}

TEST_CASE("c4 in prefill stores the state when its entries have read it, of 2048 batch rows too") {
  check_c4_prefill({C4StateMode::kRing, kBf16, kBf16, 512}, 2048, true);
}

// --- Stores ---

TEST_CASE("stores wait for rows and locations, and store after it") {
  constexpr std::int64_t kRows = 200, kPages = 5, kEntries = 64;
  for (const std::int64_t d : {kHeadDim, kIndexerDim}) {
    for (const bool wide : {false, true}) {
      CAPTURE(d);
      CAPTURE(wide);
      Random random(3);
      Bytes rows = numbers(random, kRows * d, kBf16);
      for (std::int64_t r = 0; r < kRows; r += 7) {  // not finite
        std::memset(&rows[static_cast<std::size_t>(2 * r * d)], 0x7F, 2);
      }
      std::vector<std::int64_t> locations;
      for (std::int64_t r = 0; r < kRows; ++r) {
        locations.push_back(r % 9 == 5 ? -1 : r * 77 % (kPages * kEntries));  // no two alike
      }
      const std::int64_t stride =
          d == kHeadDim ? main_page_bytes(kEntries) : indexer_page_bytes(kEntries);
      Scene scene;
      StoreParams params;
      params.input = scene.reads(rows, 0xFF);
      params.rows = kRows;
      params.locations = scene.reads(in_width(locations, wide), 0xFF);
      params.wide_locations = wide;
      params.pool = make_entry_pool(
          scene.writes<std::byte>(static_cast<std::size_t>(kPages * stride)), stride, kEntries);
      check_waits(scene, [&](Pdl pdl) {
        d == kHeadDim ? test_backend().store_flashmla(params, pdl, scene.stream())
                      : test_backend().store_indexer(params, pdl, scene.stream());
      });
    }
  }
}

// --- The read side ---

TEST_CASE("picks are translated after the wait, in place too") {
  constexpr std::int32_t kTokens = 40, kPicks = 48, kRows = 5, kCells = 8;
  for (const bool in_place : {false, true}) {
    CAPTURE(in_place);
    Random random(4);
    std::vector<std::int32_t> rows, lengths;
    for (std::int32_t t = 0; t < kTokens; ++t) {
      rows.push_back(random.below(kRows + 1) - 1);
      lengths.push_back(random.below(kCells * 64 + 1));
    }
    auto picks = random_values<std::int32_t>(random, kTokens * kPicks, kCells * 64 + 60);
    auto table = random_values<std::int32_t>(random, kRows * kCells, 1000);
    for (std::int32_t& page : table) ++page;
    Scene scene;
    TranslatePicksParams params;
    params.tokens = kTokens;
    params.k = kPicks;
    if (in_place) {
      params.locations = scene.updates(picks, 0xFF);
      params.picks = params.locations;
    } else {
      params.picks = scene.reads(picks, 0xFF);
      params.locations = scene.writes<std::int32_t>(picks.size());
    }
    params.picks_stride = params.locations_stride = kPicks;
    params.token_batch_row = scene.reads(rows, 0xFF);
    params.token_csa_length = scene.reads(lengths, 0);
    params.page_table = scene.reads(table, 0);
    params.page_table_stride = kCells;
    params.lengths = scene.writes<std::int32_t>(kTokens);
    check_waits(scene,
                [&](Pdl pdl) { test_backend().translate_picks(params, pdl, scene.stream()); });
  }
}

TEST_CASE("entries are gathered after the wait") {
  constexpr std::int64_t kCount = 131, kPages = 5, kEntries = 64;
  const std::int64_t stride = main_page_bytes(kEntries);
  for (const ElementType type : {kFp32, kBf16}) {
    for (const bool wide : {false, true}) {
      CAPTURE(static_cast<int>(type));
      CAPTURE(wide);
      Random random(5);
      std::vector<std::int64_t> locations;
      for (std::int64_t i = 0; i < kCount; ++i) {
        locations.push_back(std::max(random.below(kPages * kEntries + 40) - 40, -1));
      }
      const auto pages =
          random_values<std::byte>(random, static_cast<std::size_t>(kPages * stride), 256);
      Scene scene;
      GatherMainParams params;
      params.pool = make_entry_pool(scene.reads(pages, 0xFF), stride, kEntries);
      params.locations = scene.reads(in_width(locations, wide), 0xFF);
      params.wide_locations = wide;
      params.count = kCount;
      params.output =
          scene.writes<std::byte>(static_cast<std::size_t>(kCount * kHeadDim * bytes_of(type)));
      params.output_type = type;
      check_waits(scene, [&](Pdl pdl) { test_backend().gather_main(params, pdl, scene.stream()); });
    }
  }
}

// So many batch rows that the first of its two kernels is still counting when the second begins.
TEST_CASE("keys are counted after the wait, and gathered when all are counted") {
  constexpr std::int32_t kRows = 1 << 16, kPages = 64, kTokens = 500, kSpread = 16;
  constexpr std::size_t kCapacity = 8192;  // as many as there can be
  Random random(6);
  std::vector<std::int32_t> entries(kRows, 0), token_row, token_entries;
  for (std::size_t r = 0; r < kRows; r += kSpread) entries[r] = random.below(3);
  for (std::int32_t t = 0; t < kTokens; ++t) {
    token_row.push_back(t % 9 == 0 ? -1 : kSpread * random.below(kRows / kSpread));
    token_entries.push_back(t % 9 == 0 ? 0 : entries[static_cast<std::size_t>(token_row.back())]);
  }
  // One cell a row, and behind them what half-counted rows would reach.
  auto table = random_values<std::int32_t>(random, kRows + kCapacity / 64, kPages - 1);
  for (std::int32_t& page : table) ++page;
  const std::int64_t stride = indexer_page_bytes(64);
  const auto pages =
      random_values<std::byte>(random, static_cast<std::size_t>(kPages * stride), 256);
  Scene scene;
  GatherIndexerParams params;
  params.pool = make_entry_pool(scene.reads(pages, 0xFF), stride, 64);
  params.rows = kRows;
  params.row_entries = scene.reads(entries, 0);
  params.page_table = scene.reads(table, 0);
  params.page_table_stride = 1;
  params.cu_entries = scene.writes<std::int32_t>(kRows + 1, 0);  // not counted yet: no key
  params.capacity = kCapacity;
  params.keys = scene.writes<std::uint8_t>(kCapacity * kIndexerDim);
  params.scales = scene.writes<float>(kCapacity);
  params.tokens = kTokens;
  params.token_batch_row = scene.reads(token_row, 0xFF);
  params.token_entries = scene.reads(token_entries, 0);
  auto* ranges = scene.writes<std::int32_t>(2 * kTokens);
  params.k_start = ranges;
  params.k_end = ranges + kTokens;
  check_waits(scene, [&](Pdl pdl) { test_backend().gather_indexer(params, pdl, scene.stream()); });
}

// --- Rows that stop themselves ---

TEST_CASE("rows are stopped after the wait, by end tokens and by limits") {
  constexpr std::int32_t kRows = 64, kTokens = 3, kSeats = 8, kStart = 10;
  Random random(7);
  std::vector<BatchRowRecord> records;
  std::vector<std::int32_t> kept, limits;
  for (std::int32_t r = 0; r < kRows; ++r) {
    records.push_back({r % kSeats, kStart, kTokens, r * kTokens});
    kept.push_back(1 + random.below(kTokens));
  }
  for (std::int32_t s = 0; s < kSeats; ++s) limits.push_back(s % 2 == 0 ? 1000 : kStart + 2);
  Scene scene;
  StopRowsParams params;
  params.rows = kRows;
  params.tokens_per_row = kTokens;
  params.tokens_stride = kTokens;
  params.records = scene.reads(records, 0xFF);  // padding
  params.tokens = scene.reads(random_values<std::int32_t>(random, kRows * kTokens, 6), 0x77);
  params.end_tokens = scene.reads(std::vector<std::int32_t>{1, 4}, 0x66);
  params.end_count = 2;
  params.length_limit = scene.reads(limits, 0x7F);
  params.kept = scene.updates(kept, 0);
  params.stop = scene.writes<std::uint8_t>(kRows);
  check_waits(scene, [&](Pdl pdl) { test_backend().stop_rows(params, pdl, scene.stream()); });
}

}  // namespace
