// Reads the PTX that nvcc writes: functions, their instructions and labels, and the few facts in
// their heads that the tests of kernels need. It knows no more of the language than nvcc uses.
#pragma once

#include <cxxabi.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quire::test {

struct Instruction {
  std::string text;
  std::vector<std::string> opcode;  // "ld.global.nc.f32" in its parts
  std::string operands;
  bool guarded = false;  // may not be executed

  const std::string& name() const { return opcode.front(); }
  bool has(std::string_view part) const {
    return std::find(opcode.begin() + 1, opcode.end(), part) != opcode.end();
  }
  bool has_any(std::initializer_list<std::string_view> parts) const {
    return std::any_of(parts.begin(), parts.end(), [&](std::string_view p) { return has(p); });
  }
};

struct Function {
  std::string symbol;
  bool is_entry = false;
  int threads = 0;              // of a block, from __launch_bounds__; 0: none given
  bool dynamic_shared = false;  // uses shared memory whose size the launch gives
  std::vector<Instruction> code;
  std::map<std::string, std::size_t> labels;  // of the instruction that follows
  std::map<std::string, std::vector<std::string>> branch_targets;  // of brx.idx
};

inline std::string trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) {
    text.remove_prefix(1);
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) {
    text.remove_suffix(1);
  }
  return std::string(text);
}

inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::string part;
  std::istringstream stream{std::string(text)};
  while (std::getline(stream, part, separator)) parts.push_back(trimmed(part));
  return parts;
}

inline std::string file_text(const std::string& path) {
  std::ifstream file(path);
  if (!file.good()) throw std::runtime_error("cannot read " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline std::vector<std::string> file_lines(const std::string& path) {
  std::vector<std::string> lines = split(file_text(path), '\n');
  std::erase(lines, std::string());
  return lines;
}

inline void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

inline std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  std::string text = status == 0 ? name.get() : symbol;
  replace_all(text, "(anonymous namespace)::", "");
  replace_all(text, "quire::cuda::", "");
  replace_all(text, "quire::", "");
  replace_all(text, "(ElementType)0", "fp32");
  replace_all(text, "(ElementType)1", "bf16");
  return text;
}

// "append_ragged_seat<true>": as in the source, without namespace, result and parameters.
inline std::string kernel_name(const std::string& symbol) {
  std::string name = demangled(symbol);
  if (name.starts_with("void ")) name.erase(0, 5);
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

// Of all instances of a template.
inline std::string base_name(const std::string& kernel) {
  return kernel.substr(0, kernel.find('<'));
}

// The struct that a kernel takes by value: "AppendParams".
inline std::string parameter_type(const std::string& symbol) {
  const std::string text = demangled(symbol);
  const std::size_t open = text.rfind('(');
  if (open == std::string::npos) return {};
  return text.substr(open + 1, text.find(')', open) - open - 1);
}

// "13.0.88", of the compiler that wrote the PTX.
inline std::string compiler_version(const std::string& ptx) {
  const std::size_t at = ptx.find("Cuda compilation tools");
  const std::size_t version = at == std::string::npos ? at : ptx.find(", V", at);
  if (version == std::string::npos) return "unknown";
  return trimmed(ptx.substr(version + 3, ptx.find('\n', version) - version - 3));
}

namespace ptx {

// Drops comments and the directives that have no semicolon.
inline std::string without_noise(const std::string& text) {
  std::string clean;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    const std::string code = trimmed(line.substr(0, line.find("//")));
    if (code.starts_with(".loc") || code.starts_with(".file")) continue;
    clean += code + "\n";
  }
  return clean;
}

inline Instruction parse_instruction(std::string text) {
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
inline void add_statement(Function& function, std::string statement) {
  for (;;) {
    statement = trimmed(statement);
    if (!statement.empty() && (statement.front() == '{' || statement.front() == '}')) {
      statement.erase(0, 1);  // a scope
      continue;
    }
    const std::size_t colon = statement.find(':');
    const std::size_t word_end = statement.find_first_of(" \t\n");
    const bool is_label = colon != std::string::npos && word_end >= colon &&
                          (colon + 1 == statement.size() || statement[colon + 1] != ':');
    if (!is_label) break;
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
inline std::size_t scope_end(const std::string& text, std::size_t open) {
  int depth = 0;
  for (std::size_t i = open; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i + 1;
  }
  return text.size();
}

// ".maxntid 128, 1, 1"
inline int block_threads(const std::string& head) {
  const std::size_t at = head.find(".maxntid");
  if (at == std::string::npos) return 0;
  int threads = 1;
  std::istringstream numbers(head.substr(at + 8));
  char comma = ',';
  for (int n = 0; comma == ',' && numbers >> n; numbers >> comma) {
    threads *= n;
    comma = ' ';
  }
  return threads;
}

// Names of `extern __shared__` arrays.
inline std::vector<std::string> dynamic_arrays(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t at = 0; (at = text.find(".extern .shared", at)) != std::string::npos; ++at) {
    const std::size_t end = text.find("[]", at);
    if (end == std::string::npos) continue;
    const std::size_t begin = text.find_last_of(" \t\n", end) + 1;
    names.push_back(text.substr(begin, end - begin));
  }
  return names;
}

}  // namespace ptx

inline std::vector<Function> parse_ptx(const std::string& source) {
  const std::string text = ptx::without_noise(source);
  const std::vector<std::string> dynamic = ptx::dynamic_arrays(text);
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
    function.symbol = head.substr(name, head.find_first_of("( \t\n", name) - name);
    function.threads = ptx::block_threads(head);
    at = ptx::scope_end(text, open);
    const std::string body = text.substr(open + 1, at - open - 2);
    for (const std::string& array : dynamic) {
      function.dynamic_shared = function.dynamic_shared || body.find(array) != std::string::npos;
    }
    for (const std::string& statement : split(body, ';')) ptx::add_statement(function, statement);
    functions.push_back(std::move(function));
  }
}

}  // namespace quire::test
