// The errors of Quire. What does not fit *now* is a value (cache/shortfall.h); these are for calls
// that can never succeed as they stand, for failures of the machine, and for broken invariants.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace quire {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call was wrong: stale handle, shape or size out of range, misaligned pointer, wrong order.
// Nothing has changed. The text names what was asked, what is there and what is supported.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A call into CUDA failed. `code` is the cudaError_t.
class CudaError : public Error {
 public:
  CudaError(int code, const std::string& text) : Error(text), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// Something that must always hold does not: a defect of Quire or memory that somebody overwrote.
// The object that threw it refuses every later call with the same reason; its destruction works.
class BrokenInvariant : public Error {
 public:
  using Error::Error;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Throws UsageError made of the message parts, which are only evaluated on failure.
#define QUIRE_CHECK(condition, ...)                                        \
  do {                                                                     \
    if (!(condition)) throw ::quire::UsageError(::quire::concat(__VA_ARGS__)); \
  } while (false)

}  // namespace quire
