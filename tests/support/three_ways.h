// Every operation is tested eager, captured, and replayed after its data changed; the random data
// for that; and what is refused.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

#include "tests/support/test_backend.h"

namespace quire::test {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  std::int32_t below(std::int64_t n) {
    return static_cast<std::int32_t>(engine_() % static_cast<std::uint64_t>(n));
  }

 private:
  std::mt19937_64 engine_;
};

template <class T>
std::vector<T> random_values(Random& random, std::size_t count, std::int64_t below) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(random.below(below));
  return values;
}

// `change(seed)` gives new data, `enqueue` runs the operation on it, `check` looks at the results.
template <class Change, class Enqueue, class Check>
void run_three_ways(Stream& stream, const Change& change, const Enqueue& enqueue,
                    const Check& check) {
  change(1);
  enqueue();
  stream.wait();
  check("eager");
  Capture capture(test_backend(), stream);
  enqueue();
  const GraphExec graph = capture.finish();
  for (const std::uint32_t seed : {2u, 3u}) {
    change(seed);
    graph.launch(stream);
    stream.wait();
    check("replayed");
  }
}

// `call` throws a UsageError whose text holds `why`.
template <class Call>
void check_refused(const std::string& why, const Call& call) {
  std::string message;
  try {
    call();
  } catch (const UsageError& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK(message.find(why) != std::string::npos);
}

}  // namespace quire::test
