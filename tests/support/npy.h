// Reads the golden arrays: .npy files of version 1 or 2, little-endian, C order, of the few element
// types that the goldens use. Anything else is an error that names the file and what was found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <quire/runtime/base/errors.h>

namespace quire::test {

template <class T>
struct NpyType;
template <>
struct NpyType<float> {
  static constexpr const char* kDescr = "<f4";
};
template <>
struct NpyType<std::uint16_t> {  // also the bit patterns of bf16
  static constexpr const char* kDescr = "<u2";
};
template <>
struct NpyType<std::uint8_t> {
  static constexpr const char* kDescr = "|u1";
};
template <>
struct NpyType<std::int32_t> {
  static constexpr const char* kDescr = "<i4";
};

template <class T>
struct Npy {
  std::vector<std::size_t> shape;
  std::vector<T> values;

  std::size_t dim(std::size_t axis) const { return shape.at(axis); }

  // Row `index` of the first axis.
  const T* row(std::size_t index) const { return values.data() + index * (values.size() / dim(0)); }
};

inline std::filesystem::path goldens() { return QUIRE_GOLDENS_DIR; }

namespace npy {

inline std::string field(const std::string& header, const std::string& key,
                         const std::string& file) {
  const std::size_t at = header.find("'" + key + "':");
  QUIRE_CHECK(at != std::string::npos, file, ": no '", key, "' in the header ", header);
  const std::size_t begin = header.find_first_not_of(' ', at + key.size() + 3);
  const char close = header.at(begin) == '(' ? ')' : ',';
  const std::size_t end = header.find(close, begin);
  QUIRE_CHECK(end != std::string::npos, file, ": '", key, "' does not end in ", header);
  return header.substr(begin, end - begin);
}

inline std::vector<std::size_t> parse_shape(const std::string& text) {
  std::vector<std::size_t> shape;
  std::size_t at = text.find_first_of("0123456789");
  while (at != std::string::npos) {
    std::size_t used = 0;
    shape.push_back(std::stoul(text.substr(at), &used));
    at = text.find_first_of("0123456789", at + used);
  }
  return shape;
}

}  // namespace npy

template <class T>
Npy<T> read_npy(const std::filesystem::path& path) {
  const std::string name = path.string();
  std::ifstream stream(path, std::ios::binary);
  QUIRE_CHECK(stream.good(), name, ": cannot be opened");
  const std::string file{std::istreambuf_iterator<char>(stream), {}};

  QUIRE_CHECK(file.size() >= 12 && file.compare(0, 6, "\x93NUMPY") == 0, name, ": not a .npy file");
  const auto byte = [&](std::size_t at) { return static_cast<std::size_t>(
                                              static_cast<unsigned char>(file[at])); };
  QUIRE_CHECK(byte(6) == 1 || byte(6) == 2, name, ": .npy version ", byte(6), ", supported: 1, 2");
  const std::size_t begin = byte(6) == 1 ? 10 : 12;
  std::size_t length = byte(8) | byte(9) << 8;
  if (byte(6) == 2) length |= byte(10) << 16 | byte(11) << 24;
  QUIRE_CHECK(file.size() >= begin + length, name, ": truncated header");
  const std::string header = file.substr(begin, length);

  const std::string descr = npy::field(header, "descr", name);
  QUIRE_CHECK(descr == std::string("'") + NpyType<T>::kDescr + "'", name, ": elements are ", descr,
              ", asked for '", NpyType<T>::kDescr, "'");
  QUIRE_CHECK(npy::field(header, "fortran_order", name) == "False", name, ": Fortran order");

  Npy<T> array;
  array.shape = npy::parse_shape(npy::field(header, "shape", name));
  std::size_t count = 1;
  for (const std::size_t extent : array.shape) count *= extent;
  QUIRE_CHECK(file.size() == begin + length + count * sizeof(T), name, ": ", file.size(),
              " bytes, its header says ", begin + length + count * sizeof(T));
  array.values.resize(count);
  std::memcpy(array.values.data(), file.data() + begin + length, count * sizeof(T));
  return array;
}

inline nlohmann::json read_json(const std::filesystem::path& path) {
  std::ifstream stream(path);
  QUIRE_CHECK(stream.good(), path.string(), ": cannot be opened");
  return nlohmann::json::parse(stream);
}

}  // namespace quire::test
