// A real, small decoder in the shape of DeepSeek-V4: sliding, CSA and HCA layers with the true head
// dims, random weights from a seed. Its tokens come from attention over Quire's pages: the window
// and the compressed entries are read as they are stored. Logits of a request are the same bits in
// any batch, chunking or graph: every operation works on one input row in a fixed order.
// Layers of the draft group (ModelSpec::draft_layers) draft for it, as an MTP layer does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/owners.h>

#include "examples/serving_model.h"

namespace quire::serving {

inline constexpr std::int64_t kGemmRows = 64;  // every GEMM has this many rows, padded or not
inline constexpr std::int32_t kHeadsMax = 8;
inline constexpr std::int32_t kTopkMax = 128;
inline constexpr std::int64_t kGemmWorkspaceBytes = 4 << 20;

// Drafts of random weights are hardly ever right. For tests and benchmarks, tokens that the request
// is known to generate (TinyV4::set_truth) are tried in their place, some of them wrong, a random
// count of them in each step. Which, follows from the seed, the request's seed and the position.
struct DraftsFromTruth {
  bool on = false;
  float wrong = 0.25f;  // share of the drafts
  std::uint32_t seed = 1;
};

struct TinyV4Config {
  std::int32_t hidden = 256;       // a multiple of 64
  std::int32_t heads = 4;          // at most kHeadsMax
  std::int32_t q_rank = 64;        // queries go through so many channels; a multiple of 64
  std::int32_t indexer_heads = 4;  // at most kHeadsMax
  std::int32_t index_topk = 64;    // CSA entries that a token attends to: 64 or 128
  std::int32_t vocabulary = 512;   // a multiple of 64
  std::int32_t end_token = -1;     // a request that generates it stops in front of it
  std::uint32_t seed = 1;
  DraftsFromTruth drafts_from_truth;

  void check() const;  // UsageError

  // One row of what the first GEMM of a layer gives, in floats. All layers have the stride of the
  // widest, a CSA layer: window 512, low-rank query, then 2048 and 512 for the two compressors and
  // 64 for the heads' weights; or, of an HCA layer, 1024.
  QUIRE_HOST_DEVICE std::int64_t compressor_at() const { return kHeadDim + q_rank; }
  QUIRE_HOST_DEVICE std::int64_t indexer_at() const { return compressor_at() + 4 * kHeadDim; }
  QUIRE_HOST_DEVICE std::int64_t head_weights_at() const { return indexer_at() + 4 * kIndexerDim; }
  QUIRE_HOST_DEVICE std::int64_t projected_stride() const { return head_weights_at() + 64; }
  std::int64_t projected_width(LayerKind kind) const;

  // One row of queries: the heads of 512, then those of the indexer, 128 each.
  QUIRE_HOST_DEVICE std::int64_t attended_width() const { return heads * kHeadDim; }
  QUIRE_HOST_DEVICE std::int64_t query_stride() const {
    return attended_width() + indexer_heads * kIndexerDim;
  }
  std::int64_t query_width(LayerKind kind) const;
};

// Weights of one layer. Matrices are [in, out].
struct TinyV4Layer {
  LayerKind kind = LayerKind::kSliding;
  const float* norm = nullptr;         // [hidden]
  const float* q_norm = nullptr;       // [q_rank]
  const float* sinks = nullptr;        // [heads]
  const float* projections = nullptr;  // [hidden, projected_width]
  const float* queries = nullptr;      // [q_rank, query_width]
  const float* output = nullptr;       // [heads * 512, hidden]
};

struct TinyV4Weights {
  const float* embedding = nullptr;   // [vocabulary, hidden]
  const float* final_norm = nullptr;  // [hidden]
  const float* head = nullptr;        // [hidden, vocabulary]
  // What comes in front of the draft layers; they share embedding, final norm and head.
  const float* draft_hidden_norm = nullptr;  // [hidden]
  const float* draft_token_norm = nullptr;   // [hidden]
  const float* draft_input = nullptr;        // [2 x hidden, hidden]
  std::vector<TinyV4Layer> layers;
  std::vector<LayerBinding> bindings;
  RopeTable rope[2];  // by RopeGroup, [context_max, 32, 2]
};

// What drafting keeps from step to step, by seat; and what one operation of a step leaves for the
// next, by batch row.
struct TinyV4Drafts {
  std::int32_t* seat_tokens_max = nullptr;  // [seats] the request stops at this length
  std::int32_t* seat_count = nullptr;       // [seats] drafts that stand behind the next token
  std::int32_t* drafted = nullptr;          // [seats, context_max + 1] by position
  std::int32_t* truth = nullptr;            // [seats, context_max + 1] by position
  float* input = nullptr;                   // [tokens, 2 x hidden] hidden state, then embedding
  std::int32_t* row_tokens = nullptr;       // [rows] the sure token and the drafts behind it
  std::int32_t* kept = nullptr;             // [rows] 0: inert
  std::uint8_t* stop = nullptr;             // [rows]
  std::int32_t* pass_positions = nullptr;   // [draft_max, rows_max] of the draft passes
};

// What the model keeps. Rows are padded to whole tiles of kGemmRows.
struct TinyV4Arrays {
  std::uint32_t* seat_seed = nullptr;          // [seats]
  std::int32_t* seat_prompt_tokens = nullptr;  // [seats]
  // By position: the generated tokens, and what the model says that comes there. The two differ
  // only where a prompt says something else.
  std::int32_t* history = nullptr;    // [seats, context_max + 1]
  std::int32_t* predicted = nullptr;  // [seats, context_max + 1]
  float* x = nullptr;                 // [tokens, hidden] residual stream
  float* normed = nullptr;            // [tokens, hidden]
  float* projected = nullptr;         // [tokens, projected_stride]
  float* q_low = nullptr;             // [tokens, q_rank]
  float* queries = nullptr;           // [tokens, query_stride]
  float* attended = nullptr;          // [tokens, heads * 512] de-rotated
  float* logits = nullptr;            // [tokens, vocabulary]
  std::int32_t* picks = nullptr;      // [tokens, index_topk] ascending, -1 behind
  std::byte* workspace = nullptr;     // of the GEMMs
  TinyV4Drafts drafts;
};

// Which of a step's plans an operation belongs to.
enum class TinyV4Stage : std::int32_t {
  kTarget,  // the step's tokens through the target layers
  kExtend,  // what was kept of them through the draft layers
  kPass,    // one drafted token of each batch row through the draft layers
};

// One layer of one step, for every operation.
struct TinyV4Step {
  TinyV4Config config;
  TinyV4Arrays arrays;
  TinyV4Layer layer;
  StepShape shape;
  TinyV4Stage stage = TinyV4Stage::kTarget;
  // First draft pass: tokens per batch row of the step, in whose rows the hidden states still
  // stand.
  std::int32_t extended_tokens_per_row = 0;
  PlanViews views;
  const std::int32_t* row_seats = nullptr;     // [rows] as applied; -1: padding
  const std::int32_t* row_tokens = nullptr;    // [rows] as applied
  const std::int32_t* seat_lengths = nullptr;  // [seats] of the target group, as committed
  std::int64_t context_max = 0;
  std::int64_t rows_max = 0;
  std::int64_t window_ring_tokens = 0;
  std::int64_t draft_max = 0;
  const float* embedding = nullptr;  // [vocabulary, hidden]
  const float* rope = nullptr;       // [context_max, 32, 2] of the layer's group
  EntryPool window_ring;
  EntryPool window_scratch;
  EntryPool compressed;  // CSA or HCA entries
  EntryPool keys;        // of the indexer
  float norm_eps = 0;
  bool hadamard = false;

  QUIRE_HOST_DEVICE std::int64_t padded_tokens() const {
    return round_up<std::int64_t>(shape.tokens, kGemmRows);
  }
};

enum class TinyV4Op {
  kRowTokens,   // how many tokens each batch row tries
  kEmbed,       // x
  kQueries,     // norm, RoPE and Hadamard on the queries, in place
  kSelect,      // the indexer's scores and the best entries: picks
  kAttend,      // attended
  kSample,      // the likeliest token of every input row, ties to the lower id
  kAccept,      // what each batch row keeps, and whether it stops
  kDraftInput,  // hidden states and the embeddings of the tokens behind them
};

struct NormRows {
  const float* in = nullptr;  // [rows, width]
  std::int64_t in_stride = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
  const float* weight = nullptr;  // [width]
  std::int64_t rows = 0;
  std::int32_t width = 0;  // a multiple of 32
  float eps = 0;
};

// out = in x weights, or out += in x weights. fp32 throughout.
struct Gemm {
  const float* in = nullptr;  // [rows, depth]
  std::int64_t in_stride = 0;
  const float* weights = nullptr;  // [depth, width]
  float* out = nullptr;            // [rows, width]
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;  // a multiple of kGemmRows
  std::int32_t depth = 0;
  std::int32_t width = 0;
  bool accumulate = false;
};

// The operations on the host and on CUDA. Those of CUDA may be captured.
void run_host(TinyV4Op op, const TinyV4Step& step);
void normalise_rows_host(const NormRows& norm);
void multiply_host(const Gemm& gemm);
#ifdef QUIRE_WITH_CUDA
void run_cuda(TinyV4Op op, const TinyV4Step& step, CUstream_st* stream);
void normalise_rows_cuda(const NormRows& norm, CUstream_st* stream);
void begin_request_cuda(const TinyV4Arrays& arrays, SeatId seat, const SeatRequest& request,
                        CUstream_st* stream);
#endif
class PinnedGemms;  // tiny_v4_gemms.h

class TinyV4 : public ServingModel {
 public:
  // Makes weights from the seed and copies them to the backend; blocks.
  TinyV4(Backend& backend, const ModelSpec& spec, const Limits& limits, Stream& stream,
         const TinyV4Config& config = {});

  void bind(DeviceCache& cache) const override;
  void begin_request(SeatId seat, const SeatRequest& request, StreamView stream) override;
  // In a decode step a batch row tries its sure token and the drafts behind it, as many as there
  // are and have room, keeps those that the model would have generated itself, and drafts anew;
  // such rows have their prompts behind them, and one token less of lookahead than drafts. A ragged
  // step keeps all its tokens. A batch row stops whose request then has all the tokens it may have,
  // or its end token next.
  void enqueue_step(DeviceCache& cache, PlanBufferId buffer, StepShape shape,
                    StreamView stream) const override;
  // Computes the request again alone, from its whole prefix, with a cache of its own: the greedy
  // tokens and the bytes of all entries must be the same.
  std::int64_t wait_to_verify(const DeviceCache& cache, Stream& stream,
                              const ServedRequest& request) override;

  // Of the step and layer that ran last.
  const TinyV4Arrays& arrays() const { return arrays_; }
  const TinyV4Config& config() const { return config_; }
  const TinyV4Weights& weights() const { return weights_; }

  // The row of a seat in `history` or `predicted`, [context_max + 1]. Blocks.
  std::vector<std::int32_t> wait_for_tokens(const std::int32_t* tokens, SeatId seat,
                                            Stream& stream) const;
  // Says which tokens follow the prompt, as if they had been generated. Blocks.
  void wait_to_set_history(SeatId seat, std::span<const std::int32_t> tokens, Stream& stream);
  // In stream order: what the seat's request will generate, by position (DraftsFromTruth). `tokens`
  // stay valid until the stream has passed.
  void set_truth(SeatId seat, std::span<const std::int32_t> tokens, StreamView stream);

 private:
  struct Replica;

  TinyV4Step make_step(const DeviceCache& cache, PlanBufferId buffer, StepShape shape) const;
  void point_at_layer(TinyV4Step& step, const DeviceCache& cache, LayerId layer) const;
  // The GEMMs of a layer in order, projections, queries and output, and that of the logits.
  std::array<Gemm, 3> gemms_of(const TinyV4Layer& layer, std::int64_t rows) const;
  Gemm head_gemm(std::int64_t rows) const;
  Gemm draft_gemm(std::int64_t rows) const;
  AppendInputs rows_of(const TinyV4Step& step) const;
  void enqueue_layers(DeviceCache& cache, PlanBufferId buffer, TinyV4Step step, LayerGroup group,
                      StreamView stream) const;
  void enqueue_logits(const TinyV4Step& step, StreamView stream) const;
  void enqueue_extension(DeviceCache& cache, PlanBufferId buffer, TinyV4Step step,
                         StreamView stream) const;
  void enqueue_passes(DeviceCache& cache, PlanBufferId buffer, TinyV4Step step,
                      StreamView stream) const;
  void enqueue_draft_layers(DeviceCache& cache, PlanBufferId buffer, const TinyV4Step& step,
                            const PlanInputs& plan, StreamView stream) const;
  void run(TinyV4Op op, const TinyV4Step& step, StreamView stream) const;
  void normalise(const NormRows& norm, StreamView stream) const;
  void multiply(const Gemm& gemm, StreamView stream) const;
  Replica& replica(const DeviceCache& cache, Stream& stream);

  Backend* backend_;
  ModelSpec spec_;
  Limits limits_;
  TinyV4Config config_;
  MemoryPool pool_;
  Memory memory_;
  TinyV4Arrays arrays_;
  TinyV4Weights weights_;
  std::shared_ptr<PinnedGemms> gemms_;  // null on the host
  std::shared_ptr<Replica> replica_;    // made by the first verification
};

}  // namespace quire::serving
