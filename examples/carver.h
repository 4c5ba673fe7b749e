// Hands out aligned parts of one allocation, so that a model has one piece of memory and one place
// that says what is in it. With a null base it only measures.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/runtime/base/integers.h>

namespace quire::serving {

class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    T* place = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ = round_up<std::int64_t>(used_ + count * static_cast<std::int64_t>(sizeof(T)), 256);
    return place;
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* base_;
  std::int64_t used_ = 0;
};

}  // namespace quire::serving
