// What a step costs the host in its steady state: no allocation in the thread that prepares it, and
// nothing that grows with the context. This program replaces the global operators new and delete.
#include <doctest/doctest.h>
#include <quire/cache/cache_manager.h>
#include <quire/runtime/host/host_stream.h>
#include <quire/runtime/owners.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "tests/support/counted_new.h"
#include "tests/support/test_backend.h"

namespace quire {
namespace {

using test::calls_of_delete;
using test::calls_of_new;

constexpr PlanBufferId kBuffer(0);
constexpr std::int32_t kRows = 256;
constexpr std::int32_t kDraftMax = 1;

Limits batch_limits() {
  Limits limits;
  limits.seats_max = kRows + 8;
  limits.rows_max = kRows;
  limits.tokens_max = kRows * (kDraftMax + 1);
  limits.context_max = 2048;
  limits.pages = limits.seats_max * limits.cells_max();
  limits.draft_max = kDraftMax;
  return limits;
}

DeviceCacheOptions options_with(bool clear_on_reuse) {
  DeviceCacheOptions options;
  options.clear_on_reuse = clear_on_reuse;
  return options;
}

// A verify batch: drafts are refused, so limits are lowered; requests grow over pages at different
// times, end and make room for others; every fourth step waits for the stream.
class Batch {
 public:
  Batch(Backend& backend, bool clear_on_reuse)
      : backend_(backend),
        cache_(backend, ModelSpec{{LayerKind::kSliding}}, batch_limits(),
               options_with(clear_on_reuse)),
        stream_(backend) {
    for (std::int32_t i = 0; i < kRows; ++i) {
      rows_.push_back({admit(), kDraftMax + 1});
      outcomes_.push_back({});
    }
  }

  void step() {
    Ledger& ledger = cache_.ledger();
    for (std::int32_t i = 0; i < kRows; ++i) {
      BatchRow& row = rows_[static_cast<std::size_t>(i)];
      const std::int64_t age = ledger.info(row.request).upper_tokens;
      if (age >= 300 + i || i == renewed_) {
        ledger.release(row.request);
        row.request = admit();
      }
      (void)ledger.reserve(row.request, row.tokens).value();
      outcomes_[static_cast<std::size_t>(i)].kept_tokens = 1 + (i + steps_) % 2;
    }
    const StepId id =
        cache_.begin_step(rows_, StepShape::decode(kRows, kDraftMax + 1), kBuffer, stream_);
    ledger.settle(id, outcomes_);
    ++steps_;
  }

  // More updates in flight than the counted steps ever have.
  void warm_up() {
    const bool host = backend_.kind() == BackendKind::kHost;
    if (host) stream_.view().host()->hold();
    for (renewed_ = 0; renewed_ < 8; ++renewed_) step();  // each has a new owner
    renewed_ = -1;
    if (host) stream_.view().host()->resume();
    stream_.wait();
  }

  void wait() { stream_.wait(); }

 private:
  RequestId admit() { return cache_.ledger().admit(1024, 256).value(); }

  Backend& backend_;
  CacheManager cache_;
  Stream stream_;
  std::vector<BatchRow> rows_;
  std::vector<Outcome> outcomes_;
  std::int32_t steps_ = 0;
  std::int32_t renewed_ = -1;  // a batch row whose request makes room whatever its age
};

TEST_CASE("the counters see an allocation of every form") {
  const std::int64_t news = calls_of_new;
  const std::int64_t deletes = calls_of_delete;
  ::operator delete(::operator new(8));
  ::operator delete[](::operator new[](8));
  ::operator delete(::operator new(8, std::nothrow));
  ::operator delete(::operator new(8, std::align_val_t(64)), std::align_val_t(64));
  CHECK(calls_of_new - news == 4);
  CHECK(calls_of_delete - deletes == 4);
}

TEST_CASE("steps of 256 batch rows allocate nothing on the host") {
  for (const bool clear_on_reuse : {false, true}) {
    CAPTURE(clear_on_reuse);
    Batch batch(test::test_backend(), clear_on_reuse);
    batch.warm_up();
    std::int64_t news = 0;
    std::int64_t deletes = 0;
    for (int i = 0; i < 800; ++i) {
      const std::int64_t news_before = calls_of_new;
      const std::int64_t deletes_before = calls_of_delete;
      batch.step();
      news += calls_of_new - news_before;
      deletes += calls_of_delete - deletes_before;
      if (i % 4 == 3) batch.wait();
    }
    CHECK(news == 0);
    CHECK(deletes == 0);
  }
}

// Bytes of the updates that carry a batch from `context` tokens on, one step after the other.
std::vector<std::size_t> update_sizes(std::int64_t context) {
  constexpr std::int32_t rows_max = 16;
  constexpr std::int64_t chunk = 1 << 16;
  Limits limits;
  limits.seats_max = limits.rows_max = rows_max;
  limits.tokens_max = chunk;
  limits.context_max = context + 1024;
  limits.pages = rows_max * limits.cells_max();
  Ledger ledger(limits);
  std::vector<BatchRow> rows;
  for (std::int32_t i = 0; i < rows_max; ++i) {
    const RequestId request = ledger.admit(limits.context_max, limits.context_max).value();
    const std::int64_t length = context + 16 * i;  // other phases of their pages
    (void)ledger.reserve(request, length).value();
    for (std::int64_t done = 0; done < length;) {
      const auto tokens = static_cast<std::int32_t>(std::min(chunk, length - done));
      const BatchRow row{request, tokens};
      const Outcome all{tokens, false};
      const StepId id = ledger.prepare({&row, 1}, StepShape::ragged(1, chunk), kBuffer).id();
      ledger.settle(id, {&all, 1});
      done += tokens;
    }
    rows.push_back({request, 1});
  }
  const std::vector<Outcome> outcomes(rows.size(), Outcome{1, false});
  std::vector<std::size_t> sizes;
  for (int step = 0; step < 600; ++step) {
    for (const BatchRow& row : rows) (void)ledger.reserve(row.request, 1).value();
    const StepUpdate& update = ledger.prepare(rows, StepShape::decode(rows_max), kBuffer);
    sizes.push_back(update.bytes().size());
    ledger.settle(update.id(), outcomes);
  }
  return sizes;
}

TEST_CASE("what a step carries to the device does not depend on the context") {
  const std::vector<std::size_t> sizes = update_sizes(1 << 10);
  CHECK(sizes == update_sizes(1 << 20));
  std::size_t cells = 0;
  for (const std::size_t size : sizes) {
    cells += (size - sizeof(StepUpdateHeader) - 16 * sizeof(BatchRowUpdate)) / sizeof(CellUpdate);
  }
  // 600 tokens of 16 rows: two or three pages each, one cell per page and nothing else.
  CHECK(cells >= 32);
  CHECK(cells <= 48);
}

}  // namespace
}  // namespace quire
