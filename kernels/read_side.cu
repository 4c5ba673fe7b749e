// The read side's single operations. All wait before anything else: who wrote the picks, the pages
// and the tables is not known here.
#include <quire/kernels/read_side.h>

#include <quire/kernels/gather.h>
#include <quire/kernels/pdl.cuh>
#include <quire/kernels/read_side.cuh>
#include <quire/planner/planner.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

// --- Picks to locations: a block a token ---

constexpr int kPickThreads = 128;

__global__ void __launch_bounds__(kPickThreads)
    translate_picks_kernel(const __grid_constant__ TranslatePicksParams params) {
  pdl_wait();
  pdl_trigger();
  __shared__ std::int32_t length;
  const std::int64_t token = blockIdx.x;
  const std::int32_t r = params.token_batch_row[token];
  const std::int32_t entries = r >= 0 ? params.token_csa_length[token] : 0;
  if (threadIdx.x == 0) length = max_of(min_of(params.k, entries), params.length_floor);
  __syncthreads();
  const std::int32_t* cells = params.page_table + max_of(r, 0) * params.page_table_stride;
  const std::int32_t* picks = params.picks + token * params.picks_stride;
  std::int32_t* locations = params.locations + token * params.locations_stride;
  std::int32_t last = 0;  // behind the last valid pick that this thread meets
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < params.k; i += kPickThreads) {
    const std::int32_t pick = picks[i];
    if (pick >= 0 && pick < entries) last = i + 1;
    locations[i] = csa_location_of_pick(cells, pick, entries, params.padding_location,
                                        params.entries_per_page);
  }
  if (params.lengths == nullptr) return;
  last = __reduce_max_sync(0xFFFFFFFFu, last);
  if (threadIdx.x % 32 == 0) atomicMax(&length, last);  // the same whoever comes first
  __syncthreads();
  if (threadIdx.x == 0) params.lengths[token] = length;
}

// --- Entries, dequantised: 64 threads an entry, eight channels each ---

constexpr int kGatherThreads = 256;
constexpr int kThreadsPerEntry = 64;
constexpr int kGatherChannels = 8;
static_assert(kThreadsPerEntry * kGatherChannels == kHeadDim);

// Eight neighbours as floats, or as bf16 in two halves of four words.
struct Eight {
  std::uint32_t word[kGatherChannels];
};

template <bool kWide>
__device__ Eight load_channels(const EntryPool& pool, std::int64_t location, int thread) {
  Eight eight;
  const int channel = thread * kGatherChannels;
  const std::byte* data = pool.main_data(location);
  if (channel < kNopeDim) {
    const auto scale = static_cast<std::uint8_t>(pool.main_scales(location)[channel / kTileDim]);
    const uint2 codes = *reinterpret_cast<const uint2*>(data + channel);
#pragma unroll
    for (int k = 0; k < kGatherChannels; ++k) {
      const std::uint32_t word = k < 4 ? codes.x : codes.y;
      const float value = dequantised(static_cast<std::uint8_t>(word >> (8 * (k % 4))), scale);
      eight.word[k] = kWide ? exact::bits(value) : exact::to_bf16(value);
    }
  } else {  // the tail's bits as they are
    const uint4 tail = *reinterpret_cast<const uint4*>(data + kNopeDim + 2 * (channel - kNopeDim));
    const std::uint32_t pairs[4] = {tail.x, tail.y, tail.z, tail.w};
#pragma unroll
    for (int k = 0; k < kGatherChannels; ++k) {
      const std::uint32_t bf16 = pairs[k / 2] >> (16 * (k % 2)) & 0xFFFFu;
      eight.word[k] = kWide ? bf16 << 16 : bf16;
    }
  }
  return eight;
}

template <bool kWide>
__device__ void store_channels(void* row, int thread, const Eight& eight) {
  auto* to = static_cast<uint4*>(row) + thread * (kWide ? 2 : 1);
  const std::uint32_t(&w)[kGatherChannels] = eight.word;
  if constexpr (kWide) {
    to[0] = make_uint4(w[0], w[1], w[2], w[3]);
    to[1] = make_uint4(w[4], w[5], w[6], w[7]);
  } else {
    to[0] = make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16, w[6] | w[7] << 16);
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kGatherThreads)
    gather_main_kernel(const __grid_constant__ GatherMainParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t at = thread_in_grid() / kThreadsPerEntry;
  if (at >= params.count) return;
  const auto thread = static_cast<int>(threadIdx.x % kThreadsPerEntry);
  const std::int64_t location = gather_location(params, at);
  Eight eight{};
  if (location >= 0) eight = load_channels<kWide>(params.pool, location, thread);
  std::byte* row =
      static_cast<std::byte*>(params.output) + at * params.output_stride * (kWide ? 4 : 2);
  store_channels<kWide>(row, thread, eight);
}

// --- Indexer keys: sums over the requests, then eight threads a key ---

constexpr int kThreadsPerKey = 8;
static_assert(kThreadsPerKey * sizeof(uint4) == kIndexerDim);

struct KeySum {
  std::int64_t entries = 0;

  friend __host__ __device__ KeySum operator+(const KeySum& a, const KeySum& b) {
    return {a.entries + b.entries};
  }
};

struct CountKeys {
  const GatherIndexerParams* params;

  __host__ __device__ KeySum operator()(std::int32_t batch_row) const {
    return {gathered_entries(*params, batch_row)};
  }
};

__global__ void __launch_bounds__(kScanThreads)
    count_keys_kernel(const __grid_constant__ GatherIndexerParams params) {
  pdl_wait();
  pdl_trigger();
  const auto counts = thrust::make_transform_iterator(thrust::counting_iterator<std::int32_t>(0),
                                                      CountKeys{&params});
  const KeySum all = sum_over_rows<kScanThreads, KeySum>(
      params.rows, counts, [&](std::int32_t r, const KeySum& before) {
        params.cu_entries[r] = gathered_sum(before.entries);
      });
  if (threadIdx.x == 0) params.cu_entries[params.rows] = gathered_sum(all.entries);
}

__global__ void __launch_bounds__(kGatherThreads)
    copy_keys_kernel(const __grid_constant__ GatherIndexerParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t thread = thread_in_grid();
  if (params.k_start != nullptr && thread < params.tokens) {
    write_key_range(params, static_cast<std::int32_t>(thread));
  }
  const std::int64_t at = thread / kThreadsPerKey;
  const std::int64_t part = thread % kThreadsPerKey;
  if (at >= min_of(std::int64_t{params.cu_entries[params.rows]}, params.capacity)) return;
  const std::int32_t r = row_holding(params.cu_entries, params.rows, at);
  const std::int64_t location = gather_key_location(params, r, at - params.cu_entries[r]);
  reinterpret_cast<uint4*>(params.keys)[thread] =
      reinterpret_cast<const uint4*>(params.pool.indexer_values(location))[part];
  if (part == 0) {
    params.scales[at] = *reinterpret_cast<const float*>(params.pool.indexer_scale(location));
  }
}

}  // namespace

void launch_translate_picks(const TranslatePicksParams& params, Pdl pdl, cudaStream_t stream) {
  launch(translate_picks_kernel, linear_grid(params.tokens), dim3(kPickThreads), 0, stream,
         pdl != Pdl::kOff, params);
}

void launch_gather_main(const GatherMainParams& params, Pdl pdl, cudaStream_t stream) {
  const auto kernel = params.output_type == ElementType::kFloat32 ? gather_main_kernel<true>
                                                                  : gather_main_kernel<false>;
  constexpr std::int64_t kEntriesPerBlock = kGatherThreads / kThreadsPerEntry;
  launch(kernel, linear_grid(ceil_div(params.count, kEntriesPerBlock)), dim3(kGatherThreads), 0,
         stream, pdl != Pdl::kOff, params);
}

void launch_gather_indexer(const GatherIndexerParams& params, Pdl pdl, cudaStream_t stream) {
  launch(count_keys_kernel, dim3(1), dim3(kScanThreads), 0, stream, pdl != Pdl::kOff, params);
  const std::int64_t ranges = params.k_start == nullptr ? 0 : params.tokens;
  const std::int64_t threads = max_of(params.capacity * kThreadsPerKey, ranges);
  launch(copy_keys_kernel, linear_grid(ceil_div(threads, std::int64_t{kGatherThreads})),
         dim3(kGatherThreads), 0, stream, pdl != Pdl::kOff, params);
}

void load_read_side_kernels() {
  load_kernel(translate_picks_kernel);
  load_kernel(gather_main_kernel<true>);
  load_kernel(gather_main_kernel<false>);
  load_kernel(count_keys_kernel);
  load_kernel(copy_keys_kernel);
}

}  // namespace quire::cuda
