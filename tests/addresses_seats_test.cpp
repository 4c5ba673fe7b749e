// State of seats far into its region: window rings, rows of the CSA ring, HCA folds. Rings and
// banks are made long, so that few seats get beyond 2^31 bytes; on CUDA, where memory costs little,
// beyond 2^31 floats. Memory that is not there is in addresses_far_test.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "tests/support/field_stories.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr LayerId kLayer(0);

std::int64_t longer() { return test_backend().kind() == BackendKind::kCuda ? 4 : 1; }

// Runs the same content in seat 0 and in the last one, in the same steps: chunks, replays, a chunk.
// A seat's part of the region has `bytes` bytes and follows that of the seat before at `base`.
template <class Base>
void check_last_seat(const TestEngineOptions& options, std::int64_t bytes, const Base& base) {
  TestEngine engine(test_backend(), options);
  const std::int64_t last = options.limits.seats_max - 1;
  REQUIRE(last * bytes > longer() << 31);
  std::vector<RequestId> requests;
  for (std::int64_t seat = 0; seat <= last; ++seat) requests.push_back(engine.admit(0, 200));
  const RequestId first = requests.front();
  const RequestId far = requests.back();
  REQUIRE(engine.cache().ledger().info(far).seat.value == last);
  engine.ragged_step({{first, 130}, {far, 130}});
  for (int i = 0; i < 9; ++i) {
    engine.replay_step(std::vector<StepRow>{{first}, {far}}, StepShape::decode(2));
  }
  engine.ragged_step({{first, 30}, {far, 30}});
  const std::byte* region = base(engine.cache().device());
  const auto near_bytes = fetch(engine, region, bytes);
  const auto far_bytes = fetch(engine, region + last * bytes, bytes);
  REQUIRE(near_bytes != std::vector<std::byte>(near_bytes.size()));
  const bool same = near_bytes == far_bytes;
  CHECK(same);
}

// A1
TEST_CASE("rows of the CSA ring beyond 2^31 bytes are those of seat 0") {
  TestEngineOptions options = small_engine(66, 200);
  options.spec.layers = {LayerKind::kCsa};
  options.cache.csa_ring_tokens = longer() * 4096;
  check_last_seat(options, longer() * 4096 * 2048 * 4, [](const DeviceCache& device) {
    return reinterpret_cast<const std::byte*>(device.csa_state(kLayer));
  });
}

// A1, A2
TEST_CASE("window entries and scales beyond 2^31 bytes are those of seat 0") {
  TestEngineOptions options = small_engine(58, 200);
  options.spec.layers = {LayerKind::kSliding};
  options.cache.window_ring_tokens = longer() * 65'536;
  check_last_seat(options, longer() * 65'536 / 64 * main_page_bytes(64),  // pages of FlashMLA
                  [](const DeviceCache& device) { return device.window_ring(kLayer).base; });
}

// A1
TEST_CASE("HCA folds beyond 2^31 bytes are those of seat 0") {
  TestEngineOptions options = small_engine(88, 200);
  options.spec.layers = {LayerKind::kHca};
  options.limits.draft_max = longer() * 4'096 - 2;
  options.limits.tokens_max = longer() * 4'096;
  check_last_seat(options, longer() * 4'096 * 3 * 512 * 4, [](const DeviceCache& device) {
    return reinterpret_cast<const std::byte*>(device.hca_state(kLayer));
  });
}

}  // namespace
