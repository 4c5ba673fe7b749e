// What a benchmark program found: a table for people, and JSON for `tools/bench` and `tools/plot`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/support/timing.h"
#include "benchmarks/support/traffic.h"

namespace quire::bench {

// One line. `size` is what its axis counts: batch rows, tokens, rows.
struct Figure {
  std::string name;
  std::string axis;
  std::int64_t size = 0;
  Distribution seconds;
  std::optional<double> at_most_us;     // the figure to reach
  std::optional<double> bytes;          // moved at least; gives a rate
  std::optional<double> at_least_rate;  // bytes a second to reach
  std::string note;
};

class Report {
 public:
  // `question` is what the program answers, in a line; `arguments`: --json PATH.
  Report(std::string program, std::string question, int argc, char** argv);

  void set(const Ceilings& ceilings) { ceilings_ = ceilings; }
  // Prints the line as it comes.
  void add(const Figure& figure);
  // A line that is no figure, such as residency.
  void note(const std::string& text);
  // A value that is no time, by name.
  void set(const std::string& name, double value);

  // Writes the JSON where it was asked for. The program's exit status.
  int finish() const;

 private:
  std::string program_, question_, json_path_;
  std::optional<Ceilings> ceilings_;
  std::vector<Figure> figures_;
  std::vector<std::string> notes_;
  std::vector<std::pair<std::string, double>> values_;
};

}  // namespace quire::bench
