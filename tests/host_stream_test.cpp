// The queue of the host backend: order, work that is held in flight, capture and replay, failures.
#include <doctest/doctest.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <vector>

namespace {

using quire::HostStream;
using quire::UsageError;

TEST_CASE("tasks run in the order in which they were enqueued") {
  HostStream stream;
  std::vector<int> ran;
  std::vector<int> expected;
  for (int i = 0; i < 1000; ++i) {
    stream.enqueue([&ran, i] { ran.push_back(i); });
    expected.push_back(i);
  }
  stream.wait();
  CHECK(ran == expected);
}

TEST_CASE("tasks keep their order when more are held than ever before, again and again") {
  HostStream stream;
  std::vector<int> seen;
  int next = 0;
  for (const int held : {3, 17, 40, 5, 300}) {
    stream.enqueue([&seen, i = next++] { seen.push_back(i); });
    stream.wait();
    stream.hold();
    for (int i = 0; i < held; ++i) stream.enqueue([&seen, i = next++] { seen.push_back(i); });
    stream.resume();
  }
  stream.wait();
  REQUIRE(seen.size() == static_cast<std::size_t>(next));
  for (int i = 0; i < next; ++i) CHECK(seen[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("a held stream keeps its work in flight until it is resumed") {
  HostStream stream;
  std::atomic<int> ran = 0;
  stream.hold();
  stream.enqueue([&] { ++ran; });
  auto waiter = std::async(std::launch::async, [&] { stream.wait(); });
  CHECK(waiter.wait_for(std::chrono::milliseconds(30)) == std::future_status::timeout);
  CHECK(ran == 0);
  stream.resume();
  waiter.get();
  CHECK(ran == 1);
}

TEST_CASE("a task may enqueue on its own stream") {
  HostStream stream;
  std::atomic<int> ran = 0;
  stream.enqueue([&] { stream.enqueue([&] { ++ran; }); });
  stream.wait();
  stream.wait();
  CHECK(ran == 1);
}

TEST_CASE("a capture records without running and a replay runs the same tasks each time") {
  HostStream stream;
  int ran = 0;
  stream.begin_capture();
  CHECK(stream.capturing());
  stream.enqueue([&] { ran += 1; });
  stream.enqueue([&] { ran *= 2; });
  const auto graph = stream.end_capture();
  CHECK_FALSE(stream.capturing());
  stream.wait();
  CHECK(ran == 0);
  CHECK(graph->tasks.size() == 2);
  stream.launch(graph);
  stream.launch(graph);
  stream.wait();
  CHECK(ran == 6);
}

TEST_CASE("a graph launched into a capture becomes part of it") {
  HostStream stream;
  int ran = 0;
  stream.begin_capture();
  stream.enqueue([&] { ++ran; });
  const auto inner = stream.end_capture();
  stream.begin_capture();
  stream.launch(inner);
  stream.launch(inner);
  const auto outer = stream.end_capture();
  stream.launch(outer);
  stream.wait();
  CHECK(ran == 2);
}

TEST_CASE("an aborted capture leaves the stream usable and runs nothing") {
  HostStream stream;
  int ran = 0;
  stream.begin_capture();
  stream.enqueue([&] { ran += 100; });
  stream.abort_capture();
  stream.abort_capture();
  stream.enqueue([&] { ++ran; });
  stream.wait();
  CHECK(ran == 1);
}

TEST_CASE("capture calls out of order are refused") {
  HostStream stream;
  CHECK_THROWS_AS(stream.end_capture(), UsageError);
  stream.begin_capture();
  CHECK_THROWS_AS(stream.begin_capture(), UsageError);
  CHECK_THROWS_AS(stream.wait(), UsageError);
  CHECK_NOTHROW(stream.end_capture());
}

TEST_CASE("wait throws what the first failing task threw, once, and drops what stood behind it") {
  HostStream stream;
  int ran = 0;
  stream.hold();
  stream.enqueue([&] { ++ran; });
  stream.enqueue([] { throw std::runtime_error("first"); });
  stream.enqueue([&] { ran += 100; });
  stream.enqueue([] { throw std::runtime_error("second"); });
  stream.resume();
  CHECK_THROWS_WITH(stream.wait(), "first");
  CHECK(ran == 1);
  CHECK_NOTHROW(stream.wait());
  stream.enqueue([&] { ++ran; });
  stream.wait();
  CHECK(ran == 2);
}

TEST_CASE("destruction runs what is queued, held or not") {
  std::atomic<int> ran = 0;
  {
    HostStream stream;
    stream.hold();
    for (int i = 0; i < 10; ++i) stream.enqueue([&] { ++ran; });
  }
  CHECK(ran == 10);
}

}  // namespace
