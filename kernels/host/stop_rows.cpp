// Rows that stop themselves, on the host: a plain walk over each batch row's sampled tokens.
#include <quire/kernels/host/operations.h>

#include <algorithm>
#include <cstdint>

#include <quire/kernels/stop_rule.h>

namespace quire::host {
namespace {

std::int32_t first_end_token(const StopRowsParams& params, std::int64_t batch_row) {
  if (params.end_count == 0) return kNoEndToken;
  const std::int32_t* tokens = params.tokens + batch_row * params.tokens_stride;
  const std::int32_t* ends = params.end_tokens + params.end_count;
  for (std::int32_t j = 0; j < params.tokens_per_row; ++j) {
    if (std::find(params.end_tokens, ends, tokens[j]) != ends) return j;
  }
  return kNoEndToken;
}

}  // namespace

void stop_rows(const StopRowsParams& params) {
  for (std::int64_t r = 0; r < params.rows; ++r) {
    const BatchRowRecord record = params.records[r];
    const std::int32_t kept = params.kept != nullptr ? params.kept[r] : record.live_tokens;
    write_stopped_row(params, r,
                      stopped_row(record, kept, params.tokens_per_row, first_end_token(params, r),
                                  length_limit_of(params, record)));
  }
}

}  // namespace quire::host
