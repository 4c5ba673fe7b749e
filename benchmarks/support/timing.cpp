#include "benchmarks/support/timing.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include <cuda_runtime_api.h>

#include <quire/runtime/cuda/check.h>

namespace quire::bench {
namespace {

class Stopwatch {
 public:
  explicit Stopwatch(const Stream& stream) : stream_(&stream) {
    QUIRE_CUDA_CHECK(cudaEventCreate(&begin_));
    QUIRE_CUDA_CHECK(cudaEventCreate(&end_));
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // Seconds of one of `times` calls.
  double sample(const std::function<void()>& enqueue, int times) const {
    const cudaStream_t handle = stream_->view().cuda();
    QUIRE_CUDA_CHECK(cudaEventRecord(begin_, handle));
    for (int i = 0; i < times; ++i) enqueue();
    QUIRE_CUDA_CHECK(cudaEventRecord(end_, handle));
    stream_->wait();
    float milliseconds = 0;
    QUIRE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return static_cast<double>(milliseconds) * 1e-3 / times;
  }

  // Calls of a sample. The first ones warm up.
  int times_for(const std::function<void()>& enqueue) const {
    sample(enqueue, 3);
    const double once = std::max(sample(enqueue, 10), 1e-7);
    return std::max(1, static_cast<int>(std::ceil(kSampleSeconds / once)));
  }

 private:
  const Stream* stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace

Distribution distribution_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double share) {
    return seconds[static_cast<std::size_t>(
        std::lround(share * static_cast<double>(seconds.size() - 1)))];
  };
  return {at(0.1), at(0.5), at(0.9)};
}

Distribution time_of_eager(const std::function<void()>& enqueue, const Stream& stream) {
  const Stopwatch stopwatch(stream);
  const int calls = stopwatch.times_for(enqueue);
  std::vector<double> seconds;
  for (int i = 0; i < kSamples; ++i) seconds.push_back(stopwatch.sample(enqueue, calls));
  return distribution_of(seconds);
}

Distribution time_of(const GraphExec& graph, const Stream& stream) {
  return time_of_eager([&] { graph.launch(stream); }, stream);
}

Pair time_both(const GraphExec& with, const GraphExec& without, const Stream& stream) {
  const Stopwatch stopwatch(stream);
  const std::function<void()> one = [&] { with.launch(stream); };
  const std::function<void()> other = [&] { without.launch(stream); };
  const int times_with = stopwatch.times_for(one);
  const int times_without = stopwatch.times_for(other);
  std::vector<double> longer, shorter, difference;
  for (int i = 0; i < kSamples; ++i) {
    longer.push_back(stopwatch.sample(one, times_with));
    shorter.push_back(stopwatch.sample(other, times_without));
    difference.push_back(longer.back() - shorter.back());
  }
  return {distribution_of(longer), distribution_of(shorter), distribution_of(difference)};
}

Distribution time_of_copy(const GraphExec& many, const GraphExec& few, int copies,
                          const Stream& stream) {
  const Distribution all = time_both(many, few, stream).difference;
  return {all.p10 / copies, all.median / copies, all.p90 / copies};
}

GraphExec capture(Backend& backend, const Stream& stream, const std::function<void()>& enqueue) {
  Capture capture(backend, stream);
  enqueue();
  return capture.finish();
}

}  // namespace quire::bench
