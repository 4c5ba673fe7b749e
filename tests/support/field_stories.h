// What stories about steps in flight need beside a TestEngine: steps enqueued without a wait, a
// stream that is held back, and bytes put into or read out of the device's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <quire/runtime/host/host_stream.h>

#include "tests/support/stream_gate.h"
#include "tests/support/test_backend.h"
#include "tests/support/test_engine.h"

namespace quire::test {

// Live bytes of the first `tokens` of a content that is prefilled alone, in an engine of its own.
inline std::vector<std::byte> alone(const TestEngineOptions& options, std::int64_t content,
                                    std::int64_t tokens) {
  const auto backend = make_host_backend();
  TestEngine engine(*backend, options);
  return one_shot(engine, content, static_cast<std::int32_t>(tokens));
}

// Keeps a stream from going on, so that what is enqueued behind is in flight all at once. Meanwhile
// nothing may wait for the stream or fill its queue: on CUDA no copy between the device and
// ordinary host memory, no first launch of a graph, and a few hundred pieces of work at most; a
// mistake there ends in a message of `resume`. --overlap=0 holds no CUDA stream.
class Held {
 public:
  explicit Held(StreamView stream) : stream_(stream) {
    if (stream_.is_host()) {
      stream_.host()->hold();
    } else if (kernels_may_overlap()) {
      gate_ = close_gate(stream_);
    }
  }
  ~Held() {
    if (stream_.is_host()) stream_.host()->resume();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  // Ends a story's hold, which an exception leaves to the destructor. "" where the stream was held
  // until now.
  [[nodiscard]] std::string resume() {
    if (stream_.is_host()) stream_.host()->resume();
    return gate_ == nullptr ? std::string() : gate_->open();
  }

 private:
  StreamView stream_;
  std::unique_ptr<StreamGate> gate_;
};

// One batch row of a step that is enqueued ahead of the device.
struct AheadRow {
  StepRow row;
  std::int64_t content;
};

// Enqueues copies of a step's input rows from the banks, `skip` tokens beyond what the engine
// counts as the requests' lengths; tokens that will be refused get other rows. In a ragged step the
// rows follow each other.
inline void copy_rows(TestEngine& engine, const std::vector<AheadRow>& ahead, StepShape shape,
                      std::int64_t skip = 0) {
  const std::size_t layers = engine.options().spec.layers.size();
  for (std::size_t i = 0; i < layers; ++i) {
    const auto at = engine.rows_of(LayerId(static_cast<std::int32_t>(i)));
    std::int64_t to = 0;
    for (std::size_t r = 0; r < ahead.size(); ++r) {
      if (shape.is_decode()) to = static_cast<std::int64_t>(r) * shape.tokens_per_row;
      const std::int64_t from = ahead[r].content * engine.options().bank_tokens +
                                engine.length(ahead[r].row.request) + skip;
      const auto copy = [&](std::byte* input, const std::byte* bank, std::int64_t row_bytes) {
        if (input == nullptr) return;
        engine.backend().copy(input + to * row_bytes, bank + from * row_bytes,
                              ahead[r].row.tokens * row_bytes, engine.stream());
        const std::int32_t refused =
            ahead[r].row.kept < 0 ? 0 : ahead[r].row.tokens - ahead[r].row.kept;
        if (refused <= 0) return;
        engine.backend().fill(input + (to + ahead[r].row.kept) * row_bytes, kRefusedBytes,
                              refused * row_bytes, engine.stream());
      };
      copy(at.window, at.window_bank, 512 * 2);
      copy(at.csa, at.csa_bank, 2048 * 4);
      copy(at.indexer, at.indexer_bank, 512 * 4);
      copy(at.hca, at.hca_bank, 1024 * 4);
      to += ahead[r].row.tokens;
    }
  }
}

// Reserves and names the rows of a batch.
inline std::vector<BatchRow> batch_of(TestEngine& engine, const std::vector<AheadRow>& ahead,
                                      std::int32_t repeat = 1) {
  std::vector<BatchRow> batch;
  for (const AheadRow& row : ahead) {
    engine.cache().ledger().reserve(row.row.request, row.row.tokens * repeat).value();
    batch.push_back({row.row.request, row.row.tokens});
  }
  return batch;
}

inline std::vector<StepRow> step_rows_of(const std::vector<AheadRow>& ahead) {
  std::vector<StepRow> rows;
  for (const AheadRow& row : ahead) rows.push_back(row.row);
  return rows;
}

// Enqueues a whole decode step, input rows included, and tells the ledger its outcome at once.
// Nothing waits: TestEngine::begin would.
inline void run_ahead(TestEngine& engine, const std::vector<AheadRow>& ahead, StepShape shape,
                      const std::int32_t* kept = nullptr) {
  constexpr PlanBufferId buffer(0);
  const std::vector<BatchRow> batch = batch_of(engine, ahead);
  const StepId id = engine.cache().begin_step(batch, shape, buffer, engine.stream());
  copy_rows(engine, ahead, shape);
  engine.enqueue_body(shape, engine.stream());
  engine.cache().device().enqueue_commit(buffer, kept, nullptr, engine.stream());
  engine.finish(id, step_rows_of(ahead));
}

// Overwrites bytes of a bank from `values`.
template <class T>
void patch(TestEngine& engine, const std::byte* at, std::span<const T> values) {
  engine.backend().copy(const_cast<std::byte*>(at), values.data(),
                        static_cast<std::int64_t>(values.size_bytes()), engine.stream());
  engine.stream().wait();
}

inline std::vector<std::byte> fetch(TestEngine& engine, const std::byte* from, std::int64_t bytes) {
  std::vector<std::byte> to(static_cast<std::size_t>(bytes));
  engine.backend().copy(to.data(), from, bytes, engine.stream());
  engine.stream().wait();
  return to;
}

inline DeviceReport report_of(TestEngine& engine, PlanBufferId buffer = PlanBufferId(0)) {
  DeviceReport report{};
  engine.cache().device().report(buffer, &report, engine.stream());
  engine.stream().wait();
  return report;
}

}  // namespace quire::test
