// The flat span of a step update: it survives the way through bytes, and no damage goes unnoticed.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include <quire/cache/step_update.h>
#include <quire/runtime/base/digest.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

const Limits kLimits{.seats_max = 3,
                     .pages = 16,
                     .rows_max = 2,
                     .tokens_max = 300,
                     .context_max = 1000,
                     .plan_buffers = 2};

StepUpdate sample_update() {
  StepUpdate update(kLimits);
  update.start(41, PlanBufferId(1), StepShape::ragged(2, 300), 1);
  update.add(BatchRowUpdate{2, 1, 257, BatchRowUpdate::kNewOwner});
  update.add(BatchRowUpdate{0, 299, 555, BatchRowUpdate::kResume});
  update.add(CellUpdate{2, 1, 15});
  update.add(CellUpdate{0, 1, 7});
  update.add(CellUpdate{0, 2, 3});
  update.add(LimitUpdate{1, 0});
  update.seal();
  return update;
}

TEST_CASE("a new update is an empty, sealed padding step") {
  const StepUpdate update(kLimits);
  CHECK(update.id() == kPaddingStep);
  CHECK(update.bytes().size() == sizeof(StepUpdateHeader));
  CHECK(update.batch_rows().empty());
  CHECK(update.cells().empty());
  CHECK(update.lowered_limits().empty());
  CHECK_NOTHROW(StepUpdate::from_bytes(update.bytes()));
}

TEST_CASE("an update keeps everything on the way through bytes") {
  const StepUpdate original = sample_update();
  // From an odd address: a receive buffer need not be aligned.
  std::vector<std::byte> carried(original.bytes().size() + 1);
  std::copy(original.bytes().begin(), original.bytes().end(), carried.begin() + 1);
  const StepUpdate copy = StepUpdate::from_bytes(std::span(carried).subspan(1));
  CHECK(copy.id() == 41);
  CHECK(copy.plan_buffer() == PlanBufferId(1));
  CHECK(copy.shape() == StepShape::ragged(2, 300));
  CHECK(copy.header().repeat == 1);
  REQUIRE(copy.batch_rows().size() == 2);
  CHECK(copy.batch_rows()[0].seat == 2);
  CHECK(copy.batch_rows()[0].flags == BatchRowUpdate::kNewOwner);
  CHECK(copy.batch_rows()[1].tokens == 299);
  CHECK(copy.batch_rows()[1].limit == 555);
  REQUIRE(copy.cells().size() == 3);
  CHECK(copy.cells()[0].page == 15);
  CHECK(copy.cells()[2].cell == 2);
  REQUIRE(copy.lowered_limits().size() == 1);
  CHECK(copy.lowered_limits()[0].seat == 1);
  CHECK(std::ranges::equal(copy.bytes(), original.bytes()));
}

TEST_CASE("every truncation and every lengthening is refused") {
  const StepUpdate original = sample_update();
  const std::vector<std::byte> bytes(original.bytes().begin(), original.bytes().end());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CAPTURE(size);
    CHECK_THROWS_AS(StepUpdate::from_bytes(std::span(bytes).first(size)), UsageError);
  }
  std::vector<std::byte> longer = bytes;
  for (int i = 0; i < 64; ++i) {
    longer.push_back(std::byte{0});
    CHECK_THROWS_AS(StepUpdate::from_bytes(longer), UsageError);
  }
}

TEST_CASE("every flipped bit is refused") {
  const StepUpdate original = sample_update();
  std::vector<std::byte> bytes(original.bytes().begin(), original.bytes().end());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    CAPTURE(bit);
    const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
    bytes[bit / 8] ^= mask;
    CHECK_THROWS_AS(StepUpdate::from_bytes(bytes), UsageError);
    bytes[bit / 8] ^= mask;
  }
  CHECK_NOTHROW(StepUpdate::from_bytes(bytes));
}

TEST_CASE("counts that would overflow the size are refused") {
  const StepUpdate original = sample_update();
  std::vector<std::byte> bytes(original.bytes().begin(), original.bytes().end());
  StepUpdateHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  for (const std::int32_t count : {-1, -2147483647 - 1, 2147483647}) {
    header.cells = count;
    std::memcpy(bytes.data(), &header, sizeof header);
    CHECK_THROWS_AS(StepUpdate::from_bytes(bytes), UsageError);
  }
}

TEST_CASE("items beyond the capacity or out of order break an invariant") {
  StepUpdate update(kLimits);
  update.start(0, PlanBufferId(0), StepShape::decode(2), 1);
  update.add(CellUpdate{0, 0, 0});
  CHECK_THROWS_AS(update.add(BatchRowUpdate{}), BrokenInvariant);
  update.add(LimitUpdate{1, 0});
  CHECK_THROWS_AS(update.add(CellUpdate{}), BrokenInvariant);
  const auto fill = [&] {
    for (int i = 0; i < 1000; ++i) update.add(LimitUpdate{1, 0});
  };
  CHECK_THROWS_AS(fill(), BrokenInvariant);
}

TEST_CASE("start begins an empty update again") {
  StepUpdate update = sample_update();
  update.start(42, PlanBufferId(0), StepShape::decode(1), 1);
  update.seal();
  CHECK(update.bytes().size() == sizeof(StepUpdateHeader));
  CHECK(update.id() == 42);
  CHECK(update.cells().empty());
}

TEST_CASE("a digest depends on every word, on their order and on the number of bytes") {
  const auto digest_of = [](std::initializer_list<int> words) {
    Digest digest;
    for (const int word : words) digest.add(word);
    return digest.value();
  };
  CHECK(digest_of({1, 2}) != digest_of({2, 1}));
  CHECK(digest_of({0}) != digest_of({0, 0}));
  CHECK(digest_of({1, 2}) == digest_of({1, 2}));
  const std::byte zeroes[9]{};
  for (std::size_t size = 1; size < 9; ++size) {
    Digest shorter;
    shorter.add_bytes({zeroes, size});
    Digest longer;
    longer.add_bytes({zeroes, size + 1});
    CHECK(shorter.value() != longer.value());
  }
}

}  // namespace
}  // namespace quire
