// Synthetic inputs of the self-check (self_check.cpp).
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/abi.h"
#include "runtime/vector.h"

namespace {

struct Random {
  uint64_t state = 88172645463325252ull;
  float next() {  // in (-2, 2); xorshift64, G. Marsaglia 2003
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return float(int64_t(state) >> 11) * 0x1p-51f;
  }
};

// Beyond this many, values repeat: drawing caches took longer than attending to them. The number is prime,
// so that no two rows of a matrix are the same.
constexpr size_t kDrawn = 16411;

template <class T>
std::vector<T> draw(Random& random, size_t n) {
  std::vector<T> values(n);
  const size_t drawn = std::min(n, kDrawn);
  for (size_t i = 0; i < drawn; ++i) from_float(random.next(), &values[i]);
  for (size_t done = drawn; done < n; done += drawn) {
    std::memcpy(&values[done], values.data(), std::min(drawn, n - done) * sizeof(T));
  }
  return values;
}

// Powers of two near 2^-5, as kPowers.
inline std::vector<uint8_t> draw_powers(Random& random, size_t n) {
  std::vector<uint8_t> powers(n);
  for (uint8_t& power : powers) power = uint8_t(122.0f + 2.0f * random.next());
  return powers;
}

// The bytes of so many rows of a cache.
template <class T>
std::vector<char> draw_rows(Random& random, size_t rows, size_t head_dim, CacheKind kind) {
  std::vector<char> bytes;
  const auto put = [&](const auto& some) {
    const char* from = reinterpret_cast<const char*>(some.data());
    bytes.insert(bytes.end(), from, from + some.size() * sizeof some[0]);
  };
  if (kind == kAsQueries) {
    put(draw<T>(random, rows * head_dim));
    return bytes;
  }
  const float largest = kind == kInt8Codes ? 127.0f : 448.0f;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < head_dim; ++i) bytes.push_back(char(int(random.next() * 63.0f)));
    put(std::vector<float>{random.next() / largest});
  }
  return bytes;
}

}  // namespace
