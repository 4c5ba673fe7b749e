// Requests to serve: from a trace file, or made up from a seed. Lengths only; a trace holds no text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace quire::serving {

struct TraceRequest {
  std::int64_t prompt_tokens;
  std::int64_t output_tokens;
};

enum class BadLine { kStop, kSkip };

struct WorkloadOptions {
  std::string trace;          // .jsonl: Mooncake's fields; .csv: Azure's; empty: synthetic
  std::int64_t requests = 24;  // the first so many
  std::int64_t scale = 1;     // lengths are divided by this, rounded up
  std::uint32_t seed = 1;     // of the synthetic workload
  BadLine on_bad_line = BadLine::kStop;
};

// Throws UsageError where the file cannot be read, holds no request, or has a malformed line and
// on_bad_line is kStop; the text names line and reason. With kSkip each such line goes to `warn`.
std::vector<TraceRequest> load_workload(const WorkloadOptions& options,
                                        const std::function<void(const std::string&)>& warn);

}  // namespace quire::serving
