// Two tenants of one cache: no byte of one tenant's rows reaches what the other reads, and no index
// that plans name for a request lies outside what it owns (DESIGN 5.8). Whatever is freed is full
// of NaNs, quiet and signalling, when it goes to the next owner.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/tenant_world.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int64_t kRandomContent = 2;  // of tenant A
constexpr std::int64_t kOtherContent = 4;   // NaNs throughout, and other random values
constexpr int kTurns = 120;

// --- What indices name ---

template <class T>
std::vector<T> fetch_array(TestEngine& engine, const T* from, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  if (values.empty()) return values;
  engine.backend().copy(values.data(), from, count * std::int64_t{sizeof(T)}, engine.stream());
  engine.stream().wait();
  return values;
}

// All that one plan tells, on the host.
struct Told {
  explicit Told(TenantWorld& world) {
    TestEngine& engine = world.engine;
    const PlanBuffer& plan = engine.cache().device().plan_buffer(TenantWorld::kBuffer);
    const StepShape shape = world.shape;
    header = fetch_array(engine, plan.header, 1)[0];
    row_records = fetch_array(engine, plan.rows, shape.rows);
    tokens = fetch_array(engine, plan.tokens, shape.tokens);
    csa_entries = fetch_array(engine, plan.csa_entries, header.csa_entries);
    hca_entries = fetch_array(engine, plan.hca_entries, header.hca_entries);
    batch_row = fetch_array(engine, plan.views.token_batch_row, shape.tokens);
    ring = fetch_array(engine, plan.views.ring_locations, shape.tokens);
    scratch = fetch_array(engine, plan.views.scratch_locations, shape.tokens);
    csa = fetch_array(engine, plan.views.csa_locations, shape.tokens);
    hca = fetch_array(engine, plan.views.hca_locations, shape.tokens);
    cu_extend = fetch_array(engine, plan.views.cu_extend, shape.rows + 1);
    row_seat = fetch_array(engine, plan.views.row_seat, shape.rows);
    row_length = fetch_array(engine, plan.views.row_length, shape.rows);
    table_stride = plan.views.page_table_stride;
    page_table = fetch_array(engine, plan.views.page_table, shape.rows * table_stride);
    window_list = world.window_lists().download();
    hca_list = world.hca_lists().download();
    list_lengths = world.list_lengths().download();
  }
  PlanHeader header;
  std::vector<BatchRowRecord> row_records;
  std::vector<TokenRecord> tokens;
  std::vector<PlanRecord> csa_entries, hca_entries;
  std::vector<std::int32_t> batch_row, cu_extend, row_seat, row_length, page_table;
  std::vector<std::int64_t> ring, scratch, csa, hca;
  std::vector<std::int32_t> window_list, hca_list, list_lengths;
  std::int64_t table_stride;
};

// Counts indices that name what the request of their batch row does not own.
class IndexCheck {
 public:
  IndexCheck(TenantWorld& world, const Told& told) : world_(world), told_(told) {
    const auto rows = static_cast<std::int32_t>(world.rows.size());
    for (std::int32_t r = 0; r < rows; ++r) check_row(r);
    for (std::int32_t r = rows; r < world.shape.rows; ++r) {
      require(at(told.row_seat, r) == -1 && at(told.row_length, r) == 0, "padding names a seat");
    }
    std::int64_t behind = 0;  // tokens of no batch row
    for (std::int32_t t = 0; t < world.shape.tokens; ++t) {
      const bool of_a_row = told.cu_extend[0] <= t && t < at(told.cu_extend, rows);
      if (of_a_row || world.shape.is_decode()) continue;
      ++behind;
      require(nowhere(t), "a token of no batch row goes somewhere");
    }
    require(world.shape.is_decode() || behind == 3, "tokens behind the last batch row");
    check_entries(told.csa_entries, told.csa);
    check_entries(told.hca_entries, told.hca);
  }
  std::int64_t wrong = 0, seen = 0;
  std::string first_wrong;

 private:
  template <class T>
  static T at(const std::vector<T>& values, std::int64_t i) {
    return values[static_cast<std::size_t>(i)];
  }
  void require(bool right, const char* what) {
    ++seen;
    if (!right && wrong++ == 0) first_wrong = what;
  }
  bool nowhere(std::int64_t t) const {
    return at(told_.batch_row, t) == -1 && at(told_.tokens, t).seat == -1 &&
           at(told_.ring, t) == -1 && at(told_.scratch, t) == -1 && at(told_.csa, t) == -1 &&
           at(told_.hca, t) == -1;
  }

  void check_row(std::int32_t r) {
    const TenantRow& row = at(world_.rows, r);
    require(at(told_.row_seat, r) == row.seat && at(told_.row_records, r).seat == row.seat,
            "another's seat");
    require(at(told_.cu_extend, r) == row.first_token, "another's input rows");
    const std::int64_t cells = ceil_div<std::int64_t>(at(told_.row_length, r), kPageTokens);
    require(cells <= static_cast<std::int64_t>(row.pages.size()), "more cells than pages");
    for (std::int64_t cell = 0; cell < cells; ++cell) {
      require(at(told_.page_table, r * told_.table_stride + cell) == at(row.pages, cell).value,
              "a table cell names another's page");
    }
    for (std::int32_t j = 0; j < row.ahead.row.tokens; ++j) check_token(row, r, j);
    if (!world_.shape.is_decode()) {
      check_hca_list(row, r, ceil_div<std::int64_t>(at(told_.row_length, r) - 127, 128));
    }
  }

  void check_token(const TenantRow& row, std::int32_t r, std::int32_t j) {
    const std::int64_t t = row.first_token + j;
    const TokenRecord& token = at(told_.tokens, t);
    const std::int64_t tokens_max = world_.tokens_max();
    const std::int32_t window = at(told_.list_lengths, t);
    for (std::int64_t i = 0; i < 128; ++i) {
      const std::int32_t location = at(told_.window_list, t * 128 + i);
      require(i < window ? (row.is_long() ? in_scratch(row, r, location) : in_ring(row, location))
                         : location == -1,
              "a window list names another's entry");
    }
    if (world_.shape.is_decode()) check_hca_list(row, t, at(told_.list_lengths, tokens_max + t));
    if (token.seat == -1) {
      require(nowhere(t) && window == 0 && at(told_.list_lengths, tokens_max + t) == 0,
              "an inert token goes somewhere");
      return;
    }
    require(token.seat == row.seat && token.batch_row == r && token.index == j,
            "a token record of another");
    require(at(told_.batch_row, t) == r, "a token of another batch row");
    require(token.ring_location == at(told_.ring, t) && token.csa_location == at(told_.csa, t) &&
                token.hca_location == at(told_.hca, t) &&
                token.scratch_location == at(told_.scratch, t),
            "a view differs from its record");
    require(token.ring_location == -1 || in_ring(row, token.ring_location),
            "a ring location of another");
    require(token.scratch_location == -1 || in_scratch(row, r, token.scratch_location),
            "a scratch location of another");
    require(token.csa_location == -1 || in_pages(row, token.csa_location / 64),
            "a CSA location of another");
    require(token.hca_location == -1 || in_pages(row, token.hca_location / 2),
            "an HCA location of another");
  }

  void check_hca_list(const TenantRow& row, std::int64_t list, std::int64_t entries) {
    for (std::int64_t e = 0; e < TenantWorld::kHcaWidth; ++e) {
      const std::int32_t location = at(told_.hca_list, list * TenantWorld::kHcaWidth + e);
      require(e < entries ? location >= 0 && in_pages(row, location / 2) : location == -1,
              "an HCA list names another's page");
    }
  }

  // Compact lists of ragged steps: each record is of a token whose entry goes somewhere.
  void check_entries(const std::vector<PlanRecord>& entries,
                     const std::vector<std::int64_t>& locations) {
    for (const PlanRecord& entry : entries) {
      require(entry.batch_id < world_.rows.size(), "an entry of no batch row");
      const TenantRow& row = world_.rows[entry.batch_id];
      const std::int64_t j = std::int64_t{entry.ragged_id} - row.first_token;
      require(j >= 0 && j < row.ahead.row.tokens && at(locations, entry.ragged_id) >= 0,
              "an entry of another's token");
    }
  }

  bool in_ring(const TenantRow& row, std::int64_t location) const {
    const std::int64_t ring = world_.engine.cache().device().window_ring_tokens();
    return location >= 0 && location / ring == row.seat;
  }
  bool in_pages(const TenantRow& row, std::int64_t page) const {
    return std::any_of(row.pages.begin(), row.pages.end(),
                       [&](PageId own) { return own.value == page; });
  }
  // Its own part: the chunk, and the window before it.
  bool in_scratch(const TenantRow& row, std::int32_t r, std::int64_t location) const {
    const std::int64_t first = row.first_token + 127 * std::int64_t{r};
    return location >= first && location < first + 127 + row.ahead.row.tokens;
  }

  TenantWorld& world_;
  const Told& told_;
};

// --- Stories ---

// Tenant A's other rows: quiet and signalling NaNs and infinities in the one content.
void make_other_rows_nan(TenantWorld& world) {
  TestEngine& engine = world.engine;
  const std::int64_t tokens = engine.options().bank_tokens;
  constexpr std::uint32_t kWords[] = {0x7FC00000u, 0x7F800001u, 0xFF800000u, 0xFFA12345u};
  for (std::size_t i = 0; i < engine.options().spec.layers.size(); ++i) {
    const auto at = engine.rows_of(LayerId(static_cast<std::int32_t>(i)));
    const auto fill = [&](const std::byte* bank, std::int64_t row_bytes) {
      if (bank == nullptr) return;
      std::vector<std::uint32_t> words(static_cast<std::size_t>(tokens * row_bytes / 4));
      for (std::size_t w = 0; w < words.size(); ++w) words[w] = kWords[w % 4];
      patch<std::uint32_t>(engine, bank + kOtherContent * tokens * row_bytes, words);
    };
    fill(at.window_bank, 512 * 2);
    fill(at.csa_bank, 2048 * 4);
    fill(at.indexer_bank, 512 * 4);
    fill(at.hca_bank, 1024 * 4);
  }
}

void tell_story(std::uint32_t seed) {
  CAPTURE(seed);
  MESSAGE("seed " << seed);
  Tenant a(seed);
  Tenant b(seed + 1);
  TenantWorld alone_world(kRandomContent, false);
  TenantWorld together(kRandomContent, false);
  TenantWorld other_rows(kOtherContent, false);
  TenantWorld cleared(kOtherContent, true);
  make_other_rows_nan(other_rows);
  make_other_rows_nan(cleared);
  std::int64_t bytes = 0, indices = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    CAPTURE(turn);
    const bool ragged = hash32(seed * 31 + static_cast<std::uint32_t>(turn)) % 3 == 0;
    const TenantTurn of_a = a.next(ragged);
    const TenantTurn of_b = b.next(ragged);
    const std::vector<std::byte> expected = alone_world.run(nullptr, of_b, ragged);
    bytes += static_cast<std::int64_t>(expected.size());
    for (TenantWorld* world : {&together, &other_rows, &cleared}) {
      CAPTURE((world == &together ? "together" : world == &other_rows ? "other rows" : "cleared"));
      const bool same = world->run(&of_a, of_b, ragged) == expected;
      REQUIRE(same);
    }
    for (TenantWorld* world : {&alone_world, &together, &other_rows}) {
      const Told told(*world);
      const IndexCheck check(*world, told);
      CAPTURE(check.first_wrong);
      REQUIRE(check.wrong == 0);
      indices += check.seen;
    }
    // Whose page is whose depends on no row.
    CHECK(together.engine.cache().ledger().digest() == other_rows.engine.cache().ledger().digest());
    together.engine.cache().ledger().check_invariants();
  }
  for (const Tenant* tenant : {&a, &b}) {
    CHECK(tenant->counts.admitted >= 10);
    CHECK(tenant->counts.finished >= 5);
    CHECK(tenant->counts.preempted >= 1);
    CHECK(tenant->counts.stopped >= 1);
    CHECK(tenant->counts.inert_rows >= 1);
    CHECK(tenant->counts.refused >= 10);
    CHECK(tenant->counts.long_rows >= 10);
  }
  CHECK(together.poisoned_pages >= 20);
  CHECK(bytes > 10'000'000);
  CHECK(indices > 100'000);
  MESSAGE(bytes << " bytes of B compared three times, " << indices << " indices checked");
}

TEST_CASE("what a tenant reads does not depend on its neighbour, nor on the neighbour's rows") {
  for (const std::uint32_t seed : {7100u, 7200u}) tell_story(seed);
}

}  // namespace
