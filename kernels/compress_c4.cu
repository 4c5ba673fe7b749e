// The c4 compressor in the original kernels' form: pooled, not normed. d = 512: one block an entry;
// d = 128: one warp. Every kernel waits before anything else: who wrote lengths, records and state
// is not known here.
#include <quire/kernels/compress_c4.h>
#include <quire/planner/plan_rule.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
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
template <ElementType kType>
__device__ void store_rounded(void* data, std::int64_t at, const Four& x) {
  Four y;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const float value = kType == ElementType::kFloat32 ? x.v[k] : exact::round_to_bf16(x.v[k]);
    const std::uint32_t nan = kType == ElementType::kFloat32 ? exact::kNanBits : 0x7FFF0000u;
    y.v[k] = exact::is_nan(x.v[k]) ? exact::from_bits(nan) : value;
  }
  store_raw<kType>(data, at, y);
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
  const std::int32_t slots = mode == C4StateMode::kRing ? kC4RingTokens : kC4PageTokens;
  return (index * slots + position % slots) * (4 * kDim);
}

// --- Decode ---

template <int kDim, ElementType kType, ElementType kOutput>
__global__ void __launch_bounds__(kThreads)
    compress_c4_decode(const __grid_constant__ CompressC4DecodeParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t b = entry_of_thread<kDim>();
  if (b >= params.batch) return;
  const std::int32_t length = params.seq_lens[b];
  if (length <= 0) return;
  const std::int32_t p = length - 1;
  const std::int32_t index = params.indices[b];
  const int channel = PlaceOf<kDim>::channel();

  // A thread writes and reads the same channels only, and its own row comes from registers.
  const std::int64_t own = state_at<kDim>(params.mode, index, p);
  Four quarter[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    quarter[q] = load_elements<kType>(params.input, b * (4 * kDim) + q * kDim + channel);
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) store_raw<kType>(params.state, own + q * kDim + channel, quarter[q]);
  if (!closes_entry(kCsaRule, p)) return;

  const int first = first_window_row(p);
  const bool paged = params.mode == C4StateMode::kPageAligned;
  const std::int32_t older = paged && first == 0 ? params.previous_pages[b] : index;
  Four bias[kC4Window];
  load_bias<kDim, kType>(params.bias, bias);
  Folds<kPerThread> folds{};
  fold_rows(folds, bias, first, first, kC4Window - 1, [&](int i, Four& value, Four& score) {
    const std::int64_t row =
        state_at<kDim>(params.mode, i < kC4Overlap ? older : index, p - (kC4Window - 1) + i);
    value = load_elements<kType>(params.state, row + value_channel<PlaceOf<kDim>>(i));
    score = load_elements<kType>(params.state, row + score_channel<PlaceOf<kDim>>(i));
  });
  fold_row(folds, false, quarter[3], bias[kC4Window - 1], quarter[1]);
  store_rounded<kOutput>(params.output, b * kDim + channel, pooled(folds));
}

// --- Prefill: entries, then state ---

// SPEC 1.9: the page that holds window row i of an entry with `older` leading rows in state.
__device__ inline std::int32_t page_of_row(const C4PageBundle& bundle, int older, int i) {
  return i < kC4Overlap && older > kC4Overlap ? bundle.load_first_page : bundle.load_second_page;
}

template <int kDim, ElementType kType, ElementType kOutput>
__global__ void __launch_bounds__(kThreads)
    compress_c4_prefill_entries(const __grid_constant__ CompressC4PrefillParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t k = entry_of_thread<kDim>();
  if (k >= params.compress_capacity) return;
  const PlanRecord record = params.compress[k];
  if (record.ragged_id == kPaddingRaggedId) return;
  const std::int64_t input_row = record.ragged_id;
  const auto p = static_cast<std::int32_t>(record.position);
  const auto older = static_cast<int>(record.window_len);
  const int first = first_window_row(p);

  C4PageBundle bundle{};
  std::int32_t ring = 0;
  if (older > first) {
    if (params.mode == C4StateMode::kPageAligned) {
      bundle = params.bundles[record.batch_id];
    } else {
      ring = params.indices[record.batch_id];
    }
  }
  Four bias[kC4Window];
  load_bias<kDim, kType>(params.bias, bias);
  Folds<kPerThread> folds{};
  fold_rows(folds, bias, first, first, kC4Window, [&](int i, Four& value, Four& score) {
    const bool from_state = i < older;
    const std::int64_t index =
        params.mode == C4StateMode::kRing ? ring : page_of_row(bundle, older, i);
    const std::int64_t row = from_state
                                 ? state_at<kDim>(params.mode, index, p - (kC4Window - 1) + i)
                                 : (input_row - (kC4Window - 1) + i) * (4 * kDim);
    const void* source = from_state ? params.state : params.input;
    value = load_elements<kType>(source, row + value_channel<PlaceOf<kDim>>(i));
    score = load_elements<kType>(source, row + score_channel<PlaceOf<kDim>>(i));
  });
  store_rounded<kOutput>(params.output, input_row * kDim + PlaceOf<kDim>::channel(), pooled(folds));
}

template <int kDim, ElementType kType>
__global__ void __launch_bounds__(kThreads)
    compress_c4_prefill_state(const __grid_constant__ CompressC4PrefillParams params) {
  pdl_wait();
  pdl_trigger();
  const std::int64_t k = entry_of_thread<kDim>();
  if (k >= params.write_capacity) return;
  const PlanRecord record = params.write[k];
  if (record.ragged_id == kPaddingRaggedId) return;
  const auto p = static_cast<std::int32_t>(record.position);
  std::int32_t index = params.indices[record.batch_id];
  if (params.mode == C4StateMode::kPageAligned) {
    const C4PageBundle bundle = params.bundles[record.batch_id];
    if (p < bundle.last_position) index = bundle.write_first_page;
  }
  const std::int64_t to = state_at<kDim>(params.mode, index, p);
  const std::int64_t from = static_cast<std::int64_t>(record.ragged_id) * (4 * kDim);
  Four quarter[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int at = q * kDim + PlaceOf<kDim>::channel();
    quarter[q] = load_elements<kType>(params.input, from + at);
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    store_raw<kType>(params.state, to + q * kDim + PlaceOf<kDim>::channel(), quarter[q]);
  }
}

// --- Which kernels there are ---

struct Variant {
  std::int32_t head_dim;
  ElementType type;  // of state, input and bias
  ElementType output;
  friend constexpr bool operator==(const Variant&, const Variant&) = default;
};

constexpr ElementType kFp32 = ElementType::kFloat32;
constexpr ElementType kBf16 = ElementType::kBfloat16;
constexpr Variant kVariants[] = {{512, kFp32, kFp32}, {512, kFp32, kBf16}, {512, kBf16, kFp32},
                                 {512, kBf16, kBf16}, {128, kFp32, kFp32}, {128, kFp32, kBf16},
                                 {128, kBf16, kFp32}, {128, kBf16, kBf16}};

template <Variant kVariant>
struct Kernels {
  static constexpr int kDim = kVariant.head_dim;
  static constexpr auto kDecode = &compress_c4_decode<kDim, kVariant.type, kVariant.output>;
  static constexpr auto kEntries =
      &compress_c4_prefill_entries<kDim, kVariant.type, kVariant.output>;
  static constexpr auto kState = &compress_c4_prefill_state<kDim, kVariant.type>;

  static dim3 grid(std::int64_t entries) {
    return linear_grid(ceil_div<std::int64_t>(entries, kEntriesPerBlock<kDim>));
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

std::string describe(const Variant& v) {
  return concat("d=", v.head_dim, " ", name_of(v.type), " to ", name_of(v.output));
}

// Finds the kernels for the parameters, or says what there is.
template <class Params, class Visit>
void with_kernels(const char* operation, const Params& params, const Visit& visit) {
  const Variant wanted{params.head_dim, params.type, params.output_type};
  if (visit_variants([&](const Variant& v) { return v == wanted; }, visit) == 1) return;
  std::string supported;
  for (const Variant& v : kVariants) supported += (supported.empty() ? "" : ", ") + describe(v);
  throw UsageError(
      concat(operation, ": no kernel for ", describe(wanted), "; supported: ", supported));
}

}  // namespace

void launch_compress_c4_decode(const CompressC4DecodeParams& params, Pdl pdl, cudaStream_t stream) {
  with_kernels("compress_c4_decode", params, [&](auto kernels) {
    launch(kernels.kDecode, kernels.grid(params.batch), dim3(kThreads), 0, stream, pdl != Pdl::kOff,
           params);
  });
}

void launch_compress_c4_prefill(const CompressC4PrefillParams& params, Pdl pdl,
                                cudaStream_t stream) {
  with_kernels("compress_c4_prefill", params, [&](auto kernels) {
    launch(kernels.kEntries, kernels.grid(params.compress_capacity), dim3(kThreads), 0, stream,
           pdl != Pdl::kOff, params);
    launch(kernels.kState, kernels.grid(params.write_capacity), dim3(kThreads), 0, stream,
           pdl != Pdl::kOff, params);
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
