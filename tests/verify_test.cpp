// That verification can fail: one byte of each kind of live memory is flipped, and it must be
// named; restored, the request is right again.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

#include "examples/stand_in_model.h"
#include "examples/verify.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using namespace quire::serving;

constexpr PlanBufferId kBuffer(0);
constexpr LayerId kSliding(0);
constexpr LayerId kCsa(1);
constexpr LayerId kHca(2);
constexpr std::int64_t kPrompt = 290;
constexpr std::int64_t kTokens = 302;  // 75 CSA entries and 2 tokens; 2 HCA entries and 46 tokens

ModelSpec three_kinds() {
  return ModelSpec{{LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca}};
}

Limits small_limits() {
  Limits limits;
  limits.seats_max = 2;
  limits.pages = 4;
  limits.rows_max = 2;
  limits.tokens_max = 300;
  limits.context_max = 512;
  limits.run_ahead_max = 0;
  return limits;
}

// One request, prefilled in a chunk and decoded token by token.
struct Served {
  Served() {
    model.bind(manager.device());
    // Not seat 0 and not page 0: an address that forgets them would still be right there.
    const RequestId other = manager.ledger().admit(1, 1).value();
    manager.ledger().reserve(other, 1).value();
    request = manager.ledger().admit(kTokens, kTokens).value();
    model.begin_request(seat(), {kSeed, kPrompt}, stream);
    step(StepShape::ragged(1, kPrompt), kPrompt);
    for (std::int64_t i = kPrompt; i < kTokens; ++i) step(StepShape::decode(2), 1);
    stream.wait();
  }

  void step(StepShape shape, std::int64_t tokens) {
    manager.ledger().reserve(request, tokens).value();
    const BatchRow row{request, static_cast<std::int32_t>(tokens)};
    const StepId id = manager.begin_step({&row, 1}, shape, kBuffer, stream);
    model.enqueue_step(manager.device(), kBuffer, shape, stream);
    const Outcome outcome{row.tokens, false};
    manager.ledger().settle(id, {&outcome, 1});
  }

  SeatId seat() const { return manager.ledger().info(request).seat; }
  std::int64_t page(std::int64_t index) const {
    return manager.ledger().pages_of(request)[static_cast<std::size_t>(index)].value;
  }

  // What verification says: nothing, or the difference.
  std::string verdict() {
    try {
      const std::int64_t bytes =
          verify_request(manager.device(), model, stream,
                         {7, kSeed, kPrompt, kTokens, seat(), manager.ledger().pages_of(request)});
      return bytes > 0 ? "" : "nothing was compared";
    } catch (const Error& error) {
      return error.what();
    }
  }

  void flip(const void* at) {
    auto* byte = const_cast<std::byte*>(static_cast<const std::byte*>(at));
    std::byte value{};
    test::test_backend().copy(&value, byte, 1, stream);
    stream.wait();
    value ^= std::byte{0x01};
    test::test_backend().copy(byte, &value, 1, stream);
    stream.wait();
  }

  static constexpr std::uint32_t kSeed = 4711;
  Stream stream{test::test_backend()};
  CacheManager manager{test::test_backend(), three_kinds(), small_limits()};
  StandInModel model{test::test_backend(), three_kinds(), small_limits(), stream};
  RequestId request;
};

TEST_CASE("verification passes what was served and names each byte that was flipped in it") {
  Served served;
  REQUIRE(served.verdict() == "");
  const DeviceCache& cache = served.manager.device();
  const auto check = [&](const char* part, const void* byte, LayerId layer,
                         const std::string& named) {
    CAPTURE(part);
    served.flip(byte);
    const std::string verdict = served.verdict();
    CAPTURE(verdict);
    CHECK(verdict.find("request 7") != std::string::npos);
    CHECK(verdict.find(concat("layer ", layer.value)) != std::string::npos);
    CHECK(verdict.find(named) != std::string::npos);
    served.flip(byte);
    CHECK(served.verdict() == "");
  };
  const std::int64_t ring_tokens = cache.window_ring_tokens();
  const std::int64_t ring = served.seat().value * ring_tokens;
  for (const LayerId layer : {kSliding, kCsa, kHca}) {
    const EntryPool window = cache.window_ring(layer);
    const std::int64_t newest = ring + (kTokens - 1) % ring_tokens;
    const std::int64_t oldest = ring + (kTokens - 128) % ring_tokens;
    check("window value", window.main_data(newest) + 17, layer, "window entry of position 301");
    check("window tail", window.main_data(oldest) + 575, layer, "window entry of position 174");
    check("window scale", window.main_scales(newest) + 6, layer, "window entry of position 301");
  }

  const EntryPool csa = cache.csa_pages(kCsa);
  const EntryPool keys = cache.indexer_pages(kCsa);
  const std::int64_t first = served.page(0) * 64;       // entry 0
  const std::int64_t last = served.page(1) * 64 + 10;   // entry 74
  check("first CSA value", csa.main_data(first), kCsa, "CSA entry 0");
  check("last CSA value", csa.main_data(last) + 447, kCsa, "CSA entry 74");
  check("CSA scale", csa.main_scales(last), kCsa, "CSA entry 74");
  check("indexer value", keys.indexer_values(last) + 127, kCsa, "indexer entry 74");
  check("indexer scale", keys.indexer_scale(first) + 3, kCsa, "scale of indexer entry 0");

  const std::int64_t state_row = served.seat().value * cache.csa_ring_tokens();
  const auto row_of = [&](const float* state, std::int64_t width, std::int64_t position) {
    return state + (state_row + position % cache.csa_ring_tokens()) * width;
  };
  check("state row", row_of(cache.csa_state(kCsa), 2048, 296) + 2047, kCsa,
        "state row of position 296");
  check("newest state row", row_of(cache.csa_state(kCsa), 2048, 301), kCsa,
        "state row of position 301");
  check("indexer state row", row_of(cache.indexer_state(kCsa), 512, 301) + 511, kCsa,
        "state row of position 301");

  const EntryPool hca = cache.hca_pages(kHca);
  check("HCA value", hca.main_data(served.page(0) * 2 + 1) + 100, kHca, "HCA entry 1");
  check("HCA scale", hca.main_scales(served.page(0) * 2) + 2, kHca, "HCA entry 0");
  const std::int64_t bank =
      served.seat().value * cache.hca_banks() + kTokens % cache.hca_banks();
  check("HCA fold", cache.hca_state(kHca) + bank * kHcaBankFloats + kHcaBankFloats - 1, kHca,
        "fold");
}

TEST_CASE("what nobody may read is not verified") {
  Served served;
  const DeviceCache& cache = served.manager.device();
  // Another seat, and the page's place behind the last entry.
  served.flip(cache.window_ring(kSliding).main_data(0));
  served.flip(cache.csa_pages(kCsa).main_data(served.page(1) * 64 + 11));
  CHECK(served.verdict() == "");
}

}  // namespace
