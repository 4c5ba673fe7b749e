// main() of every test program: picks the backend, skips visibly where there is no GPU, runs doctest.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/test_backend.h"

namespace {

constexpr int kSkipped = 77;  // SKIP_RETURN_CODE of CTest

struct Chosen {
  bool cuda = false;
  std::unique_ptr<quire::Backend> backend;
  std::vector<std::string_view> arguments;
};

Chosen& chosen() {
  static Chosen instance;
  return instance;
}

bool gpu_required() {
  const char* value = std::getenv("QUIRE_REQUIRE_GPU");
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace

namespace quire::test {

Backend& test_backend() {
  Chosen& choice = chosen();
  if (choice.backend == nullptr) {
    choice.backend = choice.cuda ? make_cuda_backend() : make_host_backend();
  }
  return *choice.backend;
}

std::int64_t test_option(std::string_view name, std::int64_t otherwise) {
  const std::string prefix = "--" + std::string(name) + "=";
  for (const std::string_view argument : chosen().arguments) {
    if (argument.starts_with(prefix)) {
      return std::stoll(std::string(argument.substr(prefix.size())));
    }
  }
  return otherwise;
}

}  // namespace quire::test

int main(int argc, char** argv) {
  chosen().arguments.assign(argv + 1, argv + argc);
  for (const std::string_view argument : chosen().arguments) {
    if (argument == "--backend=cuda") chosen().cuda = true;
  }
  if (chosen().cuda && quire::cuda_device_count() == 0) {
    std::puts(gpu_required() ? "FAILED: QUIRE_REQUIRE_GPU=1, but no CUDA device was found"
                             : "SKIPPED: no CUDA device");
    return gpu_required() ? EXIT_FAILURE : kSkipped;
  }
  doctest::Context context(argc, argv);
  const int result = context.run();
  chosen().backend.reset();
  return result;
}
