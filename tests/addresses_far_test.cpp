// Seats and pages so far out that their offsets pass 32 bits in every unit, elements of 4 bytes
// too: pure pointers, and appends whose bases lie so far in front of real memory that a far seat
// and a far page fall into it. Nothing between is touched, so that no memory is needed for it.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

#include <quire/planner/plan_rule.h>
#include <quire/runtime/device_cache.h>

#include "tests/support/device_array.h"
#include "tests/support/plan_fixture.h"
#include "tests/support/test_backend.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int32_t kFarSeat = (1 << 20) + 3;
constexpr std::int32_t kFarPage = (1 << 26) + 5;
constexpr std::int32_t kDraftMax = 2;
constexpr std::int32_t kRingTokens = 192;  // of the window
constexpr std::int32_t kStateTokens = 16;  // of the CSA ring
constexpr std::int32_t kBanks = kDraftMax + 2;
constexpr std::int32_t kTokens = 160;
constexpr std::int64_t kWindowPages = kRingTokens / 64;
constexpr std::int64_t kScratchPages = 5;
constexpr PlanGeometry kGeometry{kRingTokens, kDraftMax, 64, 2, -1, -1, -1, -1};

// `bytes` in front of what `at` points to, where nothing needs to be.
template <class T>
T* in_front(T* at, std::int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(at) -
                              static_cast<std::uintptr_t>(bytes));
}

template <class T>
std::int64_t bytes_between(const T* from, const T* to) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                   reinterpret_cast<std::uintptr_t>(from));
}

std::vector<float> random_rows(std::uint32_t seed, std::int64_t count) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (float& x : rows) x = normal(random);
  return rows;
}

// One request of a layer with all parts of either kind, in this seat and on this page, which are
// all the memory that there is.
class Layer {
 public:
  Layer(LayerKind kind, std::int32_t seat, std::int32_t page)
      : kind_(kind), seat_(seat), page_(page) {
    std::vector<float> table(kTokens * 64);
    make_rope_table(RopeGroup::kCompressing, kTokens, RopeLayout::kInterleaved, table);
    rope_.upload(table);
  }

  void append(std::int32_t tokens, bool decode) {
    const BatchRowRecord row{seat_, length_, tokens, 0};
    StepTable table;  // of no cells a seat: every seat's begin here
    table.page_table = &page_;
    std::vector<TokenRecord> records;
    std::vector<PlanRecord> csa, hca;
    for (std::int32_t j = 0; j < tokens; ++j) {
      records.push_back(plan_token(kGeometry, table, row, 0, j));
      const auto list = [&](CompressionRule rule, std::vector<PlanRecord>& to) {
        if (closes_entry(rule, length_ + j)) to.push_back(plan_record(rule, j, 0, length_, j));
      };
      list(kCsaRule, csa);
      list(kHcaRule, hca);
    }
    const StepShape shape = decode ? StepShape::decode(1, tokens) : StepShape::ragged(1, tokens);
    const std::vector<PlanHeader> headers{planned_header(shape, csa.size(), hca.size())};
    for (auto* entries : {&csa, &hca}) entries->push_back(kPaddingRecord);
    const DeviceArray<PlanHeader> header_there(backend_, stream_, headers);
    const DeviceArray<BatchRowRecord> row_there(backend_, stream_, std::vector{row});
    const DeviceArray<TokenRecord> records_there(backend_, stream_, records);
    const DeviceArray<PlanRecord> csa_there(backend_, stream_, csa);
    const DeviceArray<PlanRecord> hca_there(backend_, stream_, hca);

    AppendParams params = kind_ == LayerKind::kCsa ? csa_parts() : hca_parts();
    params.shape = shape;
    params.planned_form = plan_form(shape.tokens_per_row, LayerGroup::kTarget);
    params.geometry = kGeometry;
    params.header = header_there.data();
    params.rows = row_there.data();
    params.tokens = records_there.data();
    params.csa_entries = csa_there.data();
    params.csa_entry_capacity = static_cast<std::int32_t>(csa.size());
    params.hca_entries = hca_there.data();
    params.hca_entry_capacity = static_cast<std::int32_t>(hca.size());
    params.rope = {rope_.data(), kTokens, RopeLayout::kInterleaved};
    add_window(params);
    backend_.append(params, Pdl::kOff, stream_);
    stream_.wait();
    length_ += tokens;
  }

  // All of it.
  std::vector<std::vector<std::byte>> memory() const {
    return {ring_.download(),      main_pages_.download(), keys_pages_.download(),
            csa_state_.download(), keys_state_.download(), hca_state_.download()};
  }

 private:
  // Of the tokens to come.
  static InputRows rows_of(const DeviceArray<float>& bank, std::int32_t length,
                           std::int64_t width) {
    return {bank.data() + length * width, width, ElementType::kFloat32};
  }
  float* state_of(DeviceArray<std::byte>& real, std::int64_t seat_floats) const {
    return reinterpret_cast<float*>(in_front(real.data(), seat_ * seat_floats * 4));
  }
  EntryPool pool_of(DeviceArray<std::byte>& real, std::int64_t first_page, std::int64_t page_bytes,
                    std::int32_t entries) const {
    return make_entry_pool(in_front(real.data(), first_page * page_bytes), page_bytes, entries);
  }

  void add_window(AppendParams& params) {
    params.window.rows = rows_of(window_rows_, length_, 512);
    params.window.norm_weight = weight_.data();
    params.window.ring = pool_of(ring_, seat_ * kWindowPages, main_page_bytes(64), 64);
    params.window.scratch = pool_of(scratch_, 0, main_page_bytes(64), 64);
    params.window.copy_older_window = true;
  }

  AppendParams csa_parts() {
    AppendParams params;
    const auto part = [&](std::int64_t d, DeviceArray<float>& rows, DeviceArray<std::byte>& state,
                          const EntryPool& pages) {
      CsaPart to;
      to.rows = rows_of(rows, length_, 4 * d);
      to.bias = bias_.data();
      to.norm_weight = weight_.data();
      to.state = state_of(state, kStateTokens * 4 * d);
      to.ring_tokens = kStateTokens;
      to.pages = pages;
      return to;
    };
    params.csa =
        part(kHeadDim, csa_rows_, csa_state_, pool_of(main_pages_, page_, main_page_bytes(64), 64));
    params.indexer = part(kIndexerDim, keys_rows_, keys_state_,
                          pool_of(keys_pages_, page_, indexer_page_bytes(64), 64));
    return params;
  }

  AppendParams hca_parts() {
    AppendParams params;
    params.hca.rows = rows_of(hca_rows_, length_, 1024);
    params.hca.bias = bias_.data();
    params.hca.norm_weight = weight_.data();
    params.hca.state = state_of(hca_state_, kBanks * kHcaBankFloats);
    params.hca.banks = kBanks;
    params.hca.pages = pool_of(main_pages_, page_, main_page_bytes(2), 2);
    return params;
  }

  DeviceArray<float> floats(std::uint32_t seed, std::int64_t count) {
    return DeviceArray<float>(backend_, stream_, random_rows(seed, count));
  }
  DeviceArray<std::byte> poison(std::int64_t bytes) {
    return DeviceArray<std::byte>(backend_, stream_, static_cast<std::size_t>(bytes), 0xFF);
  }

  LayerKind kind_;
  std::int32_t seat_, page_;
  std::int32_t length_ = 0;
  Backend& backend_ = test_backend();
  Stream stream_{backend_};
  DeviceArray<float> window_rows_ = floats(1, kTokens * 512);
  DeviceArray<float> csa_rows_ = floats(2, kTokens * 2048);
  DeviceArray<float> keys_rows_ = floats(3, kTokens * 512);
  DeviceArray<float> hca_rows_ = floats(4, kTokens * 1024);
  DeviceArray<float> bias_ = floats(5, 128 * 512);  // of any part
  DeviceArray<float> weight_ = floats(6, 512);
  DeviceArray<float> rope_ = floats(7, kTokens * 64);
  DeviceArray<std::byte> ring_ = poison(kWindowPages * main_page_bytes(64));
  DeviceArray<std::byte> scratch_ = poison(kScratchPages * main_page_bytes(64));
  DeviceArray<std::byte> main_pages_ = poison(main_page_bytes(64));
  DeviceArray<std::byte> keys_pages_ = poison(indexer_page_bytes(64));
  DeviceArray<std::byte> csa_state_ = poison(kStateTokens * 2048 * 4);
  DeviceArray<std::byte> keys_state_ = poison(kStateTokens * 512 * 4);
  DeviceArray<std::byte> hca_state_ = poison(kBanks * kHcaBankFloats * 4);
};

// Memory of a request that was prefilled, decoded over the end of an HCA entry, with one token a
// step and with three, and prefilled again.
std::vector<std::vector<std::byte>> memory_of(LayerKind kind, std::int32_t seat,
                                              std::int32_t page) {
  Layer layer(kind, seat, page);
  layer.append(123, false);
  for (int i = 0; i < 3; ++i) layer.append(1, true);
  for (int i = 0; i < 3; ++i) layer.append(3, true);  // 126 to 134
  layer.append(20, false);
  return layer.memory();
}

// A1, A2
TEST_CASE("entries and folds lie where 64-bit arithmetic puts them, beyond 2^32 of any unit") {
  // No memory: any address that is neither null nor near the end.
  const auto* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  constexpr std::int64_t kStride = 1'039'680;
  for (const std::int32_t entries : {2, 64}) {
    CAPTURE(entries);
    const EntryPool pool = make_entry_pool(const_cast<std::byte*>(base), kStride, entries);
    for (const std::int64_t page : {std::int64_t{2066}, std::int64_t{4132}, std::int64_t{kFarPage},
                                    (std::int64_t{1} << 33) + 7}) {
      CAPTURE(page);
      const std::int64_t location = page * entries + 1;
      const std::int64_t at = page * kStride;
      CHECK(bytes_between(base, pool.page_of(location)) == at);
      CHECK(bytes_between(base, pool.main_data(location)) == at + 576);
      CHECK(bytes_between(base, pool.main_scales(location)) == at + entries * 576 + 8);
      CHECK(bytes_between(base, pool.indexer_values(location)) == at + 128);
      CHECK(bytes_between(base, pool.indexer_scale(location)) == at + entries * 128 + 4);
    }
  }
  HcaPart part;
  part.state = reinterpret_cast<float*>(const_cast<std::byte*>(base));
  part.banks = kBanks;
  for (const std::int64_t seat : {400'000, 800'000, kFarSeat}) {
    const std::int64_t bank = seat * kBanks + 130 % kBanks;
    CHECK(bytes_between<float>(part.state, part.bank(seat, 130)) == bank * (3 * 512 * 4));
  }
}

// A1, A2
TEST_CASE("appends to a seat and a page beyond 2^32 of any unit write what those to seat 0 do") {
  for (const LayerKind kind : {LayerKind::kCsa, LayerKind::kHca}) {
    CAPTURE(static_cast<int>(kind));
    const auto near = memory_of(kind, 0, 0);
    const bool same = memory_of(kind, kFarSeat, kFarPage) == near;
    CHECK(same);
    int written = 0;
    for (const auto& bytes : near) {
      written += bytes != std::vector<std::byte>(bytes.size(), std::byte{0xFF}) ? 1 : 0;
    }
    CHECK(written == (kind == LayerKind::kCsa ? 5 : 3));
  }
}

}  // namespace
