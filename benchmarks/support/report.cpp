#include "benchmarks/support/report.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

namespace quire::bench {
namespace {

using Json = nlohmann::ordered_json;

double us(double seconds) { return seconds * 1e6; }

Json json_of(const Distribution& times) {
  return {{"p10_us", us(times.p10)}, {"median_us", us(times.median)}, {"p90_us", us(times.p90)}};
}

Json json_of(const Figure& figure) {
  Json json = {{"name", figure.name}, {"axis", figure.axis}, {"size", figure.size}};
  json.update(json_of(figure.seconds));
  if (figure.at_most_us) json["at_most_us"] = *figure.at_most_us;
  if (figure.bytes) {
    json["bytes"] = *figure.bytes;
    json["TB_per_s"] = *figure.bytes / figure.seconds.median * 1e-12;
  }
  if (figure.at_least_rate) json["at_least_TB_per_s"] = *figure.at_least_rate * 1e-12;
  if (!figure.note.empty()) json["note"] = figure.note;
  return json;
}

Json json_of(const Ceilings& ceilings) {
  return {{"copy_TB_per_s", ceilings.copy * 1e-12},
          {"read_TB_per_s", ceilings.read * 1e-12},
          {"write_TB_per_s", ceilings.write * 1e-12},
          {"empty_plain", json_of(ceilings.empty_plain)},
          {"empty_wait", json_of(ceilings.empty_wait)},
          {"empty_wait_trigger", json_of(ceilings.empty_trigger)}};
}

}  // namespace

Report::Report(std::string program, std::string question, int argc, char** argv)
    : program_(std::move(program)), question_(std::move(question)) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json" && i + 1 < argc) {
      json_path_ = argv[++i];
      continue;
    }
    std::fprintf(stderr, "%s: %s\nUsage: %s [--json PATH]\n", program_.c_str(), question_.c_str(),
                 program_.c_str());
    std::exit(argument == "--help" ? 0 : 2);
  }
  std::printf("%s: %s\n", program_.c_str(), question_.c_str());
}

void Report::add(const Figure& figure) {
  std::printf("  %-34s %5s %7lld %9.2f us (p10 %.2f, p90 %.2f)", figure.name.c_str(),
              figure.axis.c_str(), static_cast<long long>(figure.size), us(figure.seconds.median),
              us(figure.seconds.p10), us(figure.seconds.p90));
  if (figure.bytes) {
    const double rate = *figure.bytes / figure.seconds.median;
    std::printf("  %.2f TB/s", rate * 1e-12);
    if (ceilings_) std::printf(" = %.0f %% of a copy", 100 * rate / ceilings_->copy);
    if (figure.at_least_rate) {
      std::printf("  [at least %.1f: %s]", *figure.at_least_rate * 1e-12,
                  rate >= *figure.at_least_rate ? "reached" : "not reached");
    }
  }
  if (figure.at_most_us) {
    std::printf("  [at most %.1f us: %s]", *figure.at_most_us,
                us(figure.seconds.median) <= *figure.at_most_us ? "reached" : "not reached");
  }
  std::printf("%s%s\n", figure.note.empty() ? "" : "  ", figure.note.c_str());
  std::fflush(stdout);
  figures_.push_back(figure);
}

void Report::note(const std::string& text) {
  std::printf("  %s\n", text.c_str());
  notes_.push_back(text);
}

void Report::set(const std::string& name, double value) {
  std::printf("  %-34s %.4g\n", name.c_str(), value);
  values_.emplace_back(name, value);
}

int Report::finish() const {
  if (json_path_.empty()) return 0;
  Json json = {{"program", program_}, {"question", question_}};
  if (ceilings_) json["ceilings"] = json_of(*ceilings_);
  json["figures"] = Json::array();
  for (const Figure& figure : figures_) json["figures"].push_back(json_of(figure));
  for (const auto& [name, value] : values_) json["values"][name] = value;
  if (!notes_.empty()) json["notes"] = notes_;
  std::ofstream file(json_path_);
  file << json.dump(2) << '\n';
  if (!file.flush()) {
    std::fprintf(stderr, "%s: cannot write %s\n", program_.c_str(), json_path_.c_str());
    return 1;
  }
  return 0;
}

}  // namespace quire::bench
