// Registers, stack, spills and shared memory of every kernel, beside kernels/resources.txt, which
// is committed: what a change costs shows in its diff, and a growth that nobody meant fails here.
//
// Read from ptxas, as it compiles the PTX of ptx_lint_test for sm_90. A spill always fails. With
// the compiler that the table names, anything else must be equal too; with another one, register
// allocation may differ, and only growth beyond a tenth fails. ./tools/resources --accept writes
// the table.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iomanip>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/ptx.h"

namespace {

using quire::test::Function;

struct Usage {
  int threads = 0;    // of a block
  int registers = 0;  // of a thread
  int stack = 0;      // bytes of a thread
  int spills = 0;     // bytes stored and loaded
  int shared = 0;     // bytes of a block, without dynamic ones
};

struct Table {
  std::string compiler;
  std::map<std::string, Usage> kernels;
};

// --- Residency on sm_90 ---

constexpr int kSms = 132;  // of an H200

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Blocks of a kernel that an SM holds: 2,048 threads, 32 blocks, 16,384 registers in each of four
// quarters, given to warps by 256; 228 KB of shared memory, of which each block takes 1 KB more.
int blocks_per_sm(const Usage& usage) {
  const int warps = round_up(usage.threads, 32) / 32;
  if (warps == 0 || usage.registers == 0) return 0;
  const int warps_by_registers = 4 * (16384 / round_up(usage.registers * 32, 256));
  const int by_shared = 233472 / round_up(usage.shared + 1024, 128);
  return std::min({32, 64 / warps, warps_by_registers / warps, by_shared});
}

// The largest grid of which two fit the GPU at once: a launch in a programmatic chain starts beside
// the one in front.
int grid_of_pair(const Usage& usage) { return kSms * blocks_per_sm(usage) / 2; }

// --- What ptxas says ---

int number_before(const std::string& line, const std::string& words) {
  const std::size_t end = line.find(" " + words);
  if (end == std::string::npos) return 0;
  const std::size_t begin = line.find_last_of(" ,", end - 1);
  return std::stoi(line.substr(begin + 1, end - begin - 1));
}

// Usage by symbol, threads left open.
std::map<std::string, Usage> parse_log(const std::string& log) {
  std::map<std::string, Usage> usages;
  Usage* usage = nullptr;
  const std::string function = "Function properties for ";
  for (const std::string& line : quire::test::split(log, '\n')) {
    const std::size_t at = line.find(function);
    if (at != std::string::npos) usage = &usages[line.substr(at + function.size())];
    if (usage == nullptr) continue;
    if (line.find("bytes stack frame") != std::string::npos) {
      usage->stack = number_before(line, "bytes stack frame");
      usage->spills = number_before(line, "bytes spill stores");
      usage->spills += number_before(line, "bytes spill loads");
    }
    if (line.find("Used ") != std::string::npos) {
      usage->registers = number_before(line, "registers");
      usage->shared = number_before(line, "bytes smem");
    }
  }
  return usages;
}

std::string table_name(const Function& function) {
  std::string name = quire::test::kernel_name(function.symbol);
  quire::test::replace_all(name, ", ", ",");
  quire::test::replace_all(name, " >", ">");
  return name + (function.dynamic_shared ? "+dynamic" : "");
}

// Adds the kernels of one PTX file to the table.
void add_kernels(Table& table, const std::string& ptx, std::map<std::string, Usage>& usages) {
  table.compiler = quire::test::compiler_version(ptx);
  for (const Function& function : quire::test::parse_ptx(ptx)) {
    if (!function.is_entry) {
      throw std::runtime_error(function.symbol + " is not inlined: its registers are in no table");
    }
    const std::string name = table_name(function);
    if (function.threads == 0) throw std::runtime_error(name + " has no __launch_bounds__");
    const auto found = usages.find(function.symbol);
    if (found == usages.end()) throw std::runtime_error(name + " is not in the log of ptxas");
    found->second.threads = function.threads;
    if (!table.kernels.emplace(name, found->second).second) {
      throw std::runtime_error("two kernels are named " + name);
    }
  }
}

// --- The table as text ---

constexpr const char* kHeading =
    R"(# Resources of every kernel on sm_90. Written by ./tools/resources --accept, compared by the test
# kernel_resources. A spill always fails. With the compiler named below every other difference fails
# as well; with another one only growth beyond a tenth does.
#
#   threads    of a block            registers  of a thread
#   stack      bytes of a thread     spills     bytes of a thread, stored and loaded
#   shared     static bytes of a block; "+dynamic" behind a name: the launch adds to them
#   blocks     of this kernel that one SM holds; with dynamic shared memory, at most
#   pair       largest grid of which two fit an H200's 132 SMs at once
)";

std::string to_text(const Table& table) {
  std::ostringstream text;
  text << kHeading << "\ncompiler " << table.compiler << "\n\n"
       << std::left << std::setw(46) << "kernel" << std::right;
  for (const char* column :
       {"threads", "registers", "stack", "spills", "shared", "blocks", "pair"}) {
    text << std::setw(static_cast<int>(std::string(column).size()) + 2) << column;
  }
  text << "\n";
  for (const auto& [name, usage] : table.kernels) {
    text << std::left << std::setw(46) << name << std::right << std::setw(9) << usage.threads
         << std::setw(11) << usage.registers << std::setw(7) << usage.stack << std::setw(8)
         << usage.spills << std::setw(8) << usage.shared << std::setw(8) << blocks_per_sm(usage)
         << std::setw(6) << grid_of_pair(usage) << "\n";
  }
  return text.str();
}

Table parse_table(const std::string& text) {
  Table table;
  for (const std::string& line : quire::test::split(text, '\n')) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name.empty() || name.front() == '#' || name == "kernel") continue;
    if (name == "compiler") {
      words >> table.compiler;
      continue;
    }
    Usage usage;
    words >> usage.threads >> usage.registers >> usage.stack >> usage.spills >> usage.shared;
    if (words.fail()) throw std::runtime_error("kernels/resources.txt: cannot read: " + line);
    table.kernels[name] = usage;
  }
  return table;
}

// --- The comparison ---

using Differences = std::vector<std::string>;

void compare(Differences& differences, const std::string& name, const Usage& before,
             const Usage& now, bool same_compiler) {
  const std::pair<const char*, int Usage::*> columns[] = {{"threads of a block", &Usage::threads},
                                                          {"registers", &Usage::registers},
                                                          {"stack bytes", &Usage::stack},
                                                          {"shared bytes", &Usage::shared}};
  if (now.spills > 0) {
    differences.push_back("SPILLS: " + name + " spills " + std::to_string(now.spills) +
                          " bytes; no kernel may, accepted or not");
  }
  for (const auto& [what, member] : columns) {
    const int from = before.*member;
    const int to = now.*member;
    const bool differs = same_compiler ? from != to : to * 10 > from * 11;
    if (!differs) continue;
    differences.push_back(std::string(to > from ? "GROWS: " : "shrinks: ") + name + ": " + what +
                          " " + std::to_string(from) + " before, " + std::to_string(to) +
                          " now; blocks per SM " + std::to_string(blocks_per_sm(before)) +
                          " before, " + std::to_string(blocks_per_sm(now)) + " now");
  }
}

Differences compare(const Table& before, const Table& now) {
  Differences differences;
  const bool same_compiler = before.compiler == now.compiler;
  for (const auto& [name, usage] : now.kernels) {
    const auto found = before.kernels.find(name);
    if (found == before.kernels.end()) differences.push_back("new: " + name);
    compare(differences, name, found == before.kernels.end() ? usage : found->second, usage,
            same_compiler);
  }
  for (const auto& [name, usage] : before.kernels) {
    if (!now.kernels.contains(name)) differences.push_back("gone: " + name);
  }
  // Growth and spills first: "GROWS", "SPILLS" sort before the lower case.
  std::sort(differences.begin(), differences.end());
  return differences;
}

std::string joined(const Differences& differences) {
  std::string text;
  for (const std::string& line : differences) text += line + "\n";
  return text;
}

// "compiler" x and two kernels.
Table sample() {
  return {"13.0.88", {{"a", {576, 56, 0, 0, 0}}, {"b<512,bf16>", {128, 100, 80, 0, 36864}}}};
}

std::string after(int Usage::*member, int value, const char* compiler = "13.0.88") {
  Table now = sample();
  now.compiler = compiler;
  now.kernels["b<512,bf16>"].*member = value;
  return joined(compare(sample(), now));
}

}  // namespace

TEST_CASE("Blocks per SM are limited by registers, threads, blocks or shared memory") {
  CHECK(blocks_per_sm({576, 56, 0, 0, 0}) == 2);  // measured: 264 places on 132 SMs
  CHECK(grid_of_pair({576, 56, 0, 0, 0}) == 132);
  CHECK(blocks_per_sm({128, 96, 0, 0, 0}) == 5);
  CHECK(blocks_per_sm({128, 97, 0, 0, 0}) == 4);
  CHECK(blocks_per_sm({1024, 32, 0, 0, 0}) == 2);
  CHECK(blocks_per_sm({1024, 65, 0, 0, 0}) == 0);  // cannot be launched
  CHECK(blocks_per_sm({128, 32, 0, 0, 0}) == 16);
  CHECK(blocks_per_sm({32, 16, 0, 0, 0}) == 32);
  CHECK(blocks_per_sm({128, 32, 0, 0, 36880}) == 6);
}

TEST_CASE("What ptxas prints is read") {
  const auto usages = parse_log(
      "ptxas info    : 38 bytes gmem\n"
      "ptxas info    : Compiling entry function '_Za' for 'sm_90'\n"
      "ptxas info    : Function properties for _Za\n"
      "    80 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
      "ptxas info    : Used 56 registers, used 1 barriers, 80 bytes cumulative stack size, 36880 "
      "bytes smem\n"
      "ptxas info    : Function properties for _Zb\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 14 registers, used 0 barriers\n");
  REQUIRE(usages.size() == 2);
  const Usage& a = usages.at("_Za");
  CHECK(a.registers == 56);
  CHECK(a.stack == 80);
  CHECK(a.spills == 20);
  CHECK(a.shared == 36880);
  CHECK(usages.at("_Zb").registers == 14);
  CHECK(usages.at("_Zb").shared == 0);
}

TEST_CASE("A table that is written is read again") {
  CHECK(to_text(parse_table(to_text(sample()))) == to_text(sample()));
  CHECK(joined(compare(sample(), parse_table(to_text(sample())))) == "");
  CHECK_THROWS_WITH_AS(parse_table("a 1 2 x"), doctest::Contains("cannot read"),
                       std::runtime_error);
}

TEST_CASE("Every difference is told, with the kernel, before and now") {
  CHECK(after(&Usage::registers, 101) ==
        "GROWS: b<512,bf16>: registers 100 before, 101 now; blocks per SM 4 before, 4 now\n");
  CHECK(after(&Usage::registers, 96) ==
        "shrinks: b<512,bf16>: registers 100 before, 96 now; blocks per SM 4 before, 5 now\n");
  CHECK(after(&Usage::shared, 36868).starts_with("GROWS: b<512,bf16>: shared bytes 36864 before"));
  CHECK(after(&Usage::stack, 88).starts_with("GROWS: b<512,bf16>: stack bytes 80 before, 88"));
  CHECK(after(&Usage::threads, 64).starts_with("shrinks: b<512,bf16>: threads of a block 128"));
  CHECK(after(&Usage::spills, 8) ==
        "SPILLS: b<512,bf16> spills 8 bytes; no kernel may, accepted or not\n");
  Table fewer = sample();
  fewer.kernels.erase("a");
  CHECK(joined(compare(sample(), fewer)) == "gone: a\n");
  CHECK(joined(compare(fewer, sample())) == "new: a\n");
  fewer.kernels["b<512,bf16>"].spills = 8;
  CHECK(joined(compare(fewer, fewer)) != "");  // even where the table says so
}

TEST_CASE("Another compiler may differ by a tenth, and may not spill") {
  CHECK(after(&Usage::registers, 110, "13.1.5") == "");
  CHECK(after(&Usage::registers, 90, "13.1.5") == "");
  CHECK(after(&Usage::registers, 111, "13.1.5").starts_with("GROWS: b<512,bf16>: registers 100"));
  CHECK(after(&Usage::spills, 8, "13.1.5").starts_with("SPILLS"));
}

TEST_CASE("A kernel without launch bounds, and two of one name, are errors") {
  const std::string bounded = ".entry _Z1av(\n)\n.maxntid 64, 1, 1\n{\nret;\n}\n";
  std::map<std::string, Usage> usages{{"_Z1av", {0, 20, 0, 0, 0}}};
  Table table;
  add_kernels(table, bounded, usages);
  CHECK(table.kernels.at("a").threads == 64);
  CHECK_THROWS_WITH_AS(add_kernels(table, bounded, usages), doctest::Contains("two kernels"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(add_kernels(table, ".entry _Z1av(\n)\n{\nret;\n}\n", usages),
                       doctest::Contains("__launch_bounds__"), std::runtime_error);
  CHECK_THROWS_WITH_AS(add_kernels(table, ".func _Z1bv(\n)\n{\nret;\n}\n", usages),
                       doctest::Contains("not inlined"), std::runtime_error);
  const std::string dynamic =
      ".extern .shared .align 16 .b8 stages[];\n.entry _Z1av(\n)\n"
      ".maxntid 64\n{\nmov.u32 %r1, stages;\nret;\n}\n";
  add_kernels(table, dynamic, usages);
  CHECK(table.kernels.contains("a+dynamic"));
}

// --- The kernels: a CTest test of their own, visibly skipped in builds without nvcc ---

#ifdef QUIRE_PTXAS_LOG

namespace {

const std::string kTablePath = std::string(QUIRE_SOURCE_DIR) + "/kernels/resources.txt";

Table compiled_table() {
  Table table;
  std::map<std::string, Usage> usages = parse_log(quire::test::file_text(QUIRE_PTXAS_LOG));
  for (const std::string& path : quire::test::file_lines(QUIRE_PTX_LIST)) {
    add_kernels(table, quire::test::file_text(path), usages);
  }
  return table;
}

}  // namespace

TEST_SUITE("kernels" * doctest::skip()) {  // run by name alone
  TEST_CASE("The committed table tells what every kernel takes") {
    const Table now = compiled_table();
    const Table before = parse_table(quire::test::file_text(kTablePath));
    CHECK(!now.kernels.empty());
    MESSAGE("compiler of the table " << before.compiler << ", here " << now.compiler);
    const std::string differences = joined(compare(before, now));
    CHECK_MESSAGE(differences.empty(), "\n" << differences
                                            << "If this is meant: ./tools/resources --accept, and "
                                               "commit kernels/resources.txt with the reason.");
    // Blocks and pairs are computed: they too must be what the columns before them give.
    const bool as_written = to_text(before) == quire::test::file_text(kTablePath);
    CHECK_MESSAGE(as_written, "edited by hand? ./tools/resources --accept writes the table");
  }
}

TEST_SUITE("accept" * doctest::skip()) {  // ./tools/resources --accept
  TEST_CASE("The table is written") {
    const Table now = compiled_table();
    std::ofstream(kTablePath) << to_text(now);
    MESSAGE("kernels/resources.txt:\n" << to_text(now));
    for (const auto& [name, usage] : now.kernels) {
      CHECK_MESSAGE(usage.spills == 0, name << " spills: the test goes on failing");
    }
  }
}

#endif
