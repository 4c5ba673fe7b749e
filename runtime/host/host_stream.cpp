// The queue behind the host backend. One mutex guards the queue; tasks run and are destroyed
// outside it, so that a task may enqueue on this or another stream and what it owns may signal
// others.
#include <quire/runtime/base/errors.h>
#include <quire/runtime/host/host_stream.h>

#include <algorithm>
#include <utility>

namespace quire {

void HostTaskQueue::push_back(HostTask task) {
  if (count_ == ring_.size()) {
    std::vector<HostTask> larger(std::max<std::size_t>(16, 2 * count_));
    for (std::size_t i = 0; i < count_; ++i) larger[i] = std::move(at(i));
    ring_ = std::move(larger);
    first_ = 0;
  }
  at(count_) = std::move(task);
  ++count_;
}

void HostTaskQueue::pop_back() {
  --count_;
  at(count_) = nullptr;
}

HostTask HostTaskQueue::pop_front() {
  HostTask task = std::exchange(at(0), nullptr);
  first_ = (first_ + 1) % ring_.size();
  --count_;
  return task;
}

HostStream::HostStream() : worker_([this] { run(); }) {}

HostStream::~HostStream() {
  abort_capture();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  worker_.join();
}

void HostStream::enqueue(HostTask task) {
  {
    const std::lock_guard lock(mutex_);
    if (capture_ != nullptr) {
      capture_->graph.tasks.push_back(std::move(task));
      return;
    }
    queue_.push_back(std::move(task));
    ++queued_;
  }
  work_.notify_one();
}

void HostStream::wait() {
  std::exception_ptr failure;
  {
    std::unique_lock lock(mutex_);
    QUIRE_CHECK(capture_ == nullptr,
                "wait on a host stream that is capturing: end the capture first");
    const std::uint64_t last = queued_;
    done_.wait(lock, [&] { return finished_ >= last; });
    failure = std::exchange(failure_, nullptr);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void HostStream::wait_to_drain() noexcept {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return finished_ == queued_; });
}

void HostStream::begin_capture() {
  const std::lock_guard lock(mutex_);
  QUIRE_CHECK(capture_ == nullptr, "begin_capture on a host stream that is capturing already");
  auto capture = std::make_shared<HostCapture>();
  capture->streams.push_back(this);
  capture_ = std::move(capture);
}

std::shared_ptr<const HostGraph> HostStream::end_capture() {
  const std::shared_ptr<HostCapture> ended = capture();
  QUIRE_CHECK(ended != nullptr, "end_capture on a host stream that is not capturing");
  QUIRE_CHECK(ended->streams.front() == this,
              "end_capture on a host stream that was forked into the capture of another");
  auto graph = std::make_shared<HostGraph>(std::move(ended->graph));
  abort_capture();
  return graph;
}

void HostStream::abort_capture() noexcept {
  const std::shared_ptr<HostCapture> ended = capture();
  if (ended == nullptr) return;
  if (ended->streams.front() == this) {
    for (HostStream* stream : ended->streams) stream->leave_capture();
  } else {
    std::erase(ended->streams, this);
    leave_capture();
  }
}

void HostStream::leave_capture() noexcept {
  const std::lock_guard lock(mutex_);
  capture_.reset();
}

bool HostStream::capturing() const { return capture() != nullptr; }

std::shared_ptr<HostCapture> HostStream::capture() const {
  const std::lock_guard lock(mutex_);
  return capture_;
}

void HostStream::fork_into(std::shared_ptr<HostCapture> capture) {
  const std::lock_guard lock(mutex_);
  if (capture_ == capture) return;
  QUIRE_CHECK(capture_ == nullptr, "a host stream cannot take part in two captures");
  capture->streams.push_back(this);
  capture_ = std::move(capture);
}

void HostStream::launch(std::shared_ptr<const HostGraph> graph) {
  const auto add_all = [&graph](auto& to) {
    const std::size_t before = to.size();
    try {
      for (std::size_t i = 0; i < graph->tasks.size(); ++i) {
        to.push_back([graph, i] { graph->tasks[i](); });
      }
    } catch (...) {  // no memory: all of the graph or nothing
      while (to.size() > before) to.pop_back();
      throw;
    }
  };
  {
    const std::lock_guard lock(mutex_);
    if (capture_ != nullptr) {
      add_all(capture_->graph.tasks);
    } else {
      add_all(queue_);
      queued_ += graph->tasks.size();
    }
  }
  work_.notify_one();
}

void HostStream::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void HostStream::resume() {
  {
    const std::lock_guard lock(mutex_);
    held_ = false;
  }
  work_.notify_all();
}

void HostStream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || (!held_ && !queue_.empty()); });
    if (queue_.empty()) return;  // stopping, and all that was queued has run
    HostTask task = queue_.pop_front();
    const bool dropped = failure_ != nullptr;
    lock.unlock();
    std::exception_ptr failure;
    if (!dropped) {
      try {
        task();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    task = nullptr;  // before it counts as done: what it owned is gone by then
    lock.lock();
    if (failure != nullptr) failure_ = std::move(failure);
    ++finished_;
    done_.notify_all();
  }
}

}  // namespace quire
