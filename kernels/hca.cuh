// The fold of HCA layers on the device: rows of a batch row in ascending order, four channels a
// thread, 512 channels a block (SPEC 2, 3.7). The state of a seat is the fold itself, in banks by
// position (DESIGN 4).
//
// A thread keeps the next rows in flight while it folds the one in front: with one block per entry
// a long prefill has few threads, each with much to wait for.
#pragma once

#include <quire/kernels/pool.cuh>
#include <quire/planner/plan_rule.h>

#include <cstdint>
#include <type_traits>

namespace quire::cuda {

// Input rows that a thread has in flight. More take registers from blocks that could run beside it.
inline constexpr int kRowsAhead = 4;
inline constexpr int kHcaBlocksPerMultiprocessor = 4;
inline constexpr int kHcaWindow = kHcaRule.ratio;

// --- Banks ---

__device__ inline Folds load_fold(const HcaPart& part, std::int64_t seat, std::int32_t position) {
  const float* bank = part.bank(seat, position) + Place<kHeadDim>::channel();
  const Four m = load_state(bank);
  const Four z = load_state(bank + kHeadDim);
  const Four a = load_state(bank + 2 * kHeadDim);
  Folds folds;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) folds.of[k] = {m.v[k], z.v[k], a.v[k]};
  return folds;
}

__device__ inline void store_fold(const HcaPart& part, std::int64_t seat, std::int32_t position,
                                  const Folds& folds) {
  float* bank = part.bank(seat, position) + Place<kHeadDim>::channel();
  Four m, z, a;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    m.v[k] = exact::canonical(folds.of[k].m);
    z.v[k] = exact::canonical(folds.of[k].z);
    a.v[k] = exact::canonical(folds.of[k].a);
  }
  store_four(bank, m);
  store_four(bank + kHeadDim, z);
  store_four(bank + 2 * kHeadDim, a);
}

// The fold before position p, which the step that begins at `start` folds first: nothing where p
// begins a window (what a bank holds then is a former owner's), else what earlier steps kept.
__device__ inline Folds begin_fold(const HcaPart& part, std::int64_t seat, std::int32_t start,
                                   std::int32_t p) {
  return p % kHcaWindow == 0 ? Folds{} : load_fold(part, seat, start);
}

// --- Rows ---

__device__ inline Four load_hca_bias(const HcaPart& part, std::int32_t position) {
  return load_constant(part.bias + (position % kHcaWindow) * kHeadDim +
                       Place<kHeadDim>::channel());
}

// Input that is read once: first to leave the caches, where the bias rows stay. After the wait.
template <ElementType kType>
__device__ inline Four load_once(const InputRows& rows, std::int64_t input_row,
                                 std::int64_t channel) {
  const std::int64_t at = input_row * rows.stride + channel;
  if constexpr (kType == ElementType::kFloat32) {
    Four x;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(__cvta_generic_to_global(static_cast<const float*>(rows.data) + at))
                 : "memory");
    return x;
  } else {
    std::uint32_t low, high;
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];"
                 : "=r"(low), "=r"(high)
                 : "l"(__cvta_generic_to_global(static_cast<const std::uint16_t*>(rows.data) + at))
                 : "memory");
    return {{exact::from_bits(low << 16), exact::from_bits(low & 0xFFFF0000u),
             exact::from_bits(high << 16), exact::from_bits(high & 0xFFFF0000u)}};
  }
}

// Consecutive tokens of one batch row.
struct HcaSpan {
  std::int64_t input_row;  // of the first
  std::int32_t position;   // of the first
  int count;
};

// The thread's channels of rows in flight; row i of a span is in place i mod kRowsAhead.
template <ElementType kType>
struct RowsAhead {
  Four value[kRowsAhead], score[kRowsAhead], bias[kRowsAhead];

  __device__ void load_bias(const HcaPart& part, const HcaSpan& span, int place, int i) {
    bias[place] = load_hca_bias(part, span.position + i);
  }
  __device__ void load_row(const HcaPart& part, const HcaSpan& span, int place, int i) {
    const int channel = Place<kHeadDim>::channel();
    value[place] = load_once<kType>(part.rows, span.input_row + i, channel);
    score[place] = load_once<kType>(part.rows, span.input_row + i, kHeadDim + channel);
  }
  // Folds the row in its place, which then takes row i + kRowsAhead.
  template <bool kRefill>
  __device__ void fold(Folds& folds, bool is_first, const HcaPart& part, const HcaSpan& span,
                       int place, int i) {
    const Four v = value[place];
    const Four s = score[place];
    const Four b = bias[place];
    if (kRefill) {
      load_bias(part, span, place, i + kRowsAhead);
      load_row(part, span, place, i + kRowsAhead);
    }
    fold_row(folds, is_first, s, b, v);
  }
};

// Folds a span that lies in one pooling window. After the wait.
template <ElementType kType>
__device__ inline void fold_in_window(Folds& folds, const HcaPart& part, const HcaSpan& span) {
  RowsAhead<kType> ahead;
#pragma unroll
  for (int k = 0; k < kRowsAhead; ++k) {
    if (k >= span.count) break;
    ahead.load_bias(part, span, k, k);
    ahead.load_row(part, span, k, k);
  }
  // Only the first row of a span can begin the window: the others need no check.
  const bool is_fresh = span.position % kHcaWindow == 0;
  int i = 0;
  for (; i + 2 * kRowsAhead <= span.count; i += kRowsAhead) {
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      ahead.template fold<true>(folds, k == 0 && i == 0 && is_fresh, part, span, k, i + k);
    }
  }
#pragma unroll
  for (int n = 0; n < 2 * kRowsAhead; ++n) {  // those of which some have no row to follow
    if (i + n >= span.count) break;
    const bool is_first = n == 0 && i == 0 && is_fresh;
    if (i + n + kRowsAhead < span.count) {
      ahead.template fold<true>(folds, is_first, part, span, n % kRowsAhead, i + n);
    } else {
      ahead.template fold<false>(folds, is_first, part, span, n % kRowsAhead, i + n);
    }
  }
}

// Folds a span of any windows; `folded(i)` sees the folds behind each row. The bias of the first
// kRowsAhead rows is loaded. After the wait.
template <ElementType kType, class Folded>
__device__ inline void fold_and_visit(Folds& folds, RowsAhead<kType>& ahead, const HcaPart& part,
                                      const HcaSpan& span, const Folded& folded) {
  for (int i = 0; i < span.count; i += kRowsAhead) {
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (i + k >= span.count) break;
      if (i > 0) ahead.load_bias(part, span, k, i + k);
      ahead.load_row(part, span, k, i + k);
    }
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (i + k >= span.count) break;
      const bool is_first = (span.position + i + k) % kHcaWindow == 0;
      ahead.template fold<false>(folds, is_first, part, span, k, i + k);
      folded(i + k);
    }
  }
}

// Calls `call` with the rows' type as a constant.
template <class Call>
__device__ inline void with_row_type(const InputRows& rows, const Call& call) {
  if (rows.type == ElementType::kFloat32) {
    call(std::integral_constant<ElementType, ElementType::kFloat32>{});
  } else {
    call(std::integral_constant<ElementType, ElementType::kBfloat16>{});
  }
}

}  // namespace quire::cuda
