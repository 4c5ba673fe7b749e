// A host function stands in the stream until the gate opens. It takes no place on the GPU, so other
// streams run meanwhile, and it gives up after a while: a call in the story that waits for the
// stream ends as a failure, not as a hang.
#include "tests/support/stream_gate.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include <quire/runtime/cuda/check.h>

namespace quire::test {
namespace {

constexpr std::chrono::seconds kPatience{20};  // a story enqueues all it has in milliseconds

struct Latch {
  std::mutex mutex;
  std::condition_variable opened;
  bool open = false;
  bool gave_up = false;
};

using SharedLatch = std::shared_ptr<Latch>;  // whoever is last drops it: the test, or the stream

// On a thread of the driver's.
void CUDART_CB wait_at(void* handed) {
  const std::unique_ptr<SharedLatch> owned(static_cast<SharedLatch*>(handed));
  Latch& latch = **owned;
  std::unique_lock lock(latch.mutex);
  latch.gave_up = !latch.opened.wait_for(lock, kPatience, [&latch] { return latch.open; });
}

class CudaGate final : public StreamGate {
 public:
  explicit CudaGate(cudaStream_t stream) : stream_(stream) {
    auto handed = std::make_unique<SharedLatch>(latch_);
    QUIRE_CUDA_CHECK(cudaLaunchHostFunc(stream_, &wait_at, handed.get()));
    (void)handed.release();  // it is the host function's
  }
  CudaGate(const CudaGate&) = delete;
  CudaGate& operator=(const CudaGate&) = delete;
  ~CudaGate() override { (void)open_latch(); }

  std::string open() override {
    const cudaError_t before = cudaStreamQuery(stream_);
    if (before == cudaErrorNotReady) (void)cudaGetLastError();  // or later launches report it
    if (!open_latch()) {
      return concat("the stream went on after ", kPatience.count(),
                    " s: a call while it was held waits for it, or more was enqueued than a stream "
                    "takes (about 1,000 launches), or streams share a queue of the hardware "
                    "(CUDA_DEVICE_MAX_CONNECTIONS), or launches block (CUDA_LAUNCH_BLOCKING, a "
                    "sanitizer: pass --overlap=0)");
    }
    if (before == cudaErrorNotReady) return "";
    return concat("the stream was not held: ", cudaGetErrorName(before));
  }

 private:
  // Whether the host function had not given up before.
  bool open_latch() {
    bool in_time = false;
    {
      const std::lock_guard lock(latch_->mutex);
      latch_->open = true;
      in_time = !latch_->gave_up;
    }
    latch_->opened.notify_all();
    return in_time;
  }

  cudaStream_t stream_;
  SharedLatch latch_ = std::make_shared<Latch>();
};

}  // namespace

std::unique_ptr<StreamGate> close_gate(StreamView stream) {
  return std::make_unique<CudaGate>(stream.cuda());
}

}  // namespace quire::test
