// Quantise and store rows of bf16 on the host (SPEC 3.4, 3.5), with the store code of `append`.
#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/kernels/host/operations.h>

namespace quire::host {
namespace {

template <class StoreEntry>
void store_rows(const StoreParams& params, std::int64_t d, StoreEntry store_entry) {
  const FloatEnvironment environment;
  for (std::int64_t row = 0; row < params.rows; ++row) {
    const std::int64_t location = params.wide_locations
                                      ? static_cast<const std::int64_t*>(params.locations)[row]
                                      : static_cast<const std::int32_t*>(params.locations)[row];
    if (location < 0) continue;
    float entry[kHeadDim];
    widen(row_of(params.input, ElementType::kBfloat16, d, row), 0, d, entry);
    store_entry(entry, params.pool, location, params.scale_floor);
  }
}

}  // namespace

void store_flashmla(const StoreParams& params) { store_rows(params, kHeadDim, store_main_entry); }

void store_indexer(const StoreParams& params) {
  store_rows(params, kIndexerDim, store_indexer_entry);
}

}  // namespace quire::host
