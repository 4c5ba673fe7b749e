// Puts the calling thread into the floating-point environment that SPEC 3.7 demands, for one scope:
// round to nearest, subnormals kept, no traps. Another library of the process may have set
// flush-to-zero or another rounding mode on this thread; it finds its own setting again afterwards.
#pragma once

#include <cfenv>

namespace quire::host {

class FloatEnvironment {
 public:
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace quire::host
