// A kernel in front of an operation that lets it go at once, sleeps 100 us and only then writes
// what the operation reads, or reads what it writes; the arrays that this needs; and the comparison
// with a plain launch. Every array that is read is poisoned before each replay, in a way that is
// safe to run on.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/base/integers.h>
#include <quire/runtime/owners.h>
#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

#include "tests/support/device_array.h"
#include "tests/support/sleep.cuh"
#include "tests/support/test_backend.h"

namespace quire::test {

// Enqueues it in that mode.
using Operation = std::function<void(Pdl)>;

inline constexpr int kReplays = 5;
inline constexpr Pdl kModes[] = {Pdl::kOff, Pdl::kWaitOnly, Pdl::kPrologue};

// --- The kernel in front ---

struct Copy {
  const uint4* from;
  uint4* to;
  std::int64_t words;
};

struct Copies {
  static constexpr int kMost = 10;

  Copy copies[kMost];
  int count;
};

static __global__ void slow_copies(const __grid_constant__ Copies params) {
  cuda::pdl_trigger();
  sleep_us(100);
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  for (int c = 0; c < params.count; ++c) {
    const Copy& copy = params.copies[c];
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < copy.words;
         i += threads) {
      copy.to[i] = copy.from[i];
    }
  }
}

// --- What an operation reads and writes ---

struct Wrong {
  int results = 0;       // replays whose bytes are not those of a plain launch
  int early_stores = 0;  // replays in which the kernel in front already saw results
};

// The arrays of one operation. Each lies three times in a row: where the operation finds it, its
// content before the operation, and what a slow reader has seen of it.
class Scene {
 public:
  using Bytes = std::vector<std::byte>;

  // An array that is read: every byte of it is `stale` until the producer has written `fresh`. Any
  // mixture of stale and fresh arrays must be safe to run on, and each stale array must show.
  template <class T>
  T* reads(const std::vector<T>& fresh, std::uint8_t stale) {
    return add(std::as_bytes(std::span(fresh)), stale, true, false).template live<T>();
  }
  // One that is read and written.
  template <class T>
  T* updates(const std::vector<T>& fresh, std::uint8_t stale) {
    return add(std::as_bytes(std::span(fresh)), stale, true, true).template live<T>();
  }
  // One that is only written.
  template <class T>
  T* writes(std::size_t count, std::uint8_t before = 0x5A) {
    return add(Bytes(count * sizeof(T), static_cast<std::byte>(before)), before, false, true)
        .template live<T>();
  }

  Stream& stream() { return stream_; }

  // Replays of two graphs: the operation behind a slow producer of all that it reads, and behind a
  // slow reader of all that it writes.
  Wrong replay(Pdl pdl, const Operation& operation) {
    const std::vector<Bytes> expected = plain_results(operation);
    const std::vector<Bytes> before = contents(&Part::fresh);
    const GraphExec behind_producer = capture(&Part::produced, pdl, operation);
    const GraphExec behind_reader = capture(&Part::looked_at, pdl, operation);
    Wrong wrong;
    for (int i = 0; i < kReplays; ++i) {
      for (Part& part : parts_) part.is_read ? make_stale(part) : refresh(part);
      behind_producer.launch(stream_);
      wrong.results += contents(&Part::live) == expected ? 0 : 1;
      for (Part& part : parts_) refresh(part);
      behind_reader.launch(stream_);
      wrong.results += contents(&Part::live) == expected ? 0 : 1;
      wrong.early_stores += contents(&Part::seen) == before ? 0 : 1;
    }
    return wrong;
  }

  // Otherwise the replays would prove nothing of that array.
  void check_each_stale_array_shows(const Operation& operation) {
    const std::vector<Bytes> expected = plain_results(operation);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (!parts_[i].is_read) continue;
      CAPTURE(i);
      const bool same = plain_results(operation, &parts_[i]) == expected;
      CHECK_FALSE(same);
    }
  }

 private:
  struct Part {
    DeviceArray<std::byte> memory;  // [3, bytes]
    std::int64_t bytes;             // a multiple of 16
    std::uint8_t stale;
    bool is_read, is_written;

    template <class T = std::byte>
    T* live() {
      return reinterpret_cast<T*>(memory.data());
    }
    std::byte* fresh() { return memory.data() + bytes; }
    std::byte* seen() { return memory.data() + 2 * bytes; }

    Copy copy(std::byte* from, std::byte* to) const {
      return {reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), bytes / 16};
    }
    // Of a producer and of a reader; no words where that leaves the array alone.
    Copy produced() { return is_read ? copy(fresh(), live()) : Copy{}; }
    Copy looked_at() { return is_written ? copy(live(), seen()) : Copy{}; }
  };

  Part& add(std::span<const std::byte> fresh, std::uint8_t stale, bool is_read, bool is_written) {
    const std::int64_t bytes = round_up<std::int64_t>(std::ssize(fresh), 256);
    parts_.push_back(
        {DeviceArray<std::byte>(backend_, stream_, static_cast<std::size_t>(3 * bytes), stale),
         bytes, stale, is_read, is_written});
    backend_.copy(parts_.back().fresh(), fresh.data(), std::ssize(fresh), stream_);
    stream_.wait();
    return parts_.back();
  }

  void refresh(Part& part) { backend_.copy(part.live(), part.fresh(), part.bytes, stream_); }
  void make_stale(Part& part) { backend_.fill(part.live(), part.stale, part.bytes, stream_); }

  std::vector<Bytes> plain_results(const Operation& operation, const Part* stale = nullptr) {
    for (Part& part : parts_) &part == stale ? make_stale(part) : refresh(part);
    operation(Pdl::kOff);
    return contents(&Part::live<std::byte>);
  }

  // One of the three places of everything that is written.
  std::vector<Bytes> contents(std::byte* (Part::*place)()) {
    std::vector<Bytes> found;
    for (Part& part : parts_) {
      if (!part.is_written) continue;
      found.emplace_back(static_cast<std::size_t>(part.bytes));
      backend_.copy(found.back().data(), (part.*place)(), part.bytes, stream_);
    }
    stream_.wait();
    return found;
  }

  GraphExec capture(Copy (Part::*copy_of)(), Pdl pdl, const Operation& operation) {
    Copies slow{};
    for (Part& part : parts_) {
      QUIRE_CHECK(slow.count < Copies::kMost, "a scene holds ", Copies::kMost, " arrays");
      slow.copies[slow.count++] = (part.*copy_of)();
    }
    Capture capture(backend_, stream_);
    cuda::launch(slow_copies, dim3(32), dim3(256), 0, stream_.view().cuda(), false, slow);
    operation(pdl);
    return capture.finish();
  }

  Backend& backend_ = test_backend();
  Stream stream_{backend_};
  std::vector<Part> parts_;
};

inline void check_waits(Scene& scene, const Operation& operation) {
  scene.check_each_stale_array_shows(operation);
  for (const Pdl pdl : kModes) {
    CAPTURE(static_cast<int>(pdl));
    const Wrong wrong = scene.replay(pdl, operation);
    CHECK(wrong.results == 0);
    CHECK(wrong.early_stores == 0);
  }
}

}  // namespace quire::test
