// How fast does a long prefill fold and store, against what a copy reaches in the same run?
//
// The time of an append is the difference between a graph of many layers and one of one layer, each
// with input rows, weights, pages and seats of its own, behind a plan that has run: 32 layers more,
// or 4 where one layer's rows are large enough alone. So no row is in the cache, but those of small
// steps in the graph of one layer, which makes the figure longer, not shorter.
// Bytes counted: the input rows read and the entries written.
//
// The compressor parts alone are those of an engine that writes the window part by itself or on
// another stream: the copy of older window entries, once a layer and step, is not among them.
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/planner/plan_rule.h>
#include <quire/runtime/base/errors.h>

#include "benchmarks/support/bf16_rows.h"
#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"

namespace {

using namespace quire;
using namespace quire::bench;

constexpr std::int64_t kRequests = 16;
constexpr std::int64_t kPrefixMax = 127;  // tokens before a chunk that starts inside of windows
constexpr std::int64_t kBias = 128 * 512;
constexpr std::int64_t kLayerWeights = kBias + 2 * 512;
constexpr std::uint32_t kSeed = 20261130;

enum class Parts { kWindow, kCompressors, kAll };

std::int64_t compressor_width(LayerKind kind) {
  return kind == LayerKind::kCsa ? 2048 + 512 : 1024;
}

// Chunks of 16 requests, in layers of one kind.
struct Prefill {
  LayerKind kind;
  std::int64_t tokens;            // of all requests together
  bool inside_windows;            // chunks start at random positions, not at 0
  std::vector<StepShape> shapes;  // one plan buffer each, of the same chunks

  std::int64_t tokens_each() const { return tokens / kRequests; }
  std::int64_t shape_tokens() const {
    std::int64_t most = 0;
    for (const StepShape& shape : shapes) most = max_of<std::int64_t>(most, shape.tokens);
    return most;
  }
  int more_layers() const { return tokens >= 32768 ? 4 : 32; }
  int layers() const { return more_layers() + 1; }
};

StepShape exact_shape(std::int64_t tokens) {
  return StepShape::ragged(static_cast<std::int32_t>(kRequests), static_cast<std::int32_t>(tokens));
}

Limits limits_of(const Prefill& prefill) {
  Limits limits;
  limits.seats_max = kRequests;
  const auto steps = static_cast<std::int64_t>(prefill.shapes.size());
  limits.context_max = kPrefixMax + steps * prefill.tokens_each();
  limits.pages = kRequests * limits.cells_max();
  limits.tokens_max = max_of(prefill.shape_tokens(), kRequests * kPrefixMax);
  for (const StepShape& shape : prefill.shapes) {
    limits.rows_max = max_of<std::int64_t>(limits.rows_max, shape.rows);
  }
  limits.plan_buffers = steps;
  return limits;
}

class PrefillWorld {
 public:
  // Admits the requests, and prepares the same chunks for each shape. Blocks.
  PrefillWorld(Backend& backend, const Prefill& prefill)
      : backend_(&backend),
        prefill_(prefill),
        stream_(backend),
        cache_(backend, spec_of(prefill), limits_of(prefill)),
        rows_pool_(backend, row_bytes()),
        rows_(rows_pool_, row_bytes(), stream_),
        weights_pool_(backend, weight_bytes()),
        weights_(weights_pool_, weight_bytes(), stream_) {
    fill_random(reinterpret_cast<float*>(weights_.data()), weights_.bytes() / 4, 2, stream_);
    use_rows(ElementType::kFloat32);
    prepare();
    stream_.wait();
  }

  const Stream& stream() const { return stream_; }

  // Rows of this type from now on, in all parts.
  void use_rows(ElementType type) {
    type_ = type;
    if (type == ElementType::kFloat32) {
      fill_random(reinterpret_cast<float*>(rows_.data()), rows_.bytes() / 4, 1, stream_);
    } else {
      fill_random_bf16(rows_.data(), rows_.bytes() / 2, 1.0f, 1, stream_);
    }
    const float* weights = reinterpret_cast<const float*>(weights_.data());
    const RopeTable rope{weights + prefill_.layers() * kLayerWeights,
                         cache_.ledger().limits().context_max, RopeLayout::kHalves};
    cache_.device().bind_rope(RopeGroup::kCompressing, rope);
    for (std::int32_t layer = 0; layer < prefill_.layers(); ++layer, weights += kLayerWeights) {
      LayerBinding binding;
      binding.window_rows = binding.compressor_rows = type;
      binding.csa_bias = binding.hca_bias = weights;
      binding.indexer_bias = weights + 8 * 512;
      binding.csa_norm = binding.hca_norm = binding.indexer_norm = weights + kBias;
      binding.window_norm = weights + kBias + 512;
      cache_.device().bind_layer(LayerId(layer), binding);
    }
  }

  // Appends of so many layers, behind a plan that has run.
  GraphExec graph(int layers, Parts parts, int buffer = 0) {
    cache_.device().enqueue_plan(PlanBufferId(buffer), stream_);
    if (parts == Parts::kCompressors) {  // the older window entries are copied here, not below
      for (int layer = 0; layer < prefill_.layers(); ++layer) append(layer, Parts::kAll, buffer);
    }
    stream_.wait();
    return capture(*backend_, stream_, [&] {
      for (int layer = 0; layer < layers; ++layer) append(layer, parts, buffer);
    });
  }

  Distribution time_of_append(Parts parts) {
    const GraphExec many = graph(prefill_.layers(), parts);
    const GraphExec one = graph(1, parts);
    return time_of_copy(many, one, prefill_.more_layers(), stream_);
  }

  double bytes(Parts parts) const {
    std::int64_t bytes = 0;
    const std::int64_t tokens = prefill_.tokens;
    const std::int64_t element = bytes_of(type_);
    constexpr std::int64_t kMain = kMainDataBytes + kMainScaleBytes;
    constexpr std::int64_t kKeys = kIndexerDim + kIndexerScaleBytes;
    if (parts != Parts::kCompressors) {
      const std::int64_t kept = kRequests * min_of<std::int64_t>(128, prefill_.tokens_each());
      bytes += tokens * (512 * element + kMain) + kept * kMain;
    }
    if (parts != Parts::kWindow) {
      const bool csa = prefill_.kind == LayerKind::kCsa;
      bytes += tokens * compressor_width(prefill_.kind) * element;
      bytes += entries(csa ? kCsaRule : kHcaRule) * (csa ? kMain + kKeys : kMain);
    }
    return static_cast<double>(bytes);
  }

  void check() const {
    for (std::size_t i = 0; i < prefill_.shapes.size(); ++i) {
      const PlanBufferId buffer(static_cast<std::int32_t>(i));
      DeviceReport report{};
      PlanHeader header{};
      cache_.device().report(buffer, &report, stream_);
      backend_->copy(&header, cache_.device().plan_buffer(buffer).header, sizeof header, stream_);
      stream_.wait();
      check_all_lived(report);
      QUIRE_CHECK(report.nonfinite_tiles == 0,
                  "tiles that are not finite: ", report.nonfinite_tiles);
      QUIRE_CHECK(header.csa_entries == entries(kCsaRule), "planned ", header.csa_entries,
                  " CSA entries, not ", entries(kCsaRule));
    }
  }

 private:
  static ModelSpec spec_of(const Prefill& prefill) {
    ModelSpec spec;
    spec.layers.assign(static_cast<std::size_t>(prefill.layers()), prefill.kind);
    return spec;
  }

  std::int64_t layer_row_bytes() const {
    return prefill_.shape_tokens() * (512 + compressor_width(prefill_.kind)) * 4;
  }
  std::int64_t row_bytes() const { return prefill_.layers() * layer_row_bytes(); }
  std::int64_t weight_bytes() const {
    return (prefill_.layers() * kLayerWeights + limits_of(prefill_).context_max * kRopeDim) * 4;
  }

  std::int64_t entries(CompressionRule rule) const {
    std::int64_t count = 0;
    for (const std::int32_t start : starts_) {
      count += compress_count(rule, start, static_cast<std::int32_t>(prefill_.tokens_each()));
    }
    return count;
  }

  void prepare() {
    std::mt19937 random(kSeed);
    std::uniform_int_distribution<std::int32_t> prefix(1, kPrefixMax);
    const std::int64_t context = cache_.ledger().limits().context_max;
    std::vector<BatchRow> batch;
    std::int32_t tokens = 0;
    for (std::int64_t i = 0; i < kRequests; ++i) {
      batch.push_back({cache_.ledger().admit(context, context).value(), 0});
      if (prefill_.inside_windows) batch.back().tokens = max_of(prefix(random), 2);
      starts_.push_back(batch.back().tokens);
      tokens += batch.back().tokens;
    }
    if (prefill_.inside_windows) {
      begin(batch, StepShape::ragged(static_cast<std::int32_t>(kRequests), tokens), 0);
      cache_.device().enqueue_plan(PlanBufferId(0), stream_);
      cache_.device().enqueue_commit(PlanBufferId(0), nullptr, nullptr, stream_);
    }
    for (BatchRow& row : batch) row.tokens = static_cast<std::int32_t>(prefill_.tokens_each());
    int buffer = 0;
    for (const StepShape& shape : prefill_.shapes) begin(batch, shape, buffer++);
  }

  void begin(const std::vector<BatchRow>& batch, StepShape shape, int buffer) {
    std::vector<Outcome> outcomes;
    for (const BatchRow& row : batch) {
      cache_.ledger().reserve(row.request, row.tokens).value();
      outcomes.push_back({row.tokens, false});
    }
    const StepId id = cache_.begin_step(batch, shape, PlanBufferId(buffer), stream_);
    cache_.ledger().settle(id, outcomes);
  }

  void append(int layer, Parts parts, int buffer) {
    const std::byte* rows = rows_.data() + layer * layer_row_bytes();
    const std::int64_t element = bytes_of(type_);
    const std::byte* compressors = rows + prefill_.shape_tokens() * 512 * element;
    AppendInputs inputs;
    if (parts != Parts::kCompressors) inputs.window.data = rows;
    if (parts != Parts::kWindow && prefill_.kind == LayerKind::kCsa) {
      inputs.csa.data = compressors;
      inputs.indexer.data = compressors + prefill_.shape_tokens() * 2048 * element;
    } else if (parts != Parts::kWindow) {
      inputs.hca.data = compressors;
    }
    cache_.device().append(LayerId(layer), PlanBufferId(buffer), inputs, stream_);
  }

  Backend* backend_;
  Prefill prefill_;
  Stream stream_;
  CacheManager cache_;
  MemoryPool rows_pool_;
  Memory rows_;  // [layers] of [shape tokens, width] of each part
  MemoryPool weights_pool_;
  Memory weights_;  // [layers], then the RoPE table
  ElementType type_ = ElementType::kFloat32;
  std::vector<std::int32_t> starts_;
};

const char* name_of(Parts parts, LayerKind kind) {
  const bool csa = kind == LayerKind::kCsa;
  switch (parts) {
    case Parts::kWindow:
      return "window part";
    case Parts::kCompressors:
      return csa ? "CSA and indexer parts" : "HCA part";
    case Parts::kAll:
      return csa ? "CSA layer" : "HCA layer";
  }
  return "";
}

void measure(Report& report, Backend& backend, LayerKind kind, std::int64_t tokens,
             bool inside_windows) {
  PrefillWorld world(backend, {kind, tokens, inside_windows, {exact_shape(tokens)}});
  const auto add = [&](Parts parts, const std::string& what, std::optional<double> at_least) {
    report.add({name_of(parts, kind) + what,
                "tokens",
                tokens,
                world.time_of_append(parts),
                {},
                world.bytes(parts),
                at_least,
                {}});
  };
  const double target = kind == LayerKind::kCsa ? 4.0e12 : 3.5e12;
  const bool is_target = tokens == 65536 && !inside_windows;
  const std::string where = inside_windows ? ", mid-window" : "";
  add(Parts::kCompressors, where, is_target ? std::optional(target) : std::nullopt);
  if (kind == LayerKind::kCsa) add(Parts::kWindow, where, {});
  add(Parts::kAll, where, {});
  if (is_target) {
    world.use_rows(ElementType::kBfloat16);
    add(Parts::kCompressors, ", bf16 rows", {});
    if (kind == LayerKind::kCsa) add(Parts::kWindow, ", bf16 rows", {});
    add(Parts::kAll, ", bf16 rows", {});
  }
  world.check();
}

// 32,768 tokens in 16 requests, in a shape of just these and in one twice as large and of 256 batch
// rows.
void compare_padded(Report& report, Backend& backend, LayerKind kind) {
  constexpr std::int64_t kTokens = 32768;
  constexpr double kAllowed = 1.03;
  const Prefill prefill{
      kind, kTokens, false, {exact_shape(kTokens), StepShape::ragged(256, 2 * kTokens)}};
  PrefillWorld world(backend, prefill);
  const int layers = prefill.more_layers();
  for (const Parts parts : {Parts::kCompressors, Parts::kAll}) {
    const GraphExec padded = world.graph(layers, parts, 1);
    const GraphExec exact = world.graph(layers, parts, 0);
    Pair pair = time_both(padded, exact, world.stream());
    for (Distribution* times : {&pair.with, &pair.without}) {
      *times = {times->p10 / layers, times->median / layers, times->p90 / layers};
    }
    const std::string name = name_of(parts, kind);
    const double bytes = world.bytes(parts);
    report.add({name + ", exact shape", "tokens", kTokens, pair.without, {}, bytes, {}, {}});
    report.add({name + ", padded shape",
                "tokens",
                kTokens,
                pair.with,
                kAllowed * pair.without.median * 1e6,
                bytes,
                {},
                {}});
    report.set(name + ", padded over exact", pair.with.median / pair.without.median);
  }
  world.check();
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu("bench_prefill", "how fast a long prefill folds and stores", argc, argv,
                    [](Report& report, Backend& backend, const Stream& stream) {
                      report.set(measure_ceilings(backend, stream));
                      for (const LayerKind kind : {LayerKind::kCsa, LayerKind::kHca}) {
                        for (const std::int64_t tokens : {65536, 16384, 4096}) {
                          measure(report, backend, kind, tokens, false);
                        }
                        measure(report, backend, kind, 65536, true);
                        measure(report, backend, kind, 4096, true);
                        compare_padded(report, backend, kind);
                      }
                    });
}
