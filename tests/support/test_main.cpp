// main() of every test program: picks the backend, skips visibly where there is no GPU, runs doctest.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "tests/support/test_backend.h"

namespace {

constexpr int kSkipped = 77;  // SKIP_RETURN_CODE of CTest

struct Chosen {
  bool cuda = false;
  std::unique_ptr<quire::Backend> backend;
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

}  // namespace quire::test

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--backend=cuda") chosen().cuda = true;
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
