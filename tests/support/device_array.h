// Arrays in the memory of whatever backend a test runs on: filled from the host, read back to the
// host. Every call waits, so that a test reads like straight-line code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

namespace quire::test {

template <class T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // `count` elements, every byte of them `fill`.
  DeviceArray(Backend& backend, Stream& stream, std::size_t count, std::uint8_t fill)
      : backend_(&backend),
        stream_(stream.view()),
        count_(count),
        pool_(std::make_unique<MemoryPool>(backend, allocated_bytes())),
        memory_(*pool_, allocated_bytes(), stream_) {
    backend_->fill(memory_.data(), fill, allocated_bytes(), stream_);
    backend_->wait(stream_);
  }

  DeviceArray(Backend& backend, Stream& stream, std::span<const T> values)
      : DeviceArray(backend, stream, values.size(), std::uint8_t{0}) {
    upload(values);
  }

  DeviceArray(DeviceArray&&) noexcept = default;
  DeviceArray& operator=(DeviceArray&&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data()); }
  std::size_t size() const { return count_; }

  // Overwrites the first values.size() elements.
  void upload(std::span<const T> values) {
    QUIRE_CHECK(values.size() <= count_, "upload of ", values.size(), " elements into ", count_);
    if (values.empty()) return;
    backend_->copy(data(), values.data(), static_cast<std::int64_t>(values.size_bytes()), stream_);
    backend_->wait(stream_);
  }

  std::vector<T> download() const {
    std::vector<T> values(count_);
    if (count_ == 0) return values;
    backend_->copy(values.data(), data(), static_cast<std::int64_t>(count_ * sizeof(T)), stream_);
    backend_->wait(stream_);
    return values;
  }

 private:
  // Nothing is allocated with no bytes at all: an empty array still has an address.
  std::int64_t allocated_bytes() const {
    return static_cast<std::int64_t>(count_ == 0 ? sizeof(T) : count_ * sizeof(T));
  }

  Backend* backend_;
  StreamView stream_;
  std::size_t count_;
  std::unique_ptr<MemoryPool> pool_;  // behind a pointer: Memory keeps its address
  Memory memory_;
};

}  // namespace quire::test
