// "Does not fit now" is an answer, not an error: the engine waits, preempts or asks for less.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace quire {

enum class Resource { kSeats, kPages, kHolds };

const char* name_of(Resource resource);

struct Shortfall {
  Resource what;
  std::int64_t needed;  // by the call
  std::int64_t free;    // that the call could have drawn on: free and not promised to others
  std::int64_t held;    // without an owner, free once their last hold is dropped

  std::string describe() const;
};

// A value, or why there is none now. A call that answers with a Shortfall has changed nothing.
template <class T>
class [[nodiscard]] OrShortfall {
 public:
  OrShortfall(T value) : held_(std::move(value)) {}             // NOLINT: reads as a return value
  OrShortfall(Shortfall shortfall) : held_(std::move(shortfall)) {}  // NOLINT

  explicit operator bool() const { return held_.index() == 0; }
  T& value() { return std::get<0>(held_); }
  const T& value() const { return std::get<0>(held_); }
  const Shortfall& shortfall() const { return std::get<1>(held_); }

 private:
  std::variant<T, Shortfall> held_;
};

}  // namespace quire
