// Linear layers that stream their weights once: out[T, N] = x[T, K] * weight[N, K]^T.
//
// Weights stay in the rows and the dtype of the checkpoint and are widened in registers, so memory
// traffic is no more than their size. A tile is kRows rows of weights against up to kTokens tokens, or
// twice as many rows against one token; that gives enough independent sums to hide the latency of an
// addition. Each sum runs along K in one vector accumulator, in the same order for every batch, so a
// token's result does not depend on the other tokens. Where it may, many tokens that meet weights of their
// own dtype take another path (outer_products.h).
//
// Where bfloat16 products are instructions, bfloat16 tokens take other paths (dot_linear.h,
// amx_linear.h). Weights may also be packed in strips: bfloat16 ones (pair_strips.h), or quantized ones,
// which are multiplied by rounded inputs (integer_linear.h).
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "runtime/abi.h"
#include "projections/amx_linear.h"
#include "projections/dot_linear.h"
#include "projections/integer_linear.h"
#include "projections/outer_products.h"
#include "projections/pair_strips.h"
#include "projections/pair_tiles.h"
#include "runtime/parallel.h"
#include "projections/weights.h"
#include "projections/widened_inputs.h"

namespace {

constexpr int kRows = 4;            // rows of weights of a tile
constexpr int kStrip = 2 * kRows;   // the same for a tile of one token
#if defined(__AVX512F__)
constexpr int kTokens = 6;
#else
constexpr int kTokens = 3;
#endif
constexpr int64_t kActivationBytes = 384 * 1024;  // of a block of tokens that stays in a core's cache
constexpr double kBytesPerMicrosecond = 15e3;    // of weights, by one thread
constexpr double kProductsPerMicrosecond = 20e3;  // of a weight and an input
constexpr double kLaidOutPerMicrosecond = 5e3;    // bytes

// Sums [C][R] of R rows of weights, from `row` on, against C tokens, whose floats lie K apart. If rows
// come from memory (Fetches), the rows from `next` on are prefetched meanwhile; for one token, only half
// of each page. Several rows are several streams, and the hardware prefetcher does not know where the
// next ones begin.
template <int R, int C, bool Fetches, class Weights>
void tile(const Weights& w, int64_t row, int64_t next, const float* x,
          const Finish<R>& finish, float* results) {
  constexpr int kVectors = int(Weights::kStep) / W;
  const int64_t inputs = w.inputs, whole = inputs / Weights::kStep * Weights::kStep;
  vf acc[R][C] = {};
  const char* ahead = w.row(next);
  for (int64_t k = 0; k < whole; k += Weights::kStep, ahead += R * Weights::kBytes) {
#pragma GCC unroll 8
    for (int64_t i = 0; Fetches && i < R * Weights::kBytes; i += 64) {
      C == 1 ? fetch_ahead(ahead + i) : __builtin_prefetch(ahead + i);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      vf v[kVectors];
      w.read(row + r, k, v);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] += v[i] * load(x + c * inputs + k + i * W);
      }
    }
  }
  if (whole < inputs) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf v = w.read_some(row + r, whole, inputs - whole);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r][c] += v * load_some(x + c * inputs + whole, inputs - whole);
      }
    }
  }
  vf lanes[(R * C + W - 1) / W * W] = {};
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) lanes[c * R + r] = acc[r][c];
  }
  for (int i = 0; i < R * C; i += W) store(results + i, finish(reduce_each(lanes + i, add), i));
}

template <int R, bool Fetches, class Weights>
void tile_tokens(int tokens, const Weights& w, int64_t row, int64_t next,
                 const float* x, const Finish<R>& finish, float* results) {
  if constexpr (R == 1) {
    // The last rows, fewer than a tile: too few to be worth code for each number of tokens.
    for (int c = 0; c < tokens; ++c) {
      float one[W];
      tile<1, 1, Fetches>(w, row, next, x + c * w.inputs, finish, one);
      results[c] = one[0];
    }
  } else {
    switch (tokens) {
      case 1: return tile<R, 1, Fetches>(w, row, next, x, finish, results);
      case 2: return tile<R, 2, Fetches>(w, row, next, x, finish, results);
      case 3: return tile<R, 3, Fetches>(w, row, next, x, finish, results);
#if defined(__AVX512F__)
      case 4: return tile<R, 4, Fetches>(w, row, next, x, finish, results);
      case 5: return tile<R, 5, Fetches>(w, row, next, x, finish, results);
      case 6: return tile<R, 6, Fetches>(w, row, next, x, finish, results);
#endif
    }
  }
}

// Computes rows [begin, end) of the weights against all tokens; T is the dtype of tokens and results.
template <class Weights, class T>
class Panel {
 public:
  Panel(const LinearArgs& args, const float* x) : a(args), w(args), x(x) {}

  void run(int64_t begin, int64_t end) const {
    const int64_t row_bytes = int64_t(sizeof(float)) * a.inputs;
    // Weights are read once per block of tokens; a block's tokens are read once per tile of weights.
    const int64_t block =
        std::max<int64_t>(kTokens, kActivationBytes / row_bytes / kTokens * kTokens);
    for (int64_t first = 0; first < a.tokens; first += block) {
      const int64_t last = std::min(a.tokens, first + block);
      int64_t n = begin;
      for (; last - first == 1 && n + kStrip <= end; n += kStrip) strip(n, first);
      for (; n + kRows <= end; n += kRows) rows<kRows>(n, first, last);
      for (; n < end; ++n) rows<1>(n, first, last);
    }
  }

 private:
  template <int R>
  using Results = float[(std::max(R * kTokens, kStrip) + W - 1) / W * W];

  template <int R>
  Finish<R> finish_of(int64_t n) const {
    Finish<R> finish;
    for (int i = 0; i < finish.kLength; ++i) {
      finish.scales[i] = w.scale(n + i % R);
      finish.biases[i] = a.bias ? as_float(static_cast<const T*>(a.bias) + n + i % R) : 0.0f;
    }
    return finish;
  }

  // Computes one token.
  void strip(int64_t n, int64_t t) const {
    Results<kStrip> results;
    tile<kStrip, 1, true>(w, n, n + kStrip, x + t * a.inputs, finish_of<kStrip>(n), results);
    put<kStrip>(n, t, 1, results);
  }

  // Computes tokens [first, last).
  template <int R>
  void rows(int64_t n, int64_t first, int64_t last) const {
    if (std::is_same_v<Weights, Dense<float>> || last - first <= kTokens) {
      return tokens<R, true>(w, n, n, first, last);
    }
    // Widen the rows once for all tokens of the block. The floats are the same as in registers.
    thread_local std::vector<float> wide;
    if (int64_t(wide.size()) < R * a.inputs) wide.resize(size_t(R * a.inputs));
    for (int r = 0; r < R; ++r) widen_row(n + r, n + r + R, &wide[r * a.inputs]);
    tokens<R, false>(Dense<float>(wide.data(), a.inputs), 0, n, first, last);
  }

  void widen_row(int64_t row, int64_t next, float* to) const {
    const int64_t whole = a.inputs / Weights::kStep * Weights::kStep;
    const char* ahead = w.row(next);
    for (int64_t k = 0; k < whole; k += Weights::kStep, ahead += Weights::kBytes) {
      __builtin_prefetch(ahead);
      vf v[Weights::kStep / W];
      w.read(row, k, v);
      for (int i = 0; i < Weights::kStep / W; ++i) store(to + k + i * W, v[i]);
    }
    if (whole < a.inputs) {
      float rest[W];
      store(rest, w.read_some(row, whole, a.inputs - whole));
      std::memcpy(to + whole, rest, size_t(a.inputs - whole) * sizeof(float));
    }
  }

  // Rows [row, row + R) of the source (outputs from `n` on) against tokens [first, last).
  template <int R, bool Fetches, class Source>
  void tokens(const Source& source, int64_t row, int64_t n, int64_t first, int64_t last) const {
    const Finish<R> finish = finish_of<R>(n);
    Results<R> results;
    for (int64_t t = first; t < last; t += kTokens) {
      const int some = int(std::min<int64_t>(kTokens, last - t));
      const float* from = x + t * a.inputs;
      // Only the first tile prefetches; later tiles find these rows in the cache. Other weights than
      // floats have no later tiles: those are of the widened rows.
      constexpr bool kHasLater = std::is_same_v<Source, Dense<float>>;
      if (Fetches && (t == first || !kHasLater)) {
        tile_tokens<R, Fetches>(some, source, row, row + R, from, finish, results);
      } else if constexpr (kHasLater) {
        tile_tokens<R, false>(some, source, row, 0, from, finish, results);
      }
      put<R>(n, t, some, results);
    }
  }

  // Writes results [tokens][R] as outputs from (t, n) on.
  template <int R>
  void put(int64_t n, int64_t t, int tokens, const float* results) const {
    T narrow[sizeof(Results<R>) / sizeof(float)];
    for (int i = 0; i < tokens * R; i += W) from_floats(results + i, narrow + i);
    T* to = static_cast<T*>(a.out) + t * a.outputs + n;
    for (int i = 0; i < tokens; ++i) std::memcpy(to + i * a.outputs, narrow + i * R, R * sizeof(T));
  }

  const LinearArgs& a;
  const Weights w;
  const float* x;
};

template <class Weights, class T>
Status run(const LinearArgs& a) {
#if defined(SLIPSTREAM_TILES)
  if constexpr (std::is_same_v<T, bf16>) {
    if (uses_tiles(a)) {
      run_tiles<Weights>(a);
      return kOk;
    }
  }
#endif
#if defined(SLIPSTREAM_PAIRS)
  if constexpr (std::is_same_v<T, bf16>) {
    run_pairs<Weights>(a);
    return kOk;
  }
#endif
#if defined(SLIPSTREAM_OUTER_PRODUCTS)
  if constexpr (std::is_same_v<Weights, Dense<T>>) {
    if (uses_outer_products(a)) {
      run_outer_products<T>(a);
      return kOk;
    }
  }
#endif
  const float* x = widened_inputs<T>(a);
  const int64_t groups = (a.outputs + kRows - 1) / kRows;
  const double outputs = double(a.outputs), products = outputs * double(a.inputs * a.tokens);
  const double work = std::max(double(Weights(a).row_bytes()) * outputs / kBytesPerMicrosecond,
                               products / kProductsPerMicrosecond);
  const int64_t parts = worthwhile_parts(a.threads, work, groups);
  parallel_along(a.threads, parts, [&](int64_t part) {
    Panel<Weights, T>(a, x).run(groups * part / parts * kRows,
                                std::min(a.outputs, groups * (part + 1) / parts * kRows));
  });
  return kOk;
}

bool has_groups_of(const LinearArgs& a, int64_t size) {
  const bool is_known = a.kind == kE2M1
                            ? a.group_dtype == kPowers && a.offsets == nullptr
                            : a.group_dtype == kFloat32 || a.group_dtype == kBFloat16;
  if (!is_known) return false;
  return a.group >= size && a.group % size == 0 && a.inputs % a.group == 0 &&
         a.inputs % kPackedGroup == 0;
}

template <class Slices, class T>
Status run_rounded(const LinearArgs& a) {
  run_strips<Slices, T>(a);
  return kOk;
}

template <class T>
Status run_pairs_of_strips(const LinearArgs& a) {
  if (!std::is_same_v<T, bf16> || a.inputs % 2 || a.outputs % kStripOutputs) return kBadShape;
#if defined(SLIPSTREAM_TILES)
  if (fits_pair_tiles(a)) {
    run_pair_tiles(a);
    return kOk;
  }
#endif
  run_pair_strips(a);
  return kOk;
}

// Levels of 8 bits with one scale per row, or per group of inputs, which may have an offset.
template <class Level, class T>
Status run_bytes(const LinearArgs& a) {
  if (a.group != 0) return has_groups_of(a, kSmallestGroup) ? run<ByGroup<Level>, T>(a) : kBadShape;
  return a.inputs % kPackedGroup || a.offsets != nullptr ? kBadShape : run<ByRow<Level>, T>(a);
}

template <class T>
Status run_int8_strips(const LinearArgs& a) {
  if (a.group == 0) {
    return a.inputs % kLargestUnit || a.offsets != nullptr ? kBadShape
                                                           : run_rounded<Int8Slices, T>(a);
  }
  const bool fits = has_groups_of(a, kSmallestGroup) && a.outputs % kStripOutputs == 0;
  return fits ? run_rounded<Int8GroupSlices, T>(a) : kBadShape;
}

template <class T>
Status run_kind(const LinearArgs& a) {
  switch (a.kind) {
    case kBFloat16Strips: return run_pairs_of_strips<T>(a);
    case kInt8Strips: return run_int8_strips<T>(a);
    case kInt4Strips:
      return has_groups_of(a, kPackedGroup) && a.outputs % kStripOutputs == 0
                 ? run_rounded<Int4Slices, T>(a)
                 : kBadShape;
    case kInt8: return run_bytes<int8_t, T>(a);
    case kFloat8: return run_bytes<float8, T>(a);
    case kInt4: return has_groups_of(a, kPackedGroup) ? run<Int4, T>(a) : kBadShape;
    case kE2M1: return has_groups_of(a, kPackedGroup) ? run<E2M1, T>(a) : kBadShape;
    default: return a.kind == a.dtype ? run<Dense<T>, T>(a) : kBadShape;
  }
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_lay_out(const LayOutArgs* args) {
  const int64_t strips = args->strips, words = args->words, threads = args->threads;
  try {
    const double work = double(strips * words * kSlice) / kLaidOutPerMicrosecond;
    // No more parts than threads, because each part needs memory for a strip. That is allocated before
    // anything is moved, so a lack of memory leaves the weights unchanged.
    const int64_t parts = std::min(threads, worthwhile_parts(threads, work, strips));
    std::vector<uint32_t> scratch(size_t(parts * words * kStripOutputs));
    parallel(threads, parts, [&](int64_t part) {
      for (int64_t strip = strips * part / parts; strip < strips * (part + 1) / parts; ++strip) {
        lay_out_strip(static_cast<uint32_t*>(args->weight) + strip * words * kStripOutputs, words,
                      scratch.data() + part * words * kStripOutputs);
      }
    });
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

// The ways that a format has here, as bits; -1 if there is no such format.
SLIPSTREAM_EXPORT int64_t slipstream_ways(int64_t format) {
  if (format < 0 || format >= kFormats) return -1;
  int64_t bits = 0;
  for (int64_t way = 0; way < kWays; ++way) bits |= int64_t(has_way(format, way)) << way;
  return bits;
}

// Chooses the way of a format and a class of numbers of tokens; `keeps_bits`: where results must not depend
// on the number of tokens. Returns whether there is such a way.
SLIPSTREAM_EXPORT int slipstream_choose_way(int64_t format, int64_t rows_class, int keeps_bits, int64_t way) {
  return ways().choose(format, rows_class, keeps_bits != 0, way);
}

SLIPSTREAM_EXPORT int64_t slipstream_way_of(int64_t format, int64_t tokens, int keeps_bits) {
  return ways().of(format, tokens, keeps_bits != 0);
}

// From now on a token's result does not depend on the number of tokens in any format, until whoever asked has called
// with 0; there may be several.
SLIPSTREAM_EXPORT void slipstream_keep_one_way(int keep) { ways().keep_one(keep != 0); }

SLIPSTREAM_EXPORT int slipstream_linear(const LinearArgs* args) {
  const LinearArgs& a = *args;
  if (a.inputs < 1 || a.outputs < 0 || a.threads < 1) return kBadShape;
  if (a.tokens < 1 || a.outputs == 0) return kOk;
  try {
    switch (a.dtype) {
      case kFloat32: return run_kind<float>(a);
      case kBFloat16: return run_kind<bf16>(a);
      case kFloat16: return run_kind<f16>(a);
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
