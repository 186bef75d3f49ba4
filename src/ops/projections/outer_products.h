// Linear layers of many tokens by outer products: lanes of vectors are tokens.
//
// A tile along the inputs (linear.cpp) ends with a reduction of each sum's lanes, which costs as much as
// the products of a few hundred inputs. Here a step takes one input of a tile's tokens, as vectors, and
// multiplies each by that input's weight of each row, so a sum is a lane and needs no reduction. Tokens
// are transposed for that once per call, in blocks that stay in a core's cache while the weights stream.
//
// A sum runs along the inputs one by one, whatever the number of tokens and threads. That is another
// order than with few tokens, so this is only for calls whose results may depend on their number.
#pragma once
#include <algorithm>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"
#include "projections/ways.h"

// Without fused products of wide vectors, tiles along the inputs are faster.
#if defined(__AVX2__) && defined(__FMA__)
#define SLIPSTREAM_OUTER_PRODUCTS 1

namespace {

// Rows of weights and vectors of tokens of a tile, whose sums stay in registers, and the number of tokens
// from which this is faster.
#if defined(__AVX512F__)
constexpr int kOuterRows = 8, kOuterVectors = 3;
#else
constexpr int kOuterRows = 6, kOuterVectors = 2;
#endif
constexpr int64_t kFirstOuterTokens = 28;
constexpr int64_t kTransposedBytes = W * 65536;  // of a block of tokens
constexpr double kOuterProductsPerMicrosecond = 50e3;
constexpr double kTransposedPerMicrosecond = 1e3;  // inputs

inline bool uses_outer_products(const LinearArgs& a) {
  return a.tokens >= kFirstOuterTokens && !ways().keeps_one();
}

// Writes up to W tokens as [inputs][W] floats; lanes beyond are zeros.
template <class T>
void transpose_tokens(const T* x, int64_t stride, int64_t tokens, int64_t inputs, float* to) {
  const int64_t whole = inputs / W * W;
  for (int64_t k = 0; k < inputs; k += W) {
    vf v[W] = {};
    for (int64_t t = 0; t < std::min<int64_t>(W, tokens); ++t) {
      v[t] = k < whole ? load(x + t * stride + k) : load_some(x + t * stride + k, inputs - k);
    }
    transpose(v);
    for (int64_t i = 0; i < std::min<int64_t>(W, inputs - k); ++i) store(to + (k + i) * W, v[i]);
  }
}

// Computes rows of the weights against one block of transposed tokens; T is the dtype of all operands.
template <class T>
class OuterPanel {
 public:
  // The block's `count` tokens lie at `x`, as [vectors][inputs][W]; results go to `out`.
  OuterPanel(const LinearArgs& a, const float* x, int64_t count, T* out)
      : a(a), x(x), count(count), out(out) {}

  void run(int64_t begin, int64_t end) const {
    const int64_t vectors = (count + W - 1) / W;
    for (int64_t n = begin; n < end; n += kOuterRows) {
      const int some = int(std::min<int64_t>(kOuterRows, end - n));
      const float* rows[kOuterRows];
      find_rows(n, some, rows);
      for (int64_t v = 0; v < vectors;) {
        const int64_t left = vectors - v;
        if (left == 1) {
          tile<1>(rows, n, some, v), v += 1;
        } else if (left % kOuterVectors == 0 || left > 4) {
          tile<kOuterVectors>(rows, n, some, v), v += kOuterVectors;
        } else {
          // Two tiles of two vectors are faster than one of three and one of one.
          tile<2>(rows, n, some, v), v += 2;
        }
      }
    }
  }

 private:
  // Rows [n, n + some) as floats, then the last of them again. Others than floats are widened for all tokens.
  void find_rows(int64_t n, int some, const float** rows) const {
    const T* from = static_cast<const T*>(a.weight) + n * a.inputs;
    const float* first;
    if constexpr (std::is_same_v<T, float>) {
      first = from;
    } else {
      thread_local std::vector<float> wide;
      // A row's last vector may write beyond its end; the next row overwrites that.
      const size_t floats = size_t(kOuterRows * a.inputs + W);
      if (wide.size() < floats) wide.resize(floats);
      for (int r = 0; r < some; ++r) {
        convert_row(from + r * a.inputs, wide.data() + r * a.inputs, int(a.inputs));
      }
      first = wide.data();
    }
    for (int r = 0; r < kOuterRows; ++r) rows[r] = first + std::min(r, some - 1) * a.inputs;
  }

  // Rows against V vectors of tokens, from vector `at` on.
  template <int V>
  void tile(const float* const* rows, int64_t n, int some, int64_t at) const {
    const int64_t inputs = a.inputs;
    const float* tokens = x + at * inputs * W;
    const float* weights[kOuterRows];
    for (int r = 0; r < kOuterRows; ++r) weights[r] = rows[r];
    vf sums[kOuterRows][V] = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < inputs; ++k) {
      vf v[V];
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) v[i] = load(tokens + (i * inputs + k) * W);
#pragma GCC unroll 8
      for (int r = 0; r < kOuterRows; ++r) {
        const vf weight = splat(weights[r][k]);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sums[r][i] += weight * v[i];
      }
    }
    vf bias{};
    if (a.bias != nullptr) bias = load_some(static_cast<const T*>(a.bias) + n, some);
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
      vf tokens_of[W] = {};
#pragma GCC unroll 8
      for (int r = 0; r < kOuterRows; ++r) tokens_of[r] = sums[r][i];
      transpose(tokens_of);
      put(tokens_of, bias, n, some, (at + i) * W);
    }
  }

  // Writes W tokens from `first` on, whose first lanes are the sums of `some` rows from n on.
  void put(const vf* tokens, vf bias, int64_t n, int some, int64_t first) const {
    const int64_t whole = std::min<int64_t>(W, count - first);
    T* to = out + first * a.outputs + n;
    for (int64_t t = 0; t < whole; ++t, to += a.outputs) {
      float wide[W];
      T narrow[W];
      store(wide, tokens[t] + bias);
      from_floats(wide, narrow);
      // Of a size that the compiler knows, this is two moves.
      if (some == kOuterRows) {
        std::memcpy(to, narrow, kOuterRows * sizeof(T));
      } else {
        std::memcpy(to, narrow, size_t(some) * sizeof(T));
      }
    }
  }

  const LinearArgs& a;
  const float* x;
  const int64_t count;
  T* out;
};

template <class T>
void run_outer_products(const LinearArgs& a) {
  const int64_t vector_floats = a.inputs * W, groups = (a.outputs + kOuterRows - 1) / kOuterRows;
  // At least two tiles, so that weights, which come from further away, are read half as often.
  const int64_t fitting = kTransposedBytes / int64_t(sizeof(float)) / vector_floats;
  const int64_t most = std::max<int64_t>(2, fitting / kOuterVectors) * kOuterVectors;
  const int64_t vectors = std::min(most, (a.tokens + W - 1) / W);
  thread_local std::vector<float> transposed;
  if (int64_t(transposed.size()) < vectors * vector_floats) {
    transposed.resize(size_t(vectors * vector_floats));
  }
  // A pointer, because `transposed` is thread-local: other threads would see their own vector.
  float* const to = transposed.data();
  for (int64_t first = 0; first < a.tokens; first += vectors * W) {
    const int64_t count = std::min(vectors * W, a.tokens - first);
    const T* x = static_cast<const T*>(a.x) + first * a.x_stride;
    const int64_t filled = (count + W - 1) / W;
    const double moved = double(count * a.inputs) / kTransposedPerMicrosecond;
    const int64_t pieces = worthwhile_parts(a.threads, moved, filled);
    parallel(a.threads, pieces, [&](int64_t piece) {
      for (int64_t v = filled * piece / pieces; v < filled * (piece + 1) / pieces; ++v) {
        transpose_tokens(x + v * W * a.x_stride, a.x_stride, count - v * W, a.inputs, to + v * vector_floats);
      }
    });
    const double products = double(a.outputs) * double(a.inputs * count);
    const int64_t parts = worthwhile_parts(a.threads, products / kOuterProductsPerMicrosecond, groups);
    const OuterPanel<T> panel(a, to, count, static_cast<T*>(a.out) + first * a.outputs);
    parallel_along(a.threads, parts, [&](int64_t part) {
      panel.run(groups * part / parts * kOuterRows,
                std::min(a.outputs, groups * (part + 1) / parts * kOuterRows));
    });
  }
}

}  // namespace

#endif
