// Linear layers with bfloat16 tokens by dot products of pairs (AVX512_BF16), for all kinds of weights.
//
//   32 weights of a row x 32 inputs of a token -> added to 16 sums, float32
//
// Both operands are bfloat16 in place, so only quantized weights are widened. One instruction does twice
// as many products as with floats.
//
// Few tokens: rows are processed one after the other, because memory is streamed fastest that way (int4
// by four, whose sums would otherwise wait for each other). Each part of a row meets all tokens at once.
// More tokens: tiles of kPairRows rows against up to kPairTokens tokens, which are packed so that a tile
// reads them sequentially. In both cases the product of a row and a token has one vector of sums, which
// runs along all inputs, so a token's result does not depend on the other tokens.
#pragma once
#include "runtime/parallel.h"
#include "projections/weights.h"

#if defined(SLIPSTREAM_PAIRS)
#include <vector>

namespace {

constexpr int kPairRows = 4, kPairTokens = 6;      // of a tile
constexpr int kFinishedRows = W;                   // rows whose sums are finished together (few tokens)
constexpr int64_t kPairTokenBytes = 384 * 1024;    // of packed tokens that stay in a core's cache
constexpr double kPairProductsPerMicrosecond = 100e3;
constexpr double kPairBytesPerMicrosecond = 20e3;  // of weights, by one thread
constexpr double kPairsPackedPerMicrosecond = 8e3;  // inputs

// The tokens of a call (four or more), in groups of three to kPairTokens, as equal as possible. A packed
// group of C tokens is [inputs / kRun][C][kRun], zero-padded at the end.
struct TokenGroups {
  int64_t tokens, inputs, count, padded_inputs;
  explicit TokenGroups(const LinearArgs& a)
      : tokens(a.tokens),
        inputs(a.inputs),
        count((a.tokens + kPairTokens - 1) / kPairTokens),
        padded_inputs((a.inputs + kRun - 1) / kRun * kRun) {}
  int64_t first(int64_t group) const { return tokens * group / count; }

  void pack(const LinearArgs& a, int64_t group, bf16* packed) const {
    const int64_t begin = first(group), size = first(group + 1) - begin;
    const int64_t whole = inputs / kRun * kRun;
    for (int64_t i = 0; i < size; ++i) {
      const bf16* from = static_cast<const bf16*>(a.x) + (begin + i) * a.x_stride;
      bf16* to = packed + begin * padded_inputs + i * kRun;
      for (int64_t k = 0; k < whole; k += kRun, to += size * kRun) std::memcpy(to, from + k, 64);
      if (whole == inputs) continue;
      const vb rest = load_some_run(from + whole, inputs - whole);
      std::memcpy(to, &rest, sizeof rest);
    }
  }
};

// Rows [first, last) of those at `rows` are to be prefetched.
struct RowsAhead {
  const char* rows;
  int first, last;
};

template <int R, int C>
inline void add_tile(vf (&acc)[R][C], const vb (&v)[R], const bf16* x) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const vb inputs = load_run(x + c * kRun);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][c] = add_pairs(acc[r][c], v[r], inputs);
  }
}

// Sums [C][R] of R rows, whatever kind of weights they were, against a packed group of C tokens.
template <int R, int C>
void pair_tile(const Dense<bf16>& source, int64_t row, const bf16* x, const RowsAhead& ahead,
               const Finish<R>& finish, float* results) {
  const int64_t inputs = source.inputs, whole = inputs / kRun * kRun;
  vf acc[R][C] = {};
  const bf16* from = source.weights + row * inputs;
  for (int64_t k = 0; k < whole; k += kRun, x += C * kRun) {
    for (int r = ahead.first; r < ahead.last; ++r) {
      __builtin_prefetch(ahead.rows + (r * inputs + k) * int64_t(sizeof(bf16)));
    }
    vb v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = load_run(from + r * inputs + k);
    add_tile<R, C>(acc, v, x);
  }
  if (whole < inputs) {
    vb v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = load_some_run(from + r * inputs + whole, inputs - whole);
    add_tile<R, C>(acc, v, x);
  }
  vf lanes[(R * C + W - 1) / W * W] = {};
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) lanes[c * R + r] = acc[r][c];
  }
  for (int i = 0; i < R * C; i += W) store(results + i, finish(reduce_each(lanes + i, add), i));
}

template <class Weights>
class PairLinear {
 public:
  // `packed` has all groups of tokens; null if tokens are few.
  PairLinear(const LinearArgs& args, const TokenGroups& groups, const bf16* packed)
      : a(args), w(args), groups(groups), packed(packed), whole(args.inputs / kRun * kRun) {}

  // Computes outputs [begin, end).
  void run(int64_t begin, int64_t end) const {
    if (packed == nullptr) return run_few(begin, end);
    const int64_t fitting = kPairTokenBytes / (groups.padded_inputs * int64_t(sizeof(bf16)));
    const int64_t block = std::max<int64_t>(1, fitting / kPairTokens);
    for (int64_t first = 0; first < groups.count; first += block) {
      const int64_t last = std::min(groups.count, first + block);
      int64_t n = begin;
      for (; n + kPairRows <= end; n += kPairRows) rows<kPairRows>(n, first, last);
      for (; n < end; ++n) rows<1>(n, first, last);
    }
  }

 private:
  // ---- few tokens ----

  void run_few(int64_t begin, int64_t end) const {
    for (int64_t n = begin; n < end; n += kFinishedRows) {
      const int rows = int(std::min<int64_t>(kFinishedRows, end - n));
      switch (a.tokens) {
        case 1: few<1>(n, rows); break;
        case 2: few<2>(n, rows); break;
        case 3: few<3>(n, rows); break;
        case 4: few<4>(n, rows); break;
        case 5: few<5>(n, rows); break;
        case 6: few<6>(n, rows); break;
        case 7: few<7>(n, rows); break;
        case 8: few<8>(n, rows); break;
      }
    }
  }

  // Computes outputs [n, n + rows) of all C tokens.
  template <int C>
  void few(int64_t n, int rows) const {
    if constexpr (C <= Weights::kFewTokens) {
      constexpr int kTogether = std::max(1, Weights::kTogether / C);
      vf sums[C][kFinishedRows] = {};
      int row = 0;
      for (; row + kTogether <= rows; row += kTogether) add_rows<kTogether, C>(n, row, sums);
      for (; row < rows; ++row) add_rows<1, C>(n, row, sums);
      finish<C>(n, rows, sums);
    }
  }

  // Computes the sums of rows n + row to n + row + R.
  template <int R, int C>
  void add_rows(int64_t n, int row, vf (&sums)[C][kFinishedRows]) const {
    typedef decltype(w.runs(0)) Runs;
    const bf16* x = static_cast<const bf16*>(a.x);
    const int64_t row_bytes = w.row_bytes();
    const char* ahead = w.row(n + row) + (Weights::kFetchedAhead / (R * row_bytes) + 1) * R * row_bytes;
    Runs runs[R];
    // Unrolled, or they would not be in registers.
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) runs[r] = w.runs(n + row + r);
    vf acc[R][C] = {};
    for (int64_t k = 0; k < whole; k += kRun, ahead += Weights::kRunBytes) {
      vb v[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        fetch_ahead(ahead + r * row_bytes);
        v[r] = runs[r].next();
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const vb inputs = load_run(x + c * a.x_stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][c] = add_pairs(acc[r][c], v[r], inputs);
      }
    }
    if (whole < a.inputs) {
      const int64_t rest = a.inputs - whole;
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const vb inputs = load_some_run(x + c * a.x_stride + whole, rest);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][c] = add_pairs(acc[r][c], runs[r].rest(rest), inputs);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[c][row + r] = acc[r][c];
    }
  }

  template <int C>
  void finish(int64_t n, int rows, vf (&sums)[C][kFinishedRows]) const {
    float scales[kFinishedRows] = {};
    for (int row = 0; row < rows; ++row) scales[row] = w.scale(n + row);
    vf bias = {};
    if (a.bias != nullptr) bias = load_some(static_cast<const bf16*>(a.bias) + n, rows);
    bf16* to = static_cast<bf16*>(a.out) + n;
    for (int c = 0; c < C; ++c, to += a.outputs) {
      float wide[W];
      bf16 narrow[W];
      store(wide, reduce_each(sums[c], add) * load(scales) + bias);
      from_floats(wide, narrow);
      std::memcpy(to, narrow, size_t(rows) * sizeof(bf16));
    }
  }

  // ---- many tokens ----

  // Computes outputs [n, n + R) of token groups [first, last).
  template <int R>
  void rows(int64_t n, int64_t first, int64_t last) const {
    if constexpr (std::is_same_v<Weights, Dense<bf16>>) {
      return tiles<R, true>(w, n, n, first, last);
    } else {
      thread_local std::vector<bf16> wide;
      if (int64_t(wide.size()) < R * a.inputs) wide.resize(size_t(R * a.inputs));
      for (int64_t row = 0; row < R; ++row) {
        const char* ahead = w.row(n + R + row);
        auto runs = w.runs(n + row);
        for (int64_t k = 0; k < whole; k += kRun, ahead += Weights::kRunBytes) {
          __builtin_prefetch(ahead);
          const vb v = runs.next();
          std::memcpy(&wide[size_t(row * a.inputs + k)], &v, sizeof v);
        }
      }
      tiles<R, false>(Dense<bf16>(wide.data(), a.inputs), 0, n, first, last);
    }
  }

  // Rows [row, row + R) of `source` are outputs from `n` on. The next rows are prefetched meanwhile;
  // the first groups of tokens share that work.
  template <int R, bool Fetches>
  void tiles(const Dense<bf16>& source, int64_t row, int64_t n, int64_t first,
             int64_t last) const {
    Finish<R> finish;
    for (int i = 0; i < finish.kLength; ++i) {
      finish.scales[i] = w.scale(n + i % R);
      finish.biases[i] =
          a.bias == nullptr ? 0.0f : as_float(static_cast<const bf16*>(a.bias) + n + i % R);
    }
    for (int64_t group = first; group < last; ++group) {
      const int64_t token = groups.first(group), size = groups.first(group + 1) - token;
      const bf16* x = packed + token * groups.padded_inputs;
      const int64_t fetchers = std::min<int64_t>(R, last - first), index = group - first;
      RowsAhead ahead{};
      if (Fetches && index < fetchers) {
        ahead = {source.row(row + R), int(R * index / fetchers), int(R * (index + 1) / fetchers)};
      }
      float results[(R * kPairTokens + W - 1) / W * W];
      switch (size) {
        case 3: pair_tile<R, 3>(source, row, x, ahead, finish, results); break;
        case 4: pair_tile<R, 4>(source, row, x, ahead, finish, results); break;
        case 5: pair_tile<R, 5>(source, row, x, ahead, finish, results); break;
        default: pair_tile<R, 6>(source, row, x, ahead, finish, results);
      }
      put<R>(n, token, size, results);
    }
  }

  // Writes results [tokens][R] as outputs from (token, n) on.
  template <int R>
  void put(int64_t n, int64_t token, int64_t tokens, const float* results) const {
    bf16 narrow[(R * kPairTokens + W - 1) / W * W];
    for (int i = 0; i < tokens * R; i += W) from_floats(results + i, narrow + i);
    bf16* to = static_cast<bf16*>(a.out) + token * a.outputs + n;
    for (int i = 0; i < tokens; ++i, to += a.outputs) {
      std::memcpy(to, narrow + i * R, R * sizeof(bf16));
    }
  }

  const LinearArgs& a;
  const Weights w;
  const TokenGroups& groups;
  const bf16* packed;
  const int64_t whole;
};

template <class Weights>
void run_pairs(const LinearArgs& a) {
  const TokenGroups groups(a);
  thread_local std::vector<bf16> memory;
  bf16* packed = nullptr;
  if (a.tokens > Weights::kFewTokens) {
    const int64_t needed = a.tokens * groups.padded_inputs;
    if (int64_t(memory.size()) < needed) memory.resize(size_t(needed));
    // A pointer, because `memory` is thread-local: other threads would see their own vector.
    packed = memory.data();
    const double work = double(needed) / kPairsPackedPerMicrosecond;
    const int64_t packers = worthwhile_parts(a.threads, work, groups.count);
    parallel(a.threads, packers, [&](int64_t part) {
      const int64_t last = groups.count * (part + 1) / packers;
      for (int64_t i = groups.count * part / packers; i < last; ++i) groups.pack(a, i, packed);
    });
  }
  const double outputs = double(a.outputs), products = outputs * double(a.inputs * a.tokens);
  const double work = std::max(double(Weights(a).row_bytes()) * outputs / kPairBytesPerMicrosecond,
                               products / kPairProductsPerMicrosecond);
  const int64_t strips = (a.outputs + kFinishedRows - 1) / kFinishedRows;
  const int64_t parts = worthwhile_parts(a.threads, work, strips);
  parallel_along(a.threads, parts, [&](int64_t part) {
    const PairLinear<Weights> linear(a, groups, packed);
    linear.run(strips * part / parts * kFinishedRows,
               std::min(a.outputs, strips * (part + 1) / parts * kFinishedRows));
  });
}

}  // namespace
#endif
