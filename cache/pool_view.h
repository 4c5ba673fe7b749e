// A pool in the shape and strides in which attention kernels take it, for an engine to wrap as a
// tensor of bytes without copying: FlashMLA's k_cache and extra_k_cache, DeepGEMM's paged keys.
//
// The shapes are fictions that those kernels agree on: an element (page, entry) is not the entry's
// 584 or 132 adjacent bytes, since pages keep all data in front of all scales (docs/LAYOUT.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/cache/entry_layout.h>

namespace quire {

struct PoolView {
  std::byte* data = nullptr;
  std::int64_t shape[4] = {};  // elements of one byte
  std::int64_t strides_bytes[4] = {};
};

// The generation of kernels that will read the view; they differ in the pages they take.
enum class ViewTarget { kSm90, kSm100 };

// [pages, S, 1, 584] with strides (page stride, 584, 584, 1), of a CSA, HCA, window ring or scratch
// pool of `pages` pages. UsageError: no pages; a base that is not 16-byte aligned; a page stride
// below the entries' 584 x S bytes, or on SM100 one that is no multiple of 576.
PoolView flashmla_view(const EntryPool& pool, std::int64_t pages,
                       ViewTarget target = ViewTarget::kSm90);

// [pages, S, 1, 132] with strides (page stride, 132, 132, 1), of an indexer pool. UsageError: no
// pages; a base that is not 16-byte aligned; a page stride below 132 x S bytes or no multiple of 4;
// S other than 64 on SM90, than 32 or 64 on SM100.
PoolView deepgemm_view(const EntryPool& pool, std::int64_t pages,
                       ViewTarget target = ViewTarget::kSm90);

}  // namespace quire
