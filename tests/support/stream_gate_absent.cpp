// Stands in for stream_gate.cu in builds without the toolkit, where no stream is CUDA's.
#include <quire/runtime/base/errors.h>

#include "tests/support/stream_gate.h"

namespace quire::test {

std::unique_ptr<StreamGate> close_gate(StreamView) {
  throw UsageError("a gate for a CUDA stream, but this build is without CUDA");
}

}  // namespace quire::test
