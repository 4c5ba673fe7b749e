// quire-plan: what fits into a byte budget. Prints, for a model and each budget, the memory by
// purpose, pages, seats and tokens, as a table or as JSON. Touches no device.
// Exit code 1 where a budget does not hold one request, or where an input is refused.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <quire/cache/capacity.h>
#include <quire/cache/entry_layout.h>
#include <quire/runtime/backend.h>
#include <quire/runtime/base/errors.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using namespace quire;

constexpr std::int64_t kGib = std::int64_t{1} << 30;
constexpr std::int64_t kMib = std::int64_t{1} << 20;
constexpr double kGibMax = 1 << 20;

struct Settings {
  std::string model;
  std::string config;
  std::vector<double> gib;
  std::vector<std::int64_t> bytes;
  Limits limits;
  DeviceCacheOptions layout;
  CapacityOptions capacity;
  std::int64_t granularity_mib = kCudaPoolGranularityBytes / kMib;
  bool page_major = false;
  bool mtp = false;
  bool rope_tables = false;
  bool json = false;
};

void add_options(CLI::App& app, Settings& settings) {
  Limits& limits = settings.limits;
  limits = {.seats_max = 64, .rows_max = 64, .tokens_max = 8192, .context_max = 131'072};
  auto* model = app.add_option_group("model");
  model->add_option("--model", settings.model, "A preset: flash or pro")
      ->check(CLI::IsMember({"flash", "pro"}));
  model->add_option("--config", settings.config, "A Hugging Face config.json");
  model->require_option(1);
  auto* budget = app.add_option_group("budget");
  budget->add_option("--gib", settings.gib, "A budget in GiB; several are planned in turn")
      ->check(CLI::Range(0.0, kGibMax));
  budget->add_option("--bytes", settings.bytes, "A budget in bytes");
  budget->require_option(1, 2);

  app.add_option("--seats", limits.seats_max, "Live requests; 0: by --seats-share")
      ->capture_default_str();
  app.add_option("--seats-share", settings.capacity.seats_fraction, "Share of the budget for seats")
      ->capture_default_str();
  app.add_option("--context", limits.context_max, "Tokens of one request")->capture_default_str();
  app.add_option("--rows", limits.rows_max, "Batch rows of one step")->capture_default_str();
  app.add_option("--tokens", limits.tokens_max, "Tokens of one step")->capture_default_str();
  app.add_option("--drafts", limits.draft_max, "Draft tokens of a batch row")
      ->capture_default_str();
  app.add_option("--run-ahead", limits.run_ahead_max, "Steps prepared ahead of outcomes")
      ->capture_default_str();
  app.add_option("--plan-buffers", limits.plan_buffers, "Plan buffers")->capture_default_str();
  app.add_flag("--mtp", settings.mtp, "Keep caches for the MTP layers as well");
  app.add_flag("--rope-tables", settings.rope_tables, "Count RoPE tables of --context positions");
  app.add_option("--csa-stride", settings.layout.csa_page_stride_bytes, "0: tight");
  app.add_option("--indexer-stride", settings.layout.indexer_page_stride_bytes, "0: tight");
  app.add_option("--hca-stride", settings.layout.hca_page_stride_bytes, "0: tight");
  app.add_flag("--page-major", settings.page_major, "All layers of a page lie together");
  app.add_option("--granularity-mib", settings.granularity_mib,
                 "Step in which the memory pool grows; 0: not counted")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_flag("--json", settings.json, "Print JSON");
}

ModelSpec read_spec(const Settings& settings) {
  ModelSpec spec = settings.model == "flash" ? ModelSpec::deepseek_v4_flash()
                   : settings.model == "pro" ? ModelSpec::deepseek_v4_pro()
                                             : ModelSpec::from_hf_config(settings.config);
  QUIRE_CHECK(settings.limits.context_max <= spec.positions_max, "--context is ",
              settings.limits.context_max, ", but the model has ", spec.positions_max,
              " positions");
  return settings.mtp ? spec.with_mtp_layers() : spec;
}

std::vector<std::int64_t> budgets_of(const Settings& settings) {
  std::vector<std::int64_t> budgets;
  for (const double gib : settings.gib) {
    budgets.push_back(static_cast<std::int64_t>(gib * static_cast<double>(kGib)));
  }
  budgets.insert(budgets.end(), settings.bytes.begin(), settings.bytes.end());
  return budgets;
}

// 1234567 as 1,234,567.
std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) {
    at -= 3;
    text.insert(at, ",");
  }
  return text;
}

void print_line(const char* purpose, const std::string& name, const std::string& count,
                const std::string& each, std::int64_t bytes) {
  std::printf("  %-13s %-31s %13s %15s %19s\n", purpose, name.c_str(), count.c_str(), each.c_str(),
              grouped(bytes).c_str());
}

void print_notes(const Capacity& capacity, const Settings& settings) {
  const Limits& limits = capacity.limits;
  std::printf("  %s pages of 256 tokens hold %s tokens; %s tokens per GiB of pages\n",
              grouped(limits.pages).c_str(), grouped(capacity.tokens()).c_str(),
              grouped(capacity.tokens_per_gib()).c_str());
  std::printf("  %s seats of %s bytes\n", grouped(limits.seats_max).c_str(),
              grouped(capacity.seat_bytes).c_str());
  const std::int64_t whole = capacity.requests_of(limits.context_max);
  std::printf("  %s requests of %s tokens at once; %s would end first\n", grouped(whole).c_str(),
              grouped(limits.context_max).c_str(), whole == limits.seats_max ? "seats" : "pages");
  const std::int64_t usable = limits.seats_max * limits.cells_max();
  if (limits.pages > usable) {
    std::printf("  %s pages more than all seats can fill: more --seats or --context use them\n",
                grouped(limits.pages - usable).c_str());
  }
  const std::int64_t main_stride = settings.layout.csa_page_stride_bytes;
  if (main_stride % kMainDataBytes != 0 && !settings.page_major) {
    std::printf("  a CSA stride of %s is no multiple of 576: FlashMLA's SM100 kernel refuses it\n",
                grouped(main_stride).c_str());
  }
}

void print_table(const Capacity& capacity, const Settings& settings, std::int64_t budget) {
  std::printf("\nbudget %s bytes, %.2f GiB\n", grouped(budget).c_str(),
              static_cast<double>(budget) / static_cast<double>(kGib));
  std::printf("  %-13s %-31s %13s %15s %19s\n", "purpose", "", "count", "bytes each", "bytes");
  for (const CapacityItem& item : capacity.items) {
    print_line(name_of(item.region), item.name, grouped(item.count), grouped(item.item_bytes),
               item.bytes);
  }
  if (settings.granularity_mib > 0) {
    print_line("pool", concat("granularity of ", settings.granularity_mib, " MiB adds"), "", "",
               capacity.pool_adds_bytes);
  }
  print_line("total", "", "", "", capacity.total());
  print_line("left", "", "", "", budget - capacity.total());
  print_notes(capacity, settings);
}

nlohmann::ordered_json to_json(const Capacity& capacity) {
  nlohmann::ordered_json items = nlohmann::ordered_json::array();
  for (const CapacityItem& item : capacity.items) {
    items.push_back({{"purpose", name_of(item.region)},
                     {"name", item.name},
                     {"count", item.count},
                     {"item_bytes", item.item_bytes},
                     {"bytes", item.bytes}});
  }
  return {{"fits", true},
          {"pages", capacity.limits.pages},
          {"seats", capacity.limits.seats_max},
          {"tokens", capacity.tokens()},
          {"tokens_per_gib", capacity.tokens_per_gib()},
          {"page_bytes", capacity.page_bytes},
          {"seat_bytes", capacity.seat_bytes},
          {"requests_of_context", capacity.requests_of(capacity.limits.context_max)},
          {"items", std::move(items)},
          {"cache_bytes", capacity.cache.total()},
          {"rope_bytes", capacity.rope_bytes},
          {"pool_adds_bytes", capacity.pool_adds_bytes},
          {"total_bytes", capacity.total()}};
}

int run(const Settings& settings) {
  const ModelSpec spec = read_spec(settings);
  const std::int64_t sliding = spec.count(LayerKind::kSliding);
  const std::int64_t csa = spec.count(LayerKind::kCsa);
  const std::int64_t hca = spec.count(LayerKind::kHca);
  const std::string name = settings.config.empty() ? settings.model : settings.config;
  nlohmann::ordered_json plans = nlohmann::ordered_json::array();
  if (!settings.json) {
    std::printf("%s: %zu layers (%lld sliding, %lld csa, %lld hca)\n", name.c_str(),
                spec.layers.size(), static_cast<long long>(sliding), static_cast<long long>(csa),
                static_cast<long long>(hca));
  }
  bool all_fit = true;
  for (const std::int64_t budget : budgets_of(settings)) {
    nlohmann::ordered_json plan;
    try {
      const Capacity capacity =
          plan_capacity(spec, settings.limits, settings.layout, budget, settings.capacity);
      if (!settings.json) print_table(capacity, settings, budget);
      plan = to_json(capacity);
    } catch (const UsageError& error) {
      all_fit = false;
      std::fprintf(stderr, "quire-plan: does not fit: %s\n", error.what());
      plan = {{"fits", false}, {"why", error.what()}};
    }
    plan["budget_bytes"] = budget;
    plans.push_back(std::move(plan));
  }
  if (settings.json) {
    const nlohmann::ordered_json all = {
        {"model", name},
        {"layers", {{"sliding", sliding}, {"csa", csa}, {"hca", hca}}},
        {"context", settings.limits.context_max},
        {"plans", std::move(plans)}};
    std::printf("%s\n", all.dump(2).c_str());
  }
  return all_fit ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "What fits into a byte budget: pages, seats and tokens of a compressed-attention cache",
      "quire-plan");
  Settings settings;
  add_options(app, settings);
  CLI11_PARSE(app, argc, argv);
  try {
    if (settings.page_major) settings.layout.page_order = PageOrder::kPageMajor;
    if (settings.rope_tables) settings.capacity.rope_positions = settings.limits.context_max;
    if (settings.granularity_mib > 0) {
      settings.capacity.pool_granularity_bytes = settings.granularity_mib * kMib;
    }
    return run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "quire-plan: %s\n", error.what());
    return 1;
  }
}
