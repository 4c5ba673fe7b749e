// A 64-bit digest of words: FNV-1a's xor and multiply over 8-byte words instead of bytes, each step
// followed by a fold of the upper half into the lower one, so that high bits spread as well. Every
// step is a bijection of the state and of the word: one changed word always changes the result.
// For detecting damage and for comparing states; no protection against malice.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace quire {

class Digest {
 public:
  template <std::integral Integer>
  void add(Integer word) {
    value_ = (value_ ^ static_cast<std::uint64_t>(word)) * kPrime;
    value_ ^= value_ >> 32;
  }

  // Little-endian words, the last one filled up with zeroes, then the number of bytes.
  void add_bytes(std::span<const std::byte> bytes) {
    std::size_t done = 0;
    for (; done + 8 <= bytes.size(); done += 8) add_word_at(bytes.data() + done, 8);
    if (done < bytes.size()) add_word_at(bytes.data() + done, bytes.size() - done);
    add(bytes.size());
  }

  std::uint64_t value() const { return value_; }

 private:
  static constexpr std::uint64_t kOffsetBasis = 0xcbf29ce484222325;
  static constexpr std::uint64_t kPrime = 0x00000100000001b3;

  void add_word_at(const std::byte* from, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, size);
    add(word);
  }

  std::uint64_t value_ = kOffsetBasis;
};

}  // namespace quire
