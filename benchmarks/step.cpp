// What does a whole decode step of the models cost: plan, one append a layer, commit? In one graph,
// as an engine replays it, without the engine's own kernels. No state is touched again before three
// times the L2 of other traffic; phases are mixed.
#include <string>

#include "benchmarks/support/decode_world.h"
#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"

namespace {

using namespace quire;
using namespace quire::bench;

struct Target {
  std::int64_t batch;
  double us;
};
constexpr Target kTargets[] = {{1, 65}, {8, 0}, {64, 95}, {128, 0}, {256, 150}};

// The step behind a change of seats and fresh rows, less those alone.
Distribution time_of_step(DecodeWorld& world) {
  const auto in_front = [&] {
    world.next_set();
    world.touch_rows();
  };
  const GraphExec step = capture(world.backend(), world.stream(), [&] {
    in_front();
    world.enqueue_plan();
    for (std::int64_t layer = 0; layer < world.layers(); ++layer) world.enqueue_append(layer);
    world.enqueue_commit();
  });
  const GraphExec nothing = capture(world.backend(), world.stream(), in_front);
  return time_both(step, nothing, world.stream()).difference;
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu(
      "bench_step", "what plan, appends and commit of a whole decode step cost", argc, argv,
      [](Report& report, Backend& backend, const Stream&) {
        for (const bool flash : {true, false}) {
          const ModelSpec spec =
              flash ? ModelSpec::deepseek_v4_flash() : ModelSpec::deepseek_v4_pro();
          const std::string name = flash ? "V4-Flash" : "V4-Pro";
          for (const Target& target : kTargets) {
            DecodeWorld world(backend, spec, target.batch);
            const std::optional<double> at_most =
                flash && target.us > 0 ? std::optional(target.us) : std::nullopt;
            report.add(
                {name + " step", "batch", target.batch, time_of_step(world), at_most, {}, {}, {}});
            world.check();
          }
        }
      });
}
