// Packs and unpacks the flat span of a step update. Items are copied in and read in place: the
// storage of a vector is aligned for every one of them, and each section's size is a multiple of
// the next one's alignment.
#include <quire/cache/step_update.h>

#include <bit>
#include <cstring>

#include <quire/runtime/base/digest.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::size_t kDigestBytes = sizeof(StepUpdateHeader::digest);

std::uint64_t digest_of(std::span<const std::byte> update) {
  Digest digest;
  digest.add_bytes(update.subspan(kDigestBytes));
  return digest.value();
}

std::size_t size_of(std::int64_t batch_rows, std::int64_t cells, std::int64_t limits) {
  return sizeof(StepUpdateHeader) + static_cast<std::size_t>(batch_rows) * sizeof(BatchRowUpdate) +
         static_cast<std::size_t>(cells) * sizeof(CellUpdate) +
         static_cast<std::size_t>(limits) * sizeof(LimitUpdate);
}

std::size_t size_of(const StepUpdateHeader& header) {
  return size_of(header.batch_rows, header.cells, header.lowered_limits);
}

}  // namespace

StepUpdate::StepUpdate(const Limits& limits)
    : bytes_(size_of(limits.rows_max, limits.update_cells_max(), limits.seats_max)),
      used_(sizeof(StepUpdateHeader)) {
  start(kPaddingStep, PlanBufferId(0), StepShape{}, 1);
  seal();
}

StepUpdate StepUpdate::from_bytes(std::span<const std::byte> bytes) {
  QUIRE_CHECK(bytes.size() >= sizeof(StepUpdateHeader), "a step update of ", bytes.size(),
              " bytes is truncated: its header alone has ", sizeof(StepUpdateHeader));
  StepUpdateHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  QUIRE_CHECK(header.batch_rows >= 0 && header.cells >= 0 && header.lowered_limits >= 0 &&
                  size_of(header) == bytes.size(),
              "a step update of ", bytes.size(), " bytes does not add up: it claims ",
              header.batch_rows, " batch rows, ", header.cells, " cells and ",
              header.lowered_limits, " limits");
  const std::uint64_t digest = digest_of(bytes);
  QUIRE_CHECK(header.digest == digest, "a step update does not match its digest: it claims ",
              header.digest, ", its bytes have ", digest);
  StepUpdate update;
  update.bytes_.assign(bytes.begin(), bytes.end());
  update.used_ = bytes.size();
  return update;
}

const StepUpdateHeader& StepUpdate::header() const {
  return *reinterpret_cast<const StepUpdateHeader*>(bytes_.data());
}

StepUpdateHeader& StepUpdate::mutable_header() {
  return *reinterpret_cast<StepUpdateHeader*>(bytes_.data());
}

std::span<const BatchRowUpdate> StepUpdate::batch_rows() const {
  return {reinterpret_cast<const BatchRowUpdate*>(bytes_.data() + size_of(0, 0, 0)),
          static_cast<std::size_t>(header().batch_rows)};
}

std::span<const CellUpdate> StepUpdate::cells() const {
  const std::size_t at = size_of(header().batch_rows, 0, 0);
  return {reinterpret_cast<const CellUpdate*>(bytes_.data() + at),
          static_cast<std::size_t>(header().cells)};
}

std::span<const LimitUpdate> StepUpdate::lowered_limits() const {
  const std::size_t at = size_of(header().batch_rows, header().cells, 0);
  return {reinterpret_cast<const LimitUpdate*>(bytes_.data() + at),
          static_cast<std::size_t>(header().lowered_limits)};
}

void StepUpdate::start(StepId id, PlanBufferId buffer, StepShape shape, std::int32_t repeat) {
  StepUpdateHeader header{};
  header.id = id;
  header.plan_buffer = buffer.value;
  header.repeat = repeat;
  header.shape = shape;
  std::memcpy(bytes_.data(), &header, sizeof header);
  used_ = sizeof header;
}

template <class Item>
void StepUpdate::append(const Item& item) {
  if (sizeof item > bytes_.size() - used_) {
    throw BrokenInvariant(concat("step update: ", used_ + sizeof item,
                                 " bytes exceed its capacity of ", bytes_.size()));
  }
  std::memcpy(bytes_.data() + used_, &item, sizeof item);
  used_ += sizeof item;
}

void StepUpdate::add(BatchRowUpdate row) {
  if (header().cells != 0 || header().lowered_limits != 0) {
    throw BrokenInvariant("step update: a batch row was added behind cells or limits");
  }
  append(row);
  ++mutable_header().batch_rows;
}

void StepUpdate::add(CellUpdate cell) {
  if (header().lowered_limits != 0) {
    throw BrokenInvariant("step update: a cell was added behind limits");
  }
  append(cell);
  ++mutable_header().cells;
}

void StepUpdate::add(LimitUpdate limit) {
  append(limit);
  ++mutable_header().lowered_limits;
}

void StepUpdate::seal() { mutable_header().digest = digest_of(bytes()); }

}  // namespace quire
