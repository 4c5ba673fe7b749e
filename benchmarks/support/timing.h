// Times replays of captured graphs. A sample is as many replays as take at least two milliseconds,
// between two events; a figure is the median of 30 samples with the tenth and ninetieth percentile.
// What is too short for that is the difference between a graph with many copies and one with few.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <quire/runtime/owners.h>

namespace quire::bench {

inline constexpr int kSamples = 30;
inline constexpr double kSampleSeconds = 2e-3;

// Seconds.
struct Distribution {
  double p10 = 0, median = 0, p90 = 0;
};

Distribution distribution_of(std::vector<double> seconds);

// Seconds of one replay. Blocks.
Distribution time_of(const GraphExec& graph, const Stream& stream);

// Seconds of what `enqueue` puts on the stream without a graph: for what takes long. Blocks.
Distribution time_of_eager(const std::function<void()>& enqueue, const Stream& stream);

// Seconds that one of `copies` additional copies in `many` takes over `few`, sample against sample,
// taken in turn: drifts of the clock fall on both. Blocks.
Distribution time_of_copy(const GraphExec& many, const GraphExec& few, int copies,
                          const Stream& stream);

// Seconds of one replay of each, taken in turn, and of what the first takes longer. Blocks.
struct Pair {
  Distribution with, without, difference;
};
Pair time_both(const GraphExec& with, const GraphExec& without, const Stream& stream);

// Captures what `enqueue` puts on the stream.
GraphExec capture(Backend& backend, const Stream& stream, const std::function<void()>& enqueue);

}  // namespace quire::bench
