// The include rule of docs/ARCHITECTURE.md, read from the sources: folders may only include what
// lies below them, CUDA headers stay where CUDA is, public headers need nothing but the standard
// library.
#include <doctest/doctest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct Include {
  std::string file;  // relative to the source folder
  std::string header;
};

constexpr std::array<std::string_view, 4> kFolders{"cache", "planner", "kernels", "runtime"};

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> prefixes) {
  for (const std::string_view prefix : prefixes) {
    if (text.starts_with(prefix)) return true;
  }
  return false;
}

bool ends_with_any(std::string_view text, std::initializer_list<std::string_view> suffixes) {
  for (const std::string_view suffix : suffixes) {
    if (text.ends_with(suffix)) return true;
  }
  return false;
}

std::vector<Include> read_includes(const fs::path& path, const std::string& name) {
  std::vector<Include> includes;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t hash = line.find_first_not_of(" \t");
    if (hash == std::string::npos || line[hash] != '#') continue;
    const std::size_t word = line.find("include", hash);
    if (word == std::string::npos) continue;
    const std::size_t open = line.find_first_of("<\"", word);
    if (open == std::string::npos) continue;
    const std::size_t close = line.find_first_of(">\"", open + 1);
    includes.push_back({name, line.substr(open + 1, close - open - 1)});
  }
  return includes;
}

std::vector<Include> all_includes() {
  const fs::path root(QUIRE_SOURCE_DIR);
  std::vector<Include> includes;
  for (const std::string_view folder : kFolders) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!entry.is_regular_file()) continue;
      const std::string name = fs::relative(entry.path(), root).generic_string();
      if (!ends_with_any(name, {".h", ".cuh", ".cu", ".cpp"})) continue;
      for (Include& include : read_includes(entry.path(), name)) includes.push_back(include);
    }
  }
  return includes;
}

// Headers of the standard library have neither a folder nor an extension.
bool is_standard(std::string_view header) {
  return header.find('/') == std::string_view::npos && header.find('.') == std::string_view::npos;
}

bool is_cuda(std::string_view header) {
  return starts_with_any(header, {"cuda", "cub/", "thrust/", "cooperative_groups", "driver_types",
                                  "device_", "vector_types", "nv/", "nvtx"});
}

// Every include that `allowed` says no to, as one text per line.
template <class Predicate>
std::string violations(Predicate allowed) {
  std::string text;
  for (const Include& include : all_includes()) {
    if (!allowed(include)) text += include.file + " includes " + include.header + "\n";
  }
  return text;
}

TEST_CASE("the scan sees the sources") {
  const std::vector<Include> includes = all_includes();
  std::set<std::string> files;
  for (const Include& include : includes) files.insert(include.file);
  CHECK(files.size() > 20);
  CHECK(files.contains("runtime/device_cache.h"));
  CHECK(files.contains("cache/cache_manager.h"));
}

TEST_CASE("cache includes itself, runtime/base and the device cache's interface only") {
  // And a JSON parser, where a model's config is read.
  CHECK(violations([](const Include& include) {
          if (!include.file.starts_with("cache/")) return true;
          const bool reads_json = include.file == "cache/hf_config.cpp";
          return is_standard(include.header) ||
                 starts_with_any(include.header, {"quire/cache/", "quire/runtime/base/"}) ||
                 include.header == "quire/runtime/device_cache.h" ||
                 (reads_json && include.header == "nlohmann/json.hpp");
        }) == "");
}

TEST_CASE("kernels and planner never include the facade or the device cache") {
  CHECK(violations([](const Include& include) {
          if (!starts_with_any(include.file, {"kernels/", "planner/"})) return true;
          return include.header.find("cache_manager.h") == std::string::npos &&
                 include.header.find("device_cache") == std::string::npos &&
                 include.header.find("ledger") == std::string::npos;
        }) == "");
}

TEST_CASE("CUDA headers are included by CUDA sources and runtime/cuda only") {
  CHECK(violations([](const Include& include) {
          if (!is_cuda(include.header)) return true;
          return include.file.starts_with("runtime/cuda/") ||
                 ends_with_any(include.file, {".cu", ".cuh"});
        }) == "");
}

TEST_CASE("headers that plain C++ reads include the standard library and quire only") {
  CHECK(violations([](const Include& include) {
          if (!include.file.ends_with(".h") || include.file.starts_with("runtime/cuda/")) {
            return true;
          }
          return is_standard(include.header) || include.header.starts_with("quire/");
        }) == "");
}

TEST_CASE("no source includes a header of quire without the prefix") {
  CHECK(violations([](const Include& include) {
          return !starts_with_any(include.header, {"cache/", "planner/", "kernels/", "runtime/"});
        }) == "");
}

}  // namespace
