// Linear layers by bfloat16 products of pairs (AVX512_BF16), with weights in strips (weight_strips.h).
//
//   2 weights of 16 outputs x 2 inputs -> added to 16 sums, float32
//
// A slice of a strip has the weights of two inputs for each output. Tokens are read in place, two inputs
// at a time for all outputs of a slice. A sum runs along all inputs in one lane, so a token's result does
// not depend on the other tokens. Compared with rows of weights (dot_linear.h), this saves the additions
// across lanes at the end of each row, and the packing of tokens.
#pragma once
#include "runtime/pairs.h"
#include "projections/strip_panels.h"
#include "projections/widened_inputs.h"

namespace {

constexpr Speed kPairStripSpeed = {30e3, 200e3};
constexpr Speed kWidenedStripSpeed = {15e3, 30e3};

#if defined(SLIPSTREAM_PAIRS)

class PairStrips : public StripTiles<PairStrips> {
 public:
  PairStrips(const LinearArgs& args)
      : projection(args), strip_bytes(args.inputs / 2 * kSlice) {}

  const char* strip_at(int64_t strip) const {
    return static_cast<const char*>(projection.weight) + strip * strip_bytes;
  }

  // Computes C tokens.
  template <int C, Fetches How>
  void tile(int64_t strip, int64_t token, const Ahead& ahead) const {
    const int64_t inputs = projection.inputs, stride = projection.x_stride;
    const char* slice = strip_at(strip);
    const bf16* x = static_cast<const bf16*>(projection.x) + token * stride;
    vf sums[C][kStripVectors] = {};
    for (int64_t first = 0; first < inputs; first += kShareInputs) {
      const int64_t last = std::min(inputs, first + kShareInputs);
      if (How == kByShares) ahead.fetch_share(first / 2 * kSlice, (last - first) / 2 * kSlice);
      for (int64_t k = first; k < last; k += 2, slice += kSlice) {
        fetch_slice<How>(slice + kFetchedAhead);
        vb weights[kStripVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kStripVectors; ++v) {
          weights[v] = load_run(reinterpret_cast<const bf16*>(slice + v * 64));
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          const vb pair = splat_pair(x + c * stride + k);
#pragma GCC unroll 8
          for (int v = 0; v < kStripVectors; ++v) {
            sums[c][v] = add_pairs(sums[c][v], weights[v], pair);
          }
        }
      }
    }
    for (int c = 0; c < C; ++c) finish(strip * kStripOutputs, token + c, sums[c]);
  }

  const LinearArgs& projection;

 private:
  static constexpr int64_t kShareInputs = 64;  // inputs between two rounds of prefetching

  void finish(int64_t n, int64_t token, const vf (&sums)[kStripVectors]) const {
    const bf16* bias = static_cast<const bf16*>(projection.bias);
    bf16* to = static_cast<bf16*>(projection.out) + token * projection.outputs + n;
    for (int v = 0; v < kStripVectors; v += 2, to += kRun) {
      vf low = sums[v], high = sums[v + 1];
      if (bias != nullptr) low += load(bias + n + v * W), high += load(bias + n + (v + 1) * W);
      const vb both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(to, &both, sizeof both);
    }
  }

  const int64_t strip_bytes;
};

#else

// Widens the first (Second = false) or the second bfloat16 of each pair to float.
template <bool Second>
inline vf one_of_pairs(const char* pairs) {
  vu words;
  std::memcpy(&words, pairs, sizeof words);
  return (vf)(Second ? words & 0xffff0000u : words << 16);
}

#if defined(SLIPSTREAM_PANELS)

// For tokens as floats, [tokens, inputs]: weights are widened in registers.
class WidenedPairs {
 public:
  WidenedPairs(const LinearArgs& args, const float* x)
      : projection(args), slices(args.inputs / 2), x(x) {}

  template <int C, int V, class F>
  void add(const Chunk& chunk, int64_t, int64_t token, int vector, F fetcher, float* to) const {
    vf sums[C][V];
    load_sums(sums, to);
    const float* pair = x + token * projection.inputs + 2 * chunk.first;
    const char* slice = chunk.at + vector * int64_t(sizeof(vf));
    for (int64_t i = 0; i < chunk.count; ++i, slice += kSlice, pair += 2) {
      fetcher.next();
      add_one<false>(sums, slice, pair);
      add_one<true>(sums, slice, pair + 1);
    }
    store_sums(sums, to);
  }

  const LinearArgs& projection;
  const int64_t slices;

 private:
  template <bool Second, int C, int V>
  void add_one(vf (&sums)[C][V], const char* slice, const float* inputs) const {
    vf weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) weights[v] = one_of_pairs<Second>(slice + v * int(sizeof(vf)));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const vf one = splat(inputs[c * projection.inputs]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums[c][v] += weights[v] * one;
        finish_first(sums[c][v]);
      }
    }
  }

  const float* const x;
};

#else

// Computes a strip of a token by widening pairs.
inline void run_widened(const LinearArgs& a, int64_t strip, int64_t token) {
  const bf16* x = static_cast<const bf16*>(a.x) + token * a.x_stride;
  const char* slice = static_cast<const char*>(a.weight) + strip * (a.inputs / 2 * kSlice);
  vf sums[kStripVectors] = {};
  for (int64_t k = 0; k < a.inputs; k += 2, slice += kSlice) {
    const vf first = splat(as_float(x + k)), second = splat(as_float(x + k + 1));
    for (int v = 0; v < kStripVectors; ++v) {
      const char* pairs = slice + v * int(sizeof(vf));
      sums[v] += one_of_pairs<false>(pairs) * first;
      sums[v] += one_of_pairs<true>(pairs) * second;
    }
  }
  float wide[kStripOutputs];
  for (int v = 0; v < kStripVectors; ++v) store(wide + v * W, sums[v]);
  finish_strip<bf16>(a, strip, token, wide);
}

#endif
#endif

// Requires an even number of inputs, and a multiple of kStripOutputs outputs.
inline void run_pair_strips(const LinearArgs& a) {
  const double bytes = double(a.outputs * a.inputs) * sizeof(bf16);
#if defined(SLIPSTREAM_PAIRS)
  over_strips(a, bytes, a.inputs * int64_t(sizeof(bf16)), kPairStripSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
                PairStrips(a).run(strip, begin, end);
              });
#elif defined(SLIPSTREAM_PANELS)
  const WidenedPairs kernel(a, widened_inputs<bf16>(a));
  over_strips(a, bytes, kPanelTokenBytes, kWidenedStripSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
                StripPanels<WidenedPairs, bf16>(kernel).run(strip, begin, end);
              });
#else
  over_strips(a, bytes, a.inputs * int64_t(sizeof(bf16)), kWidenedStripSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) run_widened(a, strip, t);
              });
#endif
}

}  // namespace
