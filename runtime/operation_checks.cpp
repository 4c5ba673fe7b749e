// The checks of runtime/operation_checks.h: plain comparisons of parameters, nothing is read
// through a pointer. Counts are bounded by what a grid and an int32 index can hold.
#include <quire/runtime/operation_checks.h>

#include <cstdint>
#include <limits>

#include <quire/cache/entry_layout.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

constexpr std::int64_t kCountMax = INT32_MAX;
constexpr std::int32_t kRatioMax = 1 << 20;

// Says which operation's parameters are meant, so that its checks need not.
class Checker {
 public:
  explicit Checker(const char* operation) : operation_(operation) {}

  void count(const char* name, std::int64_t value) const {
    QUIRE_CHECK(value >= 0 && value <= kCountMax, operation_, ": ", name, " is ", value,
                "; supported: 0 to ", kCountMax);
  }

  // A pointer that is needed is not null; any that is given stands on `alignment` bytes.
  void pointer(const char* name, const void* value, bool needed, std::uintptr_t alignment) const {
    QUIRE_CHECK(value != nullptr || !needed, operation_, ": ", name, " is null, but needed");
    QUIRE_CHECK(reinterpret_cast<std::uintptr_t>(value) % alignment == 0, operation_, ": ", name,
                " at ", value, " is not aligned; supported: multiples of ", alignment, " bytes");
  }

  void element_type(const char* name, ElementType type) const {
    QUIRE_CHECK(type == ElementType::kFloat32 || type == ElementType::kBfloat16, operation_, ": ",
                name, " is ", static_cast<std::int32_t>(type), "; supported: 0 (fp32), 1 (bf16)");
  }

  void pool(const EntryPool& pool, bool needed,
            std::int64_t (*page_bytes)(std::int64_t entries)) const {
    const std::int32_t entries = pool.entries_per_page;
    QUIRE_CHECK(entries >= 1 && (entries & (entries - 1)) == 0, operation_,
                ": pool.entries_per_page is ", entries, "; supported: powers of two");
    QUIRE_CHECK(pool.entries_per_page_log2 >= 0 && pool.entries_per_page_log2 < 31 &&
                    (1 << pool.entries_per_page_log2) == entries,
                operation_, ": pool.entries_per_page_log2 is ", pool.entries_per_page_log2,
                ", which is not that of entries_per_page ", entries, " (make_entry_pool)");
    QUIRE_CHECK(pool.page_stride_bytes >= page_bytes(entries) && pool.page_stride_bytes % 16 == 0,
                operation_, ": pool.page_stride_bytes is ", pool.page_stride_bytes,
                "; supported: multiples of 16 from ", page_bytes(entries), ", a page of ", entries,
                " entries");
    pointer("pool.base", pool.base, needed, 16);
  }

  const char* operation() const { return operation_; }

 private:
  const char* operation_;
};

constexpr std::uintptr_t kInt = alignof(std::int32_t);

// What the two c4 operations share.
template <class Params>
void check_c4_kind(const Checker& check, const Params& params) {
  QUIRE_CHECK(params.mode == C4StateMode::kRing || params.mode == C4StateMode::kPageAligned,
              check.operation(), ": mode is ", static_cast<std::int32_t>(params.mode),
              "; supported: 0 (ring), 1 (page-aligned)");
  QUIRE_CHECK(params.head_dim == 128 || params.head_dim == 512, check.operation(),
              ": head_dim is ", params.head_dim, "; supported: 128, 512");
  check.element_type("type", params.type);
  check.element_type("output_type", params.output_type);
}

void check_store(const char* operation, const StoreParams& params,
                 std::int64_t (*page_bytes)(std::int64_t entries)) {
  const Checker check(operation);
  check.count("rows", params.rows);
  const bool any = params.rows > 0;
  check.pointer("input", params.input, any, 16);
  check.pointer("locations", params.locations, any,
                params.wide_locations ? alignof(std::int64_t) : kInt);
  check.pool(params.pool, any, page_bytes);
  check_scale_floor("StoreParams::scale_floor", params.scale_floor);
}

}  // namespace

void check_scale_floor(const char* name, float scale_floor) {
  // A NaN fails both comparisons.
  QUIRE_CHECK(scale_floor >= kScaleFloorMin && scale_floor <= std::numeric_limits<float>::max(),
              name, " is ", scale_floor, "; supported: finite, from ", kScaleFloorMin,
              " (1e-4 is the reference's, 1e-8 the original Triton store's)");
}

void check(const RecordPlanParams& params) {
  const Checker check("plan_records");
  QUIRE_CHECK(params.rule.ratio >= 1 && params.rule.ratio <= kRatioMax, check.operation(),
              ": rule.ratio is ", params.rule.ratio, "; supported: 1 to ", kRatioMax);
  check.count("rows", params.rows);
  check.count("compress_capacity", params.compress_capacity);
  check.count("write_capacity", params.write_capacity);
  check.pointer("prefix", params.prefix, params.rows > 0, kInt);
  check.pointer("extend", params.extend, params.rows > 0, kInt);
  check.pointer("compress", params.compress, false, alignof(PlanRecord));
  check.pointer("write", params.write, false, alignof(PlanRecord));
  check.pointer("cu_extend", params.cu_extend, true, kInt);
  check.pointer("cu_compress", params.cu_compress, true, kInt);
  check.pointer("cu_write", params.cu_write, true, kInt);
}

void check(const CompressC4DecodeParams& params) {
  const Checker check("compress_c4_decode");
  check_c4_kind(check, params);
  check.count("batch", params.batch);
  const bool any = params.batch > 0;
  const bool paged = params.mode == C4StateMode::kPageAligned;
  check.pointer("state", params.state, any, 16);
  check.pointer("input", params.input, any, 16);
  check.pointer("bias", params.bias, any, 16);
  check.pointer("output", params.output, any, 16);
  check.pointer("seq_lens", params.seq_lens, any, kInt);
  check.pointer("indices", params.indices, any, kInt);
  check.pointer("previous_pages", params.previous_pages, any && paged, kInt);
}

void check(const CompressC4PrefillParams& params) {
  const Checker check("compress_c4_prefill");
  check_c4_kind(check, params);
  check.count("compress_capacity", params.compress_capacity);
  check.count("write_capacity", params.write_capacity);
  const bool pools = params.compress_capacity > 0;
  const bool writes = params.write_capacity > 0;
  const bool any = pools || writes;
  const bool paged = params.mode == C4StateMode::kPageAligned;
  check.pointer("state", params.state, any, 16);
  check.pointer("input", params.input, any, 16);
  check.pointer("bias", params.bias, pools, 16);
  check.pointer("output", params.output, pools, 16);
  check.pointer("compress", params.compress, pools, alignof(PlanRecord));
  check.pointer("write", params.write, writes, alignof(PlanRecord));
  check.pointer("indices", params.indices, writes || (pools && !paged), kInt);
  check.pointer("bundles", params.bundles, any && paged, alignof(C4PageBundle));
}

void check_store_flashmla(const StoreParams& params) {
  check_store("store_flashmla", params, main_page_bytes);
}

void check_store_indexer(const StoreParams& params) {
  check_store("store_indexer", params, indexer_page_bytes);
}

void check(const StopRowsParams& params) {
  const Checker check("stop_rows");
  check.count("rows", params.rows);
  QUIRE_CHECK(params.tokens_per_row >= 1, check.operation(), ": tokens_per_row is ",
              params.tokens_per_row, "; supported: at least 1");
  QUIRE_CHECK(params.tokens_stride >= params.tokens_per_row, check.operation(),
              ": tokens_stride is ", params.tokens_stride,
              "; supported: at least tokens_per_row, ", params.tokens_per_row);
  QUIRE_CHECK(params.end_count >= 0 && params.end_count <= kEndTokensMax, check.operation(),
              ": end_count is ", params.end_count, "; supported: 0 to ", kEndTokensMax);
  QUIRE_CHECK(params.kept != nullptr || params.tokens_per_row == 1, check.operation(),
              ": kept is null, but tokens_per_row is ", params.tokens_per_row,
              "; supported: null with one token per row, of which nothing can be cut");
  const bool any = params.rows > 0;
  const bool ends = any && params.end_count > 0;
  check.pointer("records", params.records, any, alignof(BatchRowRecord));
  check.pointer("tokens", params.tokens, ends, kInt);
  check.pointer("end_tokens", params.end_tokens, ends, kInt);
  check.pointer("length_limit", params.length_limit, false, kInt);
  check.pointer("kept", params.kept, false, kInt);
  check.pointer("stop", params.stop, any, 1);
}

void check(const TranslatePicksParams& params) {
  const Checker check("translate_picks");
  check.count("tokens", params.tokens);
  check.count("k", params.k);
  QUIRE_CHECK(params.picks_stride >= params.k && params.locations_stride >= params.k,
              check.operation(), ": picks_stride is ", params.picks_stride,
              " and locations_stride ", params.locations_stride, "; supported: at least k, ",
              params.k);
  QUIRE_CHECK(params.locations != params.picks || params.locations_stride == params.picks_stride,
              check.operation(), ": in place, but picks_stride is ", params.picks_stride,
              " and locations_stride ", params.locations_stride, "; supported: one stride");
  QUIRE_CHECK(params.entries_per_page >= 1, check.operation(), ": entries_per_page is ",
              params.entries_per_page, "; supported: at least 1");
  QUIRE_CHECK(params.length_floor == 0 || params.length_floor == 1, check.operation(),
              ": length_floor is ", params.length_floor, "; supported: 0, 1");
  const bool any = params.tokens > 0;
  check.pointer("picks", params.picks, any && params.k > 0, kInt);
  check.pointer("locations", params.locations, any && params.k > 0, kInt);
  check.pointer("token_batch_row", params.token_batch_row, any, kInt);
  check.pointer("token_csa_length", params.token_csa_length, any, kInt);
  check.pointer("page_table", params.page_table, any, kInt);
  check.pointer("lengths", params.lengths, false, kInt);
}

void check(const GatherMainParams& params) {
  const Checker check("gather_main");
  check.element_type("output_type", params.output_type);
  check.count("count", params.count);
  const bool any = params.count > 0;
  check.pool(params.pool, any, main_page_bytes);
  check.pointer("locations", params.locations, any,
                params.wide_locations ? alignof(std::int64_t) : kInt);
  check.pointer("output", params.output, any, 16);
  const std::int64_t size = bytes_of(params.output_type);
  QUIRE_CHECK(params.output_stride >= kHeadDim && params.output_stride * size % 16 == 0,
              check.operation(), ": output_stride is ", params.output_stride, " elements of ", size,
              " bytes; supported: at least ", kHeadDim, " and a multiple of 16 bytes");
}

void check(const GatherIndexerParams& params) {
  const Checker check("gather_indexer");
  check.count("rows", params.rows);
  check.count("tokens", params.tokens);
  check.count("capacity", params.capacity);
  check.pool(params.pool, params.rows > 0 && params.capacity > 0, indexer_page_bytes);
  check.pointer("row_entries", params.row_entries, params.rows > 0, kInt);
  check.pointer("page_table", params.page_table, params.rows > 0, kInt);
  check.pointer("cu_entries", params.cu_entries, true, kInt);
  check.pointer("keys", params.keys, params.capacity > 0, 16);
  check.pointer("scales", params.scales, params.capacity > 0, alignof(float));
  QUIRE_CHECK((params.k_start == nullptr) == (params.k_end == nullptr), check.operation(),
              ": k_start and k_end are given together or not at all");
  const bool ranges = params.tokens > 0 && params.k_start != nullptr;
  check.pointer("token_batch_row", params.token_batch_row, ranges, kInt);
  check.pointer("token_entries", params.token_entries, ranges, kInt);
  check.pointer("k_start", params.k_start, false, kInt);
  check.pointer("k_end", params.k_end, false, kInt);
}

}  // namespace quire
