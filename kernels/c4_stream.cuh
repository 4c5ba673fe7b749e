// CSA entries pooled in a stream. Few blocks stay for a whole list, and have the rows of the next
// entry on their way to shared memory while they fold the one in front: half an entry is folded,
// two halves are under way. Where rows lie, which entries there are and what becomes of a pooled
// entry is the job's. A thread reads what it has copied itself: no barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/kernels/async_copy.cuh>
#include <quire/kernels/pool.cuh>

namespace quire::cuda {

inline constexpr int kC4Stages = 3;
inline constexpr int kC4HalfRows =
    kC4Overlap;  // the rows of the window before, and the entry's own

// Half the rows of the entries that a block has at hand. One piece is what a thread reads of one
// row: its channels of the values or of the scores.
template <int kThreads, int kPieceBytes>
struct alignas(kLineBytes) C4Stage {
  std::byte pieces[2 * kC4HalfRows][kThreads][kPieceBytes];
};

// How the thread's pieces of P::kPerThread channels get into a stage and out of it, rows of the
// input and of the state each of one type.
template <class P, ElementType kInput, ElementType kState, class Stage>
struct C4Half {
  static constexpr int kToScores = 2 * P::kDim;  // elements from a row's values to its scores

  // Sends window rows [begin, begin + 4); the first `from_state` rows of the window come from
  // state. `input` is the thread's value piece of row `begin`, `state(i)` that of window row i.
  template <class StatePiece>
  __device__ static void send(Stage& stage, int begin, int from_state, const std::byte* input,
                              std::int64_t stride_bytes, const StatePiece& state) {
    const bool all_input = begin >= from_state;
#pragma unroll
    for (int i = 0; i < kC4HalfRows; ++i, input += stride_bytes) {
      if (!all_input && begin + i < from_state) continue;
      copy<kInput>(stage, i, input);
    }
    if (all_input) return;
#pragma unroll 1
    for (int i = 0; i < min_of(from_state - begin, kC4HalfRows); ++i) {
      copy<kState>(stage, i, state(begin + i));
    }
  }

  // Folds window rows from kBegin on. No row is a branch.
  template <int kBegin>
  __device__ static void fold(Folds<P::kPerThread>& folds, int from_state,
                              const typename P::Values (&bias)[kC4Window], const Stage& stage) {
    typename P::Values value[kC4HalfRows], score[kC4HalfRows];
#pragma unroll
    for (int i = 0; i < kC4HalfRows; ++i) {
      value[i] = read(stage.pieces[2 * i][threadIdx.x], kBegin + i < from_state);
      score[i] = read(stage.pieces[2 * i + 1][threadIdx.x], kBegin + i < from_state);
    }
#pragma unroll
    for (int i = 0; i < kC4HalfRows; ++i) {
      fold_row<false>(folds, kBegin + i == 0, score[i], bias[kBegin + i], value[i]);
    }
  }

 private:
  template <ElementType kType>
  __device__ static void copy(Stage& stage, int i, const std::byte* from) {
    constexpr int kElement = static_cast<int>(bytes_of(kType));
    constexpr int kBytes = kElement * P::kPerThread;
    copy_to_shared<kBytes, false>(stage.pieces[2 * i][threadIdx.x], from);
    copy_to_shared<kBytes, false>(stage.pieces[2 * i + 1][threadIdx.x],
                                  from + kToScores * kElement);
  }

  __device__ static typename P::Values read(const std::byte* piece, bool from_state) {
    if (kInput == ElementType::kFloat32 || (kState == ElementType::kFloat32 && from_state)) {
      return load_fresh<P::kPerThread>(reinterpret_cast<const float*>(piece));
    }
    return load_fresh_bf16<P::kPerThread>(reinterpret_cast<const std::uint16_t*>(piece));
  }
};

// Works through a job's entries up to the first that is not live. The job has
//   Entry            with live(), first (window row that starts the fold) and from_state
//   Half             a C4Half
//   next()           the entry behind the last one; not live behind the end
//   send(entry, begin, stage)    of what next() gave last, where it is live: from its first half on
//   prepare(entry)   in front of the folds: loads that finish() needs
//   finish(entry, folds)
// Entries and their end are the same for all threads that finish() brings together.
template <class Job, class Values, class Stage>
__device__ void stream_c4_entries(Job& job, const Values (&bias)[kC4Window], Stage* stages) {
  using Half = typename Job::Half;
  const auto send = [&](const typename Job::Entry& entry, int begin, Stage& stage) {
    if (entry.live() && begin >= entry.first()) job.send(entry, begin, stage);
    commit_copies();
  };
  Stage *first = stages, *second = stages + 1, *third = stages + 2;
  typename Job::Entry entry = job.next();
  send(entry, 0, *first);
  send(entry, kC4HalfRows, *second);
  while (entry.live()) {
    const typename Job::Entry next = job.next();
    send(next, 0, *third);
    auto folds = empty_folds<Job::P::kPerThread>();
    wait_for_copies<2>();
    job.prepare(entry);
    if (entry.first() == 0) Half::template fold<0>(folds, entry.from_state(), bias, *first);
    send(next, kC4HalfRows, *first);
    wait_for_copies<2>();
    Half::template fold<kC4HalfRows>(folds, entry.from_state(), bias, *second);
    job.finish(entry, folds);
    entry = next;
    Stage* read = second;
    second = first;
    first = third;
    third = read;
  }
  wait_for_copies<0>();
}

}  // namespace quire::cuda
