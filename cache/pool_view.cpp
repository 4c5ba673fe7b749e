// What each consumer demands of a pool (SPEC 3.4, 3.5), checked before it is handed over.
#include <quire/cache/pool_view.h>

#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

constexpr std::int64_t kMainViewBytes = kMainDataBytes + kMainScaleBytes;     // 584
constexpr std::int64_t kIndexerViewBytes = kIndexerDim + kIndexerScaleBytes;  // 132

PoolView view_of(const char* call, const EntryPool& pool, std::int64_t pages,
                 std::int64_t entry_bytes) {
  const std::int64_t entries = pool.entries_per_page;
  QUIRE_CHECK(pages > 0, call, ": ", pages, " pages; supported: at least 1");
  QUIRE_CHECK(pool.base != nullptr, call, ": the pool has no memory");
  QUIRE_CHECK(reinterpret_cast<std::uintptr_t>(pool.base) % 16 == 0, call, ": the pool at ",
              static_cast<const void*>(pool.base), " is not 16-byte aligned");
  QUIRE_CHECK(entries > 0 && pool.page_stride_bytes >= entry_bytes * entries, call, ": pages of ",
              entries, " entries are ", pool.page_stride_bytes,
              " bytes apart; supported: at least ", entry_bytes, " bytes an entry");
  return {pool.base,
          {pages, entries, 1, entry_bytes},
          {pool.page_stride_bytes, entry_bytes, entry_bytes, 1}};
}

}  // namespace

PoolView flashmla_view(const EntryPool& pool, std::int64_t pages, ViewTarget target) {
  const PoolView view = view_of("flashmla_view", pool, pages, kMainViewBytes);
  QUIRE_CHECK(target == ViewTarget::kSm90 || pool.page_stride_bytes % kMainDataBytes == 0,
              "flashmla_view: pages are ", pool.page_stride_bytes,
              " bytes apart; FlashMLA on SM100 takes multiples of ", kMainDataBytes,
              " (on SM90 any stride)");
  return view;
}

PoolView deepgemm_view(const EntryPool& pool, std::int64_t pages, ViewTarget target) {
  const PoolView view = view_of("deepgemm_view", pool, pages, kIndexerViewBytes);
  QUIRE_CHECK(pool.page_stride_bytes % 4 == 0, "deepgemm_view: pages are ", pool.page_stride_bytes,
              " bytes apart; DeepGEMM takes multiples of 4");
  const bool is_64 = pool.entries_per_page == 64;
  const bool is_32 = pool.entries_per_page == 32 && target == ViewTarget::kSm100;
  QUIRE_CHECK(is_64 || is_32, "deepgemm_view: pages of ", pool.entries_per_page,
              " entries; DeepGEMM takes 64 on SM90, 32 or 64 on SM100");
  return view;
}

}  // namespace quire
