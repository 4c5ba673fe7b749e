// The table of field cases in docs/RELIABILITY.md beside the tests: every case is there once, every
// test named for it exists and has its id in the comment above it, every such comment is in the
// table.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// "program: name of the test"
using Tests = std::set<std::string>;

struct Case {
  std::string id;
  Tests tests;
  bool applies = true;
  bool open = false;
};

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  REQUIRE(file);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string document() { return text_of(fs::path(QUIRE_SOURCE_DIR) / "docs" / "RELIABILITY.md"); }

std::vector<Case> cases_of(const std::string& text) {
  std::vector<Case> cases;
  std::istringstream lines(text);
  const std::regex row(R"(^\| ([PAOSWG]\d+) \| (.*) \| (.*) \|$)");
  const std::regex test("`([a-z0-9_]+)`: ((?:(?!<br>).)+)");
  for (std::string line; std::getline(lines, line);) {
    std::smatch parts;
    if (!std::regex_match(line, parts, row)) continue;
    Case found{parts[1], {}};
    const std::string tests = parts[3];
    found.open = parts[2].str().find(" Open: ") != std::string::npos;
    found.applies = tests.find("Does not apply: ") != 0;
    for (std::sregex_iterator at(tests.begin(), tests.end(), test), end; at != end; ++at) {
      found.tests.insert((*at)[1].str() + ": " + (*at)[2].str());
    }
    cases.push_back(found);
  }
  return cases;
}

// What stands in comments right above tests, by id.
std::map<std::string, Tests> tests_in_sources() {
  std::map<std::string, Tests> found;
  const std::regex name(R"(^TEST_CASE\(\s*"([^"]*)\")");
  const std::regex id(R"(\b[PAOSWG]\d{1,2}\b)");
  for (const char* folder : {"tests", "tests/gpu"}) {
    for (const auto& entry : fs::directory_iterator(fs::path(QUIRE_SOURCE_DIR) / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".cpp" && extension != ".cu") continue;
      std::istringstream lines(text_of(entry.path()));
      std::string comment;
      for (std::string line; std::getline(lines, line);) {
        if (line.rfind("TEST_CASE(", 0) == 0) {
          if (line == "TEST_CASE(") {
            std::string next;
            std::getline(lines, next);
            line += next;
          }
          std::smatch parts;
          REQUIRE(std::regex_search(line, parts, name));
          for (std::sregex_iterator at(comment.begin(), comment.end(), id), end; at != end; ++at) {
            found[at->str()].insert(entry.path().stem().string() + ": " + parts[1].str());
          }
        }
        comment = line.rfind("//", 0) == 0 ? comment + line : "";
      }
    }
  }
  return found;
}

TEST_CASE("every field case is in the table once, with the tests that carry its id and no others") {
  const std::pair<char, int> kinds[] = {{'P', 14}, {'A', 3}, {'O', 14},
                                        {'S', 9},  {'W', 4}, {'G', 8}};
  std::vector<std::string> expected;
  for (const auto& [kind, count] : kinds) {
    for (int i = 1; i <= count; ++i) expected.push_back(kind + std::to_string(i));
  }
  const std::vector<Case> cases = cases_of(document());
  std::vector<std::string> ids;
  for (const Case& each : cases) ids.push_back(each.id);
  CHECK(ids == expected);

  std::map<std::string, Tests> sources = tests_in_sources();
  for (const Case& each : cases) {
    CAPTURE(each.id);
    const Tests& carried = sources[each.id];
    for (const std::string& test : each.tests) {
      CAPTURE(test);
      CHECK(carried.count(test) == 1);
    }
    for (const std::string& test : carried) {
      CAPTURE(test);
      CHECK(each.tests.count(test) == 1);
    }
    CHECK(each.applies == !each.tests.empty());
  }
  for (const auto& [id, tests] : sources) {
    CAPTURE(id);
    CHECK(std::count(expected.begin(), expected.end(), id) == 1);
  }
}

TEST_CASE("the counts above the table are those of the table, and the programs named exist") {
  const std::string text = document();
  const std::vector<Case> cases = cases_of(text);
  const auto inapplicable =
      std::count_if(cases.begin(), cases.end(), [](const Case& each) { return !each.applies; });
  const auto open =
      std::count_if(cases.begin(), cases.end(), [](const Case& each) { return each.open; });
  std::ostringstream counts;
  counts << cases.size() << " cases: " << static_cast<std::ptrdiff_t>(cases.size()) - inapplicable
         << " shown, " << open << " of them with a part open; " << inapplicable
         << " does not apply.";
  CAPTURE(counts.str());
  CHECK(text.find(counts.str()) != std::string::npos);

  const std::regex program("`([a-z0-9_]+_test)`");
  int programs = 0;
  for (std::sregex_iterator at(text.begin(), text.end(), program), end; at != end; ++at) {
    const fs::path tests = fs::path(QUIRE_SOURCE_DIR) / "tests";
    const std::string name = (*at)[1];
    CAPTURE(name);
    const bool exists = fs::exists(tests / (name + ".cpp")) ||
                        fs::exists(tests / "gpu" / (name + ".cu")) ||
                        fs::exists(tests / "gpu" / (name + ".cpp"));
    CHECK(exists);
    ++programs;
  }
  CHECK(programs > 50);
}

}  // namespace
