// How a head's key or value of one token lies in the paged cache (`cached_rows.py`): its numbers as they
// are, or codes of one byte and then a float32 factor by which they are multiplied.
//
// Codes are widened where they are used, a few rows at a time, into a buffer that stays in L1. From there
// on nothing differs from a cache without codes: a number is code * factor, rounded once. Only pairs
// (pair_rows.h) take codes as they are, which bfloat16 has exactly, and multiply scores and weights by
// factors: that is faster for few query rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/abi.h"
#include "runtime/pairs.h"

namespace {

struct Code { uint8_t bits; };
struct Int8Code { int8_t bits; };
struct Float8Code { uint8_t bits; };  // e4m3: sign, 4 bits of exponent, 3 of mantissa; no infinity

constexpr int kFactorBytes = 4;
constexpr float kLargestInt8 = 127, kLargestFloat8 = 448;

template <class C>
constexpr bool kIsCoded = std::is_same_v<C, Code>;

inline vf load(const Int8Code* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(W)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
}

// A half with the same bits at the top is the number / 256, exactly.
constexpr float kOfHalf = 256;

inline vf load(const Float8Code* p) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(words, 8), _mm256_set1_epi16(short(0x8000)));
  const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(0x3f80));
  return (vf)_mm512_cvtph_ps(_mm256_or_si256(sign, magnitude));
#else
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const vh words = __builtin_convertvector(bytes, vh);
  const vh halves = (words & 0x80) << 8 | (words & 0x7f) << 7;
  f16 some[W];
  std::memcpy(some, &halves, sizeof some);
  return load(some);
#endif
}

// Codes of W numbers of at most kLargestInt8.
inline vi codes_of_int8(vf x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer
  return (vi)(x + kMagic) - 0x4b400000;
}

// Codes of W numbers of at most kLargestFloat8.
inline vi codes_of_float8(vf x) {
  const vu sign = (vu)x & 0x80000000u, bits = (vu)x ^ sign;
  // Numbers below 2**-6 are multiples of 2**-9, the distance of floats from 2**14 on.
  const vu small = (vu)((vf)bits + 16384.0f) - 0x46800000u;
  const vu large = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  const vi is_small = (vf)bits < 0x1p-6f;
  return (vi)((is_small ? small : large) | sign >> 24);
}

// Rows of a cache in the dtype of queries.
template <class C>
class CachedRows {
 public:
  CachedRows(const AttentionArgs&, int head_dim) : head_dim(head_dim), size(head_dim) {}

  void widen(const C* row, float* to) const { convert_row(row, to, head_dim); }
  void widen_lanes(const C* row, float* to) const { convert_lanes(row, to, head_dim); }

  // Writes a token's row of each head.
  void put(const C* from, int64_t heads, C* to) const {
    std::memcpy(to, from, size_t(heads * head_dim) * sizeof(C));
  }

  const int head_dim, size;  // size: elements of a row
};

// Rows of codes.
template <>
class CachedRows<Code> {
 public:
  CachedRows(const AttentionArgs& a, int head_dim)
      : head_dim(head_dim), size(head_dim + kFactorBytes), is_int8(a.cache_kind == kInt8Codes) {}

  void widen(const Code* row, float* to) const {
    if (is_int8) {
      convert_row(reinterpret_cast<const Int8Code*>(row), to, head_dim, factor(row));
    } else {
      convert_row(reinterpret_cast<const Float8Code*>(row), to, head_dim, factor(row) * kOfHalf);
    }
  }

  // Floats need no other order.
  void widen_lanes(const Code* row, float* to) const { widen(row, to); }

#if defined(SLIPSTREAM_PAIRS)
  // The numbers, rounded to bfloat16.
  void round(const Code* row, bf16* to) const { round(row, factor(row), to); }

  // The codes, which bfloat16 has exactly.
  void take(const Code* row, bf16* to) const { round(row, 1.0f, to); }
#endif

  template <class T>
  void put(const T* from, int64_t heads, Code* to) const {
    for (int64_t head = 0; head < heads; ++head) put_row(from + head * head_dim, to + head * size);
  }

  float factor(const Code* row) const {
    float found;
    std::memcpy(&found, row + head_dim, sizeof found);
    return found;
  }

  const int head_dim, size;
  const bool is_int8;

 private:
#if defined(SLIPSTREAM_PAIRS)
  void round(const Code* row, float factor, bf16* to) const {
    if (is_int8) {
      round_codes(reinterpret_cast<const Int8Code*>(row), factor, to);
    } else {
      round_codes(reinterpret_cast<const Float8Code*>(row), factor * kOfHalf, to);
    }
  }

  template <class Some>
  void round_codes(const Some* codes, float factor, bf16* to) const {
    int d = 0;
    for (; d + int(kRun) <= head_dim; d += int(kRun)) {
      const vf low = load(codes + d) * factor, high = load(codes + d + W) * factor;
      const vb both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(to + d, &both, sizeof both);
    }
    float rest[kRun];
    convert_row(codes + d, rest, head_dim - d, factor);
    for (int i = d; i < head_dim; ++i) from_float(rest[i - d], to + i);
  }
#endif

  template <class T>
  void put_row(const T* from, Code* to) const {
    float largest = 0;
    bool is_number = true;
    for (int d = 0; d < head_dim; d += W) {
      const vf some = load_some(from + d, std::min(W, head_dim - d));
      const vf magnitude = (vf)((vu)some & 0x7fffffffu);
      largest = std::max(largest, reduce(magnitude, maximum));
      const vi lanes = some == some;
      for (int i = 0; i < W; ++i) is_number = is_number && lanes[i];
    }
    const float limit = is_int8 ? kLargestInt8 : kLargestFloat8;
    const float found = is_number ? largest / limit : std::numeric_limits<float>::quiet_NaN();
    const bool usable = found > 0 && found < std::numeric_limits<float>::infinity();
    for (int d = 0; d < head_dim; d += W) {
      const int count = std::min(W, head_dim - d);
      vf some = usable ? load_some(from + d, count) / found : vf{};
      some = some > limit ? splat(limit) : some < -limit ? splat(-limit) : some;
      const vi codes = is_int8 ? codes_of_int8(some) : codes_of_float8(some);
      for (int i = 0; i < count; ++i) to[d + i].bits = uint8_t(codes[i]);
    }
    std::memcpy(to + head_dim, &found, sizeof found);
  }
};

}  // namespace
