// The operations in plain C++, written for clarity straight from SPEC.md: the exact oracle of every
// GPU test, and what the host backend runs. Each runs on the calling thread, blocks until done, and
// takes pointers to host memory. All set the floating-point environment for themselves.
#pragma once

#include <quire/kernels/params.h>

namespace quire::host {

void apply(const ApplyParams& params);
void clear(const ClearParams& params);
void plan(const PlanParams& params);
void append(const AppendParams& params);
void commit(const CommitParams& params);
void stop_rows(const StopRowsParams& params);

void plan_records(const RecordPlanParams& params);
void compress_c4_decode(const CompressC4DecodeParams& params);
void compress_c4_prefill(const CompressC4PrefillParams& params);
void store_flashmla(const StoreParams& params);
void store_indexer(const StoreParams& params);

// The read side (docs/READ_SIDE.md).
void translate_picks(const TranslatePicksParams& params);
void gather_main(const GatherMainParams& params);
void gather_indexer(const GatherIndexerParams& params);

}  // namespace quire::host
