// The backend that a test program runs on, chosen by --backend=host|cuda, and its own options.
#pragma once

#include <cstdint>
#include <string_view>

#include <quire/runtime/backend.h>

namespace quire::test {

// One per process, made on first use, destroyed before main returns.
Backend& test_backend();

// The number behind --name=, or `otherwise`.
std::int64_t test_option(std::string_view name, std::int64_t otherwise);

// --overlap=0 says no: a tool makes launches block or kernels run one after another.
inline bool kernels_may_overlap() { return test_option("overlap", 1) != 0; }

}  // namespace quire::test
