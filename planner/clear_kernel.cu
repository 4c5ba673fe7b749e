// Zeroes pages and seats on their way to a new owner, in 16-byte stores: a block for every piece of
// every page or seat. Pages and seats lie scattered over all layers, so one kernel does what
// hundreds of memsets would.
#include <quire/planner/planner.cuh>

namespace quire::cuda {

namespace {

__global__ void __launch_bounds__(kPlannerThreads)
    clear_kernel(const __grid_constant__ ClearParams params) {
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const OwnedBytes& piece = params.pieces[block % params.piece_count];
  std::byte* to = piece.of(params.owned[block / params.piece_count]);
  constexpr std::int64_t kStore = sizeof(uint4);
  for (std::int64_t at = threadIdx.x * kStore; at < piece.bytes; at += kPlannerThreads * kStore) {
    *reinterpret_cast<uint4*>(to + at) = uint4{};
  }
}

}  // namespace

void launch_clear(const ClearParams& params, cudaStream_t stream) {
  const std::int64_t blocks = std::int64_t{params.owned_count} * params.piece_count;
  launch_plain(clear_kernel, blocks, kPlannerThreads, params, stream);
}

void load_clear_kernel() { load_kernel(clear_kernel); }

}  // namespace quire::cuda
