// Activations and weights of the engine in bf16: finite, neither zero nor all alike.
#pragma once

#include <cstdint>

#include <quire/runtime/owners.h>

namespace quire::bench {

// Values in (-scale, scale), 16-byte aligned, a multiple of 8. Does not block; may be captured.
void fill_random_bf16(void* to, std::int64_t count, float scale, std::uint32_t seed,
                      const Stream& stream);

}  // namespace quire::bench
