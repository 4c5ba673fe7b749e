// Reads the PTX of every exact kernel and proves, without a GPU, what the sources promise: only
// single, correctly rounded operations (SPEC 3.7), and the order of programmatic dependent launch
// (DESIGN 7): wait, trigger, what depends on the predecessor, stores.
//
// The order is checked on the control flow graph: an instruction that needs the wait must have it
// behind it on every path. Planted faults show that the check finds them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

// --- Reading PTX ---

struct Instruction {
  std::string text;
  std::vector<std::string> opcode;  // "ld.global.nc.f32" in its parts
  std::string operands;
  bool guarded = false;  // may not be executed

  const std::string& name() const { return opcode.front(); }
  bool has(std::string_view part) const {
    for (std::size_t i = 1; i < opcode.size(); ++i) {
      if (opcode[i] == part) return true;
    }
    return false;
  }
  bool has_any(std::initializer_list<std::string_view> parts) const {
    for (const std::string_view part : parts) {
      if (has(part)) return true;
    }
    return false;
  }
};

struct Function {
  std::string name;
  bool is_entry = false;
  std::vector<Instruction> code;
  std::map<std::string, std::size_t> labels;  // of the instruction that follows
  std::map<std::string, std::vector<std::string>> branch_targets;  // of brx.idx
};

std::string trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) {
    text.remove_prefix(1);
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) {
    text.remove_suffix(1);
  }
  return std::string(text);
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  std::istringstream stream{std::string(text)};
  while (std::getline(stream, part, separator)) parts.push_back(trimmed(part));
  return parts;
}

// Drops comments and the directives that have no semicolon.
std::string without_noise(const std::string& ptx) {
  std::string clean;
  std::istringstream lines(ptx);
  std::string line;
  while (std::getline(lines, line)) {
    const std::string code = trimmed(line.substr(0, line.find("//")));
    if (code.starts_with(".loc") || code.starts_with(".file")) continue;
    clean += code + "\n";
  }
  return clean;
}

Instruction parse_instruction(std::string text) {
  Instruction instruction;
  instruction.text = text;
  if (text.front() == '@') {
    instruction.guarded = true;
    text = trimmed(std::string_view(text).substr(text.find_first_of(" \t\n")));
  }
  const std::size_t end = text.find_first_of(" \t\n");
  instruction.opcode = split(text.substr(0, end), '.');
  if (end != std::string::npos) instruction.operands = trimmed(text.substr(end));
  return instruction;
}

// One statement of a body: labels in front of it are taken off and remembered.
void add_statement(Function& function, std::string statement) {
  for (;;) {
    statement = trimmed(statement);
    if (!statement.empty() && (statement.front() == '{' || statement.front() == '}')) {
      statement.erase(0, 1);  // a scope
      continue;
    }
    const std::size_t colon = statement.find(':');
    const std::size_t word_end = statement.find_first_of(" \t\n");
    if (colon == std::string::npos || word_end < colon || colon + 1 == word_end + 1) break;
    const std::string label = statement.substr(0, colon);
    statement = trimmed(statement.substr(colon + 1));
    if (statement.starts_with(".branchtargets")) {
      function.branch_targets[label] = split(statement.substr(14), ',');
      return;
    }
    function.labels[label] = function.code.size();
  }
  if (statement.empty() || statement.front() == '.') return;  // nothing, or a directive
  function.code.push_back(parse_instruction(statement));
}

// Index behind the brace that closes the one at `open`.
std::size_t scope_end(const std::string& text, std::size_t open) {
  int depth = 0;
  for (std::size_t i = open; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i + 1;
  }
  return text.size();
}

std::vector<Function> parse_ptx(const std::string& ptx) {
  const std::string text = without_noise(ptx);
  std::vector<Function> functions;
  std::size_t at = 0;
  for (;;) {
    const std::size_t entry = text.find(".entry", at);
    const std::size_t func = text.find(".func", at);
    const std::size_t begin = std::min(entry, func);
    if (begin == std::string::npos) return functions;
    const std::size_t open = text.find('{', begin);
    const std::size_t semicolon = text.find(';', begin);
    if (open == std::string::npos || semicolon < open) {  // a declaration
      at = begin + 5;
      continue;
    }
    Function function;
    function.is_entry = begin == entry;
    const std::string head = text.substr(begin, open - begin);
    const std::size_t name = head.find("_Z") != std::string::npos ? head.find("_Z") : 7;
    function.name = head.substr(name, head.find_first_of("( \t\n", name) - name);
    at = scope_end(text, open);
    for (const std::string& statement :
         split(std::string_view(text).substr(open + 1, at - open - 2), ';')) {
      add_statement(function, statement);
    }
    functions.push_back(std::move(function));
  }
}

// --- The rules ---

using Faults = std::vector<std::string>;

void fault(Faults& faults, const Function& function, const std::string& why,
           const std::string& text = "") {
  faults.push_back(function.name + ": " + why + (text.empty() ? "" : ": " + text));
}

// SPEC 3.7: nothing approximate, nothing that flushes or contracts.
void check_arithmetic(const Function& function, Faults& faults) {
  static const std::set<std::string_view> approximate{"ex2", "lg2", "sin", "cos", "tanh", "rsqrt"};
  static const std::set<std::string_view> rounded{"add", "sub", "mul",  "fma",
                                                  "mad", "div", "sqrt", "rcp"};
  for (const Instruction& i : function.code) {
    const bool is_float = i.has_any({"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"});
    if (i.has("ftz")) fault(faults, function, "flushes subnormals", i.text);
    if (i.has("approx") || i.has("full")) fault(faults, function, "is approximate", i.text);
    if (approximate.contains(i.name())) fault(faults, function, "is approximate", i.text);
    if (is_float && rounded.contains(i.name()) && !i.has("rn")) {
      fault(faults, function, "does not name its rounding", i.text);
    }
    // Against a constant, which is no NaN and no zero, the compiler may take the short form.
    const bool by_constant = i.operands.find(", 0f") != std::string::npos;
    if (is_float && (i.name() == "max" || i.name() == "min") && !i.has("NaN") && !by_constant) {
      fault(faults, function, "is no maximum of SPEC 3.7", i.text);
    }
  }
}

enum class Launch {
  kPlain,     // neither waits nor triggers
  kWaits,     // wait first; before it only what is immutable
  kPrologue,  // the decode append: records and seat state are loaded before the wait too
};

bool is_wait(const Instruction& i) { return i.name() == "griddepcontrol" && i.has("wait"); }
bool is_trigger(const Instruction& i) {
  return i.name() == "griddepcontrol" && i.has("launch_dependents");
}
bool is_return(const Instruction& i) { return i.name() == "ret" || i.name() == "exit"; }

// Why an instruction may not run before the wait; empty: it may.
std::string needs_wait(const Instruction& i, Launch launch) {
  static const std::set<std::string_view> memory{
      "ld", "ldu", "st", "red", "atom", "cp", "tex", "tld4", "suld", "sust", "sured", "multimem"};
  if (is_return(i)) return "returns without the wait";
  if (is_trigger(i)) return "triggers before the wait";
  if (i.name() == "call") return "calls what the check cannot follow, before the wait";
  if (!memory.contains(i.name())) return {};
  if (i.name() == "cp" && i.has("global")) return "copies what may change before the wait";
  if (i.has_any({"param", "shared", "local", "const"})) return {};
  if (i.name() != "ld") return "stores before the wait";
  if (i.has("global") && i.has("nc")) return {};
  const bool at_l2 = i.has("global") && (i.has("cg") || (i.has("relaxed") && i.has("gpu")));
  if (at_l2 && launch == Launch::kPrologue) return {};
  return "loads what may change before the wait";
}

std::vector<std::size_t> successors(const Function& function, std::size_t at, Faults& faults) {
  const Instruction& i = function.code[at];
  std::vector<std::size_t> next;
  const auto go_to = [&](const std::string& label) {
    const auto found = function.labels.find(label);
    if (found == function.labels.end()) {
      fault(faults, function, "goes to an unknown label", i.text);
    } else {
      next.push_back(found->second);
    }
  };
  if (i.name() == "bra") go_to(i.operands);
  if (i.name() == "brx") {
    const std::vector<std::string> operands = split(i.operands, ',');
    const auto targets = function.branch_targets.find(operands.back());
    if (targets == function.branch_targets.end()) {
      fault(faults, function, "branches by an unknown table", i.text);
    } else {
      for (const std::string& label : targets->second) go_to(label);
    }
  }
  const bool leaves = is_return(i) || i.name() == "bra" || i.name() == "brx" || i.name() == "trap";
  if (!leaves || i.guarded) next.push_back(at + 1);
  return next;
}

// For each instruction: on every path to it, has the wait been executed? Unreached code counts as
// waited. Falling off the end is a return.
std::vector<bool> waited_before(const Function& function, Faults& faults) {
  const std::size_t count = function.code.size();
  std::vector<bool> waited(count + 1, true);
  std::deque<std::size_t> work;
  waited[0] = false;
  work.push_back(0);
  while (!work.empty()) {
    const std::size_t at = work.front();
    work.pop_front();
    if (at == count) continue;
    const Instruction& i = function.code[at];
    if (is_wait(i) && !i.guarded) continue;  // what follows it on this path has waited
    for (const std::size_t next : successors(function, at, faults)) {
      if (!waited[next]) continue;
      waited[next] = false;
      work.push_back(next);
    }
  }
  return waited;
}

void check_order(const Function& function, Launch launch, Faults& faults) {
  bool waits = false;
  bool triggers = false;
  for (const Instruction& i : function.code) {
    waits = waits || is_wait(i);
    triggers = triggers || is_trigger(i);
  }
  if (launch == Launch::kPlain) {
    if (waits || triggers) fault(faults, function, "is launched plainly and waits or triggers");
    return;
  }
  if (!waits) fault(faults, function, "has no wait");
  if (!triggers) fault(faults, function, "has no trigger");
  const std::vector<bool> waited = waited_before(function, faults);
  if (!waited.back()) fault(faults, function, "ends without the wait");
  for (std::size_t at = 0; at < function.code.size(); ++at) {
    if (waited[at]) continue;
    const std::string why = needs_wait(function.code[at], launch);
    if (!why.empty()) fault(faults, function, why, function.code[at].text);
  }
}

// --- Planted faults ---

// A decode kernel as it should be: conditional early wait, prologue, wait, trigger, the rest.
constexpr std::string_view kGood = R"(
.visible .entry _Zgood(
	.param .align 8 .b8 _Zgood_param_0[16]
)
{
	.reg .pred 	%p<4>;
	.loc	1 20 3
	ld.param.u64 	%rd1, [_Zgood_param_0];
	@%p1 bra 	$L__BB0_2;
	griddepcontrol.wait; // from an inline asm
$L__BB0_2:
	ld.global.nc.v4.f32 	{%f1,%f2,%f3,%f4}, [%rd2];
	{ ld.global.cg.v4.f32 {%f5, %f6, %f7, %f8}, [%rd3]; }
	fma.rn.f32 	%f9, %f1, %f5, %f2;
	max.NaN.f32 	%f9, %f9, %f2;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	@%p2 bra 	$L__BB0_4;
	ld.global.f32 	%f10, [%rd4];
	add.rn.f32 	%f10, %f10, %f9;
	add.s64 	%rd5, %rd4, 8;
	st.global.f32 	[%rd5], %f10;
	atom.global.add.u32 	%r1, [%rd6], 1;
$L__BB0_4:
	ret;
}
)";

Faults all_faults(const std::string& ptx, Launch launch) {
  Faults faults;
  for (const Function& function : parse_ptx(ptx)) {
    check_arithmetic(function, faults);
    if (function.is_entry) check_order(function, launch, faults);
  }
  return faults;
}

std::string joined(const Faults& faults) {
  std::string text;
  for (const std::string& line : faults) text += line + "\n";
  return text;
}

// The good kernel with one place changed.
std::string planted(std::string_view from, std::string_view to) {
  std::string ptx(kGood);
  const std::size_t at = ptx.find(from);
  REQUIRE(at != std::string::npos);
  return ptx.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("A kernel that keeps the rules has no fault") {
  const std::vector<Function> functions = parse_ptx(std::string(kGood));
  REQUIRE(functions.size() == 1);
  CHECK(functions[0].name == "_Zgood");
  CHECK(functions[0].code.size() == 16);
  CHECK(joined(all_faults(std::string(kGood), Launch::kPrologue)) == "");
}

TEST_CASE("Each planted fault is found, and named") {
  struct Plant {
    const char *from, *to, *expected;
  };
  const Plant plants[] = {
      // Arithmetic.
      {"fma.rn.f32", "fma.rn.ftz.f32", "flushes subnormals"},
      {"add.rn.f32", "add.f32", "does not name its rounding"},
      {"add.rn.f32", "sub.f64", "does not name its rounding"},
      {"add.rn.f32", "mul.f32", "does not name its rounding"},
      {"fma.rn.f32", "fma.rz.f32", "does not name its rounding"},
      {"fma.rn.f32", "mad.f32", "does not name its rounding"},
      {"add.rn.f32", "div.full.f32", "is approximate"},
      {"add.rn.f32", "div.approx.f32", "is approximate"},
      {"add.rn.f32", "ex2.f32", "is approximate"},
      {"add.rn.f32", "sin.approx.f32", "is approximate"},
      {"max.NaN.f32", "max.f32", "is no maximum"},
      // Loads before the wait.
      {"ld.global.nc.v4", "ld.global.v4", "loads what may change"},
      {"ld.global.cg.v4", "ld.v4", "loads what may change"},
      {"ld.global.cg.v4", "ld.volatile.global.v4", "loads what may change"},
      {"ld.global.cg.v4.f32 {%f5, %f6, %f7, %f8}, [%rd3]",
       "cp.async.cg.shared.global [%r1], [%rd3], 16", "copies what may change"},
      // Stores before the wait.
      {"fma.rn.f32 	%f9, %f1, %f5, %f2;", "st.global.f32 [%rd2], %f1;", "stores before"},
      {"fma.rn.f32 	%f9, %f1, %f5, %f2;", "st.f32 [%rd2], %f1;", "stores before"},
      {"fma.rn.f32 	%f9, %f1, %f5, %f2;", "red.global.add.u32 [%rd2], 1;", "stores before"},
      {"fma.rn.f32 	%f9, %f1, %f5, %f2;", "atom.add.u32 %r1, [%rd2], 1;", "stores before"},
      {"fma.rn.f32 	%f9, %f1, %f5, %f2;", "call.uni _Zf, ();", "calls what the check"},
      // Paths around the wait.
      {"max.NaN.f32 	%f9, %f9, %f2;", "@%p3 ret;", "returns without"},
      {"max.NaN.f32 	%f9, %f9, %f2;", "@%p3 exit;", "returns without"},
      {"max.NaN.f32 	%f9, %f9, %f2;", "@%p3 bra $L__BB0_4;", "returns without"},
      {"max.NaN.f32 	%f9, %f9, %f2;", "@%p3 bra $L__BB0_9;", "unknown label"},
      {"	griddepcontrol.wait;\n	gr", "	@%p3 griddepcontrol.wait;\n	gr",
       "loads what may"},
      {"	griddepcontrol.wait;\n	gr", "	@%p3 griddepcontrol.wait;\n	gr",
       "stores before"},
      {"	griddepcontrol.wait;\n	gr", "	gr", "triggers before"},
      // The trigger.
      {"griddepcontrol.launch_dependents;", "", "has no trigger"},
      {"max.NaN.f32 	%f9, %f9, %f2;", "griddepcontrol.launch_dependents;", "triggers before"},
  };
  for (const Plant& plant : plants) {
    CAPTURE(plant.from);
    CAPTURE(plant.to);
    const std::string found = joined(all_faults(planted(plant.from, plant.to), Launch::kPrologue));
    CAPTURE(found);
    CHECK(found.find(plant.expected) != std::string::npos);
  }
}

TEST_CASE("A loop back to before the wait is no fault") {
  const std::string loop = planted("	ret;", "	@%p3 bra $L__BB0_2;\n	ret;");
  CHECK(joined(all_faults(loop, Launch::kPrologue)) == "");
}

TEST_CASE("A kernel that must wait first may not load state before its wait") {
  const std::string found = joined(all_faults(std::string(kGood), Launch::kWaits));
  CHECK(found.find("loads what may change before the wait: ld.global.cg") != std::string::npos);
}

TEST_CASE("A kernel without any wait, and a plain one with one, are faults") {
  std::string ptx(kGood);
  for (std::size_t at; (at = ptx.find("griddepcontrol.wait;")) != std::string::npos;) {
    ptx.erase(at, 20);
  }
  CHECK(joined(all_faults(ptx, Launch::kPrologue)).find("has no wait") != std::string::npos);
  CHECK(joined(all_faults(std::string(kGood), Launch::kPlain)).find("plainly") !=
        std::string::npos);
}

TEST_CASE("A jump table is followed") {
  const std::string table = planted("max.NaN.f32 	%f9, %f9, %f2;",
                                    "$L_t: .branchtargets $L__BB0_2, $L__BB0_4;\n"
                                    "brx.idx %r1, $L_t;\n$L__BB0_8:");
  CHECK(joined(all_faults(table, Launch::kPrologue)).find("returns without") != std::string::npos);
}

// --- The kernels: a CTest test of their own, visibly skipped in builds without nvcc ---

#ifdef QUIRE_PTX_LIST

namespace {

std::string file_text(const std::string& path) {
  std::ifstream file(path);
  REQUIRE_MESSAGE(file.good(), "cannot read " << path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// How the launchers of a source launch its kernels.
Launch launch_of(const std::filesystem::path& ptx, const std::string& kernel) {
  const std::string source = ptx.stem().stem().string();
  if (source == "append") {
    return kernel.find("append_decode") != std::string::npos ? Launch::kPrologue : Launch::kWaits;
  }
  if (source == "compress_c4" || source == "store" || source == "read_side") return Launch::kWaits;
  if (kernel.find("commit_kernel") != std::string::npos) return Launch::kWaits;
  return Launch::kPlain;  // planner, apply, known answers
}

}  // namespace

TEST_SUITE("kernels" * doctest::skip()) {  // run by name alone
TEST_CASE("Every exact kernel keeps the rules") {
  std::map<std::string, int> entries;  // by source
  for (const std::string& path : split(file_text(QUIRE_PTX_LIST), '\n')) {
    if (path.empty()) continue;
    CAPTURE(path);
    Faults faults;
    for (const Function& function : parse_ptx(file_text(path))) {
      check_arithmetic(function, faults);
      if (!function.is_entry) continue;
      ++entries[std::filesystem::path(path).stem().stem().string()];
      check_order(function, launch_of(path, function.name), faults);
    }
    CHECK(joined(faults) == "");
  }
  // A check that reads nothing would pass.
  CHECK(entries["append"] == 5);
  CHECK(entries["compress_c4"] == 20);
  CHECK(entries["store"] == 2);
  CHECK(entries["read_side"] == 5);
  CHECK(entries["known_answers"] == 1);
  CHECK(entries.size() > 4);
}
}  // TEST_SUITE

#endif
