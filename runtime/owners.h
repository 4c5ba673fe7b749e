// Move-only owners of what a backend makes. Each keeps a reference to its backend, which must
// outlive it. None is default-constructible; a GraphExec can only come from a capture.
#pragma once

#include <quire/runtime/backend.h>

#include <utility>

namespace quire {

class Stream {
 public:
  explicit Stream(Backend& backend) : backend_(&backend), view_(backend.make_stream()) {}
  Stream(Stream&& other) noexcept
      : backend_(std::exchange(other.backend_, nullptr)), view_(other.view_) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (backend_ != nullptr) backend_->destroy_stream(view_);
  }

  StreamView view() const { return view_; }
  operator StreamView() const { return view_; }  // NOLINT: an owner reads as its view
  void wait() const { backend_->wait(view_); }

 private:
  Backend* backend_;
  StreamView view_;
};

class Event {
 public:
  explicit Event(Backend& backend) : backend_(&backend), handle_(backend.make_event()) {}
  Event(Event&& other) noexcept
      : backend_(other.backend_), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (handle_ != nullptr) backend_->destroy_event(handle_);
  }

  void record(StreamView stream) { backend_->record(handle_, stream); }
  void join_into(StreamView stream) const { backend_->join(stream, handle_); }
  void wait() const { backend_->wait_event(handle_); }

 private:
  Backend* backend_;
  void* handle_;
};

class GraphExec {
 public:
  GraphExec(GraphExec&& other) noexcept
      : backend_(other.backend_), handle_(std::exchange(other.handle_, nullptr)) {}
  GraphExec& operator=(GraphExec&&) = delete;
  ~GraphExec() {
    if (handle_ != nullptr) backend_->destroy_graph(handle_);
  }

  void launch(StreamView stream) const { backend_->launch_graph(handle_, stream); }
  void* handle() const { return handle_; }  // a cuda::CudaGraph* with the CUDA backend

 private:
  friend class Capture;
  GraphExec(Backend& backend, void* handle) : backend_(&backend), handle_(handle) {}

  Backend* backend_;
  void* handle_;
};

// Captures what is enqueued on the stream until `finish`. Destroyed unfinished, as by an exception,
// or where `finish` fails, it ends the capture and drops the graph: the stream is usable again.
class Capture {
 public:
  Capture(Backend& backend, StreamView stream) : backend_(&backend), stream_(stream) {
    backend.begin_capture(stream);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    if (backend_ != nullptr) backend_->abort_capture(stream_);
  }

  GraphExec finish() {
    GraphExec graph(*backend_, backend_->end_capture(stream_));
    backend_ = nullptr;  // only now: a failed end may have left the stream capturing
    return graph;
  }

 private:
  Backend* backend_;
  StreamView stream_;
};

// A pool with a budget, and spans of memory from it. Destruction returns memory in stream order;
// the stream and the pool outlive it.
class MemoryPool {
 public:
  MemoryPool(Backend& backend, std::int64_t budget_bytes)
      : backend_(&backend), handle_(backend.make_pool(budget_bytes)) {}
  MemoryPool(MemoryPool&& other) noexcept
      : backend_(other.backend_), handle_(std::exchange(other.handle_, nullptr)) {}
  MemoryPool& operator=(MemoryPool&&) = delete;
  ~MemoryPool() {
    if (handle_ != nullptr) backend_->destroy_pool(handle_);
  }

  Backend& backend() const { return *backend_; }
  void* handle() const { return handle_; }

 private:
  Backend* backend_;
  void* handle_;
};

class Memory {
 public:
  // Waits for the stream once, so that the memory may be used on any stream.
  Memory(MemoryPool& pool, std::int64_t bytes, StreamView stream)
      : pool_(&pool), stream_(stream), bytes_(bytes) {
    data_ = pool.backend().allocate(pool.handle(), bytes, stream);
    try {
      pool.backend().wait(stream);
    } catch (...) {
      pool.backend().free(pool.handle(), data_, stream);
      throw;
    }
  }
  Memory(Memory&& other) noexcept
      : pool_(other.pool_),
        stream_(other.stream_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(other.bytes_) {}
  Memory& operator=(Memory&&) = delete;
  ~Memory() {
    if (data_ != nullptr) pool_->backend().free(pool_->handle(), data_, stream_);
  }

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  MemoryPool* pool_;
  StreamView stream_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_;
};

}  // namespace quire
