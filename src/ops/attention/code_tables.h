// Turns codes of a cache into bfloat16, which has each of them exactly: a code's two bytes are looked up
// by its magnitude, 64 codes at a time (AVX512_VBMI). That takes a third of the instructions of widening
// codes to floats and rounding these.
#pragma once
#include "attention/cached_rows.h"

#if defined(SLIPSTREAM_PAIRS) && defined(__AVX512BW__) && defined(__x86_64__)
#define SLIPSTREAM_CODE_TABLES 1

namespace {

inline bool has_code_tables() {
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
}

// The low and the high bytes of bfloat16, by a code's magnitude.
struct CodeTable {
  alignas(64) uint8_t low[128], high[128];

  explicit CodeTable(bool is_int8) {
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
      const uint8_t bits = uint8_t(magnitude);
      const Int8Code whole{int8_t(magnitude)};
      const Float8Code part{bits};
      bf16 number;
      from_float(is_int8 ? as_float(&whole) : as_float(&part) * kOfHalf, &number);
      low[magnitude] = uint8_t(number.bits & 0xff), high[magnitude] = uint8_t(number.bits >> 8);
    }
  }

  static const CodeTable& of(bool is_int8) {
    static const CodeTable int8(true), float8(false);
    return is_int8 ? int8 : float8;
  }
};

// Looks up `count` rows of head_dim codes, a multiple of 32, into rows one after another.
template <bool Int8>
__attribute__((target("avx512vbmi"))) inline void look_up_codes(const Code* const* rows, int count,
                                                                int head_dim, bf16* to) {
  const CodeTable& table = CodeTable::of(Int8);
  const __m512i low_a = _mm512_load_si512(table.low), low_b = _mm512_load_si512(table.low + 64);
  const __m512i high_a = _mm512_load_si512(table.high), high_b = _mm512_load_si512(table.high + 64);
  // So that interleaving, which is by lanes of 16 bytes, leaves the codes in their order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  for (int row = 0; row < count; ++row) {
    for (int d = 0; d < head_dim; d += 64) {
      const bool is_half = d + 64 > head_dim;
      const __m512i some = is_half ? _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(rows[row] + d)))
                                   : _mm512_loadu_si512(rows[row] + d);
      const __m512i codes = _mm512_permutexvar_epi64(order, some);
      // The table ignores the sign of a sign and magnitude.
      const __m512i at = Int8 ? _mm512_abs_epi8(codes) : codes;
      const __m512i low = _mm512_permutex2var_epi8(low_a, at, low_b);
      const __m512i magnitude = _mm512_permutex2var_epi8(high_a, at, high_b);
      const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, sign, 0xf8);  // a | (b & c)
      _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
      if (!is_half) _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
      to += is_half ? 32 : 64;
    }
  }
}

}  // namespace
#endif
