#include "benchmarks/support/timing.h"

#include <algorithm>
#include <cmath>

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

  // Seconds of one of `replays` replays.
  double sample(const GraphExec& graph, int replays) const {
    const cudaStream_t handle = stream_->view().cuda();
    QUIRE_CUDA_CHECK(cudaEventRecord(begin_, handle));
    for (int i = 0; i < replays; ++i) graph.launch(*stream_);
    QUIRE_CUDA_CHECK(cudaEventRecord(end_, handle));
    stream_->wait();
    float milliseconds = 0;
    QUIRE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return static_cast<double>(milliseconds) * 1e-3 / replays;
  }

  // Replays of a sample. The first replays warm up.
  int replays_for(const GraphExec& graph) const {
    sample(graph, 3);
    const double once = std::max(sample(graph, 10), 1e-7);
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

Distribution time_of(const GraphExec& graph, const Stream& stream) {
  const Stopwatch stopwatch(stream);
  const int replays = stopwatch.replays_for(graph);
  std::vector<double> times;
  for (int i = 0; i < kSamples; ++i) times.push_back(stopwatch.sample(graph, replays));
  return distribution_of(times);
}

Pair time_both(const GraphExec& with, const GraphExec& without, const Stream& stream) {
  const Stopwatch stopwatch(stream);
  const int replays_with = stopwatch.replays_for(with);
  const int replays_without = stopwatch.replays_for(without);
  std::vector<double> longer, shorter, difference;
  for (int i = 0; i < kSamples; ++i) {
    longer.push_back(stopwatch.sample(with, replays_with));
    shorter.push_back(stopwatch.sample(without, replays_without));
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
