// What the single operations can take. Both backends call these before they enqueue anything, so
// that a call which the GPU could not carry out is refused on the host as well, in the same words.
// Each throws UsageError that names the parameter, its value and what is supported. Internal, not
// installed.
#pragma once

#include <quire/kernels/params.h>

namespace quire {

// Below it the scale of an indexer entry has no finite inverse.
inline constexpr float kScaleFloorMin = 0x1.cp-118f;  // 448 x 2^-126

void check_scale_floor(const char* name, float scale_floor);

// Pointers are needed where there is work for them: a batch, rows or a capacity above 0.
void check(const RecordPlanParams& params);
void check(const CompressC4DecodeParams& params);
void check(const CompressC4PrefillParams& params);
void check_store_flashmla(const StoreParams& params);
void check_store_indexer(const StoreParams& params);
void check(const StopRowsParams& params);
void check(const TranslatePicksParams& params);
void check(const GatherMainParams& params);
void check(const GatherIndexerParams& params);

}  // namespace quire
