// Verify steps of several requests, of whose tokens some are refused: runs them in several ways and
// compares what they leave with runs that never drafted (live_book.h). What is refused is NaN, any
// bits, or input rows of another token.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/device_array.h"
#include "tests/support/live_book.h"
#include "tests/support/test_engine.h"

namespace quire::test {

// One batch row: the first `kept` of its tokens are the content's own, what follows is refused.
struct Draft {
  RequestId request;
  std::int64_t content;
  std::int32_t tokens;
  std::int32_t kept;
};

enum class How {
  kOnce,
  kTwice,      // plan and appends run again before the commit
  kJunkFirst,  // the same, and nothing was right in the first run
  kCommitTwice,
  kReplayed,
  kRagged,  // the batch rows packed into a ragged shape
  kRaggedTwice
};
constexpr std::uint32_t kHows = 7;

// Runs verify steps and requires of each, before it counts: views and the list of HCA entries show
// what is complete at each token and nothing else, the first query's window stands where its list
// says, the committed length and the live bytes are right.
class Drafter {
 public:
  // `books` has one of each content of the options, and outlives the drafter.
  Drafter(Backend& backend, const TestEngineOptions& options, const std::vector<LiveBook>& books,
          std::uint32_t seed);

  TestEngine& engine() { return engine_; }
  // Forgets all requests; what they left is NaN, so that nothing is right by itself.
  void start_over() {
    engine_.cache().reset(engine_.stream());
    engine_.poison();
  }
  // In batch rows of this order; batch rows behind them are padding.
  void step(const std::vector<Draft>& drafts, How how);

 private:
  // What append reads of one part of one layer, and where the right rows come from.
  struct Input {
    std::byte* rows;
    const std::byte* bank;
    std::int64_t row_bytes;
  };
  // What one step has left, on the host.
  struct Left {
    std::vector<std::int32_t> positions, windows, csa_entries, hca_entries;  // [tokens]
    std::vector<std::int32_t> window_locations, hca_locations;  // [tokens, 128 or hca_width_]
    std::vector<std::int32_t> row_lengths;                      // [rows]
    std::vector<std::int32_t> lengths;                          // [seats]
    Snapshot snapshot;
  };

  // Of the step that runs now.
  std::int64_t token_of(std::size_t batch_row, std::int64_t j) const {
    return first_tokens_[batch_row] + j;
  }
  void place(const std::vector<Draft>& drafts, How how);
  void run(How how);
  void put_own(const Draft& draft, std::size_t batch_row);
  void put_junk(const Draft& draft, std::size_t batch_row, std::int32_t first);
  template <class T>
  std::vector<T> download(const T* from, std::int64_t count);
  Left look();
  std::string wrong_view(const Left& left, const Draft& draft, std::size_t batch_row);
  std::string wrong_hca_list(const Left& left, const Draft& draft, std::int64_t index,
                             std::int64_t entries);
  std::string wrong_window_read(const Left& left, const Draft& draft, std::size_t batch_row);
  std::string wrong_live_bytes(const Left& left, const Draft& draft);

  TestEngine engine_;
  const std::vector<LiveBook>& books_;
  StepShape decode_;
  StepShape shape_;                         // of the step that runs now,
  std::vector<std::int64_t> first_tokens_;  // [batch rows] with the first input row of each
  std::int64_t hca_width_;
  DeviceArray<std::uint32_t> any_bits_;
  DeviceArray<std::int32_t> window_list_, hca_list_;
  std::vector<Input> inputs_;
  std::optional<GraphExec> graph_;
  std::uint32_t dice_;
};

}  // namespace quire::test
