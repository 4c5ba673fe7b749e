// Byte for byte: what the cache holds of one request against what SPEC.md says that it must hold,
// computed on the host, entry by entry, from the request's tokens alone.
#pragma once

#include <cstdint>
#include <span>

#include <quire/runtime/device_cache.h>
#include <quire/runtime/owners.h>

#include "examples/stand_in_model.h"

namespace quire::serving {

// Compares all live bytes: CSA, indexer and HCA entries with their scales, the last 128 window
// entries, the raw rows and folds of the state that the next tokens need. Returns their number.
// Blocks: the stream must hold no step of the request that is not done. Throws Error that names the
// first difference.
std::int64_t verify_request(const DeviceCache& cache, const StandInModel& model, Stream& stream,
                            const ServedRequest& request);

}  // namespace quire::serving
