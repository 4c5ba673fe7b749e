// From pooled or raw channels to stored bytes, on the device (SPEC 3.1 to 3.7): norm, RoPE,
// Hadamard, quantise, store. A main or window entry (d = 512) is one block of 128 threads, an
// indexer entry (d = 128) one warp; every thread holds four consecutive channels.
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

inline constexpr int kThreads = 128;  // of every block here
inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kChannels = 4;  // of a thread
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Four {
  float v[kChannels];
};

// Which entry of its block a thread works on, and which channels of it.
template <int kDim>
struct Place {
  static_assert(kDim == kThreads * kChannels || kDim == kWarp * kChannels);
  static constexpr bool kIsBlock = kDim == kThreads * kChannels;
  static constexpr int kEntriesPerBlock = kIsBlock ? 1 : kWarps;

  __device__ static int thread() {  // in its entry
    return static_cast<int>(kIsBlock ? threadIdx.x : threadIdx.x % kWarp);
  }
  __device__ static int channel() { return thread() * kChannels; }
  __device__ static std::int64_t entry(std::int64_t block) {
    return kIsBlock ? block : block * kWarps + threadIdx.x / kWarp;
  }
};

// --- Loads ---

// Immutable since before the planner ran: bias, norm weights, RoPE tables.
__device__ inline Four load_constant(const float* four) {
  const float4 x = __ldg(reinterpret_cast<const float4*>(four));
  return {{x.x, x.y, x.z, x.w}};
}

// Seat state, at L2: no first-level line can be stale. Volatile keeps it on its side of a wait.
__device__ inline Four load_state(const float* four) {
  Four x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
               : "l"(__cvta_generic_to_global(four))
               : "memory");
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
  const int4 a = load_int4_at_l2(header);
  const int4 b = load_int4_at_l2(&header->steps_at_plan);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, {}};
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
__device__ inline Four load_fresh(const float* four) {
  const float4 x = *reinterpret_cast<const float4*>(four);
  return {{x.x, x.y, x.z, x.w}};
}

__device__ inline Four load_fresh_bf16(const std::uint16_t* four) {
  const uint2 x = *reinterpret_cast<const uint2*>(four);
  return {{exact::from_bits(x.x << 16), exact::from_bits(x.x & 0xFFFF0000u),
           exact::from_bits(x.y << 16), exact::from_bits(x.y & 0xFFFF0000u)}};
}

__device__ inline Four load_input(const InputRows& rows, std::int64_t input_row,
                                  std::int64_t channel) {
  const std::int64_t at = input_row * rows.stride + channel;
  return rows.type == ElementType::kFloat32
             ? load_fresh(static_cast<const float*>(rows.data) + at)
             : load_fresh_bf16(static_cast<const std::uint16_t*>(rows.data) + at);
}

__device__ inline void store_four(float* to, const Four& x) {
  *reinterpret_cast<float4*>(to) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

// --- Norm ---

// The index-bit tree of SPEC 3.7: channel bits 0 and 1 in registers, 2 to 6 across the warp, 7 and
// 8 across the block's warps. `partial` is shared memory of kWarps floats, used once per kernel.
template <int kDim>
__device__ inline float sum_of_squares(const Four& c, float* partial) {
  float q[kChannels];
#pragma unroll
  for (int k = 0; k < kChannels; ++k) q[k] = exact::mul(c.v[k], c.v[k]);
  float sum = exact::add(exact::add(q[0], q[1]), exact::add(q[2], q[3]));
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    sum = exact::add(sum, __shfl_xor_sync(kAllLanes, sum, bit));
  }
  if constexpr (Place<kDim>::kIsBlock) {
    static_assert(kWarps == 4);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    __syncthreads();
    sum = exact::add(exact::add(partial[0], partial[1]), exact::add(partial[2], partial[3]));
  }
  return sum;
}

template <int kDim>
__device__ inline Four normalise(const Four& c, const Four& weight, float eps, float* partial) {
  constexpr float kInverseDim = 1.0f / kDim;
  const float r = exact::rms_scale(sum_of_squares<kDim>(c, partial), kInverseDim, eps);
  Four y;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) y.v[k] = exact::mul(exact::mul(c.v[k], r), weight.v[k]);
  return y;
}

// --- RoPE, on the last 64 channels ---

template <int kDim>
__device__ inline bool is_rotated() {
  return Place<kDim>::channel() >= kDim - kRopeDim;
}

// cos, sin, cos, sin of the thread's two pairs.
template <int kDim>
__device__ inline Four load_rotation(const RopeTable& rope, std::int32_t position) {
  const int at = Place<kDim>::channel() - (kDim - static_cast<int>(kRopeDim));
  const float* row = rope.values + static_cast<std::int64_t>(position) * kRopeDim;
  if (rope.layout == RopeLayout::kInterleaved) return load_constant(row + at);
  const float2 cos = __ldg(reinterpret_cast<const float2*>(row + at / 2));
  const float2 sin = __ldg(reinterpret_cast<const float2*>(row + kRopeDim / 2 + at / 2));
  return {{cos.x, sin.x, cos.y, sin.y}};
}

__device__ inline Four rotate(const Four& x, const Four& rotation) {
  const exact::Pair first = exact::rotate({x.v[0], x.v[1]}, rotation.v[0], rotation.v[1]);
  const exact::Pair second = exact::rotate({x.v[2], x.v[3]}, rotation.v[2], rotation.v[3]);
  return {{first.x, first.y, second.x, second.y}};
}

// What norm and RoPE of an entry need, all of it immutable.
struct Finish {
  Four weight;
  Four rotation;
};

template <int kDim>
__device__ inline Finish load_finish(const float* norm_weight, const RopeTable& rope,
                              std::int32_t position) {
  Finish finish{};
  if (norm_weight != nullptr) {
    finish.weight = load_constant(norm_weight + Place<kDim>::channel());
  }
  if (is_rotated<kDim>()) finish.rotation = load_rotation<kDim>(rope, position);
  return finish;
}

// --- Hadamard, over the 128 channels of a warp ---

__device__ inline void butterfly(float& lower, float& upper) {
  const float sum = exact::add(lower, upper);
  upper = exact::sub(lower, upper);
  lower = sum;
}

__device__ inline Four hadamard(Four x) {
  butterfly(x.v[0], x.v[1]);
  butterfly(x.v[2], x.v[3]);
  butterfly(x.v[0], x.v[2]);
  butterfly(x.v[1], x.v[3]);
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(bit)) != 0;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      const float other = __shfl_xor_sync(kAllLanes, x.v[k], bit);
      x.v[k] = upper ? exact::sub(other, x.v[k]) : exact::add(x.v[k], other);
    }
  }
#pragma unroll
  for (int k = 0; k < kChannels; ++k) x.v[k] = exact::mul(x.v[k], exact::kHadamardScale);
  return x;
}

// --- Quantise and store ---

// Largest magnitude of `kLanes` neighbouring threads' channels, NaN ignored, at least `floor`.
template <int kLanes>
__device__ inline float tile_maximum(const Four& x, float floor) {
  float amax = floor;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) amax = exact::max_num(amax, exact::magnitude(x.v[k]));
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {
    amax = exact::max_num(amax, __shfl_xor_sync(kAllLanes, amax, bit));
  }
  return amax;
}

// All lanes call it; the first lane of each tile of `kLanes` threads counts. `report` is nullable.
template <int kLanes>
__device__ inline void report_nonfinite(const Four& x, bool is_quantised, std::int32_t seat,
                                        DeviceReport* report) {
  bool found = false;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    found |= exact::bits(exact::magnitude(x.v[k])) >= exact::kInfBits;
  }
  const unsigned lanes = __ballot_sync(kAllLanes, found && is_quantised);
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned tile = kLanes == kWarp ? kAllLanes : ((1u << (kLanes % kWarp)) - 1u) << lane;
  if (report == nullptr || lane % kLanes != 0 || (lanes & tile) == 0) return;
  atomicAdd(&report->nonfinite_tiles, 1);
  atomicMin(&report->first_failing_seat, seat);
}

__device__ inline std::uint32_t pack_bytes(std::uint8_t a, std::uint8_t b, std::uint8_t c,
                                           std::uint8_t d) {
  return static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b) << 8 |
         static_cast<std::uint32_t>(c) << 16 | static_cast<std::uint32_t>(d) << 24;
}

// Main or window entry by a block: `x` is normed and rotated. All 128 threads call it.
__device__ inline void store_main_entry(const EntryPool& pool, std::int64_t location, Four x,
                                        float scale_floor, std::int32_t seat,
                                        DeviceReport* report) {
  constexpr int kTileLanes = static_cast<int>(kTileDim) / kChannels;
  const int thread = Place<kHeadDim>::thread();
  const int channel = Place<kHeadDim>::channel();
  std::uint16_t h[kChannels];
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    h[k] = exact::to_bf16(x.v[k]);
    x.v[k] = exact::from_bf16(h[k]);
  }
  const bool is_quantised = channel < kNopeDim;
  const std::uint8_t scale = exact::scale_byte(tile_maximum<kTileLanes>(x, scale_floor));
  report_nonfinite<kTileLanes>(x, is_quantised, seat, report);

  std::byte* data = pool.main_data(location);
  std::byte* scales = pool.main_scales(location);
  if (is_quantised) {
    *reinterpret_cast<std::uint32_t*>(data + channel) =
        pack_bytes(exact::quantise_main(x.v[0], scale), exact::quantise_main(x.v[1], scale),
                   exact::quantise_main(x.v[2], scale), exact::quantise_main(x.v[3], scale));
  } else {
    const auto pair = [](std::uint16_t low, std::uint16_t high) {
      return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
    };
    *reinterpret_cast<uint2*>(data + kNopeDim + 2 * (channel - kNopeDim)) =
        make_uint2(pair(h[0], h[1]), pair(h[2], h[3]));
  }
  // The eighth tile is the rotated part: it has no scale, its byte is 0.
  if (thread % kTileLanes == 0) {
    scales[thread / kTileLanes] = static_cast<std::byte>(is_quantised ? scale : 0);
  }
}

// Indexer entry by a warp: `x` is final, fp32. All 32 lanes call it.
__device__ inline void store_indexer_entry(const EntryPool& pool, std::int64_t location,
                                           const Four& x, float scale_floor, std::int32_t seat,
                                           DeviceReport* report) {
  const float scale = exact::indexer_scale(tile_maximum<kWarp>(x, scale_floor));
  const float inverse = exact::div(1.0f, scale);
  report_nonfinite<kWarp>(x, true, seat, report);
  *reinterpret_cast<std::uint32_t*>(pool.indexer_values(location) + Place<kIndexerDim>::channel()) =
      pack_bytes(exact::quantise_indexer(x.v[0], scale, inverse),
                 exact::quantise_indexer(x.v[1], scale, inverse),
                 exact::quantise_indexer(x.v[2], scale, inverse),
                 exact::quantise_indexer(x.v[3], scale, inverse));
  if (Place<kIndexerDim>::thread() == 0) {
    *reinterpret_cast<float*>(pool.indexer_scale(location)) = scale;
  }
}

}  // namespace quire::cuda
