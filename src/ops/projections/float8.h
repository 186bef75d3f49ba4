// Widens 8-bit floating point numbers, e4m3: a sign, four bits of exponent with bias 7, three of the
// mantissa ("FP8 Formats for Deep Learning", 2022). Every one is exact as a float and as a bfloat16.
//
// The bits of exponent and mantissa become those of a float, whose exponent has a bias of 127. With an
// exponent of 0 there is no leading one: such a number is read with the next exponent's leading one,
// which is taken off again. So no step meets floats that are themselves without a leading one, which
// some processes flush to zero. The number that is none (NaN) is not kept: it is read as 480.
#pragma once
#include <cstdint>
#include <cstring>

#include "runtime/vector.h"

namespace {

struct float8 {
  uint8_t bits;
};

constexpr int kMantissaShift = 23 - 3, kSignShift = 31 - 7;
constexpr int kBias = (127 - 7) << 23;         // what exponents lack
constexpr int kNextBias = (127 - 7 + 1) << 23;  // the same as a float: the smallest leading one

inline vf widen(const float8* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
  const __m512i moved = _mm512_slli_epi32(magnitude, kMantissaShift);
  const __m512 normal = _mm512_castsi512_ps(_mm512_add_epi32(moved, _mm512_set1_epi32(kBias)));
  const __m512i next = _mm512_set1_epi32(kNextBias);
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
  const __m512 all = _mm512_mask_sub_ps(normal, is_small,
                                        _mm512_castsi512_ps(_mm512_add_epi32(moved, next)),
                                        _mm512_castsi512_ps(next));
  const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(wide, 7), 31);
  return (vf)_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(all), sign));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
  const __m256i moved = _mm256_slli_epi32(magnitude, kMantissaShift);
  const __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(moved, _mm256_set1_epi32(kBias)));
  const __m256i next = _mm256_set1_epi32(kNextBias);
  const __m256 small = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_add_epi32(moved, next)),
                                     _mm256_castsi256_ps(next));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256 all = _mm256_blendv_ps(normal, small, _mm256_castsi256_ps(is_small));
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(wide, 7), 31);
  return (vf)_mm256_or_ps(all, _mm256_castsi256_ps(sign));
#else
  vf v;
  for (int i = 0; i < W; ++i) {
    const int32_t magnitude = p[i].bits & 0x7f, moved = magnitude << kMantissaShift;
    const int32_t bits = moved + (magnitude < 8 ? kNextBias : kBias);
    float value, leading;
    std::memcpy(&value, &bits, sizeof(value));
    std::memcpy(&leading, &kNextBias, sizeof(leading));
    if (magnitude < 8) value -= leading;
    v[i] = p[i].bits & 0x80 ? -value : value;
  }
  return v;
#endif
}

}  // namespace
