// The host backend's stream: a FIFO of tasks, drained by one worker thread. Work in flight is in
// flight here too. The engine's own host work enters through `enqueue` as well.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

using HostTask = std::function<void()>;

// Tasks in the order in which they were queued. Its room only grows: once there is enough for all
// that are ever queued together, nothing is allocated. A push that throws has changed nothing.
class HostTaskQueue {
 public:
  bool empty() const { return count_ == 0; }
  std::size_t size() const { return count_; }
  void push_back(HostTask task);
  void pop_back();
  HostTask pop_front();

 private:
  HostTask& at(std::size_t index) { return ring_[(first_ + index) % ring_.size()]; }

  std::vector<HostTask> ring_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

// What a capture recorded; a replay queues the same tasks again. The tasks of streams that were
// forked into the capture stand among them in the order in which they were enqueued, which is one
// of the orders that the joins allow.
struct HostGraph {
  std::vector<HostTask> tasks;
};

class HostStream;

// A capture in progress: the stream that began it comes first, forked ones follow. Owner thread.
struct HostCapture {
  HostGraph graph;
  std::vector<HostStream*> streams;
};

class HostStream {
 public:
  HostStream();
  ~HostStream();  // drains what is queued, then joins the worker
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  // Queues the task, or records it while capturing. Never blocks on the task.
  void enqueue(HostTask task);

  // Blocks until everything queued so far has run. Throws what the first failing task threw; tasks
  // behind a failure are dropped until then.
  void wait();

  // Blocks like `wait`, but leaves a failure for `wait` to throw.
  void wait_to_drain() noexcept;

  void begin_capture();                            // UsageError when capturing already
  std::shared_ptr<const HostGraph> end_capture();  // UsageError unless this stream began it
  void abort_capture() noexcept;
  bool capturing() const;
  std::shared_ptr<HostCapture> capture() const;          // null: not capturing
  void fork_into(std::shared_ptr<HostCapture> capture);  // as an event join does
  void launch(std::shared_ptr<const HostGraph> graph);

  // For tests: the worker takes no new task between hold and resume.
  void hold();
  void resume();

 private:
  void run();
  void leave_capture() noexcept;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  HostTaskQueue queue_;
  std::shared_ptr<HostCapture> capture_;
  std::exception_ptr failure_;
  std::uint64_t queued_ = 0;
  std::uint64_t finished_ = 0;
  bool held_ = false;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace quire
