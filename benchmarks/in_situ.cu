// What does a decode step grow by when an append stands in it, between the kernel that makes its
// input rows and the next one?
//
// A step of eight layers, each a producer that reads 64 MB of its own weights and writes the rows,
// the append, and a consumer that waits; less the same step without these appends, sample against
// sample, divided by eight. In front of both stand the plan and one layer's append, the plainly
// launched one. Producers: (a) triggers right behind its wait, (b) never triggers, (c) is a
// cuBLASLt GEMM, launched as cuBLASLt likes. The weights alone turn the L2 over eight times a
// replay.
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include <quire/kernels/pdl.cuh>
#include <quire/runtime/cuda/launch.cuh>

#include "benchmarks/support/bf16_rows.h"
#include "benchmarks/support/decode_world.h"
#include "benchmarks/support/gemm.h"
#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"

namespace {

using namespace quire;
using namespace quire::bench;

constexpr int kLayers = 8;
constexpr std::int64_t kBatchMax = 256;
// Of the GEMM, which makes the rows of all parts of a CSA layer at once.
constexpr std::int64_t kWidth = 512 + 2048 + 512;
constexpr std::int64_t kDepth = 10880;
constexpr std::int64_t kProducerBytes = kDepth * kWidth * 2;

struct Target {
  std::int64_t batch;
  double triggers_us, others_us;
};
constexpr Target kTargets[] = {
    {1, 1.4, 2.0}, {8, 0, 0}, {64, 2.0, 3.0}, {128, 0, 0}, {256, 4.5, 5.0}};

std::optional<double> reach(double us) { return us > 0 ? std::optional(us) : std::nullopt; }

// --- The kernels around the append ---

// One block an SM keeps enough loads in flight, and leaves more than half of threads and registers
// to those behind. All blocks are there at once: the last one to trigger does not wait for the
// first to end.
constexpr int kThreads = 512;
constexpr int kVectors = 8;  // 16-byte loads of a thread in flight
constexpr int kPartsMax = 3;

struct ProducerParams {
  const uint4* weights;
  std::int64_t vectors;
  float4* parts[kPartsMax];  // null: not there
  std::int64_t part_vectors[kPartsMax];
};

__device__ float value_of(std::uint32_t x) {
  x *= 0x9E3779B9u;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-30f;
}

template <bool kTriggers>
__global__ void __launch_bounds__(kThreads)
    producer_kernel(const __grid_constant__ ProducerParams params) {
  cuda::pdl_wait();
  if constexpr (kTriggers) cuda::pdl_trigger();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  std::uint32_t sum = 0;
  const auto take = [&](const uint4& x) { sum += x.x ^ x.y ^ x.z ^ x.w; };
  std::int64_t i = thread;
#pragma unroll 1
  for (; i + threads * (kVectors - 1) < params.vectors; i += threads * kVectors) {
    uint4 x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) x[k] = params.weights[i + k * threads];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) take(x[k]);
  }
  for (; i < params.vectors; i += threads) take(params.weights[i]);
  // The rows need what was read, as they do in a GEMM.
  const std::uint32_t seed = sum == 0x9E3779B9u ? 1 : 0;
  for (int part = 0; part < kPartsMax; ++part) {
#pragma unroll 1
    for (std::int64_t v = thread; v < params.part_vectors[part]; v += threads) {
      const auto at = static_cast<std::uint32_t>(v) * 4 + seed;
      params.parts[part][v] =
          make_float4(value_of(at), value_of(at + 1), value_of(at + 2), value_of(at + 3));
    }
  }
}

struct ConsumerParams {
  const float* rows;    // [batch, 512] window rows: in L2 with and without the append
  std::int64_t stride;  // elements
  float* sink;          // never written
};

__global__ void __launch_bounds__(128)
    consumer_kernel(const __grid_constant__ ConsumerParams params) {
  cuda::pdl_wait();
  cuda::pdl_trigger();
  const float* row = params.rows + blockIdx.x * params.stride;
  const float4 x = __ldcg(reinterpret_cast<const float4*>(row) + threadIdx.x);
  if (x.x + x.y + x.z + x.w == 12345.0f) *params.sink = x.x;
}

// --- A step with them ---

enum class Producer { kTriggers, kNeverTriggers, kGemm };

// What producers read, once for all worlds.
struct Weights {
  Weights(Backend& backend, const Stream& stream)
      : pool(backend, kBytes), memory(pool, kBytes, stream) {
    fill_random_bf16(memory.data(), kRowsAt / 2, 0x1p-6f, 5, stream);
    fill_random_bf16(in(), kBatchMax * kDepth, 1.0f, 6, stream);
    stream.wait();
  }

  static constexpr std::int64_t kRowsAt = kLayers * kProducerBytes;
  static constexpr std::int64_t kOutAt = kRowsAt + kBatchMax * kDepth * 2;
  static constexpr std::int64_t kWorkspaceAt = kOutAt + kBatchMax * kWidth * 4;
  static constexpr std::int64_t kSinkAt = kWorkspaceAt + kBenchGemmWorkspaceBytes;
  static constexpr std::int64_t kBytes = kSinkAt + 256;

  const std::byte* of(int layer) const { return memory.data() + layer * kProducerBytes; }
  std::byte* in() const { return memory.data() + kRowsAt; }
  float* out() const { return reinterpret_cast<float*>(memory.data() + kOutAt); }
  std::byte* workspace() const { return memory.data() + kWorkspaceAt; }
  float* sink() const { return reinterpret_cast<float*>(memory.data() + kSinkAt); }

  MemoryPool pool;
  Memory memory;
};

class Situation {
 public:
  Situation(DecodeWorld& world, const Weights& weights, LayerKind kind, Producer producer)
      : world_(&world),
        weights_(&weights),
        producer_(producer),
        batch_(world.shape().rows),
        inputs_(world.inputs_of(0)) {
    QUIRE_CHECK(producer != Producer::kGemm || kind == LayerKind::kCsa,
                "the GEMM makes the rows of CSA layers");
    if (producer == Producer::kGemm) {
      gemm_ = std::make_unique<Gemm>(batch_, kDepth, kWidth, weights.workspace());
      inputs_.window = {weights.out(), kWidth};
      inputs_.csa = {weights.out() + 512, kWidth};
      inputs_.indexer = {weights.out() + 512 + 2048, kWidth};
    }
    produce(0);  // what they load, cuBLASLt above all, they load here and not in a capture
    consume();
    world.stream().wait();
  }

  // Seconds that an append adds to a layer, and what the layer takes without it.
  Pair measure(Pdl pdl) const {
    const GraphExec with = step(true, pdl);
    const GraphExec without = step(false, pdl);
    Pair pair = time_both(with, without, world_->stream());
    for (Distribution* times : {&pair.with, &pair.without, &pair.difference}) {
      *times = {times->p10 / kLayers, times->median / kLayers, times->p90 / kLayers};
    }
    return pair;
  }

  std::string describe() const { return gemm_ != nullptr ? gemm_->describe() : std::string(); }

 private:
  GraphExec step(bool appends, Pdl pdl) const {
    return capture(world_->backend(), world_->stream(), [&] {
      world_->next_set();
      world_->touch_rows();
      world_->enqueue_plan();
      world_->enqueue_append(0);
      for (int layer = 0; layer < kLayers; ++layer) {
        produce(layer);
        if (appends) world_->enqueue_append(layer + 1, inputs_, pdl);
        consume();
      }
      world_->enqueue_commit();
    });
  }

  void produce(int layer) const {
    if (producer_ == Producer::kGemm) {
      return gemm_->enqueue(weights_->of(layer), weights_->in(), weights_->out(), world_->stream());
    }
    ProducerParams params{
        reinterpret_cast<const uint4*>(weights_->of(layer)), kProducerBytes / 16, {}, {}};
    int part = 0;
    const auto add = [&](const AppendInputs::Rows& rows, std::int64_t width) {
      if (rows.data == nullptr) return;
      params.parts[part] = static_cast<float4*>(const_cast<void*>(rows.data));
      params.part_vectors[part++] = batch_ * width / 4;
    };
    add(inputs_.window, 512);
    add(inputs_.csa, 2048);
    add(inputs_.indexer, 512);
    add(inputs_.hca, 1024);
    const auto kernel =
        producer_ == Producer::kTriggers ? &producer_kernel<true> : &producer_kernel<false>;
    cuda::launch(kernel, cuda::linear_grid(cuda::multiprocessors()), dim3(kThreads), 0,
                 world_->stream().view().cuda(), true, params);
  }

  void consume() const {
    const ConsumerParams params{static_cast<const float*>(inputs_.window.data),
                                inputs_.window.stride == 0 ? 512 : inputs_.window.stride,
                                weights_->sink()};
    cuda::launch(consumer_kernel, cuda::linear_grid(batch_), dim3(128), 0,
                 world_->stream().view().cuda(), true, params);
  }

  DecodeWorld* world_;
  const Weights* weights_;
  Producer producer_;
  std::int64_t batch_;
  AppendInputs inputs_;
  std::unique_ptr<Gemm> gemm_;
};

void add(Report& report, const std::string& name, std::int64_t batch, const Pair& pair,
         std::optional<double> at_most, const std::string& more = {}) {
  char beside[64];
  std::snprintf(beside, sizeof beside, "beside %.2f us of the others", pair.without.median * 1e6);
  report.add({name,
              "batch",
              batch,
              pair.difference,
              at_most,
              {},
              {},
              more.empty() ? beside : concat(beside, "; ", more)});
}

void measure(Report& report, Backend& backend, const Weights& weights, LayerKind kind,
             const Target& target) {
  ModelSpec spec;
  // The one in front, those measured, and one for the last of them to bring into L2.
  spec.layers.assign(kLayers + 2, kind);
  DecodeWorld world(backend, spec, target.batch);
  const bool csa = kind == LayerKind::kCsa;
  const std::string name = csa ? "CSA append" : "HCA append";
  {
    const Situation triggers(world, weights, kind, Producer::kTriggers);
    add(report, name + " (a) triggers", target.batch, triggers.measure(Pdl::kPrologue),
        csa ? reach(target.triggers_us) : std::nullopt);
    if (csa) {
      add(report, name + " (a), loads after wait", target.batch, triggers.measure(Pdl::kWaitOnly),
          {});
      add(report, name + " (a), plain launches", target.batch, triggers.measure(Pdl::kOff), {});
    }
  }
  {
    const Situation never(world, weights, kind, Producer::kNeverTriggers);
    add(report, name + " (b) never triggers", target.batch, never.measure(Pdl::kPrologue),
        csa ? reach(target.others_us) : std::nullopt);
  }
  if (csa) {
    const Situation gemm(world, weights, kind, Producer::kGemm);
    add(report, name + " (c) cuBLASLt", target.batch, gemm.measure(Pdl::kPrologue),
        reach(target.others_us), gemm.describe());
  }
  world.check();
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu(
      "bench_in_situ",
      "what a decode step grows by when an append stands between producer and consumer", argc, argv,
      [](Report& report, Backend& backend, const Stream& stream) {
        report.set(measure_ceilings(backend, stream));
        report.set("producer reads, bytes", static_cast<double>(kProducerBytes));
        report.set("producer writes, bytes a batch row", static_cast<double>(kWidth * 4));
        const Weights weights(backend, stream);
        for (const LayerKind kind : {LayerKind::kCsa, LayerKind::kHca}) {
          for (const Target& target : kTargets) measure(report, backend, weights, kind, target);
        }
      });
}
