// The shortest program that embeds Quire: one sliding layer, one request, a prefill and ten decode
// steps replayed from one captured graph. Runs on the GPU where one is, on the host otherwise.
#include <cstdio>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/decode_graphs.h>

int main() {
  using namespace quire;
  const auto backend = make_default_backend();
  Stream stream(*backend);
  const ModelSpec spec{.layers = {LayerKind::kSliding}};
  const Limits limits{
      .seats_max = 4, .pages = 64, .rows_max = 4, .tokens_max = 256, .context_max = 4096};
  CacheManager cache(*backend, spec, limits);

  // The engine's own memory: a RoPE table, and the rows that its GEMMs would write (here zeros).
  std::vector<float> table(static_cast<std::size_t>(limits.context_max * kRopeDim));
  make_rope_table(RopeGroup::kSliding, limits.context_max, RopeLayout::kHalves, table);
  const auto table_bytes = static_cast<std::int64_t>(table.size() * sizeof(float));
  const std::int64_t bytes = table_bytes + limits.tokens_max * kHeadDim * 2;
  MemoryPool pool(*backend, bytes);
  Memory memory(pool, bytes, stream);
  backend->fill(memory.data(), 0, bytes, stream);
  backend->copy(memory.data(), table.data(), table_bytes, stream);
  const auto* rope = reinterpret_cast<const float*>(memory.data());
  cache.device().bind_layer(LayerId(0), {});  // rows come normed, in bf16
  cache.device().bind_rope(RopeGroup::kSliding, {rope, limits.context_max, RopeLayout::kHalves});

  AppendInputs inputs;
  inputs.window.data = memory.data() + table_bytes;
  const auto enqueue_step = [&](StepShape, PlanBufferId plan, StreamView on) {
    cache.device().enqueue_plan(plan, on);
    // ... the layer's GEMMs write the rows ...
    cache.device().append(LayerId(0), plan, inputs, on);
    // ... attention reads the pools through cache.device().views(plan); sampling ...
    cache.device().enqueue_commit(plan, nullptr, nullptr, on);
  };
  const PlanBufferId buffer(0);
  const StepShape decode = StepShape::decode(4);
  DecodeGraphs graphs(cache, buffer, std::span(&decode, 1), enqueue_step, stream);

  const RequestId request = cache.ledger().admit(4096, 210).value();
  const auto step = [&](std::int32_t tokens, StepShape shape, bool replay) {
    if (!cache.ledger().reserve(request, tokens)) return;  // a Shortfall: wait, or release another
    const BatchRow row{request, tokens};
    const StepId id = cache.begin_step(std::span(&row, 1), shape, buffer, stream);
    replay ? graphs.launch(shape, stream) : enqueue_step(shape, buffer, stream);
    stream.wait();  // an engine reads its tokens here, through an event and a step later
    const Outcome outcome{.kept_tokens = tokens};
    cache.ledger().settle(id, std::span(&outcome, 1));
  };
  step(200, StepShape::ragged(1, 200), false);
  for (int i = 0; i < 10; ++i) step(1, decode, true);
  std::puts(cache.ledger().describe().c_str());
}
