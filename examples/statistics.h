// What a serving run is judged by, and how it is shown.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <quire/runtime/device_cache.h>

namespace quire::serving {

// Durations of one kind, and their percentiles.
class Latencies {
 public:
  void add(std::chrono::steady_clock::duration latency) {
    milliseconds_.push_back(std::chrono::duration<double, std::milli>(latency).count());
  }
  std::int64_t count() const { return static_cast<std::int64_t>(milliseconds_.size()); }
  // The value that `share` of them do not exceed, in ms; 0 where there are none.
  double percentile(double share) const;

 private:
  std::vector<double> milliseconds_;
};

struct ServerStatistics {
  std::int64_t requests_finished = 0;
  std::int64_t prompt_tokens = 0;  // prefilled, tokens of preempted requests again
  std::int64_t output_tokens = 0;  // decoded
  std::int64_t prefill_steps = 0;
  std::int64_t decode_visits = 0;
  std::int64_t decode_steps = 0;  // replays of a captured graph
  std::int64_t decoded_rows = 0;  // batch rows of those that lived: each kept a token, and drafts
  std::map<std::int32_t, std::int64_t> replays_by_rows;
  std::int64_t padded_rows = 0;  // batch rows of replayed shapes that no request filled
  std::int64_t preemptions = 0;
  std::int64_t admissions_delayed = 0;
  std::int64_t requests_verified = 0;
  std::int64_t bytes_verified = 0;
  std::int64_t pages_peak = 0;
  std::int64_t seats_peak = 0;
  // For the device.
  std::chrono::steady_clock::duration host_waited{};
  Latencies first_token;  // from admission until the host knows it
  Latencies next_token;   // from one to the next of a request

  double drafts_accepted() const {  // of one batch row in one step
    return decoded_rows == 0 ? 0.0
                             : static_cast<double>(output_tokens - decoded_rows) /
                                   static_cast<double>(decoded_rows);
  }
};

// The table of a finished run, ready to print.
std::string table_of(const ServerStatistics& statistics, const Limits& limits,
                     const CacheBytes& bytes, double seconds);

// A line that draws itself again on a terminal, or one line a call elsewhere. To stderr.
class ProgressBar {
 public:
  explicit ProgressBar(std::int64_t requests);
  ~ProgressBar();  // leaves the terminal on a new line
  void show(const ServerStatistics& statistics);

 private:
  std::int64_t requests_;
  bool terminal_;
  bool drawn_ = false;
};

}  // namespace quire::serving
