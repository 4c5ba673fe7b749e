// A backend's step table and plan buffer beside an image on the host, moved by the same calls: the
// backend by its own operations, the image by the reference planner. Tests of plans, updates and
// commits say what happens once and compare everything.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include <quire/planner/apply_chunks.h>
#include <quire/runtime/owners.h>

#include "tests/support/plan_fixture.h"
#include "tests/support/plan_reference.h"
#include "tests/support/test_backend.h"

namespace quire::test {

inline constexpr std::int32_t kHugePage = 0x7F7F7F7F;  // in every cell that nobody may read

inline std::int32_t csa_capacity(StepShape shape) {
  return std::min(shape.tokens, shape.tokens / 4 + shape.rows);
}

inline std::int32_t hca_capacity(StepShape shape) {
  return std::min(shape.tokens, shape.tokens / 128 + shape.rows);
}

// The backend's memory and the reference's image, moved by the same calls.
class PlanPair {
 public:
  explicit PlanPair(const PlanSizes& sizes)
      : sizes_(sizes),
        backend_(test_backend()),
        stream_(backend_),
        fixture_(backend_, stream_, sizes),
        kept_(backend_, stream_, static_cast<std::size_t>(sizes.rows), 0),
        stop_(backend_, stream_, static_cast<std::size_t>(sizes.rows), 0),
        positions_(backend_, stream_, static_cast<std::size_t>(sizes.tokens), 0),
        row_tokens_(backend_, stream_, static_cast<std::size_t>(sizes.rows), 0),
        image_(sizes),
        update_(limits_of(sizes)) {
    const PlanPlaces at = image_.places();
    std::fill_n(at.table.length, sizes.groups * sizes.seats, 0);
    std::fill_n(at.table.limit, sizes.seats, 0);
    std::fill_n(at.table.stopped, sizes.seats, 0);
    std::fill_n(at.table.owner, sizes.seats, 0);
    std::fill_n(at.table.page_table, sizes.seats * sizes.cells, kHugePage);
  }

  // Of the reference; `push` sends changes made through it.
  PlanPlaces places() { return image_.places(); }
  const PlanImage& image() const { return image_; }
  void push() { push(image_); }
  void push(const PlanImage& earlier) { fixture_.upload(earlier); }
  PlanImage download() const { return fixture_.download(); }
  StepUpdate& update() { return update_; }
  StreamView stream() const { return stream_.view(); }
  Backend& backend() const { return backend_; }

  // A seat of `length` tokens, in the target group, that may grow to `limit`, with page ids that
  // name seat and cell.
  void seat(std::int32_t seat, std::int32_t length, std::int32_t limit) {
    const PlanPlaces at = places();
    at.table.length[seat] = length;
    at.table.limit[seat] = limit;
    for (std::int32_t cell = 0; cell * 256 < limit; ++cell) {
      at.table.page_table[seat * at.table.cells + cell] = 100'000'000 + seat * 1000 + cell;
    }
  }

  void start(StepShape shape, std::int32_t repeat = 1) {
    update_.start(0, PlanBufferId(0), shape, repeat);
  }

  void apply() {
    update_.seal();
    for_each_apply_chunk(update_, fixture_.table(), fixture_.plan(), [&](const ApplyParams& chunk) {
      ++chunks_;
      backend_.apply(chunk, stream_);
    });
    stream_.wait();  // a host task reads the update's copy, not the update: waiting is for ASan
    reference_apply(image_, update_);
  }
  int chunks() const { return chunks_; }

  void enqueue_plan(const PlanRequest& request) {
    PlanBuffer plan = fixture_.plan();
    plan.read = read;
    PlanParams params{request.shape, geometry, fixture_.table(), plan};
    params.csa_entry_capacity = csa_capacity(request.shape);
    params.hca_entry_capacity = hca_capacity(request.shape);
    params.group = request.group;
    if (!request.positions.empty()) params.positions = positions_.data();
    if (!request.row_tokens.empty()) params.row_tokens = row_tokens_.data();
    backend_.plan(params, stream_);
  }
  void enqueue_plan(StepShape shape) { enqueue_plan(PlanRequest{shape}); }
  void enqueue_commit(const CommitRequest& request) {
    CommitParams params{request.shape, request.group, request.positions_supplied, fixture_.table(),
                        fixture_.plan()};
    params.draft_max = geometry.draft_max;
    if (!request.kept.empty()) params.kept = kept_.data();
    if (!request.stop.empty()) params.stop = stop_.data();
    backend_.commit(params, Pdl::kOff, stream_);
  }
  void enqueue_commit(StepShape shape) { enqueue_commit(CommitRequest{shape}); }
  void reference_plan(const PlanRequest& request) {
    ReferencePlanner(image_, request, geometry, csa_capacity(request.shape),
                     hca_capacity(request.shape))
        .run();
  }
  void reference_plan(StepShape shape) { reference_plan(PlanRequest{shape}); }
  void reference_commit(const CommitRequest& request) {
    test::reference_commit(image_, request, geometry.draft_max);
  }
  void reference_commit(StepShape shape) { reference_commit(CommitRequest{shape}); }

  // Brings what later launches read there, captured ones too.
  void supply(const PlanRequest& request) {
    positions_.upload(request.positions);
    row_tokens_.upload(request.row_tokens);
  }
  void supply(const CommitRequest& request) {
    kept_.upload(request.kept);
    stop_.upload(request.stop);
  }

  // Both, with what is supplied.
  void plan(const PlanRequest& request) {
    supply(request);
    enqueue_plan(request);
    reference_plan(request);
  }
  void plan(StepShape shape) { plan(PlanRequest{shape}); }
  void commit(const CommitRequest& request) {
    supply(request);
    enqueue_commit(request);
    reference_commit(request);
  }
  void commit(StepShape shape) { commit(CommitRequest{shape}); }

  void check_equal(const char* when) {
    stream_.wait();
    CAPTURE(when);
    REQUIRE(difference(image_, fixture_.download()) == "");
  }

  PlanGeometry geometry{192, 3, 64, 2, -1, -1, -1, -1};  // window ring for 3 drafts
  ReadLists read;                                        // in the caller's memory

 private:
  static Limits limits_of(const PlanSizes& sizes) {
    Limits limits;
    limits.seats_max = sizes.seats;
    limits.rows_max = sizes.rows;
    limits.tokens_max = sizes.seats * sizes.cells * kPageTokens;  // room for any cell
    limits.context_max = sizes.cells * kPageTokens;
    return limits;
  }

  PlanSizes sizes_;
  Backend& backend_;
  Stream stream_;
  PlanFixture fixture_;
  DeviceArray<std::int32_t> kept_;
  DeviceArray<std::uint8_t> stop_;
  DeviceArray<std::int32_t> positions_;
  DeviceArray<std::int32_t> row_tokens_;
  PlanImage image_;
  StepUpdate update_;
  int chunks_ = 0;
};

inline PlanSizes sizes_for(std::int64_t seats, std::int64_t cells, StepShape shape) {
  return {seats, cells, shape.rows, shape.tokens, csa_capacity(shape) + 3, hca_capacity(shape) + 3};
}

}  // namespace quire::test
