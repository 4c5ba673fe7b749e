// Capacity: counts and reports against page and seat formulas written anew from SPEC 3.4, 3.5 and
// 5, against what a device cache asks for, and the program quire-plan against both.
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

#include <quire/cache/capacity.h>
#include <quire/runtime/base/errors.h>
#include <nlohmann/json.hpp>

namespace quire {
namespace {

constexpr std::int64_t kGib = std::int64_t{1} << 30;

// Page bytes from the formats alone: data and scales of 64 and 2 entries, to the next 576; 132
// bytes an indexer entry.
constexpr std::int64_t kCsaPage = (64 * 584 + 575) / 576 * 576;
constexpr std::int64_t kIndexerPage = 64 * 132;
constexpr std::int64_t kHcaPage = (2 * 584 + 575) / 576 * 576;
static_assert(kCsaPage == 37'440 && kIndexerPage == 8'448 && kHcaPage == 1'728);

struct Model {
  const char* name;
  ModelSpec spec;
  std::int64_t layers, csa, hca;
  std::int64_t tokens_per_gib;

  std::int64_t page() const { return csa * (kCsaPage + kIndexerPage) + hca * kHcaPage; }
  // Window ring of two pages of 64, raw rows of 8 tokens, 2 banks of three vectors.
  std::int64_t seat() const {
    return layers * 2 * kCsaPage + csa * 8 * (4 * 512 + 4 * 128) * 4 + hca * 2 * 3 * 512 * 4;
  }
};

std::array<Model, 2> models() {
  return {{{"flash", ModelSpec::deepseek_v4_flash(), 43, 21, 20, 275'371},
           {"pro", ModelSpec::deepseek_v4_pro(), 61, 30, 31, 192'194}}};
}

Limits serving_limits() {
  return {.seats_max = 64, .rows_max = 64, .tokens_max = 8192, .context_max = 131'072};
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The report adds up, by region and in total, to what a device cache asks for.
void check_report(const Capacity& capacity, const ModelSpec& spec,
                  const DeviceCacheOptions& layout) {
  const CacheBytes asked = DeviceCache::bytes_needed(spec, capacity.limits, layout);
  std::array<std::int64_t, 6> sums{};
  for (const CapacityItem& item : capacity.items) {
    sums[static_cast<std::size_t>(item.region)] += item.bytes;
    CAPTURE(item.name);
    const std::int64_t rounding = item.bytes - item.count * item.item_bytes;
    CHECK(rounding >= 0);
    // At most one part a layer and item, or three in the step table.
    CHECK(rounding <= 255 * static_cast<std::int64_t>(spec.layers.size() + 3));
  }
  CHECK(sums == std::array{asked.pages, asked.seats, asked.scratch, asked.step_table,
                           asked.plan_buffers, capacity.rope_bytes});
  std::int64_t all = 0;
  for (const std::int64_t sum : sums) all += sum;
  CHECK(all == asked.total() + capacity.rope_bytes);
  CHECK(capacity.cache.total() == asked.total());
  const auto layers = static_cast<std::int64_t>(spec.layers.size());
  const std::int64_t pages_rounding = asked.pages - capacity.limits.pages * capacity.page_bytes;
  CHECK(pages_rounding >= 0);
  CHECK(pages_rounding <= 255 * 2 * layers);
  const std::int64_t seats_rounding = asked.seats - capacity.limits.seats_max * capacity.seat_bytes;
  CHECK(seats_rounding >= 0);
  CHECK(seats_rounding <= 255 * 3 * layers);
  CHECK(capacity.total() == all + capacity.pool_adds_bytes);
}

TEST_CASE("tokens per GiB of pages are those of the models' page bytes") {
  for (const Model& model : models()) {
    CAPTURE(model.name);
    DeviceCacheOptions layout;
    const Capacity tight = plan_capacity(model.spec, serving_limits(), layout, 8 * kGib);
    CHECK(tight.page_bytes == model.page());
    CHECK(tight.tokens_per_gib() == model.tokens_per_gib);
    CHECK(tight.tokens_per_gib() == kGib * 256 / model.page());
    layout.page_order = PageOrder::kPageMajor;  // 576 divides both models' whole page
    CHECK(plan_capacity(model.spec, serving_limits(), layout, 8 * kGib).tokens_per_gib() ==
          model.tokens_per_gib);
    layout = {};
    layout.indexer_page_stride_bytes = 8'640;
    CHECK(plan_capacity(model.spec, serving_limits(), layout, 8 * kGib).tokens_per_gib() ==
          (model.csa == 21 ? 274'263 : 191'423));
  }
}

TEST_CASE("a V4-Flash seat takes at most 5.2 MB without drafts") {
  for (const Model& model : models()) {
    const Capacity capacity = plan_capacity(model.spec, serving_limits(), {}, 8 * kGib);
    CHECK(capacity.seat_bytes == model.seat());
    if (model.csa == 21) CHECK(capacity.seat_bytes <= 5'200'000);
    Limits drafting = serving_limits();
    drafting.draft_max = 3;  // rings of 192 and 12, 5 banks
    CHECK(plan_capacity(model.spec, drafting, {}, 8 * kGib).seat_bytes ==
          model.layers * 3 * kCsaPage + model.csa * 12 * 2560 * 4 + model.hca * 5 * 6144);
  }
}

TEST_CASE("the plan takes the most pages that fit, and its report is what a cache asks for") {
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto draw = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    ModelSpec spec;
    for (std::int64_t i = draw(1, 12); i > 0; --i) {
      spec.layers.push_back(static_cast<LayerKind>(draw(0, 2)));
    }
    spec.layers.push_back(LayerKind::kHca);  // so that a page takes bytes
    Limits limits{.seats_max = draw(1, 40), .rows_max = draw(1, 60)};
    limits.draft_max = draw(0, 80);
    limits.tokens_max = draw(limits.draft_max + 1, 2000);
    limits.context_max = draw(1, 20'000);
    limits.plan_buffers = draw(1, 3);
    DeviceCacheOptions layout;
    if (draw(0, 1) == 1) layout.indexer_page_stride_bytes = 8'448 + 16 * draw(0, 20);
    if (draw(0, 1) == 1) layout.csa_page_stride_bytes = 37'440 + 16 * draw(0, 20);
    if (draw(0, 1) == 1) layout.hca_page_stride_bytes = 1'728 + 16 * draw(0, 20);
    if (draw(0, 1) == 1) layout.page_order = PageOrder::kPageMajor;
    CapacityOptions options;
    options.rope_positions = draw(0, 1) * limits.context_max;
    options.pool_granularity_bytes = draw(0, 1) == 1 ? std::int64_t{32} << 20 : 1;
    const std::int64_t bytes = draw(kGib, 4 * kGib);
    const Capacity found = plan_capacity(spec, limits, layout, bytes, options);
    check_report(found, spec, layout);
    CHECK(found.limits.seats_max == limits.seats_max);
    CHECK(found.total() <= bytes);
    CHECK((found.cache.total() + found.pool_adds_bytes) % options.pool_granularity_bytes == 0);
    CHECK(found.pool_adds_bytes < options.pool_granularity_bytes);
    Limits more = found.limits;
    ++more.pages;
    CHECK(measure_capacity(spec, more, layout, options).total() > bytes);
  }
}

TEST_CASE("seats can be found as a share of the budget") {
  Limits limits = serving_limits();
  limits.seats_max = 0;
  const ModelSpec spec = ModelSpec::deepseek_v4_flash();
  std::int64_t before = 0;
  for (const double fraction : {0.01, 0.1, 0.5}) {
    const Capacity found = plan_capacity(spec, limits, {}, 40 * kGib, {.seats_fraction = fraction});
    check_report(found, spec, {});
    const auto share = static_cast<std::int64_t>(fraction * 40.0 * static_cast<double>(kGib));
    CHECK(found.cache.seats + found.cache.step_table <= share);
    CHECK(found.limits.seats_max > before);
    Limits more = found.limits;
    ++more.seats_max;
    const CacheBytes with_more = DeviceCache::bytes_needed(spec, more, {});
    CHECK(with_more.seats + with_more.step_table > share);
    before = found.limits.seats_max;
  }
  // A share that holds no seat still gives the one that a request needs.
  CHECK(plan_capacity(spec, limits, {}, kGib, {.seats_fraction = 1e-6}).limits.seats_max == 1);
}

TEST_CASE("RoPE tables are counted for the groups that have layers") {
  const CapacityOptions options{.rope_positions = 131'072};
  constexpr std::int64_t kTable = std::int64_t{131'072} * 64 * 4;
  const Limits limits = serving_limits();
  CHECK(plan_capacity(ModelSpec::deepseek_v4_flash(), limits, {}, 8 * kGib, options).rope_bytes ==
        2 * kTable);
  CHECK(plan_capacity(ModelSpec::deepseek_v4_pro(), limits, {}, 8 * kGib, options).rope_bytes ==
        kTable);
  CHECK(plan_capacity(ModelSpec::deepseek_v4_pro().with_mtp_layers(), limits, {}, 8 * kGib, options)
            .rope_bytes == 2 * kTable);
  CHECK(plan_capacity(ModelSpec::deepseek_v4_flash(), limits, {}, 8 * kGib).rope_bytes == 0);
}

TEST_CASE("a budget that does not hold one request is refused with every need") {
  const ModelSpec spec = ModelSpec::deepseek_v4_flash();
  Limits limits = serving_limits();
  limits.pages = limits.cells_max();
  const std::int64_t least = DeviceCache::bytes_needed(spec, limits, {}).total();
  CHECK(plan_capacity(spec, limits, {}, least).limits.pages == limits.cells_max());
  for (const std::int64_t bytes : {least - 1, std::int64_t{0}, std::int64_t{-5}, INT64_MIN}) {
    const std::string text =
        refusal([&] { static_cast<void>(plan_capacity(spec, limits, {}, bytes)); });
    CAPTURE(text);
    for (const std::string& part :
         {std::to_string(bytes) + " bytes is too small",
          std::to_string(least) + " bytes are needed", std::string("context_max 131072"),
          std::string("512 pages"), std::string("64 seats"), std::string("window scratch"),
          std::string("step table"), std::string("plan buffers")}) {
      CHECK(mentions(text, part));
    }
  }
}

TEST_CASE("requests that fit are bounded by pages and by seats") {
  const Capacity capacity =
      plan_capacity(ModelSpec::deepseek_v4_flash(), serving_limits(), {}, 8 * kGib);
  CHECK(capacity.requests_of(131'072) == capacity.limits.pages / 512);
  CHECK(capacity.requests_of(257) == 64);
  CHECK(mentions(refusal([&] { static_cast<void>(capacity.requests_of(0)); }), "0 tokens"));
}

TEST_CASE("models whose pages take nothing get what their seats can fill") {
  const ModelSpec spec{{LayerKind::kSliding, LayerKind::kSliding}};
  const Capacity capacity = plan_capacity(spec, serving_limits(), {}, kGib);
  CHECK(capacity.limits.pages == 64 * 512);
  CHECK(capacity.page_bytes == 0);
  CHECK(capacity.tokens_per_gib() == 0);
  check_report(capacity, spec, {});
}

TEST_CASE("limits and options out of range are refused by name") {
  const ModelSpec spec = ModelSpec::deepseek_v4_flash();
  const auto text_of = [&](const Limits& limits, const CapacityOptions& options,
                           const DeviceCacheOptions& layout = {}) {
    return refusal(
        [&] { static_cast<void>(plan_capacity(spec, limits, layout, 8 * kGib, options)); });
  };
  const Limits good = serving_limits();
  CHECK(text_of(good, {}) == "accepted");
  CHECK(mentions(text_of(good, {.seats_fraction = 0}), "seats_fraction is 0"));
  CHECK(mentions(text_of(good, {.seats_fraction = 1}), "seats_fraction is 1"));
  CHECK(mentions(text_of(good, {.rope_positions = -1}), "rope_positions is -1"));
  CHECK(mentions(text_of(good, {.rope_positions = 1 << 25}), "rope_positions is 33554432"));
  CHECK(mentions(text_of(good, {.pool_granularity_bytes = 0}), "pool_granularity_bytes is 0"));
  for (const std::int64_t context : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    Limits limits = good;
    limits.context_max = context;
    CHECK(mentions(text_of(limits, {}), "context_max is " + std::to_string(context)));
  }
  Limits limits = good;
  limits.seats_max = -1;
  CHECK(mentions(text_of(limits, {}), "seats_max is -1"));
  DeviceCacheOptions layout;
  layout.indexer_page_stride_bytes = 8'640 + 1;
  CHECK(mentions(text_of(good, {}, layout), "indexer_page_stride_bytes is 8641"));
  // A padding location may lie in any page that is found.
  layout = {};
  layout.padding_csa_location = 8000 * 64;
  CHECK(text_of(good, {}, layout) == "accepted");
  layout.padding_csa_location = 9000 * 64;
  CHECK(mentions(text_of(good, {}, layout), "padding_csa_location"));
}

#ifdef QUIRE_PLAN_PROGRAM
struct Answer {
  int code = -1;
  std::string text;
};

Answer ask(const std::string& arguments) {
  const std::string command = std::string("'") + QUIRE_PLAN_PROGRAM + "' " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Answer answer;
  std::array<char, 4096> chunk;
  for (std::size_t got; (got = std::fread(chunk.data(), 1, chunk.size(), pipe)) > 0;) {
    answer.text.append(chunk.data(), got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) answer.code = WEXITSTATUS(status);
  return answer;
}

TEST_CASE("quire-plan gives the counts that follow from SPEC 5 at 8, 40 and 100 GiB") {
  for (const Model& model : models()) {
    CAPTURE(model.name);
    const Answer answer =
        ask(std::string("--model ") + model.name + " --gib 8 --gib 40 --gib 100 --json");
    REQUIRE(answer.code == 0);
    const auto plans = nlohmann::json::parse(answer.text)["plans"];
    REQUIRE(plans.size() == 3);
    const std::int64_t gib[] = {8, 40, 100};
    for (std::size_t i = 0; i < 3; ++i) {
      const std::int64_t budget = gib[i] * kGib;
      const auto& plan = plans[i];
      CHECK(plan["budget_bytes"] == budget);
      CHECK(plan["page_bytes"] == model.page());
      CHECK(plan["seat_bytes"] == model.seat());
      CHECK(plan["tokens_per_gib"] == model.tokens_per_gib);
      // Beside the pages: 64 seats, a scratch of 8192 + 127 x 64 tokens in pages of 64, the step
      // table, and a plan buffer, of which the records are of the order of 100 bytes a token.
      const std::int64_t seats = 64 * model.seat();
      const std::int64_t scratch = (8192 + 127 * 64) / 64 * kCsaPage;
      const std::int64_t table = 64 * (3 * 4 + 512 * 4);
      const std::int64_t without_plan = budget - seats - scratch - table;
      const std::int64_t pages = plan["pages"];
      CHECK(pages * model.page() <= without_plan - 8192 * 60);
      CHECK((pages + 3) * model.page() > without_plan - 8192 * 150);
      CHECK(plan["tokens"] == pages * 256);
      CHECK(plan["requests_of_context"] == std::min<std::int64_t>(64, pages / 512));
      // And to the byte: everything adds up to the budget's whole steps of 32 MiB.
      std::int64_t sum = 0;
      for (const auto& item : plan["items"]) sum += item["bytes"].get<std::int64_t>();
      CHECK(plan["cache_bytes"] == sum);
      CHECK(sum + plan["pool_adds_bytes"].get<std::int64_t>() == budget);
      CHECK(plan["pool_adds_bytes"] < model.page() + 256 * 3 * model.layers);
    }
  }
}

TEST_CASE("quire-plan prints a table and takes every option") {
  const Answer answer =
      ask("--model flash --bytes 9000000000 --seats 0 --seats-share 0.2 --context 65536 --rows 32 "
          "--tokens 4096 --drafts 2 --run-ahead 2 --plan-buffers 2 --indexer-stride 8640 "
          "--csa-stride 37456 --hca-stride 1744 --granularity-mib 2 --rope-tables --mtp");
  CAPTURE(answer.text);
  CHECK(answer.code == 0);
  for (const char* part : {"44 layers (3 sliding, 21 csa, 20 hca)", "8,640", "37,456", "1,744",
                           "window rings", "HCA banks", "cos and sin", "granularity of 2 MiB",
                           "tokens per GiB of pages", "no multiple of 576"}) {
    CHECK(mentions(answer.text, part));
  }
  const Answer major = ask("--model flash --gib 8 --page-major --indexer-stride 8640");
  CHECK(mentions(major.text, "274,263 tokens per GiB"));
}

TEST_CASE("quire-plan says what would not fit and why, with exit code 1") {
  Answer answer = ask("--model pro --gib 1 --gib 40 --json");
  CHECK(answer.code == 1);
  CHECK(mentions(answer.text, "\"fits\": false"));
  CHECK(mentions(answer.text, "\"fits\": true"));
  answer = ask("--model pro --gib 1");
  CHECK(answer.code == 1);
  CHECK(mentions(answer.text,
                 "does not fit: a budget of 1073741824 bytes is too small for one "
                 "request of context_max 131072 tokens"));
  answer = ask("--model flash --gib 8 --context 2000000");
  CHECK(answer.code == 1);
  CHECK(mentions(answer.text, "--context is 2000000, but the model has 1048576"));
  answer = ask("--config /nowhere/config.json --gib 8");
  CHECK(answer.code == 1);
  CHECK(mentions(answer.text, "/nowhere/config.json: no such file"));
  CHECK(ask("--gib 8").code != 0);
  CHECK(ask("--model flash").code != 0);
  CHECK(ask("--model flash --gib -3").code != 0);
}
#endif

}  // namespace
}  // namespace quire
