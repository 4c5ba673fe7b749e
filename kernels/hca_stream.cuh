// Long spans of HCA rows, through shared memory: a block folds one entry, so threads are few and
// each has much to wait for. The next rows are on their way while it folds the one in front.
#pragma once

#include <cstdint>
#include <type_traits>

#include <quire/kernels/async_copy.cuh>
#include <quire/kernels/hca.cuh>

namespace quire::cuda {

inline constexpr int kStages = 8;  // rows on their way
using StreamPlace = MainPlace<4>;  // copies of 16 bytes

// Rows on their way: values, scores and bias of each. Each thread reads what it has copied itself,
// so no barrier is needed.
struct alignas(kLineBytes) HcaStages {
  static constexpr int kRow = static_cast<int>(kHeadDim * sizeof(float));
  std::byte bytes[kStages][3 * kRow];
};

// The thread's part of the rows of a span that lies in one pooling window. After the wait.
template <ElementType kType>
class HcaRows {
 public:
  using P = StreamPlace;

  // Sends the first rows.
  __device__ HcaRows(HcaStages& stages, const HcaPart& part, const HcaSpan& span)
      : begins_(span.position % kHcaWindow == 0),
        count_(span.count),
        left_(span.count),
        stages_(stages.bytes[0]),
        row_(static_cast<const std::byte*>(part.rows.data) +
             (span.input_row * part.rows.stride + P::channel()) * kBytes),
        stride_bytes_(part.rows.stride * kBytes),
        bias_(part.bias + (span.position % kHcaWindow) * kHeadDim + P::channel()) {
#pragma unroll
    for (int k = 0; k < kStages; ++k) send(k);
  }

  // Folds them all; without NaN (exact::fold_next) where they end in an entry.
  template <bool kWithNan>
  __device__ void fold(Folds<P::kPerThread>& folds) {
    wait_for_copies<kStages - 1>();
    HcaRow<P> next = read(0);
    for (int i = 0; i < count_; i += kStages) {
#pragma unroll
      for (int k = 0; k < kStages; ++k) {
        if (i + k >= count_) return;
        const HcaRow<P> row = next;
        send(k);  // into the stage just read
        wait_for_copies<kStages - 1>();
        next = read((k + 1) % kStages);  // behind the end: nothing, which nobody folds
        fold_hca_row<P, kWithNan>(folds, k == 0 && i == 0 && begins_, row);
      }
    }
  }

 private:
  static constexpr int kBytes = kType == ElementType::kFloat32 ? 4 : 2;  // of an element
  static constexpr int kRow = HcaStages::kRow;

  // The next row, where there is one.
  __device__ void send(int stage) {
    if (left_ > 0) {
      std::byte* to = at(stage) + P::channel() * kBytes;
      copy_to_shared<P::kPerThread * kBytes, false>(to, row_);
      copy_to_shared<P::kPerThread * kBytes, false>(to + kRow, row_ + kHeadDim * kBytes);
      copy_to_shared<P::kPerThread * 4, true>(at(stage) + 2 * kRow + P::channel() * 4, bias_);
      row_ += stride_bytes_;
      bias_ += kHeadDim;
      --left_;
    }
    commit_copies();
  }

  __device__ HcaRow<P> read(int stage) const {
    const std::byte* from = at(stage) + P::channel() * kBytes;
    return {of(from), of(from + kRow),
            load_fresh<P::kPerThread>(reinterpret_cast<const float*>(at(stage) + 2 * kRow) +
                                      P::channel())};
  }

  __device__ std::byte* at(int stage) const {
    return stages_ + stage * static_cast<int>(sizeof(HcaStages::bytes[0]));
  }
  __device__ static P::Values of(const std::byte* from) {
    if constexpr (kType == ElementType::kFloat32) {
      return load_fresh<P::kPerThread>(reinterpret_cast<const float*>(from));
    } else {
      return load_fresh_bf16<P::kPerThread>(reinterpret_cast<const std::uint16_t*>(from));
    }
  }

  bool begins_;
  int count_, left_;
  std::byte* stages_;
  const std::byte* row_;
  std::int64_t stride_bytes_;
  const float* bias_;
};

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
