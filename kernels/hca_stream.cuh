// Long spans of HCA rows, through shared memory: there is one block for one or two entries, so
// threads are few and each has much to wait for. The next rows are on their way while a thread folds
// the one in front. Two entries share their bias rows, which halves what those cost the L2.
#pragma once

#include <cstdint>
#include <type_traits>

#include <quire/kernels/async_copy.cuh>
#include <quire/kernels/hca.cuh>

namespace quire::cuda {

inline constexpr int kStages = 8;  // rows on their way
using StreamPlace = MainPlace<4>;  // copies of 16 bytes

// Window rows on their way: of each entry values and scores, and the bias. Each thread reads what it
// has copied itself, so no barrier is needed.
template <int kEntries>
struct alignas(16) HcaStages {
  static constexpr int kRow = static_cast<int>(kHeadDim * sizeof(float));
  std::byte bytes[kStages][(2 * kEntries + 1) * kRow];
};

// A span inside one pooling window: rows [first, end) of the window.
struct WindowSpan {
  std::int64_t input_row = 0;  // of window row 0, had it been in this step
  int first = 0;
  int end = 0;

  __device__ bool has(int row) const { return row >= first && row < end; }
};

__device__ inline WindowSpan window_span(const HcaSpan& span) {
  const int first = span.position % kHcaWindow;
  return {span.input_row - first, first, first + span.count};
}

// The thread's part of the rows of kEntries spans, window row after window row. After the wait.
template <int kEntries, ElementType kType>
class HcaRows {
 public:
  using P = StreamPlace;

  __device__ HcaRows(HcaStages<kEntries>& stages, const HcaPart& part,
                     const WindowSpan (&spans)[kEntries])
      : stages_(stages.bytes[0]), spans_(spans), bias_(part.bias + P::channel()),
        stride_bytes_(part.rows.stride * kBytes) {
    const std::byte* rows = static_cast<const std::byte*>(part.rows.data) + P::channel() * kBytes;
    begin_ = kHcaWindow;
    end_ = 0;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      from_[e] = rows + spans[e].input_row * stride_bytes_;
      if (spans[e].first < spans[e].end) {
        begin_ = min_of(begin_, spans[e].first);
        end_ = max_of(end_, spans[e].end);
      }
    }
    sent_ = begin_;
#pragma unroll
    for (int k = 0; k < kStages; ++k) send(k);
  }

  // Folds all rows of every span into its folds.
  __device__ void fold(Folds<P::kPerThread> (&folds)[kEntries]) {
    int stage = 0;
    for (int row = begin_; row < end_; ++row) {
      wait_for_copies<kStages - 1>();
      HcaRow<P> rows[kEntries];
      bool all = true;
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        rows[e] = read(stage, e);
        all = all && spans_[e].has(row);
      }
      send(stage);  // into the stage just read
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (all) {  // together: the entries fill each other's latencies
#pragma unroll
        for (int e = 0; e < kEntries; ++e) fold_hca_row<P>(folds[e], row == 0, rows[e]);
      } else {
#pragma unroll
        for (int e = 0; e < kEntries; ++e) {
          if (spans_[e].has(row)) fold_hca_row<P>(folds[e], row == 0, rows[e]);
        }
      }
    }
  }

 private:
  static constexpr int kBytes = kType == ElementType::kFloat32 ? 4 : 2;  // of an element
  static constexpr int kRow = HcaStages<kEntries>::kRow;
  static constexpr int kPieceBytes = P::kPerThread * kBytes;

  // The next row, where there is one.
  __device__ void send(int stage) {
    if (sent_ < end_) {
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        if (!spans_[e].has(sent_)) continue;
        const std::byte* from = from_[e] + sent_ * stride_bytes_;
        std::byte* to = at(stage, 2 * e) + P::channel() * kBytes;
        copy_to_shared<kPieceBytes, false>(to, from);
        copy_to_shared<kPieceBytes, false>(to + kRow, from + kHeadDim * kBytes);
      }
      copy_to_shared<P::kPerThread * 4, true>(at(stage, 2 * kEntries) + P::channel() * 4,
                                              bias_ + sent_ * kHeadDim);
      ++sent_;
    }
    commit_copies();
  }

  __device__ HcaRow<P> read(int stage, int e) const {
    const std::byte* from = at(stage, 2 * e) + P::channel() * kBytes;
    return {of(from), of(from + kRow),
            load_fresh<P::kPerThread>(reinterpret_cast<const float*>(at(stage, 2 * kEntries)) +
                                      P::channel())};
  }

  __device__ std::byte* at(int stage, int part) const {
    return stages_ + stage * static_cast<int>(sizeof(HcaStages<kEntries>::bytes[0])) + part * kRow;
  }
  __device__ static P::Values of(const std::byte* from) {
    if constexpr (kType == ElementType::kFloat32) {
      return load_fresh<P::kPerThread>(reinterpret_cast<const float*>(from));
    } else {
      return load_fresh_bf16<P::kPerThread>(reinterpret_cast<const std::uint16_t*>(from));
    }
  }

  std::byte* stages_;
  const WindowSpan (&spans_)[kEntries];
  const std::byte* from_[kEntries];
  const float* bias_;
  std::int64_t stride_bytes_;
  int begin_, end_, sent_;
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
