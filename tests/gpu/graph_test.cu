// Captured steps on a GPU: what nodes and edges our part has, in our capture and in an engine's, in
// one piece or several, on one stream or two (docs/PDL.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <quire/runtime/cuda/check.h>
#include <quire/runtime/cuda/cuda_graph.h>
#include <quire/runtime/decode_graphs.h>
#include <quire/runtime/cuda/launch.cuh>

#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace {

using namespace quire;
using namespace quire::test;

constexpr std::int32_t kTokens = 160;
constexpr PlanBufferId kBuffer(0);

TestEngineOptions engine_options(Pdl pdl = Pdl::kPrologue) {
  TestEngineOptions options;
  options.spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, LayerKind::kCsa};
  options.limits.seats_max = 8;
  options.limits.pages = 64;
  options.limits.rows_max = 8;
  options.limits.tokens_max = 1024;
  options.limits.context_max = 520;
  options.limits.run_ahead_max = 0;
  options.pdl = pdl;
  return options;
}

// --- Nodes and edges ---

struct Edge {
  cudaGraphNode_t from, to;
  bool programmatic;
};

std::vector<Edge> edges_of(cudaGraph_t graph) {
  std::size_t count = 0;
  QUIRE_CUDA_CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &count));
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> data(count);
  QUIRE_CUDA_CHECK(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &count));
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < count; ++i) {
    const bool programmatic = data[i].type == cudaGraphDependencyTypeProgrammatic;
    if (programmatic) CHECK(data[i].from_port == cudaGraphKernelNodePortProgrammatic);
    edges.push_back({from[i], to[i], programmatic});
  }
  return edges;
}

std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
  std::size_t count = 0;
  QUIRE_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  QUIRE_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  return nodes;
}

cudaGraphNodeType type_of(cudaGraphNode_t node) {
  cudaGraphNodeType type{};
  QUIRE_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
  return type;
}

// The nodes of a graph that is one chain, first to last, and whether each is behind a programmatic
// edge.
std::vector<std::pair<cudaGraphNode_t, bool>> chain_of(cudaGraph_t graph) {
  const auto edges = edges_of(graph);
  auto nodes = nodes_of(graph);
  REQUIRE(edges.size() + 1 == nodes.size());
  std::vector<std::pair<cudaGraphNode_t, bool>> chain;
  for (const cudaGraphNode_t node : nodes) {
    const bool root =
        std::none_of(edges.begin(), edges.end(), [&](const Edge& edge) { return edge.to == node; });
    if (root) chain.emplace_back(node, false);
  }
  REQUIRE(chain.size() == 1);
  while (chain.size() < nodes.size()) {
    const auto next = std::find_if(edges.begin(), edges.end(), [&](const Edge& edge) {
      return edge.from == chain.back().first;
    });
    REQUIRE(next != edges.end());
    chain.emplace_back(next->to, next->programmatic);
  }
  return chain;
}

TEST_CASE("our captured decode step is kernels only, programmatic behind the first append") {
  TestEngine engine(test_backend(), engine_options());
  const StepShape shape = StepShape::decode(4);
  const DecodeGraphs graphs(
      engine.cache(), kBuffer, std::span(&shape, 1),
      [&](StepShape step, PlanBufferId, StreamView stream) {
        engine.enqueue_body(step, stream);
        engine.enqueue_commit(stream);
      },
      engine.stream());
  const auto* graph = static_cast<const cuda::CudaGraph*>(graphs.graph(shape).handle());
  const auto chain = chain_of(graph->graph);
  // plan, four appends, commit
  REQUIRE(chain.size() == 6);
  for (const auto& [node, programmatic] : chain) CHECK(type_of(node) == cudaGraphNodeTypeKernel);
  CHECK_FALSE(chain[1].second);  // the full edge behind the planner
  for (std::size_t i = 2; i < chain.size(); ++i) CHECK(chain[i].second);
}

TEST_CASE("plain appends are captured behind full edges") {
  TestEngine engine(test_backend(), engine_options(Pdl::kOff));
  const StepShape shape = StepShape::decode(4);
  engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
  Capture capture(engine.backend(), engine.stream());
  engine.enqueue_body(shape, engine.stream());
  engine.enqueue_commit(engine.stream());
  const GraphExec graph = capture.finish();
  for (const auto& [node, programmatic] :
       chain_of(static_cast<const cuda::CudaGraph*>(graph.handle())->graph)) {
    CHECK(type_of(node) == cudaGraphNodeTypeKernel);
    CHECK_FALSE(programmatic);
  }
}

// G7
TEST_CASE(
    "an engine may own the capture and put memset, memcpy and host nodes between our kernels") {
  TestEngine engine(test_backend(), engine_options());
  engine.poison();
  const StepShape shape = StepShape::decode(2);
  DeviceArray<std::uint32_t> scratch(engine.backend(), engine.stream(), 64, 0);
  const auto expected = one_shot(engine, 0, kTokens);
  const RequestId request = engine.admit(0, kTokens);
  int host_calls = 0;

  engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
  const cudaStream_t stream = engine.stream().view().cuda();
  cudaGraph_t graph = nullptr;
  QUIRE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  engine.cache().device().enqueue_plan(kBuffer, engine.stream());
  for (std::int32_t layer = 0; layer < 4; ++layer) {
    engine.enqueue_append(LayerId(layer), shape, engine.stream());
    if (layer == 0) {
      QUIRE_CUDA_CHECK(cudaMemsetAsync(scratch.data(), 1, 64, stream));
    } else if (layer == 1) {
      QUIRE_CUDA_CHECK(cudaMemcpyAsync(scratch.data() + 32, scratch.data(), 64,
                                       cudaMemcpyDeviceToDevice, stream));
    } else if (layer == 2) {
      QUIRE_CUDA_CHECK(cudaLaunchHostFunc(
          stream, [](void* calls) { ++*static_cast<int*>(calls); }, &host_calls));
    }
  }
  engine.enqueue_commit(engine.stream());
  QUIRE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  const auto nodes = nodes_of(graph);
  CHECK(nodes.size() == 9);
  // Next to the engine's memory and host nodes the edges are full.
  for (const Edge& edge : edges_of(graph)) {
    const bool kernels = type_of(edge.from) == cudaGraphNodeTypeKernel &&
                         type_of(edge.to) == cudaGraphNodeTypeKernel;
    if (!kernels) CHECK_FALSE(edge.programmatic);
  }
  const auto in_chain = chain_of(graph);
  CHECK_FALSE(in_chain[1].second);  // the first append
  CHECK(in_chain.back().second);    // the commit, right behind the last append
  CHECK(std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
          return type_of(node) == cudaGraphNodeTypeKernel;
        }) == 6);
  cudaGraphExec_t exec = nullptr;
  QUIRE_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));

  const std::vector<StepRow> rows{{request, 1}};
  for (std::int32_t i = 0; i < kTokens; ++i) {
    const StepId id = engine.begin(rows, shape);
    QUIRE_CUDA_CHECK(cudaGraphLaunch(exec, stream));
    engine.finish(id, rows);
  }
  engine.stream().wait();
  const bool same = engine.live_bytes(request) == expected;
  CHECK(same);
  CHECK(host_calls == kTokens);
  QUIRE_CUDA_CHECK(cudaGraphExecDestroy(exec));
  QUIRE_CUDA_CHECK(cudaGraphDestroy(graph));
}

TEST_CASE("a step may be captured in pieces, and its parts on streams that fork and join") {
  TestEngine engine(test_backend(), engine_options());
  engine.poison();
  const auto expected = one_shot(engine, 0, kTokens);
  const StepShape shape = StepShape::decode(2);
  Stream side(engine.backend());
  Event forked(engine.backend());
  Event joined(engine.backend());
  DeviceCache& device = engine.cache().device();
  engine.cache().begin_padding_step(shape, kBuffer, engine.stream());
  engine.stream().wait();

  std::vector<GraphExec> pieces;
  const auto piece = [&](const auto& body) {
    Capture capture(engine.backend(), engine.stream());
    body();
    pieces.push_back(capture.finish());
  };
  piece([&] { device.enqueue_plan(kBuffer, engine.stream()); });
  piece([&] {
    engine.enqueue_append(LayerId(0), shape, engine.stream());
    // Layer 1: the window on the side, the compressors on the main stream.
    const auto rows = engine.rows_of(LayerId(1));
    AppendInputs window, compressors;
    window.window.data = rows.window;
    compressors.csa.data = rows.csa;
    compressors.indexer.data = rows.indexer;
    forked.record(engine.stream());
    forked.join_into(side);
    device.append(LayerId(1), kBuffer, window, side);
    joined.record(side);
    device.append(LayerId(1), kBuffer, compressors, engine.stream());
    joined.join_into(engine.stream());
  });
  piece([&] {
    engine.enqueue_append(LayerId(2), shape, engine.stream());
    engine.enqueue_append(LayerId(3), shape, engine.stream());
    engine.enqueue_commit(engine.stream());
  });
  for (const GraphExec& graph : pieces) {
    for (const cudaGraphNode_t node :
         nodes_of(static_cast<const cuda::CudaGraph*>(graph.handle())->graph)) {
      CHECK(type_of(node) == cudaGraphNodeTypeKernel);
    }
  }

  const RequestId request = engine.admit(0, kTokens);
  const std::vector<StepRow> rows{{request, 1}};
  for (std::int32_t i = 0; i < kTokens; ++i) {
    const StepId id = engine.begin(rows, shape);
    for (const GraphExec& graph : pieces) graph.launch(engine.stream());
    engine.finish(id, rows);
  }
  const bool same = engine.live_bytes(request) == expected;
  CHECK(same);
}

}  // namespace
