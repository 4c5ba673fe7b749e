// Limits and model specs: what is out of range is refused by name, and sizes follow from the
// limits.
#include <doctest/doctest.h>

#include <functional>
#include <string>

#include <quire/cache/ledger.h>
#include <quire/cache/limits.h>
#include <quire/cache/model_spec.h>
#include <quire/cache/shortfall.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

Limits good_limits() {
  return {.seats_max = 4, .pages = 16, .rows_max = 4, .tokens_max = 64, .context_max = 1000};
}

// The text of the UsageError that `call` throws; empty where it throws none.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("sizes follow from the limits") {
  Limits limits = good_limits();
  CHECK(limits.cells_max() == 4);
  CHECK(limits.window_ring_tokens() == 128);
  CHECK(limits.csa_ring_tokens() == 8);
  CHECK(limits.scratch_tokens() == 576);  // 64 + 127 * 4, in pages of 64
  limits.draft_max = 3;
  CHECK(limits.window_ring_tokens() == 192);
  CHECK(limits.csa_ring_tokens() == 12);
  CHECK(limits.update_cells_max() == 8);  // 64 / 256 + 2 * 4
  limits.repeat_max = 1000;
  CHECK(limits.update_cells_max() == 16);  // never more than there are cells
}

TEST_CASE("good limits pass") { CHECK_NOTHROW(good_limits().check()); }

TEST_CASE("each limit out of its range is refused by name and value") {
  struct Case {
    const char* name;
    std::int64_t Limits::*limit;
    std::int64_t least;
    std::int64_t above;
  };
  const std::int64_t far = std::int64_t{1} << 31;
  for (const Case& c :
       {Case{"seats_max", &Limits::seats_max, 1, far}, Case{"pages", &Limits::pages, 1, far},
        Case{"rows_max", &Limits::rows_max, 1, far},
        Case{"tokens_max", &Limits::tokens_max, 1, far},
        Case{"context_max", &Limits::context_max, 1, far},
        Case{"draft_max", &Limits::draft_max, 0, far},
        Case{"repeat_max", &Limits::repeat_max, 1, far},
        Case{"run_ahead_max", &Limits::run_ahead_max, 0, far},
        Case{"plan_buffers", &Limits::plan_buffers, 1, far},
        Case{"holds_max", &Limits::holds_max, 0, far}}) {
    for (const std::int64_t value : {c.least - 1, c.above, std::int64_t{-1} << 62}) {
      Limits limits = good_limits();
      limits.*c.limit = value;
      const std::string text = refusal([&] { limits.check(); });
      CAPTURE(text);
      CHECK(mentions(text, std::string("Limits::") + c.name + " is " + std::to_string(value)));
      CHECK(mentions(text, "supported: " + std::to_string(c.least)));
    }
  }
}

TEST_CASE("limits that cannot hold one request are refused, by the ledger too") {
  Limits limits = good_limits();
  limits.pages = 3;  // 1000 tokens need four
  CHECK(mentions(refusal([&] { limits.check(); }), "needs 4 pages"));
  CHECK(mentions(refusal([&] { const Ledger ledger(limits); }), "needs 4 pages"));
  limits.pages = 4;
  CHECK_NOTHROW(limits.check());
  limits.draft_max = 64;
  CHECK(mentions(refusal([&] { limits.check(); }), "draft_max + 1 = 65"));
}

TEST_CASE("a step update that could not be counted in 32 bits is refused") {
  Limits limits = good_limits();
  limits.seats_max = 1 << 20;
  limits.pages = limits.context_max = 1 << 30;
  limits.tokens_max = 1 << 30;
  limits.repeat_max = 1 << 16;
  CHECK(mentions(refusal([&] { limits.check(); }), "page table cells"));
}

TEST_CASE("a model spec is checked by field") {
  ModelSpec spec;
  CHECK(mentions(refusal([&] { spec.check(); }), "ModelSpec::layers"));
  spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, LayerKind::kCsa};
  CHECK_NOTHROW(spec.check());
  CHECK(spec.count(LayerKind::kSliding) == 1);
  CHECK(spec.count(LayerKind::kCsa) == 2);
  CHECK(spec.count(LayerKind::kHca) == 1);

  ModelSpec wrong = spec;
  wrong.head_dim = 576;
  CHECK(mentions(refusal([&] { wrong.check(); }), "head_dim is 576; supported: 512"));
  wrong = spec;
  wrong.rope_dim = 0;
  CHECK(mentions(refusal([&] { wrong.check(); }), "rope_dim"));
  wrong = spec;
  wrong.indexer_dim = 64;
  CHECK(mentions(refusal([&] { wrong.check(); }), "indexer_dim"));
  wrong = spec;
  wrong.window_tokens = 127;
  CHECK(mentions(refusal([&] { wrong.check(); }), "window_tokens"));
  wrong = spec;
  wrong.layers[1] = static_cast<LayerKind>(7);
  CHECK(mentions(refusal([&] { wrong.check(); }), "layers[1] is kind 7"));
}

TEST_CASE("names and shortfalls read as words") {
  CHECK(std::string(name_of(LayerKind::kSliding)) == "sliding");
  CHECK(std::string(name_of(LayerKind::kCsa)) == "csa");
  CHECK(std::string(name_of(LayerKind::kHca)) == "hca");
  CHECK(std::string(name_of(Resource::kHolds)) == "holds");
  const Shortfall shortfall{Resource::kPages, 5, 3, 2};
  const std::string text = shortfall.describe();
  for (const char* part : {"pages", "5", "3", "2"}) CHECK(mentions(text, part));
}

}  // namespace
}  // namespace quire
