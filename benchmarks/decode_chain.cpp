// What does one layer's append cost in a replayed decode step, at the least?
//
// The time of an append is the difference between a graph of 33 layers and one of 1 layer, divided
// by 32: every layer has state, pages and weights of its own, and every replay another set of
// seats, so that no state is touched again before three times the L2 of other traffic. Both write
// the input rows first, as the engine's projections would have. The separate operations of the same
// work stand beside it.
#include <string>

#include <quire/kernels/append.h>
#include <quire/runtime/base/errors.h>

#include "benchmarks/support/decode_world.h"
#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"
#include "benchmarks/support/separate.h"

namespace {

using namespace quire;
using namespace quire::bench;

constexpr int kLayers = 33;

struct Target {
  std::int64_t batch;
  double csa_us, hca_us;
};
constexpr Target kTargets[] = {
    {1, 1.4, 1.2}, {8, 0, 0}, {64, 2.3, 1.9}, {128, 0, 0}, {256, 3.4, 2.8}};

std::optional<double> reach(double us) { return us > 0 ? std::optional(us) : std::nullopt; }

GraphExec chain_of(DecodeWorld& world, int layers, Pdl pdl) {
  return capture(world.backend(), world.stream(), [&] {
    world.next_set();
    world.touch_rows();
    world.enqueue_plan();
    for (int layer = 0; layer < layers; ++layer) world.enqueue_append(layer, pdl);
    world.enqueue_commit();
  });
}

Distribution time_of_append(DecodeWorld& world, Pdl pdl) {
  const GraphExec many = chain_of(world, kLayers, pdl);
  const GraphExec one = chain_of(world, 1, pdl);
  return time_of_copy(many, one, kLayers - 1, world.stream());
}

Distribution time_of_separate(DecodeWorld& world) {
  SeparateOperations separate(world, kLayers);
  const auto graph = [&](int layers) {
    return capture(world.backend(), world.stream(), [&] {
      world.next_set();
      world.touch_rows();
      world.enqueue_plan();
      for (int layer = 0; layer < layers; ++layer) separate.enqueue(layer);
      world.enqueue_commit();
    });
  };
  const GraphExec many = graph(kLayers);
  const GraphExec one = graph(1);
  return time_of_copy(many, one, kLayers - 1, world.stream());
}

void measure(Report& report, Backend& backend, LayerKind kind, const Target& target) {
  ModelSpec spec;
  spec.layers.assign(kLayers, kind);
  DecodeWorld world(backend, spec, target.batch);
  const bool csa = kind == LayerKind::kCsa;
  const std::string name = csa                       ? "CSA layer"
                           : kind == LayerKind::kHca ? "HCA layer"
                                                     : "sliding layer";
  // Of two appends behind one another, the second begins early where there is room for both.
  const std::string residency = concat("two grids: ", 2 * target.batch, " tokens on ",
                                       cuda::decode_append_places(kind, target.batch), " places");
  const auto add = [&](const std::string& what, const Distribution& times,
                       std::optional<double> at_most) {
    report.add({name + what, "batch", target.batch, times, at_most, {}, {}, residency});
  };
  const std::optional<double> at_most =
      kind == LayerKind::kSliding ? std::nullopt : reach(csa ? target.csa_us : target.hca_us);
  const Distribution fused = time_of_append(world, Pdl::kPrologue);
  add("", fused, at_most);
  add(", loads after the wait", time_of_append(world, Pdl::kWaitOnly), {});
  if (target.batch == 64) add(", plain launches", time_of_append(world, Pdl::kOff), {});
  if (csa) {
    const Distribution separate = time_of_separate(world);
    add(", separate operations", separate, target.batch == 64 ? std::optional(7.3) : std::nullopt);
    if (target.batch == 64) report.set("fused over separate", fused.median / separate.median);
  }
  world.check();
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu(
      "bench_decode_chain", "what one layer's append costs in a replayed decode chain", argc, argv,
      [](Report& report, Backend& backend, const Stream& stream) {
        report.set(measure_ceilings(backend, stream));
        for (const LayerKind kind : {LayerKind::kCsa, LayerKind::kHca, LayerKind::kSliding}) {
          for (const Target& target : kTargets) measure(report, backend, kind, target);
        }
      });
}
