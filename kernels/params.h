// Every launch is one plain struct of parameters, the same for the kernel and for its host form.
// Shapes stand behind the pointers, innermost dimension last; strides are int64 and in elements
// unless the name says bytes. The stream is never part of it. "nullable" is said where it is meant.
#pragma once

#include <cstddef>
#include <cstdint>

#include <quire/cache/entry_layout.h>
#include <quire/cache/model_spec.h>
#include <quire/cache/step_update.h>
#include <quire/planner/plan.h>
#include <quire/planner/plan_rule.h>

namespace quire {

enum class ElementType : std::int32_t { kFloat32, kBfloat16 };

constexpr std::int64_t bytes_of(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

// --- Tables and weights, bound by the engine ---

enum class RopeLayout : std::int32_t {
  kInterleaved,  // [positions, 32, 2]: cos, sin of each pair
  kHalves,       // [positions, 2, 32]: 32 cos, then 32 sin
};

struct RopeTable {
  const float* values = nullptr;  // [positions, 64]
  std::int64_t positions = 0;
  RopeLayout layout = RopeLayout::kInterleaved;
};

enum class BiasOrder : std::int32_t {
  kKernel,      // [8, d]: bias[i] overlap, bias[4 + i] normal (SPEC 1.2)
  kCheckpoint,  // [4, 2, d]: the checkpoint's ape, rows of 2d
};

// --- append: all cache work of one layer ---

// Rows from the engine's GEMMs, one per input row.
struct InputRows {
  const void* data = nullptr;  // [tokens, width], 16-byte aligned; null: this part is not ours
  std::int64_t stride = 0;     // elements between input rows; a multiple of 16 bytes
  ElementType type = ElementType::kFloat32;
};

struct WindowPart {
  InputRows rows;                      // [tokens, 512] raw, or normed where norm_weight is null
  const float* norm_weight = nullptr;  // [512], nullable
  EntryPool ring;                      // seat x ring tokens
  EntryPool scratch;                   // ragged steps only
  // Ragged steps: entries of up to 127 positions before each long batch row, ring to scratch. Apart
  // from the rows, since it is ours also where the engine writes the window entries itself.
  bool copy_older_window = false;
};

// One of the two compressors of a CSA layer: main (d = 512) or indexer (d = 128).
struct CsaPart {
  InputRows rows;                      // [tokens, 4d]
  const float* bias = nullptr;         // 8d floats in bias_order
  BiasOrder bias_order = BiasOrder::kKernel;
  const float* norm_weight = nullptr;  // [d]
  float* state = nullptr;              // [seats, ring_tokens, 4d] raw input rows, widened to fp32
  std::int32_t ring_tokens = 0;        // state of position p is at p mod ring_tokens
  EntryPool pages;
};

inline constexpr std::int64_t kHcaBankFloats = 3 * kHeadDim;

// The compressor of an HCA layer (ratio 128, d = 512): a running fold per seat instead of raw rows.
struct HcaPart {
  InputRows rows;                      // [tokens, 2d]: kv, score
  const float* bias = nullptr;         // [128, d]
  const float* norm_weight = nullptr;  // [d]
  // [seats, banks, 3, d]: m, z, a of SPEC 3.7. Position p reads bank p mod banks and writes bank
  // (p + 1) mod banks (DESIGN 4); every NaN is stored as 0x7FFFFFFF.
  float* state = nullptr;
  std::int32_t banks = 0;              // draft_max + 2
  EntryPool pages;

  // m of the bank that `position` reads; z and a follow at kHeadDim and twice that.
  QUIRE_HOST_DEVICE float* bank(std::int64_t seat, std::int32_t position) const {
    return state + (seat * banks + position % banks) * kHcaBankFloats;
  }
};

// What the layer behind loads in front of its wait. A decode append has it brought into L2: the
// seats and positions of its records are the same in every layer. Only a hint; null where nothing is.
struct NextLayer {
  const float* window_norm = nullptr;
  const float* csa_bias = nullptr;
  const float* csa_norm = nullptr;
  const float* csa_state = nullptr;
  const float* indexer_bias = nullptr;
  const float* indexer_norm = nullptr;
  const float* indexer_state = nullptr;
  const float* hca_bias = nullptr;
  const float* hca_norm = nullptr;
  const float* hca_state = nullptr;
  std::int32_t csa_ring_tokens = 0;
  std::int32_t hca_banks = 0;
};

struct AppendParams {
  StepShape shape;
  std::int32_t planned_form = 0;  // plan_form() of the shape and the layer's group
  PlanGeometry geometry;
  const PlanHeader* header = nullptr;
  const BatchRowRecord* rows = nullptr;     // [shape.rows]
  const TokenRecord* tokens = nullptr;      // [shape.tokens]
  const PlanRecord* csa_entries = nullptr;  // [csa_entry_capacity] ragged only
  std::int32_t csa_entry_capacity = 0;
  const PlanRecord* hca_entries = nullptr;  // [hca_entry_capacity] ragged only
  std::int32_t hca_entry_capacity = 0;
  WindowPart window;
  CsaPart csa;
  CsaPart indexer;
  HcaPart hca;
  NextLayer next;  // decode only
  RopeTable rope;
  float norm_eps = 1e-6f;
  float scale_floor = 1e-4f;
  bool hadamard = true;
  bool load_after_wait = false;  // Pdl::kWaitOnly
  DeviceReport* report = nullptr;
};

// Whether the records in the plan buffer are those of this step: its update was planned, in this
// shape and for this layer group. Where they are not, they name the pages of a step before it, or
// the positions of the other group.
QUIRE_HOST_DEVICE inline bool is_planned(const PlanHeader& header, const StepShape& shape,
                                         std::int32_t form) {
  // No branches: loads of the header need not wait for each other.
  return (header.steps_at_plan > 0) & (header.planned_rows == shape.rows) &
         (header.planned_form == form) & (header.planned_tokens == shape.tokens);
}

// --- The step around it ---

// Kernel parameters of one launch hold 32,764 bytes; larger updates are split, in order.
inline constexpr std::int64_t kUpdateChunkBytes = 28 * 1024;
// The host copies all parameters of a launch, used or not: most updates go in the small form. It
// holds those of 256 batch rows and 85 cells.
inline constexpr std::int64_t kSmallUpdateBytes = 5 * 1024;

template <std::size_t kBytes>
struct ApplyParamsOf {
  StepTable table;
  PlanBuffer plan;
  StepUpdateHeader header;
  bool first_chunk;                 // sets the header and pads the rest of the shape
  std::int32_t first_batch_row;     // of this chunk
  std::int32_t batch_rows, cells, lowered_limits;  // in this chunk
  // BatchRowUpdates, then CellUpdates, then LimitUpdates; packed by planner/apply_chunks.h.
  alignas(16) std::byte changes[kBytes];
};
using ApplyParams = ApplyParamsOf<kUpdateChunkBytes>;
using SmallApplyParams = ApplyParamsOf<kSmallUpdateBytes>;
static_assert(sizeof(ApplyParams) <= 32764);
static_assert(offsetof(ApplyParams, changes) == offsetof(SmallApplyParams, changes));

// Bytes that each page has, or each seat: those of number i begin at base + i x stride. Stride, bytes
// and address are multiples of 16.
struct OwnedBytes {
  std::byte* base = nullptr;
  std::int64_t stride = 0;
  std::int64_t bytes = 0;

  QUIRE_HOST_DEVICE std::byte* of(std::int32_t owned) const { return base + owned * stride; }
};

// Zeroes pages, or seats, as they go to a new owner. Packed by planner/clear_chunks.h.
struct ClearParams {
  static constexpr std::int32_t kOwnedMax = 256;
  static constexpr std::int32_t kPiecesMax = 256;

  std::int32_t owned_count;  // at least 1
  std::int32_t piece_count;  // at least 1
  std::int32_t owned[kOwnedMax];  // pages or seats
  OwnedBytes pieces[kPiecesMax];  // the same of each
};
static_assert(sizeof(ClearParams) <= 32764);

struct PlanParams {
  StepShape shape;
  PlanGeometry geometry;
  StepTable table;
  PlanBuffer plan;
  std::int32_t csa_entry_capacity = 0;
  std::int32_t hca_entry_capacity = 0;
  LayerGroup group = LayerGroup::kTarget;
  // Decode shapes only. In the layout of the input rows and batch rows of `shape`.
  const std::int32_t* positions = nullptr;   // [shape.tokens] nullable: from the group's length on
  const std::int32_t* row_tokens = nullptr;  // [shape.rows] nullable: as applied
};

struct CommitParams {
  StepShape shape;
  LayerGroup group = LayerGroup::kTarget;
  bool positions_supplied = false;
  StepTable table;
  PlanBuffer plan;
  const std::int32_t* kept = nullptr;  // [rows] nullable: all live tokens
  std::int32_t draft_max = 0;          // rows of more than draft_max + 1 tokens keep all of them
  const std::uint8_t* stop = nullptr;  // [rows] nullable: none; non-zero stops the seat
};

// What an engine may stop a row with, in one launch.
inline constexpr std::int32_t kEndTokensMax = 64;

// From the tokens that a decode or verify step has sampled: how many of each batch row's stay, and
// whether it stops behind them. Between the sampler and `enqueue_commit`, which takes `kept` and
// `stop`. Token j of a batch row is the one sampled behind its input token j. A row stops behind its
// first end token, or where its length, which does not count the newest sampled token, reaches the
// limit of its seat; so much of it is kept. Rows of more than tokens_per_row tokens, chunks of a
// prompt, never stop here. Running it again changes nothing.
struct StopRowsParams {
  std::int32_t rows = 0;
  std::int32_t tokens_per_row = 1;  // at least 1
  // [rows] PlanBuffer::rows, while the step's target plan is the newest of its plan buffer.
  const BatchRowRecord* records = nullptr;
  const std::int32_t* tokens = nullptr;        // [rows, tokens_per_row]; null where end_count is 0
  std::int64_t tokens_stride = 1;              // at least tokens_per_row
  const std::int32_t* end_tokens = nullptr;    // [end_count]
  std::int32_t end_count = 0;                  // 0 to kEndTokensMax
  const std::int32_t* length_limit = nullptr;  // [seats] tokens, by seat; nullable: no limit
  // [rows] in: counts from the first token, accepted drafts + 1, written anew in every step. Out: cut
  // behind the row's last token; 0 where the row is inert in the plan. What is negative or above
  // the row's live tokens is left for the commit to report. Nullable with one token per row: that
  // is kept, also where the limit was reached before it.
  std::int32_t* kept = nullptr;
  std::uint8_t* stop = nullptr;  // [rows] out: 1 stops, 0 does not
};

// --- Single operations, in the original kernels' form ---

// Counts per batch row, scan, expansion: SPEC 1.8. Records are batch-major, ascending, compact;
// the tail up to each capacity is kPaddingRecord.
struct RecordPlanParams {
  CompressionRule rule;
  std::int32_t rows = 0;
  const std::int32_t* prefix = nullptr;  // [rows] P0
  const std::int32_t* extend = nullptr;  // [rows] E, zero is legal
  PlanRecord* compress = nullptr;        // [compress_capacity] nullable
  PlanRecord* write = nullptr;           // [write_capacity] nullable
  std::int64_t compress_capacity = 0;    // >= compress_capacity() of plan_rule.h
  std::int64_t write_capacity = 0;
  std::int32_t* cu_extend = nullptr;     // [rows + 1]
  std::int32_t* cu_compress = nullptr;   // [rows + 1]
  std::int32_t* cu_write = nullptr;      // [rows + 1]
};

enum class C4StateMode : std::int32_t {
  kRing,        // [indices, 8, 4d]; position p at p mod 8 (SPEC 1.7)
  kPageAligned  // [pages, 4, 4d]; one window per page
};

// State, input and bias share `type`; d is 128 or 512.
struct CompressC4DecodeParams {
  C4StateMode mode = C4StateMode::kRing;
  ElementType type = ElementType::kFloat32;
  ElementType output_type = ElementType::kFloat32;
  std::int32_t head_dim = 512;
  std::int32_t batch = 0;
  void* state = nullptr;                         // [n, 8 | 4, 4d]
  const void* input = nullptr;                   // [batch, 4d]
  const void* bias = nullptr;                    // [8, d]
  void* output = nullptr;                        // [batch, d]; untouched where nothing closes
  const std::int32_t* seq_lens = nullptr;        // [batch] length, this token's included; <= 0: skip
  const std::int32_t* indices = nullptr;         // [batch] ring, or page of the current window
  const std::int32_t* previous_pages = nullptr;  // [batch] page mode: page of the previous window
};

// Two launches: entries first, state afterwards (reads before writes).
struct CompressC4PrefillParams {
  C4StateMode mode = C4StateMode::kRing;
  ElementType type = ElementType::kFloat32;
  ElementType output_type = ElementType::kFloat32;
  std::int32_t head_dim = 512;
  void* state = nullptr;                   // [n, 8 | 4, 4d]
  const void* input = nullptr;             // [tokens, 4d]
  const void* bias = nullptr;              // [8, d]
  void* output = nullptr;                  // [tokens, d]; entry at its ragged_id
  // Compact, as plan_records makes them: behind the first padding record there is nothing but padding.
  const PlanRecord* compress = nullptr;    // [compress_capacity]
  const PlanRecord* write = nullptr;       // [write_capacity]
  std::int64_t compress_capacity = 0;
  std::int64_t write_capacity = 0;
  const std::int32_t* indices = nullptr;   // [batch]
  const C4PageBundle* bundles = nullptr;   // [batch] page mode
};

// Quantise and store rows of bf16: FlashMLA entries (d = 512) or indexer entries (d = 128).
struct StoreParams {
  const void* input = nullptr;      // [rows, d] bf16
  std::int64_t rows = 0;
  const void* locations = nullptr;  // [rows] int32 or int64; negative: skip; duplicates: undefined
  bool wide_locations = false;      // int64
  EntryPool pool;
  float scale_floor = 1e-4f;        // 1e-8 reproduces the original Triton store
};

// --- The read side (docs/READ_SIDE.md) ---

// Picks of an indexer's top-k to CSA locations, place by place (kernels/read_side.cuh). Usually
// over the views of a plan. `locations` may be `picks` itself, with one stride.
struct TranslatePicksParams {
  std::int32_t tokens = 0;
  std::int32_t k = 0;
  const std::int32_t* picks = nullptr;             // [tokens, k] entries; negative: none
  std::int64_t picks_stride = 0;                   // at least k
  const std::int32_t* token_batch_row = nullptr;   // [tokens] negative: inert, picks nothing
  const std::int32_t* token_csa_length = nullptr;  // [tokens] n(p); a pick from n(p) on is none
  const std::int32_t* page_table = nullptr;        // [rows, page_table_stride]
  std::int64_t page_table_stride = 0;
  std::int32_t entries_per_page = 64;
  std::int32_t* locations = nullptr;               // [tokens, k]
  std::int64_t locations_stride = 0;               // at least k
  // [tokens] nullable. min(k, n(p)), which is known before the picks are; more only where a valid
  // pick stands further back; at least length_floor.
  std::int32_t* lengths = nullptr;
  std::int32_t padding_location = -1;
  std::int32_t length_floor = 0;
};

// Entries of a main or window pool, dequantised: e4m3 x 2^(byte - 127), NaN where the scale byte is
// 255, the bf16 tail as it is. Exact in bf16 but where the product leaves its range.
struct GatherMainParams {
  EntryPool pool;                   // CSA, HCA, window ring or scratch
  const void* locations = nullptr;  // [count] int32 or int64; negative: a row of zeros
  bool wide_locations = false;      // int64
  std::int64_t count = 0;
  void* output = nullptr;           // [count, 512], 16-byte aligned
  std::int64_t output_stride = 512; // elements; a multiple of 16 bytes
  ElementType output_type = ElementType::kBfloat16;
};

// Indexer keys of many requests, request after request, as non-paged logits take them: query token
// t scores keys k_start[t] to k_end[t]. Usually over the views of a plan.
struct GatherIndexerParams {
  EntryPool pool;
  std::int32_t rows = 0;
  const std::int32_t* row_entries = nullptr;     // [rows] entries of each request
  const std::int32_t* page_table = nullptr;      // [rows, page_table_stride]
  std::int64_t page_table_stride = 0;
  // [rows + 1] written: where each request's keys begin; the last is how many there are, also where
  // that is more than `capacity`. Saturates at INT32_MAX.
  std::int32_t* cu_entries = nullptr;
  std::int64_t capacity = 0;                     // keys; those beyond are dropped
  std::uint8_t* keys = nullptr;                  // [capacity, 128] e4m3, 16-byte aligned
  float* scales = nullptr;                       // [capacity]
  std::int32_t tokens = 0;
  const std::int32_t* token_batch_row = nullptr;  // [tokens] negative: inert, an empty range
  const std::int32_t* token_entries = nullptr;    // [tokens] n(p), at most its request's entries
  std::int32_t* k_start = nullptr;                // [tokens] nullable together with k_end
  std::int32_t* k_end = nullptr;                  // [tokens] exclusive; at most `capacity`
};

}  // namespace quire
