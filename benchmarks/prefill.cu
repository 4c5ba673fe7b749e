// How fast does a long prefill fold and store, against what a copy reaches in the same run?
//
// One ragged step of 65,536 tokens in 16 requests, one layer, the compressor parts alone (no window).
// Input rows are 670 MB for CSA and 268 MB for HCA, more than four times the L2, so no sample finds
// its rows in the cache. Bytes counted: the input rows read, and the entries written.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/runtime/cuda/check.h>
#include <quire/runtime/owners.h>

namespace {

using namespace quire;

constexpr std::int64_t kTokens = 65536;
constexpr std::int64_t kRequests = 16;
constexpr int kSamples = 30;

// Medians are shown with the tenth and ninetieth percentile.
struct Sample {
  double p10, median, p90;
};

template <class Enqueue>
Sample time_of(Stream& stream, const Enqueue& enqueue) {
  const cudaStream_t handle = stream.view().cuda();
  cudaEvent_t begin, end;
  QUIRE_CUDA_CHECK(cudaEventCreate(&begin));
  QUIRE_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < kSamples + 3; ++i) {
    QUIRE_CUDA_CHECK(cudaEventRecord(begin, handle));
    enqueue();
    QUIRE_CUDA_CHECK(cudaEventRecord(end, handle));
    stream.wait();
    float milliseconds = 0;
    QUIRE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= 3) times.push_back(milliseconds * 1e-3);  // the first ones warm up
  }
  QUIRE_CUDA_CHECK(cudaEventDestroy(begin));
  QUIRE_CUDA_CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
  };
  return {at(0.1), at(0.5), at(0.9)};
}

void print(const char* what, const Sample& sample, double bytes, double ceiling) {
  const double rate = bytes / sample.median * 1e-12;
  std::printf("%-28s %8.1f us (p10 %.1f, p90 %.1f)  %6.2f TB/s  %5.1f %% of copy\n", what,
              sample.median * 1e6, sample.p10 * 1e6, sample.p90 * 1e6, rate,
              100.0 * rate / ceiling);
}

// Rows that are neither zero nor all alike.
__global__ void fill_rows(float* rows, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    auto x = static_cast<std::uint32_t>(i) * 0x9E3779B9u;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    rows[i] = static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-30f;
  }
}

void measure(Backend& backend, LayerKind kind, double ceiling) {
  Stream stream(backend);
  ModelSpec spec;
  spec.layers = {kind};
  Limits limits;
  limits.seats_max = kRequests;
  limits.pages = kTokens / kPageTokens;
  limits.rows_max = kRequests;
  limits.tokens_max = kTokens;
  limits.context_max = kTokens / kRequests;
  CacheManager cache(backend, spec, limits);

  const std::int64_t width = kind == LayerKind::kCsa ? 2048 + 512 : 1024;
  const std::int64_t weights = 128 * 512 + 512 + limits.context_max * kRopeDim;
  MemoryPool pool(backend, (kTokens * width + weights) * 4);
  Memory memory(pool, (kTokens * width + weights) * 4, stream);
  float* rows = reinterpret_cast<float*>(memory.data());
  fill_rows<<<1024, 256, 0, stream.view().cuda()>>>(rows, kTokens * width + weights);
  QUIRE_CUDA_CHECK(cudaGetLastError());
  const float* bias = rows + kTokens * width;
  const float* norm = bias + 128 * 512;
  LayerBinding binding;
  binding.csa_bias = binding.indexer_bias = binding.hca_bias = bias;
  binding.csa_norm = binding.indexer_norm = binding.hca_norm = norm;
  cache.device().bind_layer(LayerId(0), binding);
  cache.device().bind_rope(RopeGroup::kCompressing,
                           {norm + 512, limits.context_max, RopeLayout::kHalves});

  std::vector<BatchRow> batch;
  for (std::int64_t i = 0; i < kRequests; ++i) {
    const RequestId request = cache.ledger().admit(limits.context_max, limits.context_max).value();
    cache.ledger().reserve(request, limits.context_max).value();
    batch.push_back({request, static_cast<std::int32_t>(limits.context_max)});
  }
  const PlanBufferId buffer(0);
  cache.begin_step(batch, StepShape::ragged(kRequests, kTokens), buffer, stream);
  AppendInputs inputs;
  double bytes = static_cast<double>(kTokens * width * 4);
  if (kind == LayerKind::kCsa) {
    inputs.csa.data = rows;
    inputs.indexer.data = rows + kTokens * 2048;
    bytes += static_cast<double>(kTokens / 4 * (584 + 132));
  } else {
    inputs.hca.data = rows;
    bytes += static_cast<double>(kTokens / 128 * 584);
  }
  print(kind == LayerKind::kCsa ? "plan, CSA step" : "plan, HCA step",
        time_of(stream, [&] { cache.device().enqueue_plan(buffer, stream); }), 0.0, ceiling);
  print(kind == LayerKind::kCsa ? "append, CSA and indexer" : "append, HCA",
        time_of(stream, [&] { cache.device().append(LayerId(0), buffer, inputs, stream); }), bytes,
        ceiling);
}

}  // namespace

int main() {
  if (cuda_device_count() == 0) {
    std::puts("bench_prefill: no CUDA device");
    return 77;
  }
  const auto backend = make_cuda_backend();
  Stream stream(*backend);
  constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;
  double ceiling = 0;
  {
    MemoryPool pool(*backend, 2 * kCopyBytes);
    Memory memory(pool, 2 * kCopyBytes, stream);
    const Sample copy = time_of(stream, [&] {
      backend->copy(memory.data() + kCopyBytes, memory.data(), kCopyBytes, stream);
    });
    ceiling = 2.0 * static_cast<double>(kCopyBytes) / copy.median * 1e-12;
    print("copy of 1 GiB", copy, 2.0 * static_cast<double>(kCopyBytes), ceiling);
  }
  measure(*backend, LayerKind::kCsa, ceiling);
  measure(*backend, LayerKind::kHca, ceiling);
  return 0;
}
