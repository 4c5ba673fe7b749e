// The compressor part of `append` for HCA layers on the host, in its two phases. Internal, not
// installed. Callers hold a FloatEnvironment; params.hca has rows.
#pragma once

#include <quire/kernels/params.h>

namespace quire::host {

// Phase 1: reads folds that earlier steps kept, writes the entries that this step closes.
void append_hca_entries(const AppendParams& params);

// Phase 2: writes the folds that later steps read.
void keep_hca_folds(const AppendParams& params);

}  // namespace quire::host
