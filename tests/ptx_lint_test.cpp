// Reads the PTX of every kernel and proves, without a GPU, what the sources promise: only single,
// correctly rounded operations (SPEC 3.7), and the order of programmatic dependent launch
// (docs/PDL.md): wait, trigger, what depends on the predecessor, stores.
//
// The rules are in support/ptx_rules.h. Planted faults show that they find what they should; then
// every kernel of the library is held to them, a new one to the strictest without being named.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <quire/kernels/params.h>

#include "tests/support/ptx.h"
#include "tests/support/ptx_rules.h"

namespace {

using quire::test::Faults;
using quire::test::Function;
using quire::test::joined;
using quire::test::Launch;
using quire::test::parse_ptx;
using quire::test::Rules;

// --- Planted faults ---

// A decode kernel as it should be: conditional early wait, prologue, wait, trigger, the rest. Its
// parameters: weights, seat state, input rows, a stride.
constexpr std::string_view kGood = R"(
.visible .entry _Zgood(
	.param .align 8 .b8 _Zgood_param_0[32]
)
.maxntid 128, 1, 1
{
	.reg .pred 	%p<4>;
	.loc	1 20 3
	ld.param.u64 	%rd1, [_Zgood_param_0];
	@%p1 bra 	$L__BB0_2;
	griddepcontrol.wait; // from an inline asm
$L__BB0_2:
	mov.b64 	%rd7, _Zgood_param_0;
	add.s64 	%rd8, %rd7, 24;
	ld.param.u64 	%rd20, [%rd8];
	shl.b64 	%rd21, %rd20, 2;
	cvta.to.global.u64 	%rd2, %rd1;
	add.s64 	%rd2, %rd2, %rd21;
	ld.global.nc.v4.f32 	{%f1,%f2,%f3,%f4}, [%rd2];
	ld.param.v2.u64 	{%rd10, %rd11}, [%rd8+-16];
	mad.wide.s32 	%rd3, %r4, 48, %rd10;
	{ ld.global.cg.v4.f32 {%f5, %f6, %f7, %f8}, [%rd3]; }
	prefetch.global.L2 	[%rd11];
	fma.rn.f32 	%f9, %f1, %f5, %f2;
	max.NaN.f32 	%f9, %f9, %f2;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	@%p2 bra 	$L__BB0_4;
	ld.global.f32 	%f10, [%rd11];
	add.rn.f32 	%f10, %f10, %f9;
	add.s64 	%rd5, %rd11, 8;
	st.global.f32 	[%rd5], %f10;
	atom.global.add.u32 	%r1, [%rd6], 1;
$L__BB0_4:
	ret;
}
)";

Rules rules_of_good(Launch launch) { return {launch, {{0, "weights"}}, {{8, "state"}}}; }

Faults all_faults(const std::string& ptx, Launch launch) {
  Faults faults;
  for (const Function& function : parse_ptx(ptx)) {
    check_arithmetic(function, faults);
    if (function.is_entry) check_order(function, rules_of_good(launch), faults);
  }
  return faults;
}

// The good kernel with one place changed.
std::string planted(std::string_view from, std::string_view to) {
  std::string ptx(kGood);
  const std::size_t at = ptx.find(from);
  REQUIRE(at != std::string::npos);
  return ptx.replace(at, from.size(), to);
}

struct Plant {
  const char *from, *to, *expected;
};

void check_each(const std::vector<Plant>& plants, Launch launch = Launch::kPrologue) {
  for (const Plant& plant : plants) {
    CAPTURE(plant.from);
    CAPTURE(plant.to);
    const std::string found = joined(all_faults(planted(plant.from, plant.to), launch));
    CAPTURE(found);
    CHECK(found.find(plant.expected) != std::string::npos);
  }
}

constexpr const char* kFma = "fma.rn.f32 	%f9, %f1, %f5, %f2;";  // before the wait
constexpr const char* kMax = "max.NaN.f32 	%f9, %f9, %f2;";       // likewise
constexpr const char* kMainWait = "	griddepcontrol.wait;\n	gr";  // and the trigger's beginning
constexpr const char* kState = "ld.global.cg.v4.f32 {%f5, %f6, %f7, %f8}, [%rd3]";

}  // namespace

TEST_CASE("A kernel that keeps the rules has no fault") {
  const std::vector<Function> functions = parse_ptx(std::string(kGood));
  REQUIRE(functions.size() == 1);
  CHECK(functions[0].symbol == "_Zgood");
  CHECK(functions[0].threads == 128);
  CHECK(functions[0].code.size() == 25);
  CHECK(joined(all_faults(std::string(kGood), Launch::kPrologue)) == "");
}

TEST_CASE("Inexact arithmetic is found") {
  check_each({
      {"fma.rn.f32", "fma.rn.ftz.f32", "flushes subnormals"},
      {"add.rn.f32", "add.f32", "does not name its rounding"},
      {"add.rn.f32", "sub.f64", "does not name its rounding"},
      {"add.rn.f32", "mul.f32", "does not name its rounding"},
      {"fma.rn.f32", "fma.rz.f32", "does not name its rounding"},
      {"fma.rn.f32", "mad.f32", "does not name its rounding"},
      {"add.rn.f32", "div.full.f32", "is approximate"},
      {"add.rn.f32", "div.approx.f32", "is approximate"},
      {"add.rn.f32", "rsqrt.approx.f32", "is approximate"},
      {"add.rn.f32", "ex2.f32", "is approximate"},
      {"add.rn.f32", "sin.approx.f32", "is approximate"},
      {"max.NaN.f32", "max.f32", "is no maximum"},
      {"add.rn.f32", "cvt.rz.bf16.f32", "does not round to nearest"},
      {"atom.global.add.u32", "atom.global.add.f32", "sums in the order"},
      {"atom.global.add.u32 	%r1, [%rd6]", "red.global.add.v2.f32 [%rd6]", "sums in the order"},
      {"add.rn.f32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "an order of its own"},
  });
}

TEST_CASE("Loads and copies of what may change, before the wait, are found") {
  check_each({
      {"ld.global.nc.v4", "ld.global.v4", "loads what may change"},
      {"ld.global.cg.v4", "ld.v4", "loads what may change"},
      {"ld.global.cg.v4", "ld.volatile.global.v4", "loads what may change"},
      {"ld.global.cg.v4", "ld.relaxed.cta.global.v4", "loads what may change"},
      // By the right instruction, from the wrong place: state, input rows, who knows.
      {"ld.global.nc.v4.f32 	{%f1,%f2,%f3,%f4}, [%rd2]",
       "ld.global.nc.v4.f32 	{%f1,%f2,%f3,%f4}, [%rd10+16]", "what is not immutable, from the "},
      {"mad.wide.s32 	%rd3, %r4, 48, %rd10", "mad.wide.s32 	%rd3, %r4, 48, %rd11",
       "from the pointer at parameter byte 16"},
      {"mad.wide.s32 	%rd3, %r4, 48, %rd10", "selp.b64 	%rd3, %rd10, %rd11, %p1",
       "from the pointer at parameter byte 8 16"},
      {"mad.wide.s32 	%rd3, %r4, 48, %rd10", "mul.lo.s64 	%rd3, %rd10, 8",
       "from an address that no parameter holds"},
      {"	ld.param.v2.u64", "	add.s64 	%rd8, %rd8, %rd21;\n	ld.param.v2.u64",
       "from the pointer at parameter byte -1"},
      {kState, "cp.async.cg.shared.global [%r1], [%rd11], 16", "copies what may change"},
      {kState, "cp.async.ca.shared.global [%r1], [%rd3], 16", "copies what may change"},
      {kState,
       "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd11], 16, "
       "[%r2]",
       "copies what may change"},
  });
}

TEST_CASE("Copies of weights and, at L2, of state may run before the wait") {
  for (const char* copy : {
           "cp.async.cg.shared.global [%r1], [%rd3], 16",
           "cp.async.ca.shared.global [%r1], [%rd2], 16",
           "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd3], 16, "
           "[%r2]",
           "cp.async.bulk.prefetch.L2.global [%rd3], 16",
           "cp.async.commit_group",
           "st.shared::cluster.u32 [%r1], %r2",
           "ld.relaxed.gpu.global.v4.f32 {%f5, %f6, %f7, %f8}, [%rd3]",
       }) {
    CAPTURE(copy);
    CHECK(joined(all_faults(planted(kState, copy), Launch::kPrologue)) == "");
  }
}

TEST_CASE("A read-only load of what is written is found behind the wait too") {
  check_each(
      {{"ld.global.f32 	%f10", "ld.global.nc.f32 	%f10", "through the read-only cache"}});
  check_each({{"ld.global.f32 	%f10", "ldu.global.f32 	%f10", "through the read-only cache"}});
}

TEST_CASE("Stores before the wait, and before the trigger, are found") {
  for (const char* store :
       {"st.global.f32 [%rd2], %f1;", "st.f32 [%rd2], %f1;", "red.global.add.u32 [%rd2], 1;",
        "atom.add.u32 %r1, [%rd2], 1;", "st.async.weak.global.u32 [%rd2], %r1;",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd2], [%r1], 16;",
        "multimem.red.global.add.u32 [%rd2], 1;", "discard.global.L2 [%rd2], 128;"}) {
    CAPTURE(store);
    check_each({{kFma, store, "stores before the wait"}});
    const std::string late = "	griddepcontrol.wait;\n" + std::string(store) + "\n	gr";
    check_each({{kMainWait, late.c_str(), "stores before the trigger"}});
  }
  check_each({{kFma, "call.uni _Zf, ();", "calls what the check"}});
}

TEST_CASE("Paths around the wait are found") {
  check_each({
      {kMax, "@%p3 ret;", "returns without"},
      {kMax, "@%p3 exit;", "returns without"},
      {kMax, "@%p3 bra $L__BB0_4;", "returns without"},
      {kMax, "@%p3 bra $L__BB0_9;", "unknown label"},
      {kMainWait, "	@%p3 griddepcontrol.wait;\n	gr", "loads what may"},
      {kMainWait, "	@%p3 griddepcontrol.wait;\n	gr", "stores before"},
      {kMainWait, "	gr", "triggers before"},
      {"griddepcontrol.launch_dependents;", "", "has no trigger"},
      {kMax, "griddepcontrol.launch_dependents;", "triggers before"},
  });
}

TEST_CASE("A loop back to before the wait is no fault") {
  const std::string loop = planted("	ret;", "	@%p3 bra $L__BB0_2;\n	ret;");
  CHECK(joined(all_faults(loop, Launch::kPrologue)) == "");
}

TEST_CASE("A kernel that must wait first may not load state before its wait") {
  const std::string found = joined(all_faults(std::string(kGood), Launch::kWaits));
  CHECK(found.find("loads what may change before the wait") != std::string::npos);
  check_each({{kState, "cp.async.cg.shared.global [%r1], [%rd3], 16", "copies what may change"}},
             Launch::kWaits);
}

TEST_CASE("A kernel without any wait, and a plain one with one, are faults") {
  std::string ptx(kGood);
  quire::test::replace_all(ptx, "griddepcontrol.wait;", "");
  CHECK(joined(all_faults(ptx, Launch::kPrologue)).find("has no wait") != std::string::npos);
  CHECK(joined(all_faults(ptx, Launch::kPlain)) == "");
  CHECK(joined(all_faults(std::string(kGood), Launch::kPlain)).find("plainly") !=
        std::string::npos);
}

TEST_CASE("A jump table is followed") {
  const std::string table = planted(kMax,
                                    "$L_t: .branchtargets $L__BB0_2, $L__BB0_4;\n"
                                    "brx.idx %r1, $L_t;\n$L__BB0_8:");
  CHECK(joined(all_faults(table, Launch::kPrologue)).find("returns without") != std::string::npos);
}

// --- The kernels: a CTest test of their own, visibly skipped in builds without nvcc ---

#ifdef QUIRE_PTX_LIST

namespace {

namespace fs = std::filesystem;

// What no list names is launched with the attribute, and waits before it loads what may change.
// Loads before the wait need a reason (docs/PDL.md); so does a kernel without a wait.
const std::set<std::string> kPrologueKernels{"append_window", "append_csa", "append_csa_halves",
                                             "append_hca"};
const std::set<std::string> kPlainKernels{
    "decode_plan_kernel", "ragged_plan_kernel", "record_rows_kernel",  "record_lists_kernel",
    "apply_kernel",       "clear_kernel",       "known_answers_kernel"};

#define QUIRE_AT(member) \
  { static_cast<int>(offsetof(quire::AppendParams, member)), #member }

Rules rules_of(const Function& kernel) {
  Rules rules;
  const std::string name = quire::test::base_name(quire::test::kernel_name(kernel.symbol));
  if (kPlainKernels.contains(name)) rules.launch = Launch::kPlain;
  if (kPrologueKernels.contains(name)) rules.launch = Launch::kPrologue;
  if (quire::test::parameter_type(kernel.symbol) == "AppendParams") {
    rules.immutable = {QUIRE_AT(csa.bias),           QUIRE_AT(csa.norm_weight),
                       QUIRE_AT(indexer.bias),       QUIRE_AT(indexer.norm_weight),
                       QUIRE_AT(hca.bias),           QUIRE_AT(hca.norm_weight),
                       QUIRE_AT(window.norm_weight), QUIRE_AT(rope.values)};
    rules.early = {QUIRE_AT(header),    QUIRE_AT(rows),          QUIRE_AT(tokens),
                   QUIRE_AT(csa.state), QUIRE_AT(indexer.state), QUIRE_AT(hca.state)};
  }
  return rules;
}
#undef QUIRE_AT

// Names as the sources spell them, of what the PTX holds.
std::set<std::string> compiled_kernels() {
  std::set<std::string> names;
  for (const std::string& path : quire::test::file_lines(QUIRE_PTX_LIST)) {
    for (const Function& function : parse_ptx(quire::test::file_text(path))) {
      if (!function.is_entry) continue;
      names.insert(quire::test::base_name(quire::test::kernel_name(function.symbol)));
    }
  }
  return names;
}

std::vector<fs::path> library_sources() {
  std::vector<fs::path> sources;
  for (const char* folder : {"cache", "planner", "kernels", "runtime"}) {
    for (const auto& entry :
         fs::recursive_directory_iterator(fs::path(QUIRE_SOURCE_DIR) / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension == ".cu" || extension == ".cuh") sources.push_back(entry.path());
    }
  }
  return sources;
}

std::string without_comments(const fs::path& path) {
  static const std::regex comment("//[^\n]*");
  return std::regex_replace(quire::test::file_text(path.string()), comment, "");
}

std::vector<std::string> matches(const std::string& text, const std::string& pattern) {
  std::vector<std::string> found;
  const std::regex regex(pattern);
  for (std::sregex_iterator at(text.begin(), text.end(), regex), end; at != end; ++at) {
    found.push_back((*at)[1].str());
  }
  return found;
}

// The kernels that the first argument of a launch can be: itself, or those that the variable of
// this name is set from.
std::set<std::string> launched(const std::string& text, const std::string& argument,
                               const std::set<std::string>& kernels) {
  if (kernels.contains(argument)) return {argument};
  std::set<std::string> found;
  for (const std::string& value : matches(text, "\\b" + argument + "\\s*=([^;]*);")) {
    for (const std::string& word : matches(value, "(\\w+)")) {
      if (kernels.contains(word)) found.insert(word);
    }
  }
  return found;
}

}  // namespace

TEST_SUITE("kernels" * doctest::skip()) {  // run by name alone
  TEST_CASE("Every kernel keeps the rules") {
    for (const std::string& path : quire::test::file_lines(QUIRE_PTX_LIST)) {
      CAPTURE(path);
      Faults faults;
      for (const Function& function : parse_ptx(quire::test::file_text(path))) {
        check_arithmetic(function, faults);
        if (function.is_entry) check_order(function, rules_of(function), faults);
      }
      CHECK_MESSAGE(faults.empty(), "\n" << joined(faults));
    }
  }

  TEST_CASE("Every kernel of the sources was read, and every kernel named here exists") {
    const std::set<std::string> kernels = compiled_kernels();
    std::size_t found = 0;
    for (const fs::path& source : library_sources()) {
      const std::string text = without_comments(source);
      const std::vector<std::string> names =
          matches(text, "__global__\\s+void\\s+(?:__launch_bounds__\\([^)]*\\)\\s*)?(\\w+)\\s*\\(");
      CAPTURE(source.string());
      CHECK(names.size() == matches(text, "(__global__)").size());
      for (const std::string& name : names) {
        CAPTURE(name);
        CHECK(kernels.contains(name));
      }
      found += names.size();
    }
    CHECK(found == kernels.size());
    CHECK(found > 10);
    for (const std::string& name : kPrologueKernels) CHECK_MESSAGE(kernels.contains(name), name);
    for (const std::string& name : kPlainKernels) CHECK_MESSAGE(kernels.contains(name), name);
  }

  TEST_CASE("Kernels without a wait are never launched with the attribute") {
    const std::set<std::string> kernels = compiled_kernels();
    std::size_t statements = 0;
    for (const fs::path& source : library_sources()) {
      const std::string text = without_comments(source);
      const std::vector<std::string> names = matches(text, "\\b(\\w+)\\(const __grid_constant__");
      bool has_plain = false;
      for (const std::string& name : names) has_plain = has_plain || kPlainKernels.contains(name);
      if (!has_plain) continue;
      for (const std::string& call : matches(text, "\\blaunch\\s*\\(([^;]*);")) {
        ++statements;
        if (call.find(" false,") != std::string::npos) continue;
        CAPTURE(source.string());
        CAPTURE(call);
        const std::string argument = matches(call, "^\\s*(\\w+)").at(0);
        const std::set<std::string> targets = launched(text, argument, kernels);
        CHECK_MESSAGE(!targets.empty(), "no kernel can be told from the call");
        for (const std::string& name : targets) CHECK_MESSAGE(!kPlainKernels.contains(name), name);
      }
    }
    CHECK(statements > 0);
  }

  // Bare products and sums are exact only without contraction: the library must be compiled as the
  // PTX that was read here.
  TEST_CASE("Every kernel is compiled with the flags of exact arithmetic") {
    const auto commands = nlohmann::json::parse(quire::test::file_text(QUIRE_COMPILE_COMMANDS));
    std::map<std::string, std::set<std::string>> compiled;  // sources by target
    for (const auto& entry : commands) {
      const fs::path file(entry.at("file").get<std::string>());
      const std::string folder = file.parent_path().filename().string();
      if (file.extension() != ".cu" || (folder != "kernels" && folder != "planner")) continue;
      const std::string command = entry.at("command").get<std::string>();
      for (const std::string target : {"quire.dir", "quire_ptx.dir"}) {
        if (command.find("/" + target + "/") == std::string::npos) continue;
        compiled[target].insert(file.filename().string());
        CAPTURE(file.string());
        CHECK(command.find("fast_math") == std::string::npos);
        for (const std::string flag :
             {"-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"}) {
          const std::size_t last = command.rfind(flag.substr(0, flag.find('=') + 1));
          CHECK_MESSAGE((last != std::string::npos && command.substr(last).starts_with(flag)),
                        "missing in " << target << ": " << flag);
        }
      }
    }
    CHECK(compiled["quire.dir"].size() == quire::test::file_lines(QUIRE_PTX_LIST).size());
    CHECK(compiled["quire.dir"] == compiled["quire_ptx.dir"]);
  }
}  // TEST_SUITE

#endif
