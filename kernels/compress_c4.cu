// The c4 compressor in the original kernels' form: pooled, not normed. d = 512: one block an entry;
// d = 128: one warp. Lists of records end at the first padding: few blocks stay and share them out,
// so that capacity costs nothing. Every kernel waits before anything else: who wrote lengths,
// records and state is not known here.
#include <quire/kernels/compress_c4.h>
#include <quire/planner/plan_rule.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <quire/kernels/c4_stream.cuh>
#include <quire/kernels/entry.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/kernels/pool.cuh>
#include <quire/runtime/cuda/launch.cuh>
#include <string>
#include <utility>

namespace quire::cuda {
namespace {

constexpr int kPerThread = 4;
constexpr int kThreads = MainPlace<kPerThread>::kThreads;
using Four = Channels<kPerThread>;

template <int kDim>
using PlaceOf = Place<kDim, kPerThread>;
template <int kDim>
constexpr int kEntriesPerBlock = kThreads / PlaceOf<kDim>::kThreads;

template <int kDim>
__device__ std::int64_t entry_of_thread() {
  return std::int64_t{blockIdx.x} * kEntriesPerBlock<kDim> + threadIdx.x / PlaceOf<kDim>::kThreads;
}

// --- Rows of either type ---

template <ElementType kType>
__device__ Four load_elements(const void* data, std::int64_t at) {
  if constexpr (kType == ElementType::kFloat32) {
    return load_fresh<kPerThread>(static_cast<const float*>(data) + at);
  } else {
    return load_fresh_bf16<kPerThread>(static_cast<const std::uint16_t*>(data) + at);
  }
}

// What was loaded, bit for bit: a widened bf16 has nothing in its lower half.
template <ElementType kType>
__device__ void store_raw(void* data, std::int64_t at, const Four& x) {
  if constexpr (kType == ElementType::kFloat32) {
    store_channels(static_cast<float*>(data) + at, x);
  } else {
    const auto pair = [&](int k) {
      return exact::bits(x.v[k]) >> 16 | (exact::bits(x.v[k + 1]) & 0xFFFF0000u);
    };
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(data) + at) =
        make_uint2(pair(0), pair(2));
  }
}

// A computed entry, rounded where need be. One NaN for all machines: which payload survives an
// operation is not part of IEEE 754.
__device__ inline void store_rounded(ElementType type, void* data, std::int64_t at, const Four& x) {
  Four y;
  if (type == ElementType::kFloat32) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) y.v[k] = exact::canonical(x.v[k]);
    store_raw<ElementType::kFloat32>(data, at, y);
  } else {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) y.v[k] = exact::round_to_bf16(x.v[k]);  // NaN: 0x7FFF
    store_raw<ElementType::kBfloat16>(data, at, y);
  }
}

template <int kDim, ElementType kType>
__device__ void load_bias(const void* bias, Four (&to)[kC4Window]) {
#pragma unroll
  for (int i = 0; i < kC4Window; ++i) {
    to[i] = load_elements<kType>(bias, i * kDim + PlaceOf<kDim>::channel());
  }
}

// First element of the state row of a position in ring or page `index`.
template <int kDim>
__device__ std::int64_t state_at(C4StateMode mode, std::int64_t index, std::int32_t position) {
  const std::int32_t rows = mode == C4StateMode::kRing ? kC4RingTokens : kC4PageTokens;
  return (index * rows + (position & (rows - 1))) * (4 * kDim);  // powers of two
}

// --- Decode ---

template <int kDim, ElementType kType>
__global__ void __launch_bounds__(kThreads)
    compress_c4_decode(const __grid_constant__ CompressC4DecodeParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t b = entry_of_thread<kDim>();
  if (b >= params.batch) return;
  // All that needs no other load comes first; only padding has no use for it.
  const std::int32_t length = params.seq_lens[b];
  const int channel = PlaceOf<kDim>::channel();
  Four quarter[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    quarter[q] = load_elements<kType>(params.input, b * (4 * kDim) + q * kDim + channel);
  }
  const bool paged = params.mode == C4StateMode::kPageAligned;
  const std::int32_t index = params.indices[b];
  const std::int32_t previous = paged ? params.previous_pages[b] : index;
  const std::int32_t p = length - 1;

  // A thread writes and reads the same channels only, and its own row comes from registers.
  const std::int64_t own = state_at<kDim>(params.mode, index, p);
#pragma unroll
  for (int q = 0; q < 4; ++q) {  // no return before: the loads would move behind it
    if (length > 0) store_raw<kType>(params.state, own + q * kDim + channel, quarter[q]);
  }
  if (length <= 0 || !closes_entry(kCsaRule, p)) return;

  const int first = first_window_row(p);
  Four bias[kC4Window];
  load_bias<kDim, kType>(params.bias, bias);
  Folds<kPerThread> folds{};
  fold_rows(folds, bias, first, first, kC4Window - 1, [&](int i, Four& value, Four& score) {
    const std::int64_t row =
        state_at<kDim>(params.mode, i < kC4Overlap ? previous : index, p - (kC4Window - 1) + i);
    value = load_elements<kType>(params.state, row + value_channel<PlaceOf<kDim>>(i));
    score = load_elements<kType>(params.state, row + score_channel<PlaceOf<kDim>>(i));
  });
  fold_row<false>(folds, false, quarter[3], bias[kC4Window - 1], quarter[1]);
  store_rounded(params.output_type, params.output, b * kDim + channel, pooled(folds));
}

// --- Prefill: entries, then state ---

__device__ inline PlanRecord record_at(const PlanRecord* records, std::int64_t count,
                                       std::int64_t index) {
  if (index < count) return records[index];
  return {kPaddingRaggedId, kPaddingRaggedId, kPaddingRaggedId, kPaddingRaggedId};
}

// A warp's share of a compact list: record `begin` and every `step`-th behind it. Its lanes load 32
// of them at once.
class RecordShare {
 public:
  __device__ RecordShare(const PlanRecord* records, std::int64_t count, std::int64_t begin,
                         std::int64_t step)
      : records_(records), count_(count), index_(begin + threadIdx.x % kWarp * step), step_(step) {}

  // Padding behind the end. By all lanes.
  __device__ PlanRecord next() {
    const int lane = turn_ % kWarp;
    if (lane == 0) {
      loaded_ = record_at(records_, count_, index_);
      index_ += kWarp * step_;
    }
    ++turn_;
    const auto of_lane = [&](std::uint32_t x) { return __shfl_sync(kAllLanes, x, lane); };
    return {of_lane(loaded_.ragged_id), of_lane(loaded_.batch_id), of_lane(loaded_.position),
            of_lane(loaded_.window_len)};
  }

 private:
  const PlanRecord* records_;
  std::int64_t count_, index_, step_;
  PlanRecord loaded_{};
  int turn_ = 0;
};

// SPEC 1.9: the page that holds window row i of an entry with `older` leading rows in state.
__device__ inline std::int32_t page_of_row(const C4PageBundle& bundle, int older, int i) {
  return i < kC4Overlap && older > kC4Overlap ? bundle.load_first_page : bundle.load_second_page;
}

// Pools the entries of a list (c4_stream.cuh).
template <int kDim, ElementType kType>
class PoolEntries {
 public:
  using P = PlaceOf<kDim>;
  static constexpr int kElement = static_cast<int>(bytes_of(kType));
  using Stage = C4Stage<kThreads, kPerThread * kElement>;
  using Half = C4Half<P, kType, kType, Stage>;

  struct Entry {
    PlanRecord record;
    __device__ bool live() const { return record.ragged_id != kPaddingRaggedId; }
    __device__ std::int32_t position() const { return static_cast<std::int32_t>(record.position); }
    __device__ int first() const { return first_window_row(position()); }
    __device__ int from_state() const { return static_cast<int>(record.window_len); }
  };

  __device__ explicit PoolEntries(const CompressC4PrefillParams& params)
      : params_(params),
        share_(params.compress, params.compress_capacity, entry_of_thread<kDim>(),
               std::int64_t{gridDim.x} * kEntriesPerBlock<kDim>) {}

  __device__ Entry next() { return {share_.next()}; }

  __device__ void send(const Entry& entry, int begin, Stage& stage) const {
    const std::int64_t row = std::int64_t{entry.record.ragged_id} - (kC4Window - 1) + begin;
    Half::send(stage, begin, entry.from_state(),
               piece(params_.input, row * (4 * kDim) + value_channel<P>(begin)),
               std::int64_t{4 * kDim} * kElement, [&](int i) {
                 const std::int64_t state = state_at<kDim>(params_.mode, state_index(entry, i),
                                                           entry.position() - (kC4Window - 1) + i);
                 return piece(params_.state, state + value_channel<P>(i));
               });
  }

  __device__ void prepare(const Entry&) const {}

  __device__ void finish(const Entry& entry, const Folds<kPerThread>& folds) const {
    store_rounded(params_.output_type, params_.output,
                  std::int64_t{entry.record.ragged_id} * kDim + P::channel(),
                  pooled_together(folds));
  }

 private:
  __device__ static const std::byte* piece(const void* data, std::int64_t element) {
    return static_cast<const std::byte*>(data) + element * kElement;
  }

  // Ring or page of window row i, which stands in state.
  __device__ std::int64_t state_index(const Entry& entry, int i) const {
    const std::uint32_t row = entry.record.batch_id;
    if (params_.mode == C4StateMode::kRing) return params_.indices[row];
    return page_of_row(params_.bundles[row], entry.from_state(), i);
  }

  const CompressC4PrefillParams& params_;
  RecordShare share_;
};

constexpr int kEntryBlocksPerSm = 4;

template <int kDim, ElementType kType>
__global__ void __launch_bounds__(kThreads, kEntryBlocksPerSm)
    compress_c4_prefill_entries(const __grid_constant__ CompressC4PrefillParams params) {
  using Job = PoolEntries<kDim, kType>;
  extern __shared__ std::byte shared[];
  pdl_wait();
  pdl_trigger();
  Four bias[kC4Window];
  load_bias<kDim, kType>(params.bias, bias);
  Job job(params);
  stream_c4_entries(job, bias, reinterpret_cast<typename Job::Stage*>(shared));
}

constexpr int kStateBlocksPerSm = 8;

// The next record is on its way while a row is copied.
template <int kDim, ElementType kType>
__global__ void __launch_bounds__(kThreads, kStateBlocksPerSm)
    compress_c4_prefill_state(const __grid_constant__ CompressC4PrefillParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t step = std::int64_t{gridDim.x} * kEntriesPerBlock<kDim>;
  std::int64_t k = entry_of_thread<kDim>();
  PlanRecord record = record_at(params.write, params.write_capacity, k);
  while (record.ragged_id != kPaddingRaggedId) {
    k += step;
    const PlanRecord ahead = record_at(params.write, params.write_capacity, k);
    const std::int64_t from = std::int64_t{record.ragged_id} * (4 * kDim);
    Four quarter[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int at = q * kDim + PlaceOf<kDim>::channel();
      quarter[q] = load_elements<kType>(params.input, from + at);
    }
    const auto p = static_cast<std::int32_t>(record.position);
    std::int32_t index = params.indices[record.batch_id];
    if (params.mode == C4StateMode::kPageAligned) {
      const C4PageBundle bundle = params.bundles[record.batch_id];
      if (p < bundle.last_position) index = bundle.write_first_page;
    }
    const std::int64_t to = state_at<kDim>(params.mode, index, p);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      store_raw<kType>(params.state, to + q * kDim + PlaceOf<kDim>::channel(), quarter[q]);
    }
    record = ahead;
  }
}

// --- Which kernels there are ---

struct Variant {
  std::int32_t head_dim;
  ElementType type;  // of state, input and bias
  friend constexpr bool operator==(const Variant&, const Variant&) = default;
};

constexpr ElementType kFp32 = ElementType::kFloat32;
constexpr ElementType kBf16 = ElementType::kBfloat16;
constexpr Variant kVariants[] = {{512, kFp32}, {512, kBf16}, {128, kFp32}, {128, kBf16}};

template <Variant kVariant>
struct Kernels {
  static constexpr int kDim = kVariant.head_dim;
  static constexpr auto kDecode = &compress_c4_decode<kDim, kVariant.type>;
  static constexpr auto kEntries = &compress_c4_prefill_entries<kDim, kVariant.type>;
  static constexpr auto kState = &compress_c4_prefill_state<kDim, kVariant.type>;
  static constexpr std::size_t kEntriesSharedBytes =
      kC4Stages * sizeof(typename PoolEntries<kDim, kVariant.type>::Stage);

  static std::int64_t blocks(std::int64_t entries) {
    return ceil_div<std::int64_t>(entries, kEntriesPerBlock<kDim>);
  }
};

// Calls `visit(Kernels<v>())` for every variant v that `select` takes; returns how many.
template <class Select, class Visit>
int visit_variants(const Select& select, const Visit& visit) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return ((select(kVariants[I]) ? (visit(Kernels<kVariants[I]>()), 1) : 0) + ...);
  }
  (std::make_index_sequence<std::size(kVariants)>());
}

const char* name_of(ElementType type) { return type == kFp32 ? "fp32" : "bf16"; }

std::string describe(const Variant& v) { return concat("d=", v.head_dim, " ", name_of(v.type)); }

// Finds the kernels for the parameters, or says what there is.
template <class Params, class Visit>
void with_kernels(const char* operation, const Params& params, const Visit& visit) {
  const Variant wanted{params.head_dim, params.type};
  if (visit_variants([&](const Variant& v) { return v == wanted; }, visit) == 1) return;
  std::string supported;
  for (const Variant& v : kVariants) supported += (supported.empty() ? "" : ", ") + describe(v);
  throw UsageError(
      concat(operation, ": no kernel for ", describe(wanted), "; supported: ", supported));
}

}  // namespace

void launch_compress_c4_decode(const CompressC4DecodeParams& params, Pdl pdl, cudaStream_t stream) {
  with_kernels("compress_c4_decode", params, [&](auto kernels) {
    launch(kernels.kDecode, linear_grid(kernels.blocks(params.batch)), dim3(kThreads), 0, stream,
           pdl != Pdl::kOff, params);
  });
}

void launch_compress_c4_prefill(const CompressC4PrefillParams& params, Pdl pdl,
                                cudaStream_t stream) {
  with_kernels("compress_c4_prefill", params, [&](auto kernels) {
    const std::int64_t sms = multiprocessors();
    allow_shared_bytes(kernels.kEntries, kernels.kEntriesSharedBytes);
    launch(kernels.kEntries,
           linear_grid(min_of(kernels.blocks(params.compress_capacity), sms * kEntryBlocksPerSm)),
           dim3(kThreads), kernels.kEntriesSharedBytes, stream, pdl != Pdl::kOff, params);
    launch(kernels.kState,
           linear_grid(min_of(kernels.blocks(params.write_capacity), sms * kStateBlocksPerSm)),
           dim3(kThreads), 0, stream, pdl != Pdl::kOff, params);
  });
}

void load_compress_c4_kernels() {
  visit_variants([](const Variant&) { return true; },
                 [](auto kernels) {
                   load_kernel(kernels.kDecode);
                   load_kernel(kernels.kEntries);
                   load_kernel(kernels.kState);
                 });
}

}  // namespace quire::cuda
