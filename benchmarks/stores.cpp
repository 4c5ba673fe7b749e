// How fast do the single operations store, fold and gather, at the sizes of a long prefill? And
// what does it cost to zero pages and seats on their way to new owners?
//
// Each operation has as many sets of input and output as it takes that no byte is touched again
// before three times the L2 of other traffic; a figure is the difference between graphs of 33
// (fold: 5) and of 1, over the sets in turn; where a set fits the L2, the graph of 1 is warm, which
// makes the figure longer. Locations are int64, all different, in order or in the random order of a
// pool that has served for a while. Bytes counted: what is read and written once, the locations
// included.
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <quire/planner/plan_rule.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/device_cache.h>

#include "benchmarks/support/bf16_rows.h"
#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"

namespace {

using namespace quire;
using namespace quire::bench;

constexpr std::int64_t kRows = 65536;
constexpr std::int64_t kPageEntries = 64;
constexpr std::int64_t kPages = kRows / kPageEntries;
constexpr int kCopies = 33;
constexpr std::uint32_t kSeed = 20261130;

constexpr std::int64_t kMainBytes = kMainDataBytes + kMainScaleBytes;
constexpr std::int64_t kKeyBytes = kIndexerDim + kIndexerScaleBytes;

struct Target {
  double flashmla_us = 33, indexer_us = 9;
};

// Sets of memory, each cut into pieces in the same order.
class Sets {
 public:
  Sets(Backend& backend, const Stream& stream, std::int64_t touched_bytes, std::int64_t set_bytes)
      : count_(static_cast<int>(ceil_div(3 * this_device().l2_bytes, touched_bytes)) + 1),
        set_bytes_(round_up<std::int64_t>(set_bytes, 256)),
        pool_(backend, count_ * set_bytes_),
        memory_(pool_, count_ * set_bytes_, stream) {
    backend.fill(memory_.data(), 0, memory_.bytes(), stream);
  }

  int count() const { return count_; }
  std::byte* of(int copy) const { return memory_.data() + copy % count_ * set_bytes_; }

 private:
  int count_;
  std::int64_t set_bytes_;
  MemoryPool pool_;
  Memory memory_;
};

std::vector<std::int64_t> locations_of(bool scattered, int set) {
  std::vector<std::int64_t> locations(kRows);
  std::iota(locations.begin(), locations.end(), 0);
  if (scattered) {
    std::mt19937 random(kSeed + static_cast<std::uint32_t>(set));
    std::shuffle(locations.begin(), locations.end(), random);
  }
  return locations;
}

// Seconds of one operation; `enqueue` is told which copy it is.
Distribution time_of_operation(Backend& backend, const Stream& stream,
                               const std::function<void(int copy)>& enqueue, int copies = kCopies) {
  const auto chain = [&](int length) {
    return capture(backend, stream, [&] {
      for (int copy = 0; copy < length; ++copy) enqueue(copy);
    });
  };
  const GraphExec many = chain(copies);
  const GraphExec one = chain(1);
  return time_of_copy(many, one, copies - 1, stream);
}

struct Kind {
  bool keys;
  std::int64_t dim, entry_bytes, page_bytes;

  std::int64_t row_bytes() const { return kRows * dim * 2; }
  std::int64_t pages_bytes() const { return kPages * page_bytes; }
  double touched() const {
    return static_cast<double>(kRows * (dim * 2 + entry_bytes + std::int64_t{8}));
  }
  EntryPool pool(std::byte* base) const {
    return make_entry_pool(base, page_bytes, static_cast<std::int32_t>(kPageEntries));
  }
};
constexpr Kind kMain{false, kHeadDim, kMainBytes, main_page_bytes(kPageEntries)};
constexpr Kind kKeys{true, kIndexerDim, kKeyBytes, indexer_page_bytes(kPageEntries)};

// Stores rows to pages, and gathers the main ones back. A set: rows, locations, pages.
void measure_stores(Report& report, Backend& backend, const Stream& stream, const Kind& kind) {
  const std::int64_t locations_at = kind.row_bytes();
  const std::int64_t pages_at = locations_at + kRows * 8;
  const Sets sets(backend, stream, static_cast<std::int64_t>(kind.touched()),
                  pages_at + kind.pages_bytes());
  for (const bool scattered : {true, false}) {
    for (int set = 0; set < sets.count(); ++set) {
      fill_random_bf16(sets.of(set), kRows * kind.dim, 4.0f, static_cast<std::uint32_t>(set),
                       stream);
      const std::vector<std::int64_t> locations = locations_of(scattered, set);
      backend.copy(sets.of(set) + locations_at, locations.data(), kRows * 8, stream);
      stream.wait();
    }
    const auto store = [&](int copy) {
      StoreParams params;
      params.input = sets.of(copy);
      params.rows = kRows;
      params.locations = sets.of(copy) + locations_at;
      params.wide_locations = true;
      params.pool = kind.pool(sets.of(copy) + pages_at);
      kind.keys ? backend.store_indexer(params, Pdl::kWaitOnly, stream)
                : backend.store_flashmla(params, Pdl::kWaitOnly, stream);
    };
    const auto gather = [&](int copy) {
      GatherMainParams params;
      params.pool = kind.pool(sets.of(copy) + pages_at);
      params.locations = sets.of(copy) + locations_at;
      params.wide_locations = true;
      params.count = kRows;
      params.output = sets.of(copy);
      backend.gather_main(params, Pdl::kWaitOnly, stream);
    };
    const std::string where = scattered ? ", scattered" : ", in order";
    report.add({(kind.keys ? "store_indexer" : "store_flashmla") + where,
                "rows",
                kRows,
                time_of_operation(backend, stream, store),
                kind.keys ? Target{}.indexer_us : Target{}.flashmla_us,
                kind.touched(),
                {},
                {}});
    if (kind.keys) continue;
    for (int set = 0; set < sets.count(); ++set) store(set);  // so that all pages are written
    report.add({"gather_main" + where,
                "rows",
                kRows,
                time_of_operation(backend, stream, gather),
                {},
                kind.touched(),
                {},
                {}});
  }
}

// The indexer keys of 16 requests, 65,536 together, from scattered pages.
void measure_gather_indexer(Report& report, Backend& backend, const Stream& stream) {
  constexpr std::int64_t kRequests = 16;
  constexpr std::int64_t kCells = kPages / kRequests;
  constexpr std::int64_t kTouched = kRows * 2 * kKeyBytes + kPages * 4;
  const std::int64_t keys_at = kKeys.pages_bytes();
  const std::int64_t scales_at = keys_at + kRows * kIndexerDim;
  const std::int64_t table_at = scales_at + kRows * 4;
  const std::int64_t entries_at = table_at + kPages * 4;
  const std::int64_t sums_at = entries_at + kRequests * 4;
  const Sets sets(backend, stream, kTouched, sums_at + (kRequests + 1) * 4);
  const std::vector<std::int32_t> entries(kRequests, static_cast<std::int32_t>(kRows / kRequests));
  std::vector<std::int32_t> table(kPages);
  std::iota(table.begin(), table.end(), 0);
  std::mt19937 random(kSeed);
  for (int set = 0; set < sets.count(); ++set) {
    std::shuffle(table.begin(), table.end(), random);
    backend.copy(sets.of(set) + table_at, table.data(), kPages * 4, stream);
    backend.copy(sets.of(set) + entries_at, entries.data(), kRequests * 4, stream);
    stream.wait();
  }
  const auto at = [&](int copy, std::int64_t offset) {
    return reinterpret_cast<std::int32_t*>(sets.of(copy) + offset);
  };
  const auto gather = [&](int copy) {
    GatherIndexerParams params;
    params.pool = kKeys.pool(sets.of(copy));
    params.rows = static_cast<std::int32_t>(kRequests);
    params.row_entries = at(copy, entries_at);
    params.page_table = at(copy, table_at);
    params.page_table_stride = kCells;
    params.cu_entries = at(copy, sums_at);
    params.capacity = kRows;
    params.keys = reinterpret_cast<std::uint8_t*>(sets.of(copy) + keys_at);
    params.scales = reinterpret_cast<float*>(sets.of(copy) + scales_at);
    backend.gather_indexer(params, Pdl::kWaitOnly, stream);
  };
  report.add({"gather_indexer",
              "rows",
              kRows,
              time_of_operation(backend, stream, gather),
              {},
              static_cast<double>(kTouched),
              {},
              {}});
  std::int32_t gathered = 0;
  backend.copy(&gathered, at(0, sums_at + kRequests * 4), 4, stream);
  stream.wait();
  QUIRE_CHECK(gathered == kRows, "gather_indexer gathered ", gathered, " keys, not ", kRows);
}

// 512 picks each of 4,096 tokens of 16 requests.
void measure_translate_picks(Report& report, Backend& backend, const Stream& stream) {
  constexpr std::int64_t kTokens = 4096, kPicks = 512, kRequests = 16, kCells = 64;
  constexpr std::int64_t kList = kTokens * kPicks * 4;
  constexpr std::int64_t kEntries = kCells * kPageEntries;  // of each request
  constexpr std::int64_t kRowsAt = 2 * kList, kLengthsAt = kRowsAt + kTokens * 4;
  constexpr std::int64_t kTableAt = kLengthsAt + kTokens * 4;
  constexpr std::int64_t kOutAt = kTableAt + kRequests * kCells * 4;
  constexpr std::int64_t kEnd = kOutAt + kTokens * 4;
  const Sets sets(backend, stream, 2 * kList, kEnd);
  std::vector<std::int32_t> set(kEnd / 4, 0);
  std::mt19937 random(kSeed);
  std::uniform_int_distribution<std::int32_t> pick(0, static_cast<std::int32_t>(kEntries) - 1);
  std::generate(set.begin(), set.begin() + kList / 4, [&] { return pick(random); });
  for (std::int64_t token = 0; token < kTokens; ++token) {
    set[static_cast<std::size_t>(kRowsAt / 4 + token)] =
        static_cast<std::int32_t>(token * kRequests / kTokens);
    set[static_cast<std::size_t>(kLengthsAt / 4 + token)] = static_cast<std::int32_t>(kEntries);
  }
  std::iota(set.begin() + kTableAt / 4, set.begin() + kOutAt / 4, 0);
  std::shuffle(set.begin() + kTableAt / 4, set.begin() + kOutAt / 4, random);
  for (int i = 0; i < sets.count(); ++i) backend.copy(sets.of(i), set.data(), kEnd, stream);
  stream.wait();
  const auto translate = [&](int copy) {
    const auto at = [&](std::int64_t offset) {
      return reinterpret_cast<std::int32_t*>(sets.of(copy) + offset);
    };
    TranslatePicksParams params;
    params.tokens = static_cast<std::int32_t>(kTokens);
    params.k = static_cast<std::int32_t>(kPicks);
    params.picks = at(0);
    params.locations = at(kList);
    params.picks_stride = params.locations_stride = kPicks;
    params.token_batch_row = at(kRowsAt);
    params.token_csa_length = at(kLengthsAt);
    params.page_table = at(kTableAt);
    params.page_table_stride = kCells;
    params.lengths = at(kOutAt);
    backend.translate_picks(params, Pdl::kWaitOnly, stream);
  };
  report.add({"translate_picks, 512 each",
              "tokens",
              kTokens,
              time_of_operation(backend, stream, translate),
              {},
              static_cast<double>(2 * kList),
              {},
              {}});
}

// The fold of 65,536 tokens of 16 requests, d = 512, fp32: with a list of just the entries, and
// with one padded to the tokens. The rows alone are 537 MB: one set.
void measure_compress(Report& report, Backend& backend, const Stream& stream) {
  constexpr std::int64_t kRequests = 16, kDim = kHeadDim, kEntries = kRows / kCsaRule.ratio;
  const std::int64_t writes = write_capacity(kCsaRule, kRequests, kRows);
  std::int64_t bytes = 0;
  const auto piece = [&](std::int64_t size) {
    return std::exchange(bytes, bytes + round_up<std::int64_t>(size, 256));
  };
  const std::int64_t input = piece(kRows * 4 * kDim * 4);
  const std::int64_t state = piece(kRequests * kC4RingTokens * 4 * kDim * 4);
  const std::int64_t bias = piece(8 * kDim * 4);
  const std::int64_t floats = bytes / 4;  // to be filled
  const std::int64_t output = piece(kRows * kDim * 4);
  const std::int64_t compress = piece(kRows * 16), write = piece(writes * 16);
  const std::int64_t ints = piece(6 * 32 * 4);  // six lists of up to 17
  MemoryPool pool(backend, bytes);
  const Memory memory(pool, bytes, stream);
  fill_random(reinterpret_cast<float*>(memory.data()), floats, 7, stream);
  const auto list = [&](int i) {
    return reinterpret_cast<std::int32_t*>(memory.data() + ints) + i * 32;
  };
  const std::vector<std::int32_t> prefix(kRequests, 0), extend(kRequests, kRows / kRequests);
  std::vector<std::int32_t> seats(kRequests);
  std::iota(seats.begin(), seats.end(), 0);
  const std::vector<std::int32_t>* lists[] = {&prefix, &extend, &seats};
  for (int i = 0; i < 3; ++i) backend.copy(list(i), lists[i]->data(), kRequests * 4, stream);

  RecordPlanParams plan;
  plan.rule = kCsaRule;
  plan.rows = kRequests;
  plan.prefix = list(0);
  plan.extend = list(1);
  plan.compress = reinterpret_cast<PlanRecord*>(memory.data() + compress);
  plan.write = reinterpret_cast<PlanRecord*>(memory.data() + write);
  plan.compress_capacity = kRows;
  plan.write_capacity = writes;
  plan.cu_extend = list(3);
  plan.cu_compress = list(4);
  plan.cu_write = list(5);
  backend.plan_records(plan, stream);
  std::int32_t planned = 0;
  backend.copy(&planned, plan.cu_compress + kRequests, 4, stream);
  stream.wait();
  QUIRE_CHECK(planned == kEntries, "planned ", planned, " entries, not ", kEntries);

  for (const bool padded : {false, true}) {
    const auto fold = [&](int) {
      CompressC4PrefillParams params;
      params.head_dim = kDim;
      params.state = memory.data() + state;
      params.input = memory.data() + input;
      params.bias = memory.data() + bias;
      params.output = memory.data() + output;
      params.compress = plan.compress;
      params.write = plan.write;
      params.compress_capacity = padded ? kRows : kEntries;
      params.write_capacity = writes;
      params.indices = list(2);
      backend.compress_c4_prefill(params, Pdl::kWaitOnly, stream);
    };
    constexpr auto kBytes = static_cast<double>(kRows * 4 * kDim * 4 + kEntries * kDim * 4);
    report.add({padded ? "compress_c4_prefill, padded plan" : "compress_c4_prefill, exact plan",
                "tokens",
                kRows,
                time_of_operation(backend, stream, fold, 5),
                padded ? std::nullopt : std::optional(131.0),
                kBytes,
                {},
                padded ? "the original: 181 us" : "the original: 131 us"});
  }
}

// An update that gives 64 seats and 64 pages of V4-Flash to new owners: what `clear_on_reuse` adds
// to it. Updates cannot be captured: without the option, the figure is the host's.
void measure_clear_on_reuse(Report& report, Backend& backend, const Stream& stream) {
  constexpr std::int32_t kOwners = 64;
  Limits limits;
  limits.seats_max = limits.rows_max = limits.tokens_max = limits.pages = kOwners;
  limits.context_max = kPageTokens;
  for (const bool clears : {true, false}) {
    DeviceCacheOptions options;
    options.clear_on_reuse = clears;
    DeviceCache cache(backend, ModelSpec::deepseek_v4_flash(), limits, options);
    StepUpdate update(limits);
    StepId id = 0;
    const auto apply = [&] {
      update.start(id++, PlanBufferId(0), StepShape::decode(kOwners), 1);
      for (std::int32_t i = 0; i < kOwners; ++i) {
        update.add(BatchRowUpdate{i, 1, 1, BatchRowUpdate::kNewOwner});
      }
      for (std::int32_t i = 0; i < kOwners; ++i) update.add(CellUpdate{i, 0, i});
      update.seal();
      cache.apply(update, stream);
    };
    const CacheBytes bytes = cache.bytes();
    report.add(
        {clears ? "apply, 64 new owners, clear_on_reuse" : "apply, 64 new owners",
         "owners",
         kOwners,
         time_of_eager(apply, stream),
         {},
         clears ? std::optional(static_cast<double>(bytes.seats + bytes.pages)) : std::nullopt,
         {},
         {}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu("bench_stores", "how fast the single operations store, fold and gather", argc,
                    argv, [](Report& report, Backend& backend, const Stream& stream) {
                      report.set(measure_ceilings(backend, stream));
                      measure_stores(report, backend, stream, kMain);
                      measure_stores(report, backend, stream, kKeys);
                      measure_gather_indexer(report, backend, stream);
                      measure_translate_picks(report, backend, stream);
                      measure_compress(report, backend, stream);
                      measure_clear_on_reuse(report, backend, stream);
                    });
}
