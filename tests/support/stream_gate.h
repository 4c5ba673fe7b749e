// Keeps a CUDA stream from going on while a test enqueues behind the gate, for Held
// (tests/support/field_stories.h). Two bodies: stream_gate.cu, and stream_gate_absent.cpp where the
// library is built without CUDA.
#pragma once

#include <memory>
#include <string>

#include <quire/runtime/base/stream_view.h>

namespace quire::test {

class StreamGate {
 public:
  virtual ~StreamGate() = default;  // opens
  // Lets the stream go on. "" where nothing behind the gate had run before; else what went wrong.
  virtual std::string open() = 0;
};

// Enqueues the gate; what is in front of it still runs. Does not wait. UsageError without CUDA.
std::unique_ptr<StreamGate> close_gate(StreamView stream);

}  // namespace quire::test
