// One ledger drives two device caches, as tensor-parallel ranks: what it decides travels as bytes.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include <quire/cache/ledger.h>
#include <quire/runtime/owners.h>

#include "tests/support/device_array.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

std::vector<std::byte> memory_of(Backend& backend, const DeviceCache& cache, Stream& stream) {
  const std::span<std::byte> regions[] = {cache.pages_memory(), cache.seats_memory(),
                                          cache.step_table_memory()};
  std::size_t total = 0;
  for (const auto region : regions) total += region.size();
  std::vector<std::byte> bytes(total);
  std::size_t at = 0;
  for (const auto region : regions) {
    backend.copy(bytes.data() + at, region.data(), static_cast<std::int64_t>(region.size()),
                 stream);
    at += region.size();
  }
  stream.wait();
  return bytes;
}

TEST_CASE("one ledger drives two device caches through serialised updates, equal to the byte") {
  constexpr std::uint32_t kSeed = 11;
  MESSAGE("seed " << kSeed);
  Backend& backend = test_backend();
  Stream stream(backend);
  ModelSpec spec;
  spec.layers = {LayerKind::kCsa};
  Limits limits;
  limits.seats_max = 6;
  limits.pages = 9;  // fewer than all seats could want: reuse happens
  limits.rows_max = 6;
  limits.tokens_max = 512;
  limits.context_max = 512;
  limits.run_ahead_max = 1;

  Ledger ledger(limits);
  DeviceCache ranks[2] = {DeviceCache(backend, spec, limits), DeviceCache(backend, spec, limits)};
  std::vector<float> table(static_cast<std::size_t>(limits.context_max * kRopeDim));
  make_rope_table(RopeGroup::kCompressing, limits.context_max, RopeLayout::kHalves, table);
  DeviceArray<float> rope(backend, stream, table);
  std::vector<float> values(8 * 512 + 8 * 128);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(hash32(static_cast<std::uint32_t>(i)) % 2048) * 0x1p-10f;
  }
  DeviceArray<float> weights(backend, stream, values);
  std::vector<float> input(static_cast<std::size_t>(limits.tokens_max) * 2048);
  for (std::size_t i = 0; i < input.size(); ++i) {
    input[i] = static_cast<float>(hash32(static_cast<std::uint32_t>(i) + 77) % 4096) * 0x1p-10f;
  }
  DeviceArray<float> rows(backend, stream, input);
  LayerBinding binding;
  binding.window_rows = ElementType::kFloat32;
  binding.csa_bias = weights.data();
  binding.csa_norm = weights.data();
  binding.indexer_bias = weights.data() + 8 * 512;
  binding.indexer_norm = weights.data();
  for (DeviceCache& rank : ranks) {
    rank.bind_layer(LayerId(0), binding);
    rank.bind_rope(RopeGroup::kCompressing, {rope.data(), limits.context_max, RopeLayout::kHalves});
  }
  AppendInputs inputs;
  inputs.window = {rows.data(), 512};
  inputs.csa.data = rows.data();
  inputs.indexer = {rows.data(), 512};

  std::vector<RequestId> live;
  std::vector<std::vector<Outcome>> outcomes;
  std::uint32_t dice = kSeed;
  const auto roll = [&](std::uint32_t sides) { return (dice = hash32(dice + 1)) % sides; };
  StepId settled = 0;
  for (int turn = 0; turn < 120; ++turn) {
    if (roll(3) == 0) {
      if (const auto admitted = ledger.admit(512, 100); admitted) live.push_back(admitted.value());
    }
    if (!live.empty() && roll(9) == 0) {
      ledger.release(live.front());
      live.erase(live.begin());
    }
    std::vector<BatchRow> batch;
    std::int32_t tokens = 0;
    for (const RequestId request : live) {
      const auto wanted = static_cast<std::int32_t>(1 + roll(60));
      const RequestInfo info = ledger.info(request);
      if (info.upper_tokens + wanted > info.context_max_tokens) continue;
      if (!ledger.reserve(request, wanted)) continue;
      batch.push_back({request, wanted});
      tokens += wanted;
    }
    std::stable_partition(batch.begin(), batch.end(),
                          [](const BatchRow& row) { return row.tokens == 1; });
    if (batch.empty()) continue;
    while (settled < static_cast<StepId>(outcomes.size()) - 1) {
      ledger.settle(settled, outcomes[static_cast<std::size_t>(settled)]);
      ++settled;
    }
    const StepShape shape =
        StepShape::ragged(static_cast<std::int32_t>(batch.size()), tokens);
    const StepUpdate& decided = ledger.prepare(batch, shape, PlanBufferId(0));
    for (DeviceCache& rank : ranks) {
      rank.apply(StepUpdate::from_bytes(decided.bytes()), stream);
      rank.enqueue_plan(PlanBufferId(0), stream);
      rank.append(LayerId(0), PlanBufferId(0), inputs, stream);
      rank.enqueue_commit(PlanBufferId(0), nullptr, nullptr, stream);
    }
    outcomes.emplace_back();
    for (const BatchRow& row : batch) outcomes.back().push_back({row.tokens, false});
    ledger.check_invariants();
  }
  REQUIRE(outcomes.size() > 60);
  const auto first = memory_of(backend, ranks[0], stream);
  const bool equal = first == memory_of(backend, ranks[1], stream);
  CHECK(equal);
  // Not for want of anything to differ in.
  const DeviceCache untouched(backend, spec, limits);
  const auto fresh = memory_of(backend, untouched, stream);
  REQUIRE(first.size() == fresh.size());
  std::size_t changed = 0;
  for (std::size_t i = 0; i < first.size(); ++i) changed += first[i] == fresh[i] ? 0u : 1u;
  CHECK(changed > first.size() / 100);
  CHECK(std::any_of(first.begin(), first.end(), [](auto byte) { return byte != decltype(byte){}; }));
}

}  // namespace
