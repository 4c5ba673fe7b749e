// Steps are compared row by row: what views and lists show, the entries that a list names, the
// committed length, the live bytes. Nothing is told to the engine before.
#include "tests/support/drafter.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace quire::test {
namespace {

constexpr PlanBufferId kBuffer(0);

std::vector<std::uint32_t> random_words(std::uint32_t seed, std::int64_t count) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = hash32(seed + static_cast<std::uint32_t>(i));
  }
  return words;
}

}  // namespace

Drafter::Drafter(Backend& backend, const TestEngineOptions& options,
                 const std::vector<LiveBook>& books, std::uint32_t seed)
    : engine_(backend, options),
      books_(books),
      decode_(StepShape::decode(static_cast<std::int32_t>(options.limits.rows_max),
                                static_cast<std::int32_t>(options.limits.draft_max + 1))),
      shape_(decode_),
      hca_width_(ceil_div<std::int64_t>(options.limits.context_max, 128)),
      any_bits_(backend, engine_.stream(),
                random_words(seed, (options.limits.draft_max + 1) * 2048)),
      window_list_(backend, engine_.stream(),
                   static_cast<std::size_t>(options.limits.tokens_max * 128), 0),
      hca_list_(backend, engine_.stream(),
                static_cast<std::size_t>(options.limits.tokens_max * hca_width_), 0),
      dice_(seed) {
  for (std::size_t i = 0; i < options.spec.layers.size(); ++i) {
    const auto at = engine_.rows_of(LayerId(static_cast<std::int32_t>(i)));
    const auto add = [&](std::byte* rows, const std::byte* bank, std::int64_t row_bytes) {
      if (rows != nullptr) inputs_.push_back({rows, bank, row_bytes});
    };
    const std::int64_t element = bytes_of(options.compressor_rows);
    add(at.window, at.window_bank, 512 * bytes_of(options.window_rows));
    add(at.csa, at.csa_bank, 2048 * element);
    add(at.indexer, at.indexer_bank, 512 * element);
    add(at.hca, at.hca_bank, 1024 * element);
  }
  ReadLists lists;
  lists.window_locations = window_list_.data();
  lists.hca_locations = hca_list_.data();
  lists.hca_width = hca_width_;
  engine_.cache().device().bind_read_lists(kBuffer, lists);
  engine_.cache().begin_padding_step(decode_, kBuffer, engine_.stream());
  engine_.stream().wait();
  Capture capture(engine_.backend(), engine_.stream());
  engine_.enqueue_body(decode_, engine_.stream());
  engine_.enqueue_commit(engine_.stream());
  graph_.emplace(capture.finish());
}

void Drafter::step(const std::vector<Draft>& drafts, How how) {
  std::vector<StepRow> rows;
  for (const Draft& draft : drafts) rows.push_back({draft.request, draft.tokens, draft.kept});
  place(drafts, how);
  const StepId id = engine_.begin(rows, shape_);
  if (how == How::kJunkFirst) {
    for (std::size_t r = 0; r < drafts.size(); ++r) put_junk(drafts[r], r, 0);
    engine_.enqueue_body(shape_, engine_.stream());
    for (std::size_t r = 0; r < drafts.size(); ++r) put_own(drafts[r], r);
  }
  for (std::size_t r = 0; r < drafts.size(); ++r) put_junk(drafts[r], r, drafts[r].kept);
  run(how);
  const Left left = look();
  for (std::size_t r = 0; r < drafts.size(); ++r) {
    CAPTURE(engine_.length(drafts[r].request));
    CAPTURE(drafts[r].tokens);
    CAPTURE(drafts[r].kept);
    CAPTURE(static_cast<int>(how));
    REQUIRE(wrong_view(left, drafts[r], r) == "");
    REQUIRE(wrong_window_read(left, drafts[r], r) == "");
    REQUIRE(wrong_live_bytes(left, drafts[r]) == "");
  }
  engine_.finish(id, rows);
}

void Drafter::place(const std::vector<Draft>& drafts, How how) {
  const bool is_ragged = how == How::kRagged || how == How::kRaggedTwice;
  first_tokens_.clear();
  std::int32_t tokens = 0;
  for (std::size_t r = 0; r < drafts.size(); ++r) {
    first_tokens_.push_back(is_ragged ? tokens
                                      : static_cast<std::int64_t>(r) * decode_.tokens_per_row);
    tokens += drafts[r].tokens;
  }
  shape_ =
      is_ragged ? StepShape::ragged(static_cast<std::int32_t>(drafts.size()), tokens) : decode_;
}

void Drafter::run(How how) {
  const StreamView stream = engine_.stream();
  if (how == How::kReplayed) {
    graph_->launch(stream);
    return;
  }
  engine_.enqueue_body(shape_, stream);
  if (how == How::kTwice || how == How::kRaggedTwice) engine_.enqueue_body(shape_, stream);
  engine_.enqueue_commit(stream);
  if (how == How::kCommitTwice) engine_.enqueue_commit(stream);
}

void Drafter::put_own(const Draft& draft, std::size_t batch_row) {
  const std::int64_t from =
      draft.content * engine_.options().bank_tokens + engine_.length(draft.request);
  for (const Input& input : inputs_) {
    engine_.backend().copy(input.rows + token_of(batch_row, 0) * input.row_bytes,
                           input.bank + from * input.row_bytes, draft.kept * input.row_bytes,
                           engine_.stream());
  }
}

// From token `first` on: NaN, any bits, or what tokens of the next content have.
void Drafter::put_junk(const Draft& draft, std::size_t batch_row, std::int32_t first) {
  if (first == draft.tokens) return;
  dice_ = hash32(dice_ + 1);
  const std::int64_t tokens = draft.tokens - first;
  const std::int64_t bank_tokens = engine_.options().bank_tokens;
  const std::int64_t other = (draft.content + 1) % engine_.options().contents * bank_tokens +
                             dice_ / 4 % (bank_tokens - tokens + 1);
  for (const Input& input : inputs_) {
    std::byte* to = input.rows + token_of(batch_row, first) * input.row_bytes;
    const std::int64_t bytes = tokens * input.row_bytes;
    if (dice_ % 4 == 0) {
      engine_.backend().fill(to, 0xFF, bytes, engine_.stream());
    } else {
      const auto* any = reinterpret_cast<const std::byte*>(any_bits_.data());
      const std::byte* from = dice_ % 4 == 1 ? any : input.bank + other * input.row_bytes;
      engine_.backend().copy(to, from, bytes, engine_.stream());
    }
  }
}

template <class T>
std::vector<T> Drafter::download(const T* from, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  engine_.backend().copy(to.data(), from, count * std::int64_t{sizeof(T)}, engine_.stream());
  engine_.stream().wait();
  return to;
}

Drafter::Left Drafter::look() {
  const DeviceCache& device = engine_.cache().device();
  const PlanViews& views = device.views(kBuffer);
  const std::int64_t tokens = shape_.tokens;
  return {download(views.positions, tokens),
          download(views.token_window_length, tokens),
          download(views.token_csa_length, tokens),
          download(views.token_hca_length, tokens),
          download(window_list_.data(), tokens * 128),
          download(hca_list_.data(), tokens * hca_width_),
          download(views.row_length, shape_.rows),
          download(device.step_table().length, engine_.options().limits.seats_max),
          engine_.snapshot()};
}

// Views and the list of HCA entries show what is complete at each token: none of the entries that
// refused tokens of earlier steps have completed.
std::string Drafter::wrong_view(const Left& left, const Draft& draft, std::size_t batch_row) {
  const std::int64_t start = engine_.length(draft.request);
  if (left.row_lengths[batch_row] != start + draft.tokens) return "length of the batch row";
  for (std::int64_t j = 0; j < draft.tokens; ++j) {
    const auto token = static_cast<std::size_t>(token_of(batch_row, j));
    const std::int64_t seen = start + j + 1;
    if (left.positions[token] != start + j) return concat("position of token ", j);
    if (left.windows[token] != std::min<std::int64_t>(seen, 128)) return concat("window of ", j);
    if (left.csa_entries[token] != seen / 4) return concat("CSA entries of token ", j);
    if (left.hca_entries[token] != seen / 128) return concat("HCA entries of token ", j);
    if (shape_.is_decode()) {
      const std::string wrong = wrong_hca_list(left, draft, token_of(batch_row, j), seen / 128);
      if (wrong != "") return concat(wrong, " of token ", j);
    }
  }
  if (shape_.is_decode()) return "";
  return wrong_hca_list(left, draft, static_cast<std::int64_t>(batch_row),
                        (start + draft.tokens) / 128);
}

// The list that stands at `index` names `entries` entries of the request, and nothing behind them.
std::string Drafter::wrong_hca_list(const Left& left, const Draft& draft, std::int64_t index,
                                    std::int64_t entries) {
  const auto pages = engine_.cache().ledger().pages_of(draft.request);
  for (std::int64_t e = 0; e < hca_width_; ++e) {
    const auto page = static_cast<std::size_t>(e / 2);
    const std::int64_t right = e < entries ? std::int64_t{pages[page].value} * 2 + e % 2 : -1;
    if (left.hca_locations[static_cast<std::size_t>(index * hca_width_ + e)] != right) {
      return concat("HCA entry ", e, " in the list");
    }
  }
  return "";
}

// What the list of the row's first query names, which needs the oldest entries: in no layer may a
// later token of the row have overwritten it.
std::string Drafter::wrong_window_read(const Left& left, const Draft& draft,
                                       std::size_t batch_row) {
  const DeviceCache& device = engine_.cache().device();
  const LiveBook& book = books_[static_cast<std::size_t>(draft.content)];
  const std::int64_t start = engine_.length(draft.request);
  const auto copied = [&](const std::byte* at) {
    return left.snapshot.seats.data() + (at - device.seats_memory().data());
  };
  for (std::size_t layer = 0; layer < device.spec().layers.size(); ++layer) {
    const EntryPool ring = device.window_ring(LayerId(static_cast<std::int32_t>(layer)));
    for (std::int64_t i = draft.kept > 0 ? 0 : 1; i <= std::min<std::int64_t>(start, 127); ++i) {
      const auto at = static_cast<std::size_t>(token_of(batch_row, 0) * 128 + i);
      const std::int64_t location = left.window_locations[at];
      std::byte entry[kMainDataBytes + kMainScaleBytes];
      std::memcpy(entry, copied(ring.main_data(location)), kMainDataBytes);
      std::memcpy(entry + kMainDataBytes, copied(ring.main_scales(location)), kMainScaleBytes);
      if (!book.has(layer, Piece::kWindow, start - i, entry)) {
        return concat("window position ", start - i, " of layer ", layer);
      }
    }
  }
  return "";
}

// Of a ring with no token to spare, a step that keeps nothing takes window position length - 128,
// which no query from `length` on reads.
std::string Drafter::wrong_live_bytes(const Left& left, const Draft& draft) {
  const CacheManager& cache = engine_.cache();
  const SeatId seat = cache.ledger().info(draft.request).seat;
  const std::int64_t length = engine_.length(draft.request) + draft.kept;
  if (left.lengths[static_cast<std::size_t>(seat.value)] != length) return "committed length";
  const bool spare = cache.device().window_ring_tokens() > 128 + cache.device().limits().draft_max;
  return books_[static_cast<std::size_t>(draft.content)].difference(
      engine_.live_bytes(left.snapshot, seat, cache.ledger().pages_of(draft.request), length),
      length, draft.kept > 0 || spare);
}

}  // namespace quire::test
