// Executes on one backend what a ledger has decided: holds the memory, carries out updates,
// enqueues plans, appends and commits. It decides nothing.
//
// One thread at a time. Nothing blocks but construction, destruction and what has `wait` in its
// name. All steps run on one stream or on streams that join it; destruction waits for them.
// `enqueue_plan`, `append` and `enqueue_commit` may be captured; `apply` may not. Every call
// restores the current device.
#pragma once

#include <quire/cache/limits.h>
#include <quire/cache/model_spec.h>
#include <quire/cache/step_update.h>
#include <quire/kernels/params.h>
#include <quire/runtime/backend.h>
#include <quire/runtime/base/log.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace quire {

// What the engine supplies for one layer. Pointers are kept, nothing is copied: they stay valid and
// their content unchanged as long as the cache lives. fp32 throughout.
struct LayerBinding {
  ElementType window_rows = ElementType::kBfloat16;     // type of the rows passed to append
  ElementType compressor_rows = ElementType::kFloat32;  // CSA, indexer and HCA rows
  const float* window_norm = nullptr;                   // [512]; null: window rows come normed
  const float* csa_bias = nullptr;                      // 8 x 512 in bias_order
  const float* csa_norm = nullptr;                      // [512]
  const float* indexer_bias = nullptr;                  // 8 x 128 in bias_order
  const float* indexer_norm = nullptr;                  // [128]
  const float* hca_bias = nullptr;                      // [128, 512]
  const float* hca_norm = nullptr;                      // [512]
  BiasOrder bias_order = BiasOrder::kCheckpoint;
};

// Layers of kind sliding rotate with one table, compressing layers with another (SPEC 3.2).
enum class RopeGroup : std::int32_t { kSliding, kCompressing };

// What lies next to a page of one layer: its next page, or the same page of the next layer.
enum class PageOrder : std::int32_t { kLayerMajor, kPageMajor };

struct DeviceCacheOptions {
  float norm_eps = 1e-6f;
  float scale_floor = 1e-4f;  // 1e-8 reproduces the original Triton store
  bool hadamard = true;       // on the indexer's keys
  bool checked = false;       // refuses a second append of the same part to a ragged plan

  // 0: what the limits need. Larger is allowed; smaller is refused with the least that works.
  std::int64_t window_ring_tokens = 0;  // a multiple of 64
  std::int64_t csa_ring_tokens = 0;     // a multiple of 4

  // Strides between pages of one layer; 0: tight. Multiples of 16, not below a page.
  // In page-major order, where all layers of a page lie together, what each takes of it.
  std::int64_t csa_page_stride_bytes = 0;
  std::int64_t indexer_page_stride_bytes = 0;
  std::int64_t hca_page_stride_bytes = 0;
  PageOrder page_order = PageOrder::kLayerMajor;

  // For tenants that hand raw pools to others: what goes to a new owner is zeroed in stream order
  // by `apply`, before any step of that owner. A page in every layer when an update first names it,
  // a seat (window ring, CSA state, HCA banks) when an update first names its owner. Costs the
  // writing of these bytes, and nothing in updates that name neither. The sink is no owner's:
  // reserve it before the first request. Window scratch, views and records of plan buffers are
  // working memory and are not zeroed.
  bool clear_on_reuse = false;

  // What views show where a step writes nothing. -1, or a location that exists (`reserve_sink`).
  std::int64_t padding_csa_location = -1;
  std::int64_t padding_hca_location = -1;
  std::int64_t padding_ring_location = -1;
  std::int64_t padding_scratch_location = -1;

  // Told what is opened, cleared and captured, and what broke; null: silence. Outlives the cache.
  const Logger* log = nullptr;

  // The engine's memory instead of a pool of our own: at least `DeviceCache::bytes_needed`,
  // 256-byte aligned, alive as long as the cache.
  std::optional<std::span<std::byte>> memory;
};

// Rows of one step for one layer, one per input row. An absent part (data null) is not written.
// The types are those bound with the layer.
struct AppendInputs {
  struct Rows {
    const void* data = nullptr;  // 16-byte aligned
    std::int64_t stride = 0;     // elements; 0: dense
  };
  Rows window;   // [tokens, 512]
  Rows csa;      // [tokens, 2048]: kv_overlap, kv, score_overlap, score
  Rows indexer;  // [tokens, 512]: likewise, 128 each
  Rows hca;      // [tokens, 1024]: kv, score
};

struct AppendOptions {
  Pdl pdl = Pdl::kPrologue;
};

// What is planned, where it is not the applied step of the target group. Several plans of one plan
// buffer may follow each other in a step, each with its appends and, where it should last, its
// commit; that of the target group comes first. Pointers are to device memory, read when the plan
// runs, 4-byte aligned, and belong to decode shapes.
struct PlanInputs {
  LayerGroup group = LayerGroup::kTarget;
  // Draft group: fewer tokens in each batch row than the applied shape has; 0: as many.
  std::int32_t tokens_per_row = 0;
  // [rows x tokens_per_row] where each token stands; null: from the group's length on. A batch row
  // is made inert, and is reported, whose positions are below that length, do not ascend by one,
  // are at or above the seat's limit, or more than draft_max beyond the length. What lies between
  // the length and the first of them must have been appended by earlier passes of the same step:
  // that cannot be checked. No view of the plan buffer: a plan writes those while it reads these.
  const std::int32_t* positions = nullptr;
  // [rows] tokens of each batch row; null: as many as were applied and have room. A batch row with
  // more than those, or fewer than none, is made inert and is reported; one that was applied with
  // none stays silent whatever stands here.
  const std::int32_t* row_tokens = nullptr;
};

// Sizes of the regions, requested bytes; their sum is what a pool is asked for.
struct CacheBytes {
  std::int64_t pages, seats, scratch, step_table, plan_buffers;
  std::int64_t total() const { return pages + seats + scratch + step_table + plan_buffers; }
};

class DeviceCache {
 public:
  // Allocates and clears everything, and compares the known answers of SPEC 3.7 with the host's.
  // Blocks. UsageError on limits or options that do not hold; CudaError when memory is short.
  DeviceCache(Backend& backend, const ModelSpec& spec, const Limits& limits,
              const DeviceCacheOptions& options = {});
  ~DeviceCache();
  DeviceCache(DeviceCache&&) noexcept;
  DeviceCache& operator=(DeviceCache&&) = delete;

  static CacheBytes bytes_needed(const ModelSpec& spec, const Limits& limits,
                                 const DeviceCacheOptions& options = {});

  // Before the first append of the layer or group. Null or misaligned pointers that the layer's
  // kind needs are refused by name. Binding again replaces, for later calls only: captured graphs
  // keep what they have captured.
  void bind_layer(LayerId layer, const LayerBinding& binding);
  void bind_rope(RopeGroup group, const RopeTable& table);

  // Lists that every later plan of the buffer fills; ReadLists{} unbinds them. Pointers are kept:
  // the memory lives, and belongs to the plans, as long as it is bound or a captured graph writes
  // it. Captured graphs keep what they captured. Does not block. UsageError, and nothing is bound:
  // a list that is not 16-byte aligned or that the backend cannot reach, an hca_width below
  // ceil(context_max / 128), a length_floor other than 0 or 1, a padding_location that is neither
  // -1 nor in all pools of the bound lists, limits under which a location does not fit in int32.
  void bind_read_lists(PlanBufferId buffer, const ReadLists& lists);

  // Views of later plans show entry 0 of this page (`Ledger::reserve_sink`) where a step closes no
  // entry, instead of the padding locations of the options. For consumers that write or read every
  // location they are given. Captured graphs keep what they captured: call it before.
  void use_sink(PageId page);

  // Throws what `apply` and `clear` would throw for this stream: it belongs to another backend or
  // is capturing, or the cache is broken.
  void check_can_apply(StreamView stream) const;

  // Carries one update out, in stream order. Updates arrive in the order of their ids; padding
  // updates at any time. UsageError: out of order, foreign limits, a stream that is capturing.
  void apply(const StepUpdate& update, StreamView stream);

  // Plans the shape that was last applied to the buffer. Pure: writes its plan buffer only, so it
  // may run any number of times. UsageError where nothing was applied yet, or `inputs` ask for what
  // the model or the shape does not have.
  void enqueue_plan(PlanBufferId buffer, StreamView stream, const PlanInputs& inputs = {});

  // All cache work of one layer for the parts given. After it, on the stream, queries of this step
  // may read everything up to their own position in this layer. The first append after each
  // enqueue_plan, and every append on another stream than its plan's, is launched plainly whatever
  // the options say. A replay behind another plan, of another shape or the other layer group,
  // appends nothing and is reported. UsageError: layer not bound, a part that the layer's kind does
  // not have, misaligned pointer or stride, nothing planned, or planned for the other layer group.
  void append(LayerId layer, PlanBufferId buffer, const AppendInputs& inputs, StreamView stream,
              const AppendOptions& options = {});

  // Moves the lengths of the planned group by seat, in the order of the same step's batch rows:
  // start of the plan + kept. The target group's ends the step.
  // `kept` [rows] counts from the first token, null keeps all; `stop` [rows] is ORed into the
  // seat's flag, null stops none. Absolute: a second commit changes nothing. Inert rows are left
  // alone. So is, and is reported, a row whose kept is negative, above its live tokens, or not all
  // of them where the row is longer than draft_max + 1: it runs once and cannot be taken back; or
  // whose positions were supplied and begin beyond the length; or whose draft group would get ahead
  // of the target. A replay behind another plan than this one does nothing and is reported, as that
  // of an append is. UsageError: `stop` with a plan of the draft group.
  void enqueue_commit(PlanBufferId buffer, const std::int32_t* kept, const std::uint8_t* stop,
                      StreamView stream, const AppendOptions& options = {});

  // Fixed addresses, valid as long as the cache.
  const PlanViews& views(PlanBufferId buffer) const;
  const PlanBuffer& plan_buffer(PlanBufferId buffer) const;
  const StepTable& step_table() const;

  // The shape of the update last applied to the buffer since construction or `clear`.
  std::optional<StepShape> applied_shape(PlanBufferId buffer) const;

  // Pools as the consumers index them. `scratch` belongs to a plan buffer, shared by its layers.
  EntryPool window_ring(LayerId layer) const;
  EntryPool window_scratch(PlanBufferId buffer) const;
  EntryPool csa_pages(LayerId layer) const;
  EntryPool indexer_pages(LayerId layer) const;
  const float* csa_state(LayerId layer) const;      // [seats, csa_ring_tokens, 2048]
  const float* indexer_state(LayerId layer) const;  // [seats, csa_ring_tokens, 512]
  EntryPool hca_pages(LayerId layer) const;
  const float* hca_state(LayerId layer) const;  // [seats, hca_banks, 3, 512]: m, z, a
  std::int64_t hca_banks() const;
  std::int64_t csa_ring_tokens() const;
  std::int64_t window_ring_tokens() const;

  // Copies the report of the buffer to `to` in stream order (host memory; pinned for CUDA to stay
  // asynchronous).
  void report(PlanBufferId buffer, DeviceReport* to, StreamView stream) const;

  // Copies what has become of the first `to.size()` batch rows, as the newest commit of the target
  // group left it, in stream order (host memory; pinned for CUDA to stay asynchronous). After a
  // visit of many steps: kept tokens are `length` less what it was before. What stands behind the
  // batch rows of the applied shape means nothing. UsageError: no room, or more than rows_max.
  void results(PlanBufferId buffer, std::span<RowResult> to, StreamView stream) const;

  // Zeroes pages, seats and step table in place, in stream order; graphs stay valid. Together with
  // `Ledger::reset`. What was applied or planned before is void: until the next update a replayed
  // plan finds no rows, and replayed appends and commits do nothing and are reported as unplanned.
  // Reports stay until then. Where the machine fails halfway, every later call says so.
  void clear(StreamView stream);

  // The regions, for tests and for engines that copy memory themselves.
  std::span<std::byte> pages_memory() const;
  std::span<std::byte> seats_memory() const;
  std::span<std::byte> step_table_memory() const;

  Backend& backend() const;
  const ModelSpec& spec() const;
  const Limits& limits() const;
  const DeviceCacheOptions& options() const;
  CacheBytes bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Fills `values` [positions, 64] in `layout` with the correctly rounded cos and sin of the fp32
// product frequency x position (SPEC 3.2). Blocks; host memory. UsageError: a span of another size,
// more than 2^24 positions, parameters that ModelSpec::check refuses.
void make_rope_table(const RopeParameters& rope, std::int64_t positions, RopeLayout layout,
                     std::span<float> values);
// The same with the parameters that all models of SPEC 5 have.
void make_rope_table(RopeGroup group, std::int64_t positions, RopeLayout layout,
                     std::span<float> values);

}  // namespace quire
