// The host backend's stream: a FIFO of tasks, drained by one worker thread. Work in flight is in
// flight here too. The engine's own host work enters through `enqueue` as well.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

using HostTask = std::function<void()>;

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
  std::pmr::unsynchronized_pool_resource queue_memory_;  // so that a deque's blocks are used again
  std::pmr::deque<HostTask> queue_{&queue_memory_};
  std::shared_ptr<HostCapture> capture_;
  std::exception_ptr failure_;
  std::uint64_t queued_ = 0;
  std::uint64_t finished_ = 0;
  bool held_ = false;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace quire
