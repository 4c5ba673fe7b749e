// The verbs of a backend, the same on the host and on CUDA: pools, copies, events, captures,
// errors.
#include <doctest/doctest.h>
#include <quire/runtime/backend.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>
#include <quire/runtime/owners.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/support/test_backend.h"

namespace {

using quire::Backend;
using quire::BackendKind;
using quire::Capture;
using quire::Error;
using quire::Event;
using quire::GraphExec;
using quire::Memory;
using quire::MemoryPool;
using quire::Stream;
using quire::StreamView;
using quire::UsageError;
using quire::test::test_backend;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kBytes = 4096;

// Memory of the backend and a look at it from here.
struct Fixture {
  Backend& backend = test_backend();
  Stream stream{backend};
  MemoryPool pool{backend, 32 * kMiB};
  Memory memory{pool, kBytes, stream};

  std::vector<std::uint8_t> read() {
    std::vector<std::uint8_t> bytes(kBytes);
    backend.copy(bytes.data(), memory.data(), kBytes, stream);
    stream.wait();
    return bytes;
  }
};

// G3
TEST_CASE("a fill and a copy arrive in stream order") {
  Fixture fixture;
  std::vector<std::uint8_t> expected(kBytes, 0x11);
  fixture.backend.fill(fixture.memory.data(), 0x22, kBytes, fixture.stream);
  fixture.backend.fill(fixture.memory.data(), 0x11, kBytes, fixture.stream);
  CHECK(fixture.read() == expected);
  expected[7] = 0x33;
  fixture.backend.copy(fixture.memory.data(), expected.data(), kBytes, fixture.stream);
  CHECK(fixture.read() == expected);
}

TEST_CASE("memory is aligned and reachable by the backend's operations") {
  Fixture fixture;
  CHECK(reinterpret_cast<std::uintptr_t>(fixture.memory.data()) % 256 == 0);
  CHECK_NOTHROW(fixture.backend.check_memory(fixture.memory.data(), "memory"));
  CHECK_THROWS_AS(fixture.backend.check_memory(nullptr, "memory"), UsageError);
  if (fixture.backend.kind() == BackendKind::kCuda) {
    const int here = 0;
    CHECK_THROWS_AS(fixture.backend.check_memory(&here, "memory"), UsageError);
  }
}

TEST_CASE("a pool never holds more than its budget and gives back what is freed") {
  Backend& backend = test_backend();
  const Stream stream(backend);
  MemoryPool pool(backend, 64 * kMiB);
  {
    const Memory first(pool, 60 * kMiB, stream);
    CHECK_THROWS_AS(Memory(pool, 60 * kMiB, stream), Error);
  }
  CHECK_THROWS_AS(Memory(pool, 65 * kMiB, stream), Error);
  const Memory again(pool, 60 * kMiB, stream);
  CHECK(again.bytes() == 60 * kMiB);
}

TEST_CASE("a budget can be spent to the last byte in one allocation") {
  Backend& backend = test_backend();
  const Stream stream(backend);
  MemoryPool pool(backend, 33 * kMiB + 5);
  const Memory whole(pool, 33 * kMiB + 5, stream);
  CHECK(whole.data() != nullptr);
}

TEST_CASE("pools and allocations of no size are refused") {
  Fixture fixture;
  CHECK_THROWS_AS(MemoryPool(fixture.backend, 0), UsageError);
  CHECK_THROWS_AS(Memory(fixture.pool, 0, fixture.stream), UsageError);
  CHECK_THROWS_AS(Memory(fixture.pool, -1, fixture.stream), UsageError);
}

TEST_CASE("a stream that joins an event sees what came before its record") {
  Fixture fixture;
  Backend& backend = fixture.backend;
  const Stream other(backend);
  Event ready(backend);
  const std::vector<std::uint8_t> expected(kBytes, 0x5A);
  for (int round = 0; round < 20; ++round) {
    backend.fill(fixture.memory.data(), 0x5A, kBytes, fixture.stream);
    ready.record(fixture.stream);
    ready.join_into(other);
    std::vector<std::uint8_t> seen(kBytes);
    backend.copy(seen.data(), fixture.memory.data(), kBytes, other);
    other.wait();
    CHECK(seen == expected);
    backend.fill(fixture.memory.data(), 0, kBytes, fixture.stream);
  }
}

TEST_CASE("waiting for an event waits for its last record, and an unrecorded one is past") {
  Fixture fixture;
  Event event(fixture.backend);
  event.wait();
  event.join_into(fixture.stream);
  std::vector<std::uint8_t> seen(kBytes);
  fixture.backend.fill(fixture.memory.data(), 0x77, kBytes, fixture.stream);
  fixture.backend.copy(seen.data(), fixture.memory.data(), kBytes, fixture.stream);
  event.record(fixture.stream);
  event.wait();
  CHECK(seen == std::vector<std::uint8_t>(kBytes, 0x77));
}

TEST_CASE("a held host stream keeps its events back, and a dropped record still completes") {
  if (test_backend().kind() != BackendKind::kHost) {
    MESSAGE("SKIPPED on CUDA: only a host stream can be held");
    return;
  }
  Backend& backend = test_backend();
  const Stream first(backend);
  const Stream second(backend);
  Event event(backend);
  quire::HostStream& held = *first.view().host();
  std::vector<int> ran;
  held.hold();
  held.enqueue([&] { ran.push_back(1); });
  event.record(first);
  event.join_into(second);
  second.view().host()->enqueue([&] { ran.push_back(2); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // long enough to run ahead
  CHECK(ran.empty());
  held.resume();
  second.wait();
  CHECK(ran == std::vector<int>{1, 2});

  held.enqueue([] { throw std::runtime_error("task failed"); });
  event.record(first);
  event.wait();
  CHECK_THROWS_WITH(first.wait(), "task failed");
}

TEST_CASE("a captured graph runs each time it is launched and not before") {
  Fixture fixture;
  Backend& backend = fixture.backend;
  backend.fill(fixture.memory.data(), 0x01, kBytes, fixture.stream);
  fixture.stream.wait();
  Capture capture(backend, fixture.stream);
  CHECK(backend.is_capturing(fixture.stream));
  backend.fill(fixture.memory.data(), 0x02, kBytes, fixture.stream);
  const GraphExec graph = capture.finish();
  CHECK_FALSE(backend.is_capturing(fixture.stream));
  CHECK(fixture.read() == std::vector<std::uint8_t>(kBytes, 0x01));
  for (int round = 0; round < 2; ++round) {
    graph.launch(fixture.stream);
    CHECK(fixture.read() == std::vector<std::uint8_t>(kBytes, 0x02));
    backend.fill(fixture.memory.data(), 0x01, kBytes, fixture.stream);
  }
}

TEST_CASE("a fork that joins becomes part of the capture") {
  Fixture fixture;
  Backend& backend = fixture.backend;
  const Stream side(backend);
  Event forked(backend);
  Event joined(backend);
  backend.fill(fixture.memory.data(), 0, kBytes, fixture.stream);
  fixture.stream.wait();
  Capture capture(backend, fixture.stream);
  backend.fill(fixture.memory.data(), 0x03, kBytes, fixture.stream);
  forked.record(fixture.stream);
  forked.join_into(side);
  CHECK(backend.is_capturing(side));
  backend.fill(fixture.memory.data(), 0x04, kBytes / 2, side);
  joined.record(side);
  joined.join_into(fixture.stream);
  backend.fill(fixture.memory.data(), 0x05, 16, fixture.stream);
  const GraphExec graph = capture.finish();
  CHECK_FALSE(backend.is_capturing(side));
  CHECK(fixture.read() == std::vector<std::uint8_t>(kBytes, 0));
  graph.launch(fixture.stream);
  const auto seen = fixture.read();
  CHECK(seen.front() == 0x05);
  CHECK(seen[16] == 0x04);
  CHECK(seen.back() == 0x03);
}

// G4
TEST_CASE("a capture body that throws leaves the stream usable and the next capture works") {
  Fixture fixture;
  Backend& backend = fixture.backend;
  backend.fill(fixture.memory.data(), 0, kBytes, fixture.stream);
  const auto failing = [&] {
    Capture capture(backend, fixture.stream);
    backend.fill(fixture.memory.data(), 0xEE, kBytes, fixture.stream);
    throw std::runtime_error("the body failed");
  };
  CHECK_THROWS_WITH(failing(), "the body failed");
  CHECK_FALSE(backend.is_capturing(fixture.stream));
  CHECK(fixture.read() == std::vector<std::uint8_t>(kBytes, 0));
  Capture capture(backend, fixture.stream);
  backend.fill(fixture.memory.data(), 0x09, kBytes, fixture.stream);
  const GraphExec graph = capture.finish();
  graph.launch(fixture.stream);
  CHECK(fixture.read() == std::vector<std::uint8_t>(kBytes, 0x09));
}

TEST_CASE("captures out of order and allocations inside of one are refused") {
  Fixture fixture;
  Backend& backend = fixture.backend;
  CHECK_THROWS_AS(backend.end_capture(fixture.stream), UsageError);
  {
    Capture capture(backend, fixture.stream);
    CHECK_THROWS_AS(backend.begin_capture(fixture.stream), UsageError);
    CHECK_THROWS_AS(backend.allocate(fixture.pool.handle(), 256, fixture.stream), UsageError);
  }
  CHECK_NOTHROW(fixture.stream.wait());
}

TEST_CASE("a stream of another backend is refused") {
  Backend& backend = test_backend();
  if (backend.kind() == BackendKind::kHost) {
    int not_a_stream = 0;
    const StreamView foreign(reinterpret_cast<CUstream_st*>(&not_a_stream));
    CHECK_THROWS_AS(backend.check_stream(foreign), UsageError);
    CHECK_THROWS_AS(backend.wait(foreign), UsageError);
    CHECK_THROWS_AS(backend.fill(&not_a_stream, 0, 4, foreign), UsageError);
    CHECK(not_a_stream == 0);
  } else {
    quire::HostStream host;
    CHECK_THROWS_AS(backend.check_stream(StreamView(host)), UsageError);
    CUstream_st* legacy = nullptr;
    CHECK_THROWS_AS(backend.check_stream(StreamView(legacy)), UsageError);
  }
}

TEST_CASE("asking for a CUDA device that is not there says what is there") {
  CHECK_THROWS_AS(quire::make_cuda_backend(4096), UsageError);
  const auto chosen = quire::make_default_backend();
  CHECK((chosen->kind() == BackendKind::kCuda) == (quire::cuda_device_count() > 0));
}

TEST_CASE("every kernel loads, and known answers are the same on both sides") {
  Backend& backend = test_backend();
  CHECK_NOTHROW(backend.load_kernels());
  CHECK(backend.wait_for_known_answers() == quire::make_host_backend()->wait_for_known_answers());
}

}  // namespace
