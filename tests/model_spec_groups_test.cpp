// Parts of a model spec: slices of its layers for stages of a pipeline, and which layers are the
// draft group, through slices and with MTP layers appended.
#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <quire/cache/model_spec.h>
#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// Five layers of the target, and as many draft layers behind them.
ModelSpec drafted_spec(std::int64_t draft_layers) {
  ModelSpec spec;
  spec.layers = {LayerKind::kSliding, LayerKind::kCsa, LayerKind::kHca, LayerKind::kCsa,
                 LayerKind::kHca};
  for (std::int64_t i = 0; i < draft_layers; ++i) {
    spec.layers.push_back(i % 2 == 0 ? LayerKind::kCsa : LayerKind::kSliding);
  }
  spec.draft_layers = draft_layers;
  return spec;
}

TEST_CASE("MTP layers are data until they are appended") {
  const ModelSpec flash = ModelSpec::deepseek_v4_flash();
  const ModelSpec whole = flash.with_mtp_layers();
  CHECK(whole.layers.size() == 44);
  CHECK(whole.layers.back() == LayerKind::kSliding);
  CHECK(whole.mtp_layers.empty());
  CHECK(whole.with_mtp_layers() == whole);
  CHECK(flash.count(LayerKind::kSliding) == 2);
}

TEST_CASE("slices cut the layers for stages of a pipeline; the last keeps the MTP layers") {
  const ModelSpec pro = ModelSpec::deepseek_v4_pro();
  std::vector<LayerKind> joined;
  for (const auto& [first, count] : {std::pair{0, 16}, {16, 15}, {31, 15}, {46, 15}}) {
    const ModelSpec stage = pro.slice(first, count);
    CHECK_NOTHROW(stage.check());
    CHECK(stage.layers.size() == static_cast<std::size_t>(count));
    CHECK(stage.mtp_layers.size() == (first + count == 61 ? 1 : 0));
    CHECK(stage.index_topk == 1024);
    joined.insert(joined.end(), stage.layers.begin(), stage.layers.end());
  }
  CHECK(joined == pro.layers);
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{-1, 2},
                                     {0, 0},
                                     {60, 2},
                                     {61, 1},
                                     {0, 62},
                                     {2, INT64_MAX},
                                     {INT64_MAX, 1}}) {
    const std::string text = refusal([&] { static_cast<void>(pro.slice(first, count)); });
    CHECK(text.find("layers 0 to 60") != std::string::npos);
  }
}

TEST_CASE("the last layers are the draft group, as many as the spec says") {
  for (std::int64_t draft_layers = 0; draft_layers <= 3; ++draft_layers) {
    const ModelSpec spec = drafted_spec(draft_layers);
    CHECK_NOTHROW(spec.check());
    CHECK(spec.groups() == (draft_layers == 0 ? 1 : 2));
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(spec.layers.size()); ++i) {
      CAPTURE(i);
      CHECK(spec.group_of(LayerId(i)) == (i < 5 ? LayerGroup::kTarget : LayerGroup::kDraft));
    }
  }
  CHECK(std::string(name_of(LayerGroup::kTarget)) == "target");
  CHECK(std::string(name_of(LayerGroup::kDraft)) == "draft");
  CHECK(std::string(name_of(static_cast<LayerGroup>(2))) == "unknown layer group");
}

TEST_CASE("MTP layers become the draft group, behind draft layers that are there already") {
  for (const ModelSpec& preset : {ModelSpec::deepseek_v4_flash(), ModelSpec::deepseek_v4_pro()}) {
    CHECK(preset.draft_layers == 0);
    CHECK(preset.groups() == 1);
    const ModelSpec whole = preset.with_mtp_layers();
    CHECK_NOTHROW(whole.check());
    CHECK(whole.draft_layers == 1);
    const auto last = static_cast<std::int32_t>(whole.layers.size()) - 1;
    CHECK(whole.group_of(LayerId(last)) == LayerGroup::kDraft);
    CHECK(whole.group_of(LayerId(last - 1)) == LayerGroup::kTarget);
  }
  ModelSpec spec = drafted_spec(2);
  spec.mtp_layers = {LayerKind::kHca, LayerKind::kSliding};
  CHECK(spec.with_mtp_layers().draft_layers == 4);
  CHECK(spec.with_mtp_layers().layers.back() == LayerKind::kSliding);
  CHECK(spec.with_mtp_layers().group_of(LayerId(5)) == LayerGroup::kDraft);
  CHECK(spec.with_mtp_layers().group_of(LayerId(4)) == LayerGroup::kTarget);
}

TEST_CASE("every layer of a slice is of the group that it is of in the whole") {
  for (std::int64_t draft_layers = 0; draft_layers <= 8; ++draft_layers) {
    ModelSpec spec = drafted_spec(3);
    spec.draft_layers = draft_layers;
    const auto layers = static_cast<std::int64_t>(spec.layers.size());
    for (std::int64_t first = 0; first < layers; ++first) {
      for (std::int64_t count = 1; count <= layers - first; ++count) {
        const ModelSpec stage = spec.slice(first, count);
        CHECK_NOTHROW(stage.check());
        std::int64_t drafting = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          const LayerId here(static_cast<std::int32_t>(i));
          const LayerId there(static_cast<std::int32_t>(first + i));
          CHECK(stage.group_of(here) == spec.group_of(there));
          drafting += stage.group_of(here) == LayerGroup::kDraft ? 1 : 0;
        }
        CHECK(stage.draft_layers == drafting);
      }
    }
  }
}

TEST_CASE("more draft layers than there are, or fewer than none, are refused by name") {
  ModelSpec spec = drafted_spec(0);
  spec.draft_layers = 5;  // all of them: a stage that drafts only
  CHECK_NOTHROW(spec.check());
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{6}, INT64_MAX, INT64_MIN}) {
    spec.draft_layers = bad;
    const std::string text = refusal([&] { spec.check(); });
    CAPTURE(text);
    CHECK(text.find("ModelSpec::draft_layers is " + std::to_string(bad)) != std::string::npos);
    CHECK(text.find("supported: 0 to the 5") != std::string::npos);
  }
}

}  // namespace
}  // namespace quire
