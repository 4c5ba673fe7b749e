#include "benchmarks/support/separate.h"

#include <quire/kernels/entry.cuh>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::bench {
namespace {

constexpr int kMain = 512;
constexpr int kKeys = 128;
constexpr int kPerThread = 4;
constexpr int kThreads = cuda::MainPlace<kPerThread>::kThreads;
constexpr int kKeysPerBlock = kThreads / cuda::KeysPlace<kPerThread>::kThreads;
constexpr std::int64_t kRing = 8;
constexpr std::int64_t kStateFloats = kRing * 4 * (kMain + kKeys);  // of a seat and layer
constexpr std::int64_t kWeightFloats = (8 + 1) * (kMain + kKeys);   // of a layer
constexpr std::int64_t kPositions = 1024;

struct FinishParams {
  const float* pooled;  // [batch, d]
  const float* norm_weight;
  const std::int32_t* positions;
  const std::int64_t* locations;
  std::int64_t batch;
  RopeTable rope;
  EntryPool pages;
};

// Norm, RoPE, for keys Hadamard, quantise, store.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ FinishParams params) {
  using P = cuda::Place<kDim, kPerThread>;
  __shared__ cuda::Scratch<P> scratch;
  cuda::pdl_wait();
  cuda::pdl_trigger();
  const std::int64_t b =
      std::int64_t{blockIdx.x} * (kThreads / P::kThreads) + threadIdx.x / P::kThreads;
  if (b >= params.batch) return;
  const std::int64_t location = params.locations[b];
  if (location < 0) return;
  const auto finish =
      cuda::load_finish<P>(params.norm_weight, params.rope, params.positions[b] - 3);
  auto x = cuda::load_fresh<kPerThread>(params.pooled + b * kDim + P::channel());
  x = cuda::normalise<P>(x, finish.weight, 1e-6f, scratch);
  if (cuda::is_rotated<P>()) x = cuda::rotate(x, finish.rotation);
  if constexpr (kDim == kMain) {
    cuda::store_main_entry<P>(cuda::main_entry(params.pages, location), x, 1e-4f, 0, nullptr);
  } else {
    cuda::store_indexer_entry<P>(cuda::indexer_entry(params.pages, location),
                                 cuda::hadamard<P>(x, scratch), 1e-4f, 0, nullptr, scratch);
  }
}

std::int64_t floats_of(std::int64_t seats, std::int64_t batch, int layers) {
  return layers * (seats * kStateFloats + kWeightFloats) + batch * (kMain + kKeys) +
         kPositions * kRopeDim;
}

}  // namespace

SeparateOperations::SeparateOperations(DecodeWorld& world, int layers)
    : world_(&world),
      batch_(world.shape().rows),
      seats_(world.cache().device().limits().seats_max),
      pool_(world.backend(), floats_of(seats_, batch_, layers) * 4),
      memory_(pool_, floats_of(seats_, batch_, layers) * 4, world.stream()) {
  fill_random(reinterpret_cast<float*>(memory_.data()), memory_.bytes() / 4, 3, world.stream());
}

void SeparateOperations::enqueue(int layer) {
  Backend& backend = world_->backend();
  const Stream& stream = world_->stream();
  const PlanViews& views = world_->cache().device().views(PlanBufferId(0));
  const AppendInputs inputs = world_->inputs_of(layer);
  float* rope = reinterpret_cast<float*>(memory_.data());
  float* pooled = rope + kPositions * kRopeDim;
  float* state =
      pooled + batch_ * (kMain + kKeys) + layer * (seats_ * kStateFloats + kWeightFloats);
  float* weights = state + seats_ * kStateFloats;

  const auto compress = [&](int dim, void* at, const void* input, const void* bias, void* output) {
    CompressC4DecodeParams params;
    params.head_dim = dim;
    params.batch = static_cast<std::int32_t>(batch_);
    params.state = at;
    params.input = input;
    params.bias = bias;
    params.output = output;
    params.seq_lens = views.row_length;
    params.indices = views.row_seat;
    backend.compress_c4_decode(params, Pdl::kPrologue, stream);
  };
  float* keys = pooled + batch_ * kMain;
  compress(kMain, state, inputs.csa.data, weights, pooled);
  compress(kKeys, state + seats_ * kRing * 4 * kMain, inputs.indexer.data, weights + 8 * kMain,
           keys);
  const float* norms = weights + 8 * (kMain + kKeys);
  const LayerId id(layer);
  const RopeTable table{rope, kPositions, RopeLayout::kInterleaved};
  const FinishParams main{pooled,
                          norms,
                          views.positions,
                          views.csa_locations,
                          batch_,
                          table,
                          world_->cache().device().csa_pages(id)};
  const FinishParams indexer{keys,
                             norms + kMain,
                             views.positions,
                             views.csa_locations,
                             batch_,
                             table,
                             world_->cache().device().indexer_pages(id)};
  const cudaStream_t handle = stream.view().cuda();
  cuda::launch(finish_kernel<kMain>, cuda::linear_grid(batch_), dim3(kThreads), 0, handle, true,
               main);
  cuda::launch(finish_kernel<kKeys>,
               cuda::linear_grid(ceil_div<std::int64_t>(batch_, kKeysPerBlock)), dim3(kThreads), 0,
               handle, true, indexer);
  AppendInputs window;
  window.window = inputs.window;
  world_->enqueue_append(layer, window, Pdl::kPrologue);
}

}  // namespace quire::bench
