// The known answers of SPEC 3.7 on the device. Runs once, when a cache is opened, on a stream that
// nothing else uses: it is launched plainly and neither waits nor triggers.
#include <quire/kernels/known_answers.h>
#include <quire/kernels/known_answers_launch.h>

#include <memory>
#include <quire/runtime/cuda/launch.cuh>

namespace quire::cuda {
namespace {

constexpr int kAnswerThreads = 64;

struct KnownAnswersParams {
  std::uint32_t* words = nullptr;  // [count]
  std::int32_t count = 0;
};

__global__ void __launch_bounds__(kAnswerThreads)
    known_answers_kernel(const __grid_constant__ KnownAnswersParams params) {
  const auto index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < params.count) params.words[index] = known_answer(index);
}

struct FreeDeviceMemory {
  void operator()(void* memory) const { static_cast<void>(cudaFree(memory)); }
};

}  // namespace

std::vector<std::uint32_t> wait_for_known_answers(cudaStream_t stream) {
  std::vector<std::uint32_t> words(kKnownAnswers);
  const std::size_t bytes = words.size() * sizeof(std::uint32_t);
  void* memory = nullptr;
  QUIRE_CUDA_CHECK(cudaMalloc(&memory, bytes));
  const std::unique_ptr<void, FreeDeviceMemory> owner(memory);
  const KnownAnswersParams params{static_cast<std::uint32_t*>(memory), kKnownAnswers};
  launch(known_answers_kernel, linear_grid(ceil_div<std::int64_t>(params.count, kAnswerThreads)),
         dim3(kAnswerThreads), 0, stream, false, params);
  QUIRE_CUDA_CHECK(cudaMemcpyAsync(words.data(), memory, bytes, cudaMemcpyDeviceToHost, stream));
  QUIRE_CUDA_CHECK(cudaStreamSynchronize(stream));
  return words;
}

void load_known_answers_kernel() { load_kernel(known_answers_kernel); }

}  // namespace quire::cuda
