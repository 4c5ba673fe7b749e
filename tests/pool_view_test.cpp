// Pools as FlashMLA and DeepGEMM take them: an address computed from shape and strides alone, as
// those kernels compute theirs, meets the byte that the layout means; what cannot be taken is
// refused.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include <quire/cache/entry_layout.h>
#include <quire/cache/pool_view.h>
#include <quire/runtime/base/errors.h>

namespace {

using namespace quire;

struct alignas(64) Line {
  std::byte bytes[64];
};

std::vector<Line> memory(4000);

std::byte* base() { return memory.data()->bytes; }

std::string refusal(auto call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE(
    "a main pool is FlashMLA's [pages, S, 1, 584]: data from the page on, scales behind S x 576") {
  for (const std::int32_t entries : {64, 2}) {
    const std::int64_t stride = main_page_bytes(entries) + 576;
    const EntryPool pool = make_entry_pool(base(), stride, entries);
    const PoolView view = flashmla_view(pool, 5, ViewTarget::kSm100);
    CHECK(view.shape[0] == 5);
    CHECK(view.shape[1] == entries);
    CHECK(view.shape[2] == 1);
    CHECK(view.shape[3] == 584);
    CHECK(view.strides_bytes[0] == stride);
    CHECK(view.strides_bytes[1] == 584);
    CHECK(view.strides_bytes[2] == 584);
    CHECK(view.strides_bytes[3] == 1);
    for (std::int64_t index = 0; index < 5 * entries; ++index) {
      std::byte* page = view.data + index / view.shape[1] * view.strides_bytes[0];
      const std::int64_t slot = index % view.shape[1];
      CHECK(page + slot * 576 == pool.main_data(index));
      CHECK(page + view.shape[1] * 576 + slot * 8 == pool.main_scales(index));
    }
  }
}

TEST_CASE("an indexer pool is DeepGEMM's [pages, 64, 1, 132]: keys first, fp32 scales behind") {
  const EntryPool pool = make_entry_pool(base(), indexer_page_bytes(64) + 64, 64);
  const PoolView view = deepgemm_view(pool, 7);
  CHECK(view.shape[0] == 7);
  CHECK(view.shape[1] == 64);
  CHECK(view.shape[2] == 1);
  CHECK(view.shape[3] == 132);
  CHECK(view.strides_bytes[0] == 8512);
  CHECK(view.strides_bytes[1] == 132);
  CHECK(view.strides_bytes[3] == 1);
  for (std::int64_t index = 0; index < 7 * 64; ++index) {
    std::byte* page = view.data + index / 64 * view.strides_bytes[0];
    CHECK(page + index % 64 * 128 == pool.indexer_values(index));
    CHECK(page + 64 * 128 + index % 64 * 4 == pool.indexer_scale(index));
  }
}

TEST_CASE("a pool that the consumer cannot take is refused with what it takes") {
  const auto flash = [](std::int64_t stride, std::int32_t entries, ViewTarget target) {
    return refusal([&] { flashmla_view(make_entry_pool(base(), stride, entries), 1, target); });
  };
  CHECK(flash(37'376, 64, ViewTarget::kSm90) == "");  // 64 x 584, not padded
  CHECK(contains(flash(37'376, 64, ViewTarget::kSm100), "multiples of 576"));
  CHECK(flash(37'440, 64, ViewTarget::kSm100) == "");
  CHECK(contains(flash(37'360, 64, ViewTarget::kSm90), "at least 584 bytes an entry"));

  const auto gemm = [](std::int64_t stride, std::int32_t entries, ViewTarget target) {
    return refusal([&] { deepgemm_view(make_entry_pool(base(), stride, entries), 1, target); });
  };
  CHECK(gemm(8448, 64, ViewTarget::kSm90) == "");
  CHECK(contains(gemm(8450, 64, ViewTarget::kSm90), "multiples of 4"));
  CHECK(contains(gemm(8432, 64, ViewTarget::kSm90), "at least 132 bytes an entry"));
  CHECK(contains(gemm(4224, 32, ViewTarget::kSm90), "64 on SM90"));
  CHECK(gemm(4224, 32, ViewTarget::kSm100) == "");
  CHECK(contains(gemm(16'896, 128, ViewTarget::kSm100), "32 or 64 on SM100"));

  const EntryPool pool = make_entry_pool(base(), 37'440, 64);
  CHECK(contains(refusal([&] { flashmla_view(pool, 0); }), "0 pages"));
  EntryPool moved = pool;
  moved.base += 8;
  CHECK(contains(refusal([&] { flashmla_view(moved, 1); }), "not 16-byte aligned"));
  moved.base = nullptr;
  CHECK(contains(refusal([&] { flashmla_view(moved, 1); }), "no memory"));
}

}  // namespace
