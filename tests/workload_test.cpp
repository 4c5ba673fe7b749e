// Trace files of the serving example: good ones, malformed ones, missing ones.
#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <quire/runtime/base/errors.h>

#include "examples/workload.h"

namespace {

using namespace quire;
using namespace quire::serving;

class TraceFile {
 public:
  TraceFile(const std::string& name, const std::string& text) : path_(name) {
    std::ofstream(path_) << text;
  }
  ~TraceFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<TraceRequest> load(const WorkloadOptions& options,
                               std::vector<std::string>* warnings = nullptr) {
  return load_workload(options, [&](const std::string& text) {
    if (warnings != nullptr) warnings->push_back(text);
  });
}

std::string error_of(const WorkloadOptions& options) {
  try {
    load(options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("both kinds of trace are read, and lengths are scaled and rounded up") {
  const TraceFile mooncake("workload_test.jsonl",
                           "{\"timestamp\":0,\"input_length\":33,\"output_length\":16}\n"
                           "{\"timestamp\":9,\"input_length\":1,\"output_length\":2}\n");
  WorkloadOptions options;
  options.trace = mooncake.path();
  options.scale = 16;
  const auto requests = load(options);
  REQUIRE(requests.size() == 2);
  CHECK(requests[0].prompt_tokens == 3);
  CHECK(requests[0].output_tokens == 1);
  CHECK(requests[1].prompt_tokens == 1);

  const TraceFile azure("workload_test.csv",
                        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16,374,44\r\n");
  options = {};
  options.trace = azure.path();
  const auto rows = load(options);
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].prompt_tokens == 374);
  CHECK(rows[0].output_tokens == 44);
}

TEST_CASE("a malformed line stops with its number and reason, or is skipped where asked") {
  const char* bad_lines[] = {"{",
                             "[]",
                             "{\"input_length\":5}",
                             "{\"input_length\":\"5\",\"output_length\":1}",
                             "{\"input_length\":0,\"output_length\":1}",
                             "{\"input_length\":5,\"output_length\":-1}",
                             "{\"input_length\":5.5,\"output_length\":1}",
                             ""};
  for (const char* bad : bad_lines) {
    CAPTURE(bad);
    const TraceFile file("workload_bad.jsonl",
                         std::string("{\"input_length\":5,\"output_length\":1}\n") + bad +
                             "\n{\"input_length\":6,\"output_length\":2}\n");
    WorkloadOptions options;
    options.trace = file.path();
    CHECK(contains(error_of(options), "line 2"));
    options.on_bad_line = BadLine::kSkip;
    std::vector<std::string> warnings;
    CHECK(load(options, &warnings).size() == 2);
    REQUIRE(warnings.size() == 1);
    CHECK(contains(warnings[0], "line 2"));
  }
  const TraceFile csv("workload_bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,12\n");
  WorkloadOptions options;
  options.trace = csv.path();
  CHECK(contains(error_of(options), "line 2"));
}

TEST_CASE("a missing, foreign or empty trace is named") {
  WorkloadOptions options;
  options.trace = "no_such_trace.jsonl";
  CHECK(contains(error_of(options), "no_such_trace.jsonl"));
  options.trace = "trace.parquet";
  CHECK(contains(error_of(options), ".jsonl"));
  const TraceFile empty("workload_empty.jsonl", "");
  options.trace = empty.path();
  CHECK(contains(error_of(options), "no request"));
  options = {};
  options.requests = 0;
  CHECK(contains(error_of(options), "requests"));
  options.requests = 1;
  options.scale = 0;
  CHECK(contains(error_of(options), "scale"));
}

}  // namespace
