// Products of pairs of bfloat16, added to sums in float32 (AVX512_BF16).
//
// A tile of a left-hand operand is 16 rows of 32 bfloat16. A tile of a right-hand operand interleaves
// pairs of rows ("VNNI"): dword (p, n) is elements (2p, n) and (2p + 1, n). AMX requires this layout.
#pragma once
#include "runtime/vector.h"

#if defined(__AVX512BF16__)
#define SLIPSTREAM_PAIRS 1

namespace {

typedef __m512bh vb;

constexpr int64_t kRun = 32;                // bfloat16 of a vector
constexpr int kTile = 16;                   // rows of a tile; columns of float32, pairs of bfloat16
constexpr int kDepth = int(kRun);           // bfloat16 in a tile's row
constexpr int kTileSize = kTile * kDepth;   // bfloat16 in a tile

inline vb load_run(const bf16* p) {
  vb v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first `count` elements, then zeros.
inline vb load_some_run(const bf16* p, int64_t count) {
  bf16 some[kRun] = {};
  std::memcpy(some, p, size_t(count) * sizeof(bf16));
  return load_run(some);
}

// The upper 16 bits of a's lanes, then of b's: floats truncated to bfloat16.
inline vb upper_halves(vf a, vf b) {
  typedef uint16_t Lanes __attribute__((vector_size(64)));
  constexpr Lanes kOdd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (vb)_mm512_permutex2var_epi16((__m512i)a, (__m512i)kOdd, (__m512i)b);
}

inline vb splat_pair(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (vb)(vu{} + pair);
}

inline vf add_pairs(vf sums, vb a, vb b) {
  return (vf)_mm512_dpbf16_ps((__m512)sums, a, b);
}

// sums[N][R][16] += R rows of `left` x N tiles of `right`, which lie `apart` elements apart.
template <int N, int R>
inline void add_products(vf (&sums)[N][R], const bf16* left, const bf16* right, int64_t apart) {
  for (int p = 0; p < kTile; ++p) {
    vb columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load_run(right + n * apart + p * kDepth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vb row = splat_pair(left + r * kDepth + 2 * p);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][r] = add_pairs(sums[n][r], row, columns[n]);
    }
  }
}

}  // namespace
#endif
