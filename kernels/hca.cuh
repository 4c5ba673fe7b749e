// The fold of HCA layers on the device: rows of a batch row in ascending order, four channels a
// thread, 512 channels a block (SPEC 2, 3.7). The state of a seat is the fold itself, in banks by
// position (DESIGN 4).
//
// A long prefill has one block per entry, so few threads, and each has much to wait for: its next
// rows are on their way to shared memory while it folds the one in front. Decode steps and short
// rows have a few rows at most, which registers hold.
#pragma once

#include <quire/planner/plan_rule.h>
#include <quire/kernels/pool.cuh>

#include <cstdint>
#include <type_traits>

namespace quire::cuda {

inline constexpr int kStages = 6;     // rows on their way, of a long span
inline constexpr int kRowsAhead = 4;  // rows in registers, of a short one
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
  return load_constant(part.bias + (position % kHcaWindow) * kHeadDim + Place<kHeadDim>::channel());
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

// The thread's channels of one row.
struct HcaRow {
  Four value, score, bias;
};

template <ElementType kType>
__device__ inline void load_hca_row(HcaRow& row, const HcaPart& part, const HcaSpan& span, int i) {
  const int channel = Place<kHeadDim>::channel();
  row.value = load_once<kType>(part.rows, span.input_row + i, channel);
  row.score = load_once<kType>(part.rows, span.input_row + i, kHeadDim + channel);
}
__device__ inline void load_hca_bias(HcaRow& row, const HcaPart& part, const HcaSpan& span, int i) {
  row.bias = load_hca_bias(part, span.position + i);
}
__device__ inline void fold_hca_row(Folds& folds, bool is_first, const HcaRow& row) {
  fold_row(folds, is_first, row.score, row.bias, row.value);
}

// --- Long spans: rows on their way through shared memory ---

// Rows of a block on their way. Each thread reads what it has copied itself, so no barrier is
// needed.
struct alignas(16) HcaStages {
  std::byte bytes[kStages][2 * kHeadDim * sizeof(float) + kHeadDim * sizeof(float)];
};

// `kKept`: in the first-level cache too, for the blocks beside. Eight bytes always are.
template <int kBytes, bool kKept>
__device__ inline void copy_to_shared(std::byte* to, const void* from) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const std::size_t global = __cvta_generic_to_global(from);
  if constexpr (kBytes == 16 && !kKept) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes)
                 : "memory");
  }
}

// The thread's part of the rows of a span, in order, kStages of them on their way. After the wait.
template <ElementType kType>
class HcaRows {
 public:
  __device__ HcaRows(HcaStages& stages, const HcaPart& part, const HcaSpan& span)
      : stages_(stages.bytes[0] + Place<kHeadDim>::channel() * kBytes),
        row_(static_cast<const std::byte*>(part.rows.data) +
             (span.input_row * part.rows.stride + Place<kHeadDim>::channel()) * kBytes),
        stride_bytes_(part.rows.stride * kBytes),
        bias_(part.bias + (span.position % kHcaWindow) * kHeadDim + Place<kHeadDim>::channel()),
        left_(span.count) {}

  // Sends the next row, where there is one, into a stage that has been read.
  __device__ void send(int stage) {
    if (left_ > 0) {
      std::byte* to = at(stage);
      copy_to_shared<kChannels * kBytes, false>(to, row_);
      copy_to_shared<kChannels * kBytes, false>(to + kHeadDim * kBytes, row_ + kHeadDim * kBytes);
      copy_to_shared<kChannels * 4, true>(bias_at(stage), bias_);
      row_ += stride_bytes_;
      bias_ += kHeadDim;
      --left_;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Of the rows sent, all but the youngest kStages - 1 have arrived.
  __device__ static void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
  }

  __device__ HcaRow read(int stage) const {
    const std::byte* from = at(stage);
    return {of(from), of(from + kHeadDim * kBytes),
            load_fresh(reinterpret_cast<const float*>(bias_at(stage)))};
  }

 private:
  static constexpr int kBytes = kType == ElementType::kFloat32 ? 4 : 2;

  __device__ std::byte* at(int stage) const {
    return stages_ + stage * static_cast<int>(sizeof(HcaStages::bytes[0]));
  }
  __device__ std::byte* bias_at(int stage) const {
    return at(stage) + 2 * kHeadDim * sizeof(float) +
           Place<kHeadDim>::channel() * (static_cast<int>(sizeof(float)) - kBytes);
  }
  __device__ static Four of(const std::byte* from) {
    if constexpr (kType == ElementType::kFloat32) {
      return load_fresh(reinterpret_cast<const float*>(from));
    } else {
      return load_fresh_bf16(reinterpret_cast<const std::uint16_t*>(from));
    }
  }

  std::byte* stages_;
  const std::byte* row_;
  std::int64_t stride_bytes_;
  const float* bias_;
  int left_;
};

// Folds a span that lies in one pooling window and is not empty. After the wait.
template <ElementType kType>
__device__ inline void fold_in_window(Folds& folds, const HcaPart& part, HcaSpan span,
                                      HcaStages& stages) {
  HcaRow first;
  const bool begins = span.position % kHcaWindow == 0;
  if (begins) {
    load_hca_bias(first, part, span, 0);
    load_hca_row<kType>(first, part, span, 0);
    span = {span.input_row + 1, span.position + 1, span.count - 1};
  }
  HcaRows<kType> rows(stages, part, span);
#pragma unroll
  for (int k = 0; k < kStages; ++k) rows.send(k);
  if (begins) fold_hca_row(folds, true, first);
  rows.wait();
  HcaRow next = rows.read(0);
  for (int i = 0; i < span.count; i += kStages) {
#pragma unroll
    for (int k = 0; k < kStages; ++k) {
      if (i + k >= span.count) return;
      const HcaRow row = next;
      rows.send(k);
      rows.wait();
      next = rows.read((k + 1) % kStages);  // behind the end: nothing, which nobody folds
      fold_hca_row(folds, false, row);
    }
  }
}

// --- Short spans ---

// Rows that a short batch row has in flight at once.
struct ShortRows {
  HcaRow row[kRowsAhead];

  // Before the wait as well.
  __device__ void load_bias(const HcaPart& part, const HcaSpan& span, int first) {
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (first + k < span.count) load_hca_bias(row[k], part, span, first + k);
    }
  }
};

// Folds a span of any windows; `folded(i)` sees the folds behind each row. The bias of the first
// kRowsAhead rows is loaded. After the wait.
template <ElementType kType, class Folded>
__device__ inline void fold_short(Folds& folds, ShortRows& rows, const HcaPart& part,
                                  const HcaSpan& span, const Folded& folded) {
  for (int i = 0; i < span.count; i += kRowsAhead) {
    if (i > 0) rows.load_bias(part, span, i);
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (i + k < span.count) load_hca_row<kType>(rows.row[k], part, span, i + k);
    }
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      if (i + k >= span.count) break;
      fold_hca_row(folds, (span.position + i + k) % kHcaWindow == 0, rows.row[k]);
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
