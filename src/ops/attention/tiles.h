// One tile of attention: scores of up to 64 packed query rows against 64 keys, online softmax,
// weighted sum of values. Flash attention (T. Dao et al., 2022) in registers and L1/L2.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/vector.h"

namespace {

constexpr int kKeys = 64;           // keys of a tile; tiles start at multiples of it
constexpr int kStep = 128;          // the same for tile products (strips.h)
constexpr int kMaxHeadDim = 576;   // of latents; other heads have up to 256
constexpr int kGemmRows = 64;       // packed query rows of a prefill tile
#if defined(__AVX512BF16__)
constexpr int kTileRows = 256;      // packed query rows of an item of tile products
#else
constexpr int kTileRows = kGemmRows;
#endif
constexpr int kWeighed = 8;         // values per turn of a head, when values are read in place
constexpr int kWidened = 32;        // the same when they are widened once for many query rows
constexpr int kDotRows = 16;        // packed query rows of a decode tile
constexpr int kWidening = 8;        // up to so many query rows, each block of rows widens what it reads
constexpr float kInfinity = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int kMR = 6, kNR = 4;
constexpr int kSums = 16;           // registers that hold sums of weighted values
#else
constexpr int kMR = 6, kNR = 2;
constexpr int kSums = 8;
#endif

inline int padded(int n) { return (n + W - 1) / W * W; }

struct Item;

// Location of the keys of one tile of an item.
struct KeyTile {
  const Item* item = nullptr;
  int64_t begin = 0;         // the tile's first key
  int first = 0, last = 0;   // keys of the tile that the item has
  int fetched = 0;           // leading keys that were prefetched while the previous tile was computed
  // Offsets of keys of its first kv head in the caches, in elements; outside of [first, last), that of
  // the nearest key.
  int64_t offsets[kStep];
};

// Per-thread working memory of one work item.
struct alignas(64) Scratch {
  float query[kGemmRows * kMaxHeadDim];     // [rows, padded head_dim], scaled
  float out[kTileRows * kMaxHeadDim];       // [rows, padded head_dim], not yet normalised
  float keys[kKeys * kMaxHeadDim];          // transposed [head_dim, kKeys], or [kKeys, head_dim]
  float values[kKeys * kMaxHeadDim];        // [kKeys, padded head_dim]
  float scores[kGemmRows * kKeys];          // [rows, kKeys]: scores, then weights
  float folded[kTileRows * kMaxHeadDim];    // [rows, padded head_dim]: sums of the previous splits
  alignas(64) float maximum[kTileRows], sum[kTileRows], rescale[kTileRows];
  float folded_maximum[kTileRows], folded_sum[kTileRows];
  KeyTile tiles[2];
  KeyTile* now = tiles;                     // the tile that is being computed
  KeyTile* ahead = tiles + 1;               // the next tile, if its `item` is set
};

// c[MR, NR * W] = (Accumulate ? c * scale[row] : 0) + a[MR, depth] * b[depth, NR * W]
template <int MR, int NR, bool Accumulate>
inline void multiply_block(const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                           int depth, const float* scale) {
  vf acc[MR][NR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) {
      acc[i][j] = Accumulate ? load(c + i * ldc + j * W) * scale[i] : vf{};
    }
  }
  for (int k = 0; k < depth; ++k) {
    vf row[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) row[j] = load(b + size_t(k) * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const vf x = splat(a[i * lda + k]);
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) acc[i][j] += x * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) store(c + i * ldc + j * W, acc[i][j]);
  }
}

template <int NR, bool Accumulate>
inline void multiply_panel(const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                           int rows, int depth, const float* scale) {
  int i = 0;
#define SLIPSTREAM_ROWS(MR)                                                                      \
  for (; i + MR <= rows; i += MR) {                                                              \
    multiply_block<MR, NR, Accumulate>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth,        \
                                       scale + i);                                               \
  }
  SLIPSTREAM_ROWS(kMR)
  SLIPSTREAM_ROWS(4)
  SLIPSTREAM_ROWS(2)
  SLIPSTREAM_ROWS(1)
#undef SLIPSTREAM_ROWS
}

// c[rows, columns] = (Accumulate ? c * scale[row] : 0) + a[rows, depth] * b[depth, columns];
// columns is a multiple of W.
template <bool Accumulate>
inline void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int rows,
                     int columns, int depth, const float* scale) {
  int j = 0;
  for (; j + kNR * W <= columns; j += kNR * W) {
    multiply_panel<kNR, Accumulate>(a, lda, b + j, ldb, c + j, ldc, rows, depth, scale);
  }
  for (; j < columns; j += W) {
    multiply_panel<1, Accumulate>(a, lda, b + j, ldb, c + j, ldc, rows, depth, scale);
  }
}

// Bounds the scores of rows [begin, end): cap * tanh(score / cap).
inline void cap_rows(Scratch& s, int begin, int end, float cap) {
  const float inverse = 1.0f / cap;
  for (float* x = s.scores + begin * kKeys; x < s.scores + end * kKeys; x += W) {
    store(x, tangent(load(x) * inverse) * cap);
  }
}

// Turns one row's scores into weights exp(score - maximum) and updates maximum, sum and rescale.
// Only keys [first, last) of the tile are visible to this row.
inline void softmax_row(Scratch& s, int row, int first, int last) {
  float* scores = s.scores + row * kKeys;
  if (first >= last) {
    std::fill(scores, scores + kKeys, 0.0f);
    s.rescale[row] = 1.0f;
    return;
  }
  vf highest = splat(-kInfinity);
  const bool whole = first <= 0 && last >= kKeys;
  for (int j = 0; j < kKeys; j += W) {
    vf x = load(scores + j);
    if (!whole) {
      const vi index = iota() + j;
      x = ((index >= first) & (index < last)) ? x : splat(-kInfinity);
      store(scores + j, x);
    }
    highest = maximum(x, highest);
  }
  const float before = s.maximum[row];
  const float now = std::max(before, reduce(highest, maximum));
  if (now == -kInfinity) {  // every visible score is -inf or NaN (a comparison with NaN is false)
    const bool is_number = std::all_of(scores, scores + kKeys, [](float x) { return x == x; });
    if (!is_number) s.sum[row] = std::numeric_limits<float>::quiet_NaN();
    std::fill(scores, scores + kKeys, 0.0f);
    s.rescale[row] = 1.0f;
    return;
  }
  vf total = splat(0.0f);
  for (int j = 0; j < kKeys; j += W) {
    const vf weight = exponential(load(scores + j) - now);
    store(scores + j, weight);
    total += weight;
  }
  const float rescale = before == now ? 1.0f : before == -kInfinity ? 0.0f : std::exp(before - now);
  s.maximum[row] = now;
  s.sum[row] = s.sum[row] * rescale + reduce(total, add);
  s.rescale[row] = rescale;
}

// Adds a split's weighted sum of values, maximum and sum of weights to those of the splits before it
// (log-sum-exp). Not inlined, so that all callers round alike.
__attribute__((noinline)) void join_splits(float* out, float& maximum, float& sum,
                                           const float* more, float more_maximum, float more_sum,
                                           int width) {
  if (more_maximum == -kInfinity) {
    // No key was visible, or all scores were NaN.
    if (more_sum != more_sum) sum = more_sum;
    return;
  }
  const float now = std::max(maximum, more_maximum);
  const float keep = maximum == -kInfinity ? 0.0f : std::exp(maximum - now);
  const float weight = std::exp(more_maximum - now);
  sum = sum * keep + weight * more_sum;
  for (int d = 0; d < width; d += W) {
    store(out + d, load(out + d) * keep + load(more + d) * weight);
  }
  maximum = now;
}

// Scores of R query rows against W keys from key j of the tile on; the rows share each load of a key. It
// forms W sums at a time and reduces their lanes together. Calls each(count) before every `count` keys.
// Queries and float keys have their elements in the order of load_two().
template <int R, class T, class Each>
inline void dot_rows(Scratch& s, const T* const (&keys)[W], int row, int width, int j,
                     const Each& each) {
  constexpr int kTogether = W / R;  // keys
  const float* query = s.query + row * width;
  for (int i = 0; i < W; i += kTogether) {
    each(kTogether);
    vf acc[W] = {};
    int d = 0;
    for (; d + 2 * W <= width; d += 2 * W) {
#pragma GCC unroll 16
      for (int k = 0; k < kTogether; ++k) {
        vf a, b;
        load_two(keys[i + k] + d, a, b);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r * kTogether + k] += load(query + r * width + d) * a;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r * kTogether + k] += load(query + r * width + d + W) * b;
      }
    }
    if (d < width) {
#pragma GCC unroll 16
      for (int k = 0; k < kTogether; ++k) {
        const vf key = load(keys[i + k] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r * kTogether + k] += load(query + r * width + d) * key;
      }
    }
    float scores[W];
    store(scores, reduce_each(acc, add));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      std::memcpy(s.scores + (row + r) * kKeys + j + i, scores + r * kTogether,
                  kTogether * sizeof(float));
    }
  }
}

// Number of blocks (of 4, 2 or 1 rows) in which `rows` rows are computed.
constexpr int blocks_of(int rows) { return rows / 4 + rows % 4 / 2 + rows % 2; }

// scores[row, key] = query[row] . key for `rows` rows from `row` on and W keys from `j` on, each of
// `width` elements. The order of a row's sum does not depend on the other rows. Calls each(count) on the
// way: W keys in total for each block of rows.
template <class T, class Each>
inline void dot_scores(Scratch& s, const T* const (&keys)[W], int row, int rows, int width, int j,
                       const Each& each) {
  const int end = row + rows;
  for (; row + 4 <= end; row += 4) dot_rows<4>(s, keys, row, width, j, each);
  for (; row + 2 <= end; row += 2) dot_rows<2>(s, keys, row, width, j, each);
  for (; row < end; ++row) dot_rows<1>(s, keys, row, width, j, each);
}

// Computes N vectors of R rows from element d on; the rows share each load of values [0, count).
template <int R, int N, class T>
inline void weigh_columns(float* out, const float* weights, const T* const* values, int width, int d,
                          int count) {
  vf acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) acc[r][i] = load(out + r * width + d + i * W);
  }
  for (int key = 0; key < count; ++key) {
    const T* at = values[key] + d;
    vf value[N];
    if constexpr (N == 1) {
      value[0] = load(at);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < N; i += 2) load_two(at + i * W, value[i], value[i + 1]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf weight = splat(weights[r * kKeys + key]);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) acc[r][i] += weight * value[i];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) store(out + r * width + d + i * W, acc[r][i]);
  }
}

template <int R, class T, class Each>
inline void weigh_rows(float* out, const float* weights, const T* const* values, int width, int count,
                       const Each& each) {
  // Enough independent sums to hide the latency of an addition, but no more than fit in registers.
  constexpr int kMost = std::min(8, kSums / R), kSome = std::min(4, kMost);
  const auto visit = [&](int d, int n) { each(count * (d + n * W) / width - count * d / width); };
  int d = 0;
  for (; d + kMost * W <= width; d += kMost * W) {
    visit(d, kMost);
    weigh_columns<R, kMost>(out, weights, values, width, d, count);
  }
  for (; d + kSome * W <= width; d += kSome * W) {
    visit(d, kSome);
    weigh_columns<R, kSome>(out, weights, values, width, d, count);
  }
  for (; d + 2 * W <= width; d += 2 * W) {
    visit(d, 2);
    weigh_columns<R, 2>(out, weights, values, width, d, count);
  }
  if (d < width) {
    visit(d, 1);
    weigh_columns<R, 1>(out, weights, values, width, d, count);
  }
}

// out[row] += weights[row] . values over keys [first, last) of the tile, for `rows` rows from `row` on,
// with elements in the order of load_two(); values[0] belongs to the first key. Each row is summed key by
// key, independently of the other rows. Calls each(count) on the way: all keys in total for each block of
// rows.
template <class T, class Each>
inline void weigh_values(Scratch& s, const T* const* values, int row, int rows, int width, int first,
                         int last, const Each& each) {
  const int end = row + rows, count = last - first;
  const auto out = [&] { return s.out + row * width; };
  const auto weights = [&] { return s.scores + row * kKeys + first; };
  for (; row + 4 <= end; row += 4) weigh_rows<4>(out(), weights(), values, width, count, each);
  for (; row + 2 <= end; row += 2) weigh_rows<2>(out(), weights(), values, width, count, each);
  for (; row < end; ++row) weigh_rows<1>(out(), weights(), values, width, count, each);
}

// packed[d * kKeys + key] = the d-th of a key's numbers, as widen(key, row) widens them to floats; keys
// outside of [first, last) become 0.
template <class Widen>
inline void pack_keys(float* packed, int head_dim, int first, int last, const Widen& widen) {
  alignas(64) float rows[W * kMaxHeadDim];
  const int width = padded(head_dim);
  for (int j = 0; j < kKeys; j += W) {
    for (int i = 0; i < W; ++i) {
      float* row = rows + i * width;
      if (j + i >= first && j + i < last) {
        widen(j + i, row);
      } else {
        std::fill(row, row + width, 0.0f);
      }
    }
    for (int d = 0; d < head_dim; d += W) {
      vf block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = load(rows + i * width + d);
      transpose(block);
      const int count = std::min(W, head_dim - d);
      for (int i = 0; i < count; ++i) store(packed + (d + i) * kKeys + j, block[i]);
    }
  }
}

}  // namespace
