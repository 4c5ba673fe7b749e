// From pooled or raw channels to stored bytes, on the device (SPEC 3.1 to 3.7): norm, RoPE,
// Hadamard, quantise, store. An entry is worked on by a group of threads of a block, each with a
// few consecutive channels: how many is the kernel's choice.
//
// All float operations are those of exact_math.h and fp8.h. What may be loaded before the wait
// (docs/PDL.md) has a helper of its own: load_constant, load_state, load_record.
#pragma once

#include <quire/cache/entry_layout.h>
#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>
#include <quire/kernels/params.h>
#include <quire/planner/plan.h>

#include <cstdint>

namespace quire::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kLineBytes = 128;  // of the caches
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Neighbouring channels of one thread.
template <int kCount>
struct Channels {
  float v[kCount];
};

// The threads of a block that share one entry of kDim channels, kPerThread each, from thread
// kFirstThread on. Few channels a thread make a short way through one entry, many make few threads.
// Entries of a warp or less may stand side by side in all of the block.
template <int kDim_, int kPerThread_, int kFirstThread = 0>
struct Place {
  static constexpr int kDim = kDim_;
  static constexpr int kPerThread = kPerThread_;
  static constexpr int kThreads = kDim / kPerThread;
  static constexpr int kWarps = kThreads < kWarp ? 1 : kThreads / kWarp;
  static_assert(kPerThread % 2 == 0 && kDim % kPerThread == 0 && kFirstThread % kThreads == 0);
  static_assert(kWarps == 1 || kFirstThread % 256 == 0, "groups that meet need barriers apart");
  using Values = Channels<kPerThread>;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ static int warp() { return thread() / kWarp; }
  __device__ static int channel() { return thread() * kPerThread; }

  // Brings the threads of the entry together. All of them call it.
  __device__ static void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      constexpr int kBarrier = 1 + kFirstThread / 256;
      asm volatile("barrier.sync.aligned %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
    }
  }
};

// Of main and window entries, and of indexer entries.
template <int kPerThread, int kFirstThread = 0>
using MainPlace = Place<static_cast<int>(kHeadDim), kPerThread, kFirstThread>;
template <int kPerThread, int kFirstThread = 0>
using KeysPlace = Place<static_cast<int>(kIndexerDim), kPerThread, kFirstThread>;

// Through which the warps of an entry exchange. Once for each entry, or behind a barrier.
template <class P>
struct Scratch {
  float sums[P::kWarps];
  std::uint32_t maxima[P::kWarps];
  alignas(P::kWarps == 2 ? 16 : 4) float channels[P::kWarps == 2 ? P::kDim : 1];
};

// --- Loads ---

// Immutable since before the planner ran: bias, norm weights, RoPE tables.
template <int kCount>
__device__ inline Channels<kCount> load_constant(const float* from) {
  Channels<kCount> x;
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int k = 0; k < kCount; k += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + k));
      x.v[k] = four.x;
      x.v[k + 1] = four.y;
      x.v[k + 2] = four.z;
      x.v[k + 3] = four.w;
    }
  } else {
    static_assert(kCount == 2);
    const float2 two = __ldg(reinterpret_cast<const float2*>(from));
    x.v[0] = two.x;
    x.v[1] = two.y;
  }
  return x;
}

// Seat state, at L2: no first-level line can be stale. Volatile keeps it on its side of a wait.
template <int kCount>
__device__ inline Channels<kCount> load_state(const float* from) {
  Channels<kCount> x;
  if constexpr (kCount == 4) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.v[0]), "=f"(x.v[1])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  }
  return x;
}

__device__ inline int4 load_int4_at_l2(const void* at) {
  int4 x;
  asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(at))
               : "memory");
  return x;
}

__device__ inline std::int64_t join_words(int low, int high) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high))
                                       << 32 |
                                   static_cast<std::uint32_t>(low));
}

__device__ inline PlanHeader load_header(const PlanHeader* header) {
  const int4 applied = load_int4_at_l2(&header->rows);
  const int4 planned = load_int4_at_l2(&header->planned_rows);
  const int4 counts = load_int4_at_l2(&header->short_rows);
  const int4 rest = load_int4_at_l2(&header->used_rows);
  return {applied.x, applied.y, applied.z, applied.w, planned.x, planned.y, planned.z,
          planned.w, counts.x,  counts.y,  counts.z,  counts.w,  rest.x,    {}};
}

// Of the header only what tells whether this step was planned: one load.
__device__ inline bool load_is_planned(const AppendParams& params) {
  const int4 planned = load_int4_at_l2(&params.header->planned_rows);
  PlanHeader part{};
  part.planned_rows = planned.x;
  part.planned_form = planned.y;
  part.planned_tokens = planned.z;
  part.steps_at_plan = planned.w;
  return is_planned(part, params.shape, params.planned_form);
}

// A plan record, at L2 for the same reason.
__device__ inline TokenRecord load_record(const TokenRecord* record) {
  const int4 a = load_int4_at_l2(record);
  const int4 b = load_int4_at_l2(&record->ring_location);
  const int4 c = load_int4_at_l2(&record->csa_location);
  return {a.x,
          a.y,
          a.z,
          a.w,
          join_words(b.x, b.y),
          join_words(b.z, b.w),
          join_words(c.x, c.y),
          join_words(c.z, c.w)};
}

__device__ inline BatchRowRecord load_record(const BatchRowRecord* record) {
  const int4 x = load_int4_at_l2(record);
  return {x.x, x.y, x.z, x.w};
}

// What the kernel in front wrote: plain loads, only ever after the wait.
template <int kCount>
__device__ inline Channels<kCount> load_fresh(const float* from) {
  Channels<kCount> x;
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int k = 0; k < kCount; k += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + k);
      x.v[k] = four.x;
      x.v[k + 1] = four.y;
      x.v[k + 2] = four.z;
      x.v[k + 3] = four.w;
    }
  } else {
    static_assert(kCount == 2);
    const float2 two = *reinterpret_cast<const float2*>(from);
    x.v[0] = two.x;
    x.v[1] = two.y;
  }
  return x;
}

// kWords words of 32 bits, in as few loads as there are 16 bytes.
template <int kWords>
__device__ inline void load_words(std::uint32_t (&words)[kWords], const void* from) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[w / 4];
      words[w] = four.x;
      words[w + 1] = four.y;
      words[w + 2] = four.z;
      words[w + 3] = four.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x;
    words[1] = two.y;
  } else {
    static_assert(kWords == 1);
    words[0] = *reinterpret_cast<const std::uint32_t*>(from);
  }
}

template <int kWords>
__device__ inline void store_words(void* to, const std::uint32_t (&words)[kWords]) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      reinterpret_cast<uint4*>(to)[w / 4] =
          make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    static_assert(kWords == 1);
    *reinterpret_cast<std::uint32_t*>(to) = words[0];
  }
}

__device__ inline float low_bf16(std::uint32_t pair) { return exact::from_bits(pair << 16); }
__device__ inline float high_bf16(std::uint32_t pair) {
  return exact::from_bits(pair & 0xFFFF0000u);
}

template <int kCount>
__device__ inline Channels<kCount> load_fresh_bf16(const std::uint16_t* from) {
  std::uint32_t pairs[kCount / 2];
  load_words(pairs, from);
  Channels<kCount> x;
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    x.v[k] = low_bf16(pairs[k / 2]);
    x.v[k + 1] = high_bf16(pairs[k / 2]);
  }
  return x;
}

template <int kCount>
__device__ inline Channels<kCount> load_input(const InputRows& rows, std::int64_t input_row,
                                              std::int64_t channel) {
  const std::int64_t at = input_row * rows.stride + channel;
  return rows.type == ElementType::kFloat32
             ? load_fresh<kCount>(static_cast<const float*>(rows.data) + at)
             : load_fresh_bf16<kCount>(static_cast<const std::uint16_t*>(rows.data) + at);
}

template <int kCount>
__device__ inline void store_channels(float* to, const Channels<kCount>& x) {
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  } else {
    *reinterpret_cast<float2*>(to) = make_float2(x.v[0], x.v[1]);
  }
}

// --- Norm ---

// Sum over the values of `count` warps or channels, a power of two, as the index-bit tree has it:
// neighbours first.
template <int kCount>
__device__ inline float tree_sum(const float* terms) {
  if constexpr (kCount == 1) {
    return terms[0];
  } else {
    return exact::add(tree_sum<kCount / 2>(terms), tree_sum<kCount / 2>(terms + kCount / 2));
  }
}

// The index-bit tree of SPEC 3.7: the lowest channel bits in registers, the next five across the
// warp, the others across the entry's warps.
template <class P>
__device__ inline float sum_of_squares(const typename P::Values& c, Scratch<P>& scratch) {
  float squares[P::kPerThread];
#pragma unroll
  for (int k = 0; k < P::kPerThread; ++k) squares[k] = exact::mul(c.v[k], c.v[k]);
  float sum = tree_sum<P::kPerThread>(squares);
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    sum = exact::add(sum, __shfl_xor_sync(kAllLanes, sum, bit));
  }
  if constexpr (P::kWarps > 1) {
    if (threadIdx.x % kWarp == 0) scratch.sums[P::warp()] = sum;
    P::sync();
    sum = tree_sum<P::kWarps>(scratch.sums);
  }
  return sum;
}

template <class P>
__device__ inline typename P::Values normalise(const typename P::Values& c,
                                               const typename P::Values& weight, float eps,
                                               Scratch<P>& scratch) {
  constexpr float kInverseDim = 1.0f / P::kDim;
  const float r = exact::rms_scale(sum_of_squares<P>(c, scratch), kInverseDim, eps);
  typename P::Values y;
#pragma unroll
  for (int k = 0; k < P::kPerThread; ++k) {
    y.v[k] = exact::mul(exact::mul(c.v[k], r), weight.v[k]);
  }
  return y;
}

// --- RoPE, on the last 64 channels ---

template <class P>
__device__ inline bool is_rotated() {
  return P::channel() >= P::kDim - kRopeDim;
}

// cos, sin of each of the thread's pairs.
template <class P>
__device__ inline typename P::Values load_rotation(const RopeTable& rope, std::int32_t position) {
  constexpr int kPairs = P::kPerThread / 2;
  const int at = P::channel() - (P::kDim - static_cast<int>(kRopeDim));
  const float* row = rope.values + static_cast<std::int64_t>(position) * kRopeDim;
  if (rope.layout == RopeLayout::kInterleaved) return load_constant<P::kPerThread>(row + at);
  typename P::Values rotation;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    rotation.v[2 * pair] = __ldg(row + at / 2 + pair);
    rotation.v[2 * pair + 1] = __ldg(row + kRopeDim / 2 + at / 2 + pair);
  }
  return rotation;
}

template <int kCount>
__device__ inline Channels<kCount> rotate(const Channels<kCount>& x,
                                          const Channels<kCount>& rotation) {
  Channels<kCount> y;
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    const exact::Pair pair = exact::rotate({x.v[k], x.v[k + 1]}, rotation.v[k], rotation.v[k + 1]);
    y.v[k] = pair.x;
    y.v[k + 1] = pair.y;
  }
  return y;
}

// What norm and RoPE of an entry need, all of it immutable.
template <class P>
struct Finish {
  typename P::Values weight;
  typename P::Values rotation;
};

template <class P>
__device__ inline Finish<P> load_finish(const float* norm_weight, const RopeTable& rope,
                                        std::int32_t position) {
  Finish<P> finish{};
  if (norm_weight != nullptr) {
    finish.weight = load_constant<P::kPerThread>(norm_weight + P::channel());
  }
  if (is_rotated<P>()) finish.rotation = load_rotation<P>(rope, position);
  return finish;
}

// --- Hadamard, over the channels of an indexer entry ---

__device__ inline void butterfly(float& lower, float& upper) {
  const float sum = exact::add(lower, upper);
  upper = exact::sub(lower, upper);
  lower = sum;
}

// A channel with its partner's value.
__device__ inline float butterfly_half(float own, float other, bool is_upper) {
  return is_upper ? exact::sub(other, own) : exact::add(own, other);
}

template <class P>
__device__ inline typename P::Values hadamard(typename P::Values x, Scratch<P>& scratch) {
#pragma unroll
  for (int step = 1; step < P::kPerThread; step *= 2) {
#pragma unroll
    for (int k = 0; k < P::kPerThread; ++k) {
      if ((k & step) == 0) butterfly(x.v[k], x.v[k + step]);
    }
  }
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(bit)) != 0;
#pragma unroll
    for (int k = 0; k < P::kPerThread; ++k) {
      x.v[k] = butterfly_half(x.v[k], __shfl_xor_sync(kAllLanes, x.v[k], bit), is_upper);
    }
  }
  if constexpr (P::kWarps > 1) {
    static_assert(P::kWarps == 2);
    store_channels(scratch.channels + P::channel(), x);
    P::sync();
    const auto other = load_fresh<P::kPerThread>(scratch.channels + (P::channel() ^ (P::kDim / 2)));
    const bool is_upper = P::channel() >= P::kDim / 2;
#pragma unroll
    for (int k = 0; k < P::kPerThread; ++k) {
      x.v[k] = butterfly_half(x.v[k], other.v[k], is_upper);
    }
  }
#pragma unroll
  for (int k = 0; k < P::kPerThread; ++k) x.v[k] = exact::mul(x.v[k], exact::kHadamardScale);
  return x;
}

// --- Quantise and store ---

// Lanes of the thread's tile of kLanes neighbouring lanes.
template <int kLanes>
__device__ inline unsigned tile_lanes() {
  if constexpr (kLanes == kWarp) {
    return kAllLanes;
  } else {
    const unsigned first = threadIdx.x % kWarp / kLanes * kLanes;
    return ((1u << kLanes) - 1u) << first;
  }
}

// Bits of the largest magnitude of a tile's channels within the warp: NaN ignored, at least `floor`
// (which is none). Magnitudes order as their bits do.
template <int kLanes, int kCount>
__device__ inline std::uint32_t tile_maximum(const Channels<kCount>& x, float floor) {
  std::uint32_t most = exact::bits(floor);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const std::uint32_t magnitude = exact::bits(exact::magnitude(x.v[k]));
    most = max(most, magnitude > exact::kInfBits ? 0u : magnitude);
  }
  if constexpr (kLanes >= kWarp / 2) {
    return __reduce_max_sync(tile_lanes<kLanes>(), most);  // one a tile
  } else {
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) {
      most = max(most, __shfl_xor_sync(kAllLanes, most, bit));
    }
    return most;
  }
}

template <int kCount>
__device__ inline bool has_nonfinite(const Channels<kCount>& x) {
  bool found = false;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    found |= exact::bits(exact::magnitude(x.v[k])) >= exact::kInfBits;
  }
  return found;
}

// By one thread of a tile. `report` is nullable.
__device__ inline void report_nonfinite_tile(std::int32_t seat, DeviceReport* report) {
  if (report == nullptr) return;
  atomicAdd(&report->nonfinite_tiles, 1);
  atomicMin(&report->first_failing_seat, seat);
}

__device__ inline std::uint32_t join_halves(std::uint32_t low, std::uint32_t high) {
  return low | high << 16;
}

// Two e4m3 codes, the lower in the lower byte: one instruction where there is one.
__device__ inline std::uint32_t to_e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return static_cast<std::uint32_t>(exact::to_e4m3(low)) |
         static_cast<std::uint32_t>(exact::to_e4m3(high)) << 8;
#endif
}

// One byte of each channel, `of(k)`.
template <int kCount, class Byte>
__device__ inline void store_bytes(std::byte* to, const Byte& of) {
  const auto pair = [&](int k) {
    return static_cast<std::uint32_t>(of(k)) | static_cast<std::uint32_t>(of(k + 1)) << 8;
  };
  if constexpr (kCount % 4 == 0) {
    std::uint32_t words[kCount / 4];
#pragma unroll
    for (int k = 0; k < kCount; k += 4) words[k / 4] = join_halves(pair(k), pair(k + 2));
    store_words(to, words);
  } else {
    static_assert(kCount == 2);
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(pair(0));
  }
}

// Where a main or window entry lies.
struct MainEntry {
  std::byte* data;
  std::byte* scales;
};
__device__ inline MainEntry main_entry(const EntryPool& pool, std::int64_t location) {
  return {pool.main_data(location), pool.main_scales(location)};
}

// Main or window entry: `x` is normed and rotated. All threads of the entry call it.
template <class P>
__device__ inline void store_main_entry(const MainEntry& entry, typename P::Values x,
                                        float scale_floor, std::int32_t seat,
                                        DeviceReport* report) {
  constexpr int kTileLanes = static_cast<int>(kTileDim) / P::kPerThread;
  const int channel = P::channel();
  std::uint16_t h[P::kPerThread];
#pragma unroll
  for (int k = 0; k < P::kPerThread; ++k) {
    h[k] = exact::to_bf16(x.v[k]);
    x.v[k] = exact::from_bf16(h[k]);
  }
  const bool is_quantised = channel < kNopeDim;
  const std::uint8_t scale =
      exact::scale_byte(exact::from_bits(tile_maximum<kTileLanes>(x, scale_floor)));
  if (is_quantised) {
    store_bytes<P::kPerThread>(entry.data + channel,
                               [&](int k) { return exact::quantise_main(x.v[k], scale); });
  } else {
    std::uint32_t pairs[P::kPerThread / 2];
#pragma unroll
    for (int k = 0; k < P::kPerThread; k += 2) pairs[k / 2] = join_halves(h[k], h[k + 1]);
    store_words(entry.data + kNopeDim + 2 * (channel - kNopeDim), pairs);
  }
  // The eighth tile is the rotated part: it has no scale, its byte is 0.
  if (P::thread() % kTileLanes == 0) {
    entry.scales[P::thread() / kTileLanes] = static_cast<std::byte>(is_quantised ? scale : 0);
  }
  const unsigned nonfinite = __ballot_sync(kAllLanes, is_quantised && has_nonfinite(x));
  if (P::thread() % kTileLanes == 0 && (nonfinite & tile_lanes<kTileLanes>()) != 0) {
    report_nonfinite_tile(seat, report);
  }
}

// Where an indexer entry lies; null: nowhere, and nothing is stored.
struct IndexerEntry {
  std::byte* values;
  float* scale;
};
__device__ inline IndexerEntry indexer_entry(const EntryPool& pool, std::int64_t location) {
  return {pool.indexer_values(location), reinterpret_cast<float*>(pool.indexer_scale(location))};
}

// Indexer entry: `x` is final, fp32. All threads of the entry call it, and of all entries that
// share a warp.
template <class P>
__device__ inline void store_indexer_entry(const IndexerEntry& entry, const typename P::Values& x,
                                           float scale_floor, std::int32_t seat,
                                           DeviceReport* report, Scratch<P>& scratch) {
  constexpr int kLanes = P::kThreads < kWarp ? P::kThreads : kWarp;
  std::uint32_t most = tile_maximum<kLanes>(x, scale_floor);
  bool nonfinite = (__ballot_sync(kAllLanes, has_nonfinite(x)) & tile_lanes<kLanes>()) != 0;
  if constexpr (P::kWarps > 1) {
    static_assert(P::kWarps == 2);
    constexpr std::uint32_t kNonfinite = 0x80000000u;  // magnitudes leave this bit free
    if (threadIdx.x % kWarp == 0) {
      scratch.maxima[P::warp()] = most | (nonfinite ? kNonfinite : 0u);
    }
    P::sync();
    const std::uint32_t one = scratch.maxima[0];
    const std::uint32_t other = scratch.maxima[1];
    most = max(one & ~kNonfinite, other & ~kNonfinite);
    nonfinite = ((one | other) & kNonfinite) != 0;
  }
  if (entry.values == nullptr) return;
  const float scale = exact::indexer_scale(exact::from_bits(most));
  const float inverse = exact::div(1.0f, scale);
  store_bytes<P::kPerThread>(entry.values + P::channel(), [&](int k) {
    return exact::quantise_indexer(x.v[k], scale, inverse);
  });
  if (P::thread() == 0) {
    *entry.scale = scale;
    if (nonfinite) report_nonfinite_tile(seat, report);
  }
}

}  // namespace quire::cuda
