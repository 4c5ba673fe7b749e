// Quantise and store finished bf16 rows: FlashMLA entries, one block a row; indexer entries, one
// warp a row. Both wait before anything else: who wrote the rows is not known here.
#include <quire/kernels/store.h>

#include <quire/kernels/entry.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;

template <class P>
__global__ void __launch_bounds__(kThreads)
    store_rows(const __grid_constant__ StoreParams params) {
  __shared__ Scratch<P> scratch;
  pdl_wait();
  pdl_trigger();
  const std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / P::kThreads) + threadIdx.x / P::kThreads;
  if (row >= params.rows) return;
  const std::int64_t location = params.wide_locations
                                    ? static_cast<const std::int64_t*>(params.locations)[row]
                                    : static_cast<const std::int32_t*>(params.locations)[row];
  if (location < 0) return;
  const auto x = load_fresh_bf16<P::kPerThread>(
      static_cast<const std::uint16_t*>(params.input) + row * P::kDim + P::channel());
  if constexpr (P::kDim == kHeadDim) {
    store_main_entry<P>(main_entry(params.pool, location), x, params.scale_floor, 0, nullptr);
  } else {
    store_indexer_entry<P>(indexer_entry(params.pool, location), x, params.scale_floor, 0, nullptr,
                           scratch);
  }
}

constexpr int kPerThread = 4;
constexpr auto kStoreFlashmla = &store_rows<MainPlace<kPerThread>>;
constexpr auto kStoreIndexer = &store_rows<KeysPlace<kPerThread>>;

}  // namespace

void launch_store_flashmla(const StoreParams& params, Pdl pdl, cudaStream_t stream) {
  launch(kStoreFlashmla, linear_grid(params.rows), dim3(kThreads), 0, stream,
         pdl != Pdl::kOff, params);
}

void launch_store_indexer(const StoreParams& params, Pdl pdl, cudaStream_t stream) {
  constexpr int kRowsPerBlock = kThreads / KeysPlace<kPerThread>::kThreads;
  launch(kStoreIndexer, linear_grid(ceil_div<std::int64_t>(params.rows, kRowsPerBlock)),
         dim3(kThreads), 0, stream, pdl != Pdl::kOff, params);
}

void load_store_kernels() {
  load_kernel(kStoreFlashmla);
  load_kernel(kStoreIndexer);
}

}  // namespace quire::cuda
