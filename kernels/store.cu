// Quantise and store finished bf16 rows: FlashMLA entries, a warp a row; indexer entries, eight
// lanes a row. A warp has the rows of several steps on their way before it works on the first.
// Finite rows go a short way, on pairs of bf16 as they are; the others the way of every entry. Both
// wait before anything else: who wrote the rows is not known here.
#include <quire/kernels/store.h>

#include <quire/kernels/entry.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBlockWarps = kThreads / kWarp;
constexpr int kBlocksPerSm = 8;

// A lane has 16 channels of a row, eight in each half: what a warp loads at once lies side by side.
constexpr int kPerLane = 16;
constexpr int kRunPairs = kPerLane / 4;  // pairs of channels in one half
constexpr int kTileLanes = 8;            // of half an indexer row as well
constexpr int kSteps = 4;                // of a warp

template <int kDim>
constexpr int kRowsPerStep = kWarp* kPerLane / kDim;

template <int kDim>
__device__ int lane_in_row() {
  return static_cast<int>(threadIdx.x) % (kDim / kPerLane);
}
template <int kDim>
__device__ int row_in_step() {
  return static_cast<int>(threadIdx.x) % kWarp / (kDim / kPerLane);
}

// First row of step `step`: each step of all warps is one run of rows.
template <int kDim>
__device__ std::int64_t first_row(int step) {
  const std::int64_t warp = std::int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarp;
  const std::int64_t warps = std::int64_t{gridDim.x} * kBlockWarps;
  return (warp + step * warps) * kRowsPerStep<kDim>;
}

// The lane's channels of one row: pairs of bf16, lower channel in the lower half.
struct Run {
  std::uint32_t pairs[kRunPairs];
};
struct RowPart {
  Run halves[2];
};

template <int kDim>
__device__ RowPart load_row_part(const StoreParams& params, std::int64_t row) {
  RowPart part{};
  if (row >= params.rows) return part;
  const std::uint16_t* from = static_cast<const std::uint16_t*>(params.input) + row * kDim +
                              lane_in_row<kDim>() * (kPerLane / 2);
  load_words(part.halves[0].pairs, from);
  load_words(part.halves[1].pairs, from + kDim / 2);
  return part;
}

// Where an entry lies; null: nowhere.
struct Target {
  std::byte* values;
  std::byte* scales;
};

// Of the row that the lane looks up for its warp: row `lane % kRowsPerStep` of step
// `lane / kRowsPerStep`.
template <int kDim>
__device__ Target look_up_target(const StoreParams& params) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int step = lane / kRowsPerStep<kDim>;
  const std::int64_t row = first_row<kDim>(step) + lane % kRowsPerStep<kDim>;
  if (step >= kSteps || row >= params.rows) return {};
  const std::int64_t location = params.wide_locations
                                    ? static_cast<const std::int64_t*>(params.locations)[row]
                                    : static_cast<const std::int32_t*>(params.locations)[row];
  if (location < 0) return {};
  if constexpr (kDim == kHeadDim) {
    return {params.pool.main_data(location), params.pool.main_scales(location)};
  } else {
    return {params.pool.indexer_values(location), params.pool.indexer_scale(location)};
  }
}

__device__ inline std::byte* from_lane(std::byte* pointer, int lane) {
  const auto shuffled = reinterpret_cast<std::byte*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
  __builtin_assume(__isGlobal(shuffled));
  return shuffled;
}
template <int kDim>
__device__ Target target_of_step(const Target& looked_up, int step) {
  const int lane = step * kRowsPerStep<kDim> + row_in_step<kDim>();
  return {from_lane(looked_up.values, lane), from_lane(looked_up.scales, lane)};
}

// --- Finite rows ---

// Larger of the magnitudes in each half of two words; a bf16 magnitude is ordered as its bits are.
__device__ inline std::uint32_t larger_pair(std::uint32_t a, std::uint32_t b) {
  return __vmaxu2(a, b);
}

__device__ inline std::uint32_t run_maximum(const Run& run) {
  constexpr std::uint32_t kMagnitudes = 0x7FFF7FFFu;
  std::uint32_t most = run.pairs[0] & kMagnitudes;
#pragma unroll
  for (int w = 1; w < kRunPairs; ++w) most = larger_pair(most, run.pairs[w] & kMagnitudes);
  return most;
}

// Largest magnitudes of the kTileLanes lanes' first and second halves, in the lower and the upper
// 16 bits.
__device__ inline std::uint32_t tile_maxima(const RowPart& part) {
  const std::uint32_t first = run_maximum(part.halves[0]);
  const std::uint32_t second = run_maximum(part.halves[1]);
  std::uint32_t most =
      larger_pair(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
#pragma unroll
  for (int bit = 1; bit < kTileLanes; bit *= 2) {
    most = larger_pair(most, __shfl_xor_sync(kAllLanes, most, bit));
  }
  return most;
}

// Whether either of two magnitudes is infinite or NaN: adding 0x80 carries into bit 15.
__device__ inline bool has_nonfinite_pair(std::uint32_t magnitudes) {
  return ((magnitudes + 0x00800080u) & 0x80008000u) != 0;
}

// The larger of a bf16 magnitude, given as the upper half of a word, and `floor`.
__device__ inline float at_least(std::uint32_t upper_half, float floor) {
  return exact::from_bits(max(upper_half, exact::bits(floor)));
}

__device__ inline std::uint32_t quantise_pair(std::uint32_t pair, float inverse) {
  return to_e4m3_pair(exact::mul(low_bf16(pair), inverse), exact::mul(high_bf16(pair), inverse));
}

__device__ inline void store_codes(std::byte* to, const Run& run, float inverse) {
  std::uint32_t codes[kRunPairs / 2];
#pragma unroll
  for (int w = 0; w < kRunPairs; w += 2) {
    codes[w / 2] =
        join_halves(quantise_pair(run.pairs[w], inverse), quantise_pair(run.pairs[w + 1], inverse));
  }
  store_words(to, codes);
}

// A tile in each half; the last is the rotated part, which is kept as it is and has a scale byte of
// 0.
__device__ inline void store_finite_main(const Target& to, const RowPart& part,
                                         std::uint32_t maxima, float floor) {
  constexpr int kHalf = static_cast<int>(kHeadDim) / 2;
  constexpr int kTilesPerHalf = kWarp / kTileLanes;
  const int lane = lane_in_row<kHeadDim>();
  const int channel = lane * (kPerLane / 2);
  const int tile = lane / kTileLanes;
  const std::uint8_t first = exact::scale_byte(at_least(maxima << 16, floor));
  const std::uint8_t second = exact::scale_byte(at_least(maxima & 0xFFFF0000u, floor));
  const bool is_quantised = kHalf + channel < kNopeDim;
  store_codes(to.values + channel, part.halves[0], exact::inverse_scale(first));
  if (is_quantised) {
    store_codes(to.values + kHalf + channel, part.halves[1], exact::inverse_scale(second));
  } else {
    store_words(to.values + kNopeDim + 2 * (kHalf + channel - kNopeDim), part.halves[1].pairs);
  }
  if (lane % kTileLanes == 0) {
    to.scales[tile] = static_cast<std::byte>(first);
    to.scales[kTilesPerHalf + tile] = static_cast<std::byte>(is_quantised ? second : 0);
  }
}

__device__ inline void store_finite_indexer(const Target& to, const RowPart& part,
                                            std::uint32_t maxima, float floor) {
  constexpr int kHalf = static_cast<int>(kIndexerDim) / 2;
  const int lane = lane_in_row<kIndexerDim>();
  const int channel = lane * (kPerLane / 2);
  if (to.values == nullptr) return;
  const float scale =
      exact::indexer_scale(at_least(max(maxima << 16, maxima & 0xFFFF0000u), floor));
  const float inverse = exact::div(1.0f, scale);
  store_codes(to.values + channel, part.halves[0], inverse);
  store_codes(to.values + kHalf + channel, part.halves[1], inverse);
  if (lane == 0) *reinterpret_cast<float*>(to.scales) = scale;
}

// --- All rows ---

// By all lanes of a warp.
template <int kDim>
__device__ void store_any(const StoreParams& params, std::int64_t row, const Target& to) {
  using P = Place<kDim, kPerLane>;
  Channels<kPerLane> x{};
  if (row < params.rows) {
    x = load_fresh_bf16<kPerLane>(static_cast<const std::uint16_t*>(params.input) + row * kDim +
                                  P::channel());
  }
  if constexpr (kDim == kHeadDim) {
    store_main_entry<P>({to.values, to.scales}, x, params.scale_floor, 0, nullptr);
  } else {
    Scratch<P> unused;  // an entry of one warp exchanges nothing
    store_indexer_entry<P>({to.values, reinterpret_cast<float*>(to.scales)}, x, params.scale_floor,
                           0, nullptr, unused);
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    store_rows(const __grid_constant__ StoreParams params) {
  pdl_wait();
  pdl_trigger();
  RowPart parts[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    parts[step] = load_row_part<kDim>(params, first_row<kDim>(step) + row_in_step<kDim>());
  }
  const Target looked_up = look_up_target<kDim>(params);
  unsigned nonfinite = 0;  // steps, the same in all lanes
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const Target to = target_of_step<kDim>(looked_up, step);
    if (!__any_sync(kAllLanes, to.values != nullptr)) continue;
    const std::uint32_t maxima = tile_maxima(parts[step]);
    if (__any_sync(kAllLanes, has_nonfinite_pair(maxima))) {
      nonfinite |= 1u << step;
    } else if constexpr (kDim == kHeadDim) {
      store_finite_main(to, parts[step], maxima, params.scale_floor);
    } else {
      store_finite_indexer(to, parts[step], maxima, params.scale_floor);
    }
  }
#pragma unroll 1
  for (int step = 0; nonfinite != 0; ++step, nonfinite >>= 1) {
    if ((nonfinite & 1u) == 0) continue;
    store_any<kDim>(params, first_row<kDim>(step) + row_in_step<kDim>(),
                    target_of_step<kDim>(looked_up, step));
  }
}

constexpr auto kStoreFlashmla = &store_rows<static_cast<int>(kHeadDim)>;
constexpr auto kStoreIndexer = &store_rows<static_cast<int>(kIndexerDim)>;

// Few rows go to as many warps as the device holds, many in full steps.
template <int kDim>
void launch_store(const StoreParams& params, Pdl pdl, cudaStream_t stream) {
  const std::int64_t steps = ceil_div<std::int64_t>(params.rows, kRowsPerStep<kDim>);
  const std::int64_t resident = std::int64_t{multiprocessors()} * kBlocksPerSm * kBlockWarps;
  const std::int64_t warps = max_of(ceil_div<std::int64_t>(steps, kSteps), min_of(steps, resident));
  launch(&store_rows<kDim>, linear_grid(ceil_div<std::int64_t>(warps, kBlockWarps)), dim3(kThreads),
         0, stream, pdl != Pdl::kOff, params);
}

}  // namespace

void launch_store_flashmla(const StoreParams& params, Pdl pdl, cudaStream_t stream) {
  launch_store<static_cast<int>(kHeadDim)>(params, pdl, stream);
}

void launch_store_indexer(const StoreParams& params, Pdl pdl, cudaStream_t stream) {
  launch_store<static_cast<int>(kIndexerDim)>(params, pdl, stream);
}

void load_store_kernels() {
  load_kernel(kStoreFlashmla);
  load_kernel(kStoreIndexer);
}

}  // namespace quire::cuda
