// Linear layers of bfloat16 by products of pairs (AVX512_BF16), weights in strips (weight_strips.h).
//
//   2 weights of 16 outputs x 2 inputs -> added to 16 sums, float32
//
// A slice of a strip is two inputs' weights of each output. Tokens are met where they lie, two inputs
// at a time by all of a slice. A sum runs along all inputs in one lane, so a token's result does not
// depend on its company. Against rows of weights (dot_linear.h) this saves the additions across lanes
// at the end of each row, and the packing of tokens.
#pragma once
#include "pairs.h"
#include "weight_strips.h"

namespace {

constexpr Speed kPairStripSpeed = {30e3, 200e3};

#if defined(SLIPSTREAM_PAIRS)

class PairStrips : public StripTiles<PairStrips> {
 public:
  PairStrips(const Projection& args)
      : projection(args), strip_bytes(args.inputs / 2 * kSlice) {}

  const char* strip_at(int64_t strip) const {
    return static_cast<const char*>(projection.weight) + strip * strip_bytes;
  }

  // C tokens.
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

  const Projection& projection;

 private:
  static constexpr int64_t kShareInputs = 64;  // between two looks at what to fetch

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

// The float that the first (Second = false) or the second bfloat16 of each pair is.
template <bool Second>
inline vf one_of_pairs(vu pairs) {
  return (vf)(Second ? pairs & 0xffff0000u : pairs << 16);
}

// A strip of a token, by widening pairs.
inline void run_widened(const LinearArgs& a, int64_t strip, int64_t token) {
  const bf16* x = static_cast<const bf16*>(a.x) + token * a.x_stride;
  const char* slice = static_cast<const char*>(a.weight) + strip * (a.inputs / 2 * kSlice);
  vf sums[kStripVectors] = {};
  for (int64_t k = 0; k < a.inputs; k += 2, slice += kSlice) {
    const vf first = splat(as_float(x + k)), second = splat(as_float(x + k + 1));
    for (int v = 0; v < kStripVectors; ++v) {
      vu pairs;
      std::memcpy(&pairs, slice + v * sizeof pairs, sizeof pairs);
      sums[v] += one_of_pairs<false>(pairs) * first;
      sums[v] += one_of_pairs<true>(pairs) * second;
    }
  }
  float wide[kStripOutputs];
  for (int v = 0; v < kStripVectors; ++v) store(wide + v * W, sums[v]);
  finish_strip<bf16>(a, strip, token, wide);
}

#endif

// Needs an even number of inputs, and outputs for whole strips.
inline void run_pair_strips(const Projection& a) {
  const int64_t row_bytes = a.inputs * int64_t(sizeof(bf16));
  over_strips(a, double(a.outputs * row_bytes), row_bytes, kPairStripSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
#if defined(SLIPSTREAM_PAIRS)
                PairStrips(a).run(strip, begin, end);
#else
                for (int64_t t = begin; t < end; ++t) run_widened(a, strip, t);
#endif
              });
}

}  // namespace
