// Every phase of rejection (DESIGN 4, 5.3): wherever a verify step starts and however many of its
// tokens are refused, the live bytes are those of a run that never drafted, and so is what the
// step's own queries read. Walks of one stride each meet every length with every count kept, side
// by side in one batch. What is refused is NaN, any bits, or input rows of another token.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/drafter.h"
#include "tests/support/field_stories.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr PlanBufferId kBuffer(0);
constexpr std::uint32_t kSeed = 20270301;
constexpr std::int64_t kContents = 2;

std::vector<LiveBook> books_of(const TestEngineOptions& options) {
  std::vector<LiveBook> books;
  for (std::int64_t content = 0; content < kContents; ++content) {
    books.emplace_back(options, content);
  }
  return books;
}

// Verify steps that start at `first` and then every `kept` tokens, below `end`. Where they keep
// nothing, the one sure token follows in a step of its own.
struct Walk {
  std::int32_t kept, first, end;
  std::int64_t content = 0;
  RequestId request{};
  bool sure_next = false;
};

// Length and kept count of each verify step.
using Seen = std::set<std::pair<std::int64_t, std::int32_t>>;

// One batch of those walks that are not over, some of which rest; false where none is left.
bool run_turn(Drafter& drafter, std::span<Walk> walks, std::uint32_t turn, Seen& seen) {
  const auto width = static_cast<std::int32_t>(drafter.engine().options().limits.draft_max + 1);
  std::vector<Draft> drafts;
  bool any = false;
  for (std::size_t i = 0; i < walks.size(); ++i) {
    // Requests change places from step to step.
    Walk& walk = walks[(i + turn * 5) % walks.size()];
    const std::int64_t length = drafter.engine().length(walk.request);
    if (length >= walk.end) continue;
    any = true;
    if (hash32(kSeed + turn * 64 + static_cast<std::uint32_t>(i)) % 8 == 0) continue;
    if (walk.sure_next) {
      drafts.push_back({walk.request, walk.content, 1, 1});
    } else {
      drafts.push_back({walk.request, walk.content, width, walk.kept});
      seen.insert({length, walk.kept});
    }
    walk.sure_next = walk.kept == 0 && !walk.sure_next;
  }
  if (!drafts.empty()) drafter.step(drafts, static_cast<How>(hash32(turn) % kHows));
  return any;
}

// All walks, as many at a time as there are seats.
Seen run(Drafter& drafter, std::vector<Walk> walks) {
  Seen seen;
  const auto seats = static_cast<std::size_t>(drafter.engine().options().limits.seats_max);
  const std::int64_t context = drafter.engine().options().limits.context_max;
  std::uint32_t turn = 0;
  for (std::size_t first = 0; first < walks.size(); first += seats) {
    const std::span round(walks.data() + first, std::min(seats, walks.size() - first));
    drafter.start_over();
    for (std::size_t i = 0; i < round.size(); ++i) {
      Walk& walk = round[i];
      walk.content = static_cast<std::int64_t>(i) % kContents;
      walk.request = drafter.engine().admit(walk.content, context);
      if (walk.first > 0) drafter.engine().ragged_step({{walk.request, walk.first}});
    }
    while (run_turn(drafter, round, turn++, seen)) {
    }
  }
  return seen;
}

// Walks that together start a verify step at every length below `starts` with every count kept.
std::vector<Walk> all_walks(std::int32_t draft_max, std::int32_t starts) {
  std::vector<Walk> walks;
  for (std::int32_t kept = 0; kept <= draft_max + 1; ++kept) {
    const std::int32_t stride = std::max(kept, 1);
    const std::int32_t tokens = kept == 0 ? 16 : 32 * stride;  // of a walk: 32 steps
    for (std::int32_t offset = 0; offset < stride; ++offset) {
      for (std::int32_t first = offset; first < starts; first += tokens) {
        walks.push_back({kept, first, std::min(starts, first + tokens)});
      }
    }
  }
  // Counts mix in each batch.
  std::vector<std::pair<std::uint32_t, Walk>> shuffled;
  for (const Walk& walk : walks) {
    shuffled.push_back({hash32(kSeed + static_cast<std::uint32_t>(shuffled.size())), walk});
  }
  std::sort(shuffled.begin(), shuffled.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < walks.size(); ++i) walks[i] = shuffled[i].second;
  return walks;
}

TestEngineOptions three_kinds(std::int64_t draft_max, std::int64_t seats, std::int64_t context,
                              ElementType compressor_rows = ElementType::kFloat32) {
  TestEngineOptions options = small_engine(seats, context);
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca};
  options.limits.draft_max = draft_max;
  options.limits.tokens_max = std::max(context, seats * (draft_max + 1));
  options.contents = kContents;
  options.compressor_rows = compressor_rows;
  return options;
}

TEST_CASE("after any count refused at any length, live bytes are those of a run without drafts") {
  MESSAGE("seed " << kSeed);
  // Every length mod 128 twice, and once when a window ring of 192 tokens has come around.
  constexpr std::int32_t kStarts = 320;
  constexpr std::int64_t kContext = 352;
  std::size_t cases = 0;
  for (const ElementType rows : {ElementType::kFloat32, ElementType::kBfloat16}) {
    const std::vector<LiveBook> books = books_of(three_kinds(0, 1, kContext, rows));
    for (const std::int32_t draft_max : {0, 1, 4, 13}) {
      if (rows == ElementType::kBfloat16 && draft_max != 4) continue;
      CAPTURE(draft_max);
      Drafter drafter(test_backend(), three_kinds(draft_max, 16, kContext, rows), books, kSeed);
      const Seen seen = run(drafter, all_walks(draft_max, kStarts));
      CHECK(seen.size() == static_cast<std::size_t>(kStarts * (draft_max + 2)));
      cases += seen.size();
    }
  }
  MESSAGE(cases << " lengths and counts");
}

// With 64 drafts the ring has no token to spare, with 130 a step closes two HCA entries.
TEST_CASE("so they are with drafts by the dozen, at chosen lengths and counts") {
  MESSAGE("seed " << kSeed);
  const std::vector<LiveBook> books = books_of(three_kinds(0, 1, 600));
  for (const std::int32_t draft_max : {64, 130}) {
    CAPTURE(draft_max);
    Drafter drafter(test_backend(), three_kinds(draft_max, 6, 600), books, kSeed);
    std::vector<Walk> walks;
    for (const std::int32_t first : {0, 3, 126, 127, 128, 190, 255, 319}) {
      for (const std::int32_t kept : {0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 130, 131}) {
        // Two steps each.
        if (kept <= draft_max + 1) walks.push_back({kept, first, first + kept + 1});
      }
    }
    const Seen seen = run(drafter, walks);
    CHECK(seen.size() >= walks.size());
  }
}

std::int32_t fetch_value(TestEngine& engine, const std::int32_t* from) {
  std::int32_t value = 0;
  std::memcpy(&value, fetch(engine, reinterpret_cast<const std::byte*>(from), 4).data(), 4);
  return value;
}

// Of the CSA and the HCA entry that position 127 completes, those that stand in their places.
std::string right_entries(TestEngine& engine, RequestId request, const LiveBook& book) {
  const DeviceCache& device = engine.cache().device();
  const std::int64_t page = engine.cache().ledger().pages_of(request)[0].value;
  const auto holds = [&](std::size_t layer, Piece piece, std::int64_t index,
                         std::initializer_list<std::pair<const std::byte*, std::int64_t>> parts) {
    std::vector<std::byte> entry;
    for (const auto& [at, bytes] : parts) {
      const std::vector<std::byte> part = fetch(engine, at, bytes);
      entry.insert(entry.end(), part.begin(), part.end());
    }
    return book.has(layer, piece, index, entry.data());
  };
  const EntryPool csa = device.csa_pages(LayerId(1));
  const EntryPool keys = device.indexer_pages(LayerId(1));
  const EntryPool hca = device.hca_pages(LayerId(2));
  const bool csa_right = holds(1, Piece::kCsaEntry, 31,
                               {{csa.main_data(page * 64 + 31), kMainDataBytes},
                                {csa.main_scales(page * 64 + 31), kMainScaleBytes},
                                {keys.indexer_values(page * 64 + 31), kIndexerDim},
                                {keys.indexer_scale(page * 64 + 31), kIndexerScaleBytes}});
  const bool hca_right = holds(
      2, Piece::kHcaEntry, 0,
      {{hca.main_data(page * 2), kMainDataBytes}, {hca.main_scales(page * 2), kMainScaleBytes}});
  return concat(csa_right ? "CSA" : "", hca_right ? "HCA" : "");
}

TEST_CASE("an entry that refused tokens complete is not seen by the next plan, and written anew") {
  const TestEngineOptions options = three_kinds(4, 1, 256);
  const std::vector<LiveBook> books = books_of(options);
  Drafter drafter(test_backend(), options, books, kSeed);
  const PlanViews& views = drafter.engine().cache().device().views(kBuffer);
  for (std::int32_t first = 123; first <= 127; ++first) {
    for (std::int32_t kept = 0; first + kept < 128; ++kept) {
      CAPTURE(first);
      CAPTURE(kept);
      drafter.start_over();
      TestEngine& engine = drafter.engine();
      const RequestId request = engine.admit(0, 256);
      engine.ragged_step({{request, first}});
      drafter.step({{request, 0, 5, kept}}, How::kOnce);
      // Refused or not, position 127 was appended.
      const auto poisoned = std::vector<std::byte>(kMainDataBytes, std::byte{0xFF});
      const std::int64_t page = engine.cache().ledger().pages_of(request)[0].value;
      const EntryPool hca = engine.cache().device().hca_pages(LayerId(2));
      CHECK(fetch(engine, hca.main_data(page * 2), kMainDataBytes) != poisoned);
      CHECK(right_entries(engine, request, books[0]) == "");
      while (engine.length(request) < 127) {
        drafter.step({{request, 0, 1, 1}}, How::kOnce);
        CHECK(fetch_value(engine, views.row_csa_length) == 31);
        CHECK(fetch_value(engine, views.row_hca_length) == 0);
        CHECK(right_entries(engine, request, books[0]) == "");
      }
      drafter.step({{request, 0, 1, 1}}, How::kOnce);
      CHECK(fetch_value(engine, views.row_csa_length) == 32);
      CHECK(fetch_value(engine, views.row_hca_length) == 1);
      CHECK(right_entries(engine, request, books[0]) == "CSAHCA");
    }
  }
}

}  // namespace
