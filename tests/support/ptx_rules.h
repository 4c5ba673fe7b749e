// What the PTX of a kernel must keep (docs/PDL.md, SPEC 3.7): nothing inexact; wait, trigger,
// stores, in that order on every path; and loads that may run early or through the read-only cache
// only from where the rules of the kernel's parameters say.
//
// Order is checked on the control flow graph. Where a load reads from is found by following its
// address back to the kernel parameter that holds the pointer.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/ptx.h"

namespace quire::test {

using Faults = std::vector<std::string>;

inline void fault(Faults& faults, const Function& function, const std::string& why,
                  const std::string& text = "") {
  faults.push_back(kernel_name(function.symbol) + ": " + why + (text.empty() ? "" : ": " + text));
}

// --- Arithmetic ---

inline void check_arithmetic(const Function& function, Faults& faults) {
  static const std::set<std::string_view> approximate{"ex2", "lg2", "sin", "cos", "tanh", "rsqrt"};
  static const std::set<std::string_view> rounded{"add", "sub", "mul",  "fma",
                                                  "mad", "div", "sqrt", "rcp"};
  static const std::set<std::string_view> tensor{"mma", "wmma", "wgmma", "tcgen05"};
  for (const Instruction& i : function.code) {
    const bool is_float = i.has_any({"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"});
    if (i.has("ftz")) fault(faults, function, "flushes subnormals", i.text);
    if (i.has("approx") || i.has("full")) fault(faults, function, "is approximate", i.text);
    if (approximate.contains(i.name())) fault(faults, function, "is approximate", i.text);
    if (tensor.contains(i.name())) fault(faults, function, "sums in an order of its own", i.text);
    if (is_float && rounded.contains(i.name()) && !i.has("rn")) {
      fault(faults, function, "does not name its rounding", i.text);
    }
    if (is_float && i.name() == "cvt" && i.has_any({"rz", "rm", "rp", "rna", "rs"})) {
      fault(faults, function, "does not round to nearest even", i.text);
    }
    if (is_float && (i.name() == "atom" || i.name() == "red") && i.has("add")) {
      fault(faults, function, "sums in the order in which threads come", i.text);
    }
    // Against a constant, which is no NaN and no zero, the compiler may take the short form.
    const bool by_constant = i.operands.find(", 0f") != std::string::npos;
    if (is_float && (i.name() == "max" || i.name() == "min") && !i.has("NaN") && !by_constant) {
      fault(faults, function, "is no maximum of SPEC 3.7", i.text);
    }
  }
}

// --- Which parameter an address comes from ---

enum class Launch {
  kPlain,     // never launched with the attribute: no wait
  kWaits,     // wait first; before it only what is immutable
  kPrologue,  // records and seat state are loaded before the wait too
};

// Pointers in a kernel's parameters, by byte offset, with a name for messages.
using Pointers = std::map<int, std::string>;

struct Rules {
  Launch launch = Launch::kWaits;
  Pointers immutable;  // since before the planner: alone may use the read-only cache
  Pointers early;      // at L2, before the wait of a kPrologue kernel
};

// What a 64-bit register may hold: the address of a kernel parameter, or something with the
// pointers that stand there added in.
struct Origin {
  std::set<int> addresses, pointers;

  bool add(const Origin& other) {
    const std::size_t before = addresses.size() + pointers.size();
    addresses.insert(other.addresses.begin(), other.addresses.end());
    pointers.insert(other.pointers.begin(), other.pointers.end());
    return addresses.size() + pointers.size() != before;
  }
};

inline constexpr int kUnknownParameter = -1;

class Origins {
 public:
  explicit Origins(const Function& function) {
    const std::string parameter = function.symbol + "_param_0";
    for (bool changed = true; changed;) {
      changed = false;
      for (const Instruction& i : function.code) changed = follow(i, parameter) || changed;
    }
  }

  // Of the n-th bracketed address of an instruction.
  std::set<int> pointers_of(const Instruction& i, int n) const {
    std::size_t at = i.operands.find('[');
    for (; n > 0 && at != std::string::npos; --n) at = i.operands.find('[', at + 1);
    if (at == std::string::npos) return {};
    const auto known = registers_.find(first_word(i.operands.substr(at + 1)));
    return known == registers_.end() ? std::set<int>{} : known->second.pointers;
  }

 private:
  // Up to the end of a register's or a symbol's name.
  static std::string first_word(std::string_view text) {
    return std::string(text.substr(0, text.find_first_of("+-]},; \t")));
  }

  static int displacement(const std::string& text) {
    const std::size_t at = text.find('+');
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + 1);
  }

  // Of an operand: a register, the parameter itself, or nothing of interest.
  Origin origin_of(const std::string& operand, const std::string& parameter) const {
    if (first_word(operand) == parameter) return {{displacement(operand)}, {}};
    const auto known = registers_.find(operand);
    return known == registers_.end() ? Origin{} : known->second;
  }

  static Origin moved(const Origin& origin, const std::string& by) {
    Origin result{{}, origin.pointers};
    const bool is_number = by.front() != '%';
    for (const int address : origin.addresses) {
      const int to = address + (is_number ? std::atoi(by.c_str()) : 0);
      // A computed index, or a loop over parameters: who knows which.
      const bool known = is_number && to >= 0 && to < 32768 && origin.addresses.size() < 64;
      known ? result.addresses.insert(to) : result.pointers.insert(kUnknownParameter);
    }
    return result;
  }

  bool follow(const Instruction& i, const std::string& parameter) {
    if (!i.has_any({"u64", "s64", "b64", "wide", "global"})) return false;
    if (i.name() == "ld") return i.has("param") && follow_load(i, parameter);
    const std::vector<std::string> operand = split(i.operands, ',');
    const auto source = [&](std::size_t n) { return origin_of(operand[n], parameter); };
    Origin origin;
    if ((i.name() == "mov" || i.name() == "cvta") && operand.size() == 2) {
      origin = source(1);
    } else if ((i.name() == "add" || i.name() == "sub") && operand.size() == 3) {
      origin = moved(source(1), operand[2]);
      origin.add(moved(source(2), operand[1]));
    } else if (i.name() == "mad" && operand.size() == 4) {
      origin = moved(source(3), "%");  // what is multiplied is an index
    } else if ((i.name() == "selp" || i.name() == "and" || i.name() == "or") &&
               operand.size() >= 3) {
      origin = source(1);
      origin.add(source(2));
    } else {
      return false;
    }
    return registers_[operand[0]].add(origin);
  }

  bool follow_load(const Instruction& i, const std::string& parameter) {
    const std::size_t open = i.operands.find('[');
    const std::string address = i.operands.substr(open + 1);
    const Origin base = origin_of(first_word(address), parameter);
    std::string results = i.operands.substr(0, i.operands.rfind(',', open));
    std::erase_if(results, [](char c) { return c == '{' || c == '}'; });
    bool changed = false;
    int at = displacement(address);
    for (const std::string& result : split(results, ',')) {
      Origin origin;
      for (const int offset : base.addresses) origin.pointers.insert(offset + at);
      if (base.pointers.contains(kUnknownParameter)) origin.pointers.insert(kUnknownParameter);
      changed = registers_[result].add(origin) || changed;
      at += 8;
    }
    return changed;
  }

  std::map<std::string, Origin> registers_;
};

inline std::string offsets_text(const std::set<int>& pointers) {
  if (pointers.empty()) return "an address that no parameter holds";
  std::string text = "the pointer at parameter byte";
  for (const int at : pointers) text += " " + std::to_string(at);
  return text;
}

inline bool all_in(const std::set<int>& pointers, const Pointers& allowed,
                   const Pointers& also = {}) {
  return !pointers.empty() && std::all_of(pointers.begin(), pointers.end(), [&](int at) {
    return allowed.contains(at) || also.contains(at);
  });
}

// --- Order ---

inline bool is_wait(const Instruction& i) { return i.name() == "griddepcontrol" && i.has("wait"); }
inline bool is_trigger(const Instruction& i) {
  return i.name() == "griddepcontrol" && i.has("launch_dependents");
}
inline bool is_return(const Instruction& i) { return i.name() == "ret" || i.name() == "exit"; }

// State spaces of the block alone, or nobody's to write.
inline bool is_private(const std::string& space) {
  return space == "param" || space == "local" || space == "const" || space.starts_with("shared");
}

enum class Access { kNone, kLoad, kCopy, kStore };

// What an instruction does to global memory; a copy goes from there to shared memory.
inline Access access_of(const Instruction& i) {
  static const std::set<std::string_view> stores{"st",    "red",      "atom",    "sust",
                                                 "sured", "multimem", "discard", "tensormap"};
  static const std::set<std::string_view> loads{"ld", "ldu", "tex", "tld4", "suld"};
  const bool is_copy = i.name() == "cp";
  if (!is_copy && !stores.contains(i.name()) && !loads.contains(i.name())) return Access::kNone;
  // The first state space is where a store, or a copy, goes to. None: it may be global memory.
  const auto space = std::find_if(i.opcode.begin() + 1, i.opcode.end(), [](const auto& part) {
    return part == "global" || is_private(part);
  });
  const bool is_private_space = space != i.opcode.end() && *space != "global";
  if (is_copy) {
    // commit_group, wait_group, mbarrier.arrive; and hints, which change nothing.
    if (space == i.opcode.end() || i.has("prefetch") || i.has("mbarrier")) return Access::kNone;
    if (!is_private_space || i.has("reduce")) return Access::kStore;
    return i.has("global") ? Access::kCopy : Access::kNone;
  }
  if (is_private_space) return Access::kNone;
  return stores.contains(i.name()) ? Access::kStore : Access::kLoad;
}

inline bool reads_at_l2(const Instruction& i) {
  return i.has("global") && (i.has("cg") || (i.has("relaxed") && i.has("gpu")) || i.has("bulk"));
}

// Why an instruction may not run before the wait; empty: it may.
inline std::string needs_wait(const Instruction& i, const Rules& rules, const Origins& origins) {
  if (is_return(i)) return "returns without the wait";
  if (is_trigger(i)) return "triggers before the wait";
  if (i.name() == "call") return "calls what the check cannot follow, before the wait";
  const Access access = access_of(i);
  if (access == Access::kNone) return {};
  if (access == Access::kStore) return "stores before the wait";
  const std::set<int> from = origins.pointers_of(i, access == Access::kCopy ? 1 : 0);
  const bool at_l2 = reads_at_l2(i);
  const bool read_only = i.has("nc") || access == Access::kCopy;
  if (read_only && all_in(from, rules.immutable)) return {};
  if (at_l2 && rules.launch == Launch::kPrologue && all_in(from, rules.early, rules.immutable)) {
    return {};
  }
  return std::string(access == Access::kCopy ? "copies" : "loads") +
         " what may change before the wait, from " + offsets_text(from);
}

inline std::vector<std::size_t> successors(const Function& function, std::size_t at,
                                           Faults& faults) {
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

// For each instruction: does every path to it lead through one that `is_it`? Unreached code counts
// as so. Falling off the end is a return.
inline std::vector<bool> behind_on_every_path(const Function& function,
                                              bool (*is_it)(const Instruction&), Faults& faults) {
  const std::size_t count = function.code.size();
  std::vector<bool> behind(count + 1, true);
  std::deque<std::size_t> work;
  behind[0] = false;
  work.push_back(0);
  while (!work.empty()) {
    const std::size_t at = work.front();
    work.pop_front();
    if (at == count) continue;
    const Instruction& i = function.code[at];
    if (is_it(i) && !i.guarded) continue;  // what follows it on this path is behind it
    for (const std::size_t next : successors(function, at, faults)) {
      if (!behind[next]) continue;
      behind[next] = false;
      work.push_back(next);
    }
  }
  return behind;
}

inline void check_read_only_loads(const Function& function, const Rules& rules,
                                  const Origins& origins, Faults& faults) {
  for (const Instruction& i : function.code) {
    if (i.name() != "ldu" && !(i.name() == "ld" && i.has("nc"))) continue;
    const std::set<int> from = origins.pointers_of(i, 0);
    if (all_in(from, rules.immutable)) continue;
    fault(faults, function,
          "loads through the read-only cache what is not immutable, from " + offsets_text(from),
          i.text);
  }
}

inline void check_order(const Function& function, const Rules& rules, Faults& faults) {
  const Origins origins(function);
  check_read_only_loads(function, rules, origins, faults);
  const auto& code = function.code;
  const bool waits = std::any_of(code.begin(), code.end(), is_wait);
  if (rules.launch == Launch::kPlain) {
    if (waits) fault(faults, function, "is launched plainly and waits");
    return;
  }
  if (!waits) fault(faults, function, "has no wait, and is not named as launched plainly");
  if (std::none_of(code.begin(), code.end(), is_trigger)) {
    fault(faults, function, "has no trigger");
  }
  const std::vector<bool> waited = behind_on_every_path(function, is_wait, faults);
  const std::vector<bool> triggered = behind_on_every_path(function, is_trigger, faults);
  if (!waited.back()) fault(faults, function, "ends without the wait");
  for (std::size_t at = 0; at < code.size(); ++at) {
    const std::string why = waited[at] ? "" : needs_wait(code[at], rules, origins);
    if (!why.empty()) fault(faults, function, why, code[at].text);
    if (waited[at] && !triggered[at] && access_of(code[at]) == Access::kStore) {
      fault(faults, function, "stores before the trigger", code[at].text);
    }
  }
}

// The first few of each check are enough to act on.
inline std::string joined(const Faults& faults) {
  constexpr std::size_t kShown = 12;
  std::string text;
  for (std::size_t i = 0; i < faults.size() && i < kShown; ++i) text += faults[i] + "\n";
  if (faults.size() > kShown) {
    text += "and " + std::to_string(faults.size() - kShown) + " more\n";
  }
  return text;
}

}  // namespace quire::test
