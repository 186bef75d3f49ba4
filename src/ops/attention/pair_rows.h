// Few bfloat16 query rows against keys and values in place (AVX512_BF16). Scores are dot products along
// the head dimension. Sums of values use pairs of neighbouring keys, whose elements meet in one product,
// as in strips.
//
// A row's score of a key, and its sum of the values of a pair of keys, are computed in the same way
// whatever the other rows.
#pragma once
#include "runtime/pairs.h"
#include "attention/tiles.h"

#if defined(SLIPSTREAM_PAIRS)

namespace {

// scores[row, key] = scale * query[row] . key, where lane r * W / R + i of `scale` belongs to row r and to
// key i, for W / R keys of a tile of kKeys from j on, and for Rows
// rows from `row` on, at most R. Queries are [rows, head_dim], each a whole number of vectors.
template <int R, int Rows = R>
inline void dot_pairs(Scratch& s, const bf16* queries, const bf16* const* keys, int row,
                      int head_dim, vf scale, int j) {
  constexpr int kTogether = W / R;
  vf acc[W] = {};
  for (int d = 0; d < head_dim; d += kDepth) {
    vb query[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) query[r] = load_run(queries + (row + r) * head_dim + d);
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) {
      const vb key = load_run(keys[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        acc[r * kTogether + i] = add_pairs(acc[r * kTogether + i], query[r], key);
      }
    }
  }
  float scores[W];
  store(scores, reduce_each(acc, add) * scale);
  for (int r = 0; r < Rows; ++r) {
    std::memcpy(s.scores + (row + r) * kKeys + j, scores + r * kTogether, kTogether * sizeof(float));
  }
}

// Rounds the weights [rows, kKeys] of a tile's keys to bfloat16, for products of pairs of values. Adjusts
// the sums of weights to the rounded ones, so that they still add up to 1 after the division.
inline void round_weights(Scratch& s, int rows, bf16* to) {
  const float* from = s.scores;
  for (int row = 0; row < rows; ++row) {
    vf more = {};
    for (int i = 0; i < kKeys; i += int(kRun), from += kRun, to += kRun) {
      const vf low = load(from), high = load(from + W);
      const vb both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(to, &both, sizeof both);
      more += (load(to) - low) + (load(to + W) - high);
    }
    s.sum[row] += reduce(more, add);
  }
}

// Rounds weights [rows, kKeys] of keys [key, end), each times the factor of its value, for values that are
// codes. Sums of weights need no adjustment then: the rounding is that of products.
inline void scale_weights(const Scratch& s, int row, int rows, int key, int end, const float* factors,
                          bf16* to) {
  for (const int last = row + rows; row < last; ++row) {
    const float* from = s.scores + row * kKeys;
    bf16* at = to + row * kKeys;
    int i = key;
    for (; i + 2 * W <= end; i += 2 * W) {
      const vf low = load(from + i) * load(factors + i - key);
      const vf high = load(from + i + W) * load(factors + i + W - key);
      const vb both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(at + i, &both, sizeof both);
    }
    if (i + W <= end) {
      const vf some = load(from + i) * load(factors + i - key);
      const vb low = _mm512_cvtne2ps_pbh((__m512)vf{}, (__m512)some);
      std::memcpy(at + i, &low, sizeof low / 2);
      i += W;
    }
    for (; i < end; ++i) from_float(from[i] * factors[i - key], at + i);
  }
}

// `N` numbers, again and again.
template <int N>
inline vf repeated(const float* numbers) {
  float lanes[W];
  for (int i = 0; i < W; i += N) std::memcpy(lanes + i, numbers, N * sizeof(float));
  return load(lanes);
}

// Elements of two keys interleaved: of every eight elements, the first four, and the other four.
struct Interleaved {
  vb low, high;
  Interleaved(const bf16* first, const bf16* second) {
    const __m512i a = (__m512i)load_run(first), b = (__m512i)load_run(second);
    low = (vb)_mm512_unpacklo_epi16(a, b), high = (vb)_mm512_unpackhi_epi16(a, b);
  }
  explicit Interleaved(const bf16* packed) : low(load_run(packed)), high(load_run(packed + kRun)) {}
};

// Values in place; interleaved at each use.
struct ValueRows {
  const bf16* const* rows;
  Interleaved at(int key, int d) const { return {rows[key] + d, rows[key + 1] + d}; }
};

// Values interleaved once, for many query rows.
struct PackedValues {
  const bf16* packed;
  int head_dim;
  Interleaved at(int key, int d) const {
    return Interleaved(packed + key * head_dim + 2 * d);
  }
};

// Interleaves `count` values, an even number, for PackedValues.
inline void interleave(bf16* packed, const bf16* const* values, int count, int head_dim) {
  for (int i = 0; i < count; i += 2) {
    for (int d = 0; d < head_dim; d += int(kRun), packed += 2 * kRun) {
      const Interleaved some(values[i] + d, values[i + 1] + d);
      std::memcpy(packed, &some.low, sizeof some.low);
      std::memcpy(packed + kRun, &some.high, sizeof some.high);
    }
  }
}

// Computes N vectors of 32 elements for R query rows.
template <int R, int N, class Values>
inline void weigh_runs(float* out, const bf16* weights, const Values& values, int width, int d,
                       int count) {
  vf acc[R][2 * N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * N; ++i) acc[r][i] = load(out + r * width + d + i * W);
  }
  for (int key = 0; key < count; key += 2) {
    vb pairs[2 * N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Interleaved some = values.at(key, d + n * int(kRun));
      pairs[2 * n] = some.low, pairs[2 * n + 1] = some.high;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vb weight = splat_pair(weights + r * kKeys + key);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * N; ++i) acc[r][i] = add_pairs(acc[r][i], pairs[i], weight);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * N; ++i) store(out + r * width + d + i * W, acc[r][i]);
  }
}

// out[row] += weights[row] . values of `count` keys (an even number), for R rows. Calls each(keys) on the
// way, for all keys in total.
template <int R, class Values, class Each>
inline void weigh_pairs(float* out, const bf16* weights, const Values& values, int width, int count,
                        const Each& each) {
  constexpr int kMost = std::min(4, 8 / R), kStepOf = kMost * int(kRun);
  int d = 0;
  for (; d + kStepOf <= width; d += kStepOf) {
    each(count * (d + kStepOf) / width - count * d / width);
    weigh_runs<R, kMost>(out, weights, values, width, d, count);
  }
  for (; d < width; d += int(kRun)) {
    each(count * (d + int(kRun)) / width - count * d / width);
    weigh_runs<R, 1>(out, weights, values, width, d, count);
  }
}

// Brings a row of sums of weigh_pairs() from interleaved order into the elements' order.
inline void put_pairs_in_order(float* row, int width) {
  for (int d = 0; d < width; d += int(kRun)) {
    float some[kRun];
    for (int i = 0; i < int(kRun); i += 8) {
      std::memcpy(some + i, row + d + i / 2, 4 * sizeof(float));
      std::memcpy(some + i + 4, row + d + W + i / 2, 4 * sizeof(float));
    }
    std::memcpy(row + d, some, sizeof some);
  }
}

}  // namespace
#endif
