// The backend that a test program runs on, chosen by --backend=host|cuda.
#pragma once

#include <quire/runtime/backend.h>

namespace quire::test {

// One per process, made on first use, destroyed before main returns.
Backend& test_backend();

}  // namespace quire::test
