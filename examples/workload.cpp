#include "examples/workload.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>

#include <nlohmann/json.hpp>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>

#include "examples/stand_in_math.h"

namespace quire::serving {
namespace {

// A line's request, or the reason why it has none.
struct Parsed {
  std::optional<TraceRequest> request;
  std::string reason;
};

Parsed checked(std::int64_t prompt, std::int64_t output) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  if (prompt < 1 || prompt > kMost) return {{}, concat("input length is ", prompt)};
  if (output < 1 || output > kMost) return {{}, concat("output length is ", output)};
  return {TraceRequest{prompt, output}, {}};
}

Parsed parse_mooncake(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return {{}, "not a JSON object"};
  for (const char* field : {"input_length", "output_length"}) {
    if (!json.contains(field)) return {{}, concat("field ", field, " is missing")};
    if (!json[field].is_number_integer()) return {{}, concat("field ", field, " is no integer")};
  }
  return checked(json["input_length"].get<std::int64_t>(),
                 json["output_length"].get<std::int64_t>());
}

Parsed parse_azure(std::string_view line) {
  const auto first = line.find(',');
  const auto second = first == line.npos ? line.npos : line.find(',', first + 1);
  if (second == line.npos) return {{}, "not TIMESTAMP,ContextTokens,GeneratedTokens"};
  std::int64_t lengths[2] = {};
  const std::string_view texts[2] = {line.substr(first + 1, second - first - 1),
                                     line.substr(second + 1)};
  for (int i = 0; i < 2; ++i) {
    const char* end = texts[i].data() + texts[i].size();
    const auto [stop, error] = std::from_chars(texts[i].data(), end, lengths[i]);
    if (error != std::errc{} || (stop != end && *stop != '\r')) {
      return {{}, concat("'", texts[i], "' is no integer")};
    }
  }
  return checked(lengths[0], lengths[1]);
}

std::vector<TraceRequest> synthetic(const WorkloadOptions& options) {
  std::vector<TraceRequest> requests;
  std::uint32_t random = options.seed;
  for (std::int64_t i = 0; i < options.requests; ++i) {
    random = mix(random + 1);
    // A few long prompts among many short ones, as real traces have.
    const std::int64_t prompt = 1 + random % (i % 6 == 0 ? 3000 : 400);
    random = mix(random + 1);
    requests.push_back({prompt, 1 + random % 96});
  }
  return requests;
}

}  // namespace

std::vector<TraceRequest> load_workload(const WorkloadOptions& options,
                                        const std::function<void(const std::string&)>& warn) {
  QUIRE_CHECK(options.requests >= 1, "requests is ", options.requests, ", at least 1 is needed");
  QUIRE_CHECK(options.scale >= 1, "scale is ", options.scale, ", at least 1 is needed");
  std::vector<TraceRequest> requests;
  if (options.trace.empty()) {
    requests = synthetic(options);
  } else {
    const auto extension = std::filesystem::path(options.trace).extension();
    QUIRE_CHECK(extension == ".jsonl" || extension == ".csv", "trace '", options.trace,
                "': supported are .jsonl (Mooncake) and .csv (Azure)");
    std::ifstream file(options.trace);
    QUIRE_CHECK(file.good(), "trace '", options.trace, "' cannot be read");
    std::string line;
    for (std::int64_t number = 1;
         static_cast<std::int64_t>(requests.size()) < options.requests && std::getline(file, line);
         ++number) {
      if (extension == ".csv" && number == 1) continue;  // the header
      const Parsed parsed = extension == ".csv" ? parse_azure(line) : parse_mooncake(line);
      if (parsed.request) {
        requests.push_back(*parsed.request);
        continue;
      }
      const std::string text =
          concat("trace '", options.trace, "', line ", number, ": ", parsed.reason);
      QUIRE_CHECK(options.on_bad_line == BadLine::kSkip, text, " (--on-bad-line skip goes on)");
      warn(text + ", skipped");
    }
    QUIRE_CHECK(!requests.empty(), "trace '", options.trace, "' holds no request");
  }
  for (TraceRequest& request : requests) {
    request.prompt_tokens = ceil_div(request.prompt_tokens, options.scale);
    request.output_tokens = ceil_div(request.output_tokens, options.scale);
  }
  return requests;
}

}  // namespace quire::serving
