// Linear layers of quantized weights and rounded inputs, by products of integers (AVX512_VNNI).
//
//   4 weights, unsigned, of 16 outputs x 4 inputs, signed -> added to 16 sums, int32
//
// Weights lie in strips of kStripOutputs outputs, as the instruction takes them: a slice of a strip
// is four inputs' weights of each, of int4 eight inputs', the first four in the low halves. So
// nothing is moved about, and a strip is read from one end to the other. All are unsigned, by an
// offset, which the tokens' sums take off again (rounded_inputs.h).
//
// A unit's products are summed as integers, exactly, in whatever order; units are added up one
// after the other as floats. So a token's result does not depend on its company.
#pragma once
#include "rounded_inputs.h"
#include "weights.h"

namespace {

constexpr int kStripOutputs = 64;
constexpr int64_t kSlice = kStripOutputs * 4;  // bytes
constexpr int64_t kTokensOfAPiece = 24;  // at least, of work for a thread
constexpr double kIntegerProductsPerMicrosecond = 300e3;
constexpr double kIntegerBytesPerMicrosecond = 30e3;  // of weights, by one thread

// Of weights: what they are larger by than their values, and how many inputs' are in a slice.
struct Int8Slices {
  static constexpr int kOffset = 128, kInputs = 4;
};

struct Int4Slices {
  static constexpr int kOffset = 8, kInputs = 8;
};

// What comes of sums of a token, outputs n to n + W. Units of int8 have no scales, its rows do.
template <class T>
inline void finish(const LinearArgs& a, int64_t n, const float* sums, const float* scales,
                   const T* bias, T* to) {
  vf results = load(sums);
  if (a.kind == kInt8Strips) results = results * load(scales);
  if (a.bias != nullptr) results = results + load(bias);
  float wide[W];
  store(wide, results);
  from_floats(wide, to);
}

// Those of a strip.
template <class T>
inline void finish_strip(const LinearArgs& a, int64_t strip, int64_t token, const float* sums) {
  int64_t n = strip * kStripOutputs;
  const int64_t end = std::min(a.outputs, n + kStripOutputs);
  const float* scales = a.scales;
  const T* bias = static_cast<const T*>(a.bias);
  T* const to = static_cast<T*>(a.out) + token * a.outputs;
  for (; n + W <= end; n += W, sums += W) finish(a, n, sums, scales + n, bias + n, to + n);
  if (n == end) return;
  float some_scales[W] = {};
  T some_bias[W] = {}, some[W];
  const size_t rest = size_t(end - n);
  if (a.kind == kInt8Strips) std::memcpy(some_scales, scales + n, rest * sizeof(float));
  if (bias != nullptr) std::memcpy(some_bias, bias + n, rest * sizeof(T));
  finish(a, n, sums, some_scales, some_bias, some);
  std::memcpy(to + n, some, rest * sizeof(T));
}

// Scales of int4, of a unit of a strip: [kStripOutputs].
inline const float* scales_of(const LinearArgs& a, int64_t strip, int64_t unit, int64_t unit_size) {
  const int64_t group = unit * unit_size / a.group;
  return a.scales + (strip * (a.inputs / a.group) + group) * kStripOutputs;
}

#if defined(__AVX512VNNI__)

constexpr int kVectors = kStripOutputs / W;
constexpr int kIntegerTokens = 6;  // of a tile

typedef __m512i vq;  // 64 bytes

inline vf add_scaled(vf sums, vi products, vf factor) {
  return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)products), (__m512)factor, (__m512)sums);
}

// Weights of four inputs, those from 4 * Part on of a slice, of 16 outputs.
template <class Slices, int Part>
inline vq weights_of(const char* slice) {
  const vq bytes = _mm512_loadu_si512(slice);
  if constexpr (Slices::kInputs == 4) return bytes;
  return _mm512_and_si512(Part == 0 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
}

typedef void FinishFunction(const LinearArgs&, int64_t strip, int64_t token, const float* sums);

template <class Slices>
class IntegerLinear {
 public:
  IntegerLinear(const Projection& args, const RoundedTokens& tokens, FinishFunction* finish)
      : a(args), x(tokens), finish(finish), strip_bytes(args.inputs / Slices::kInputs * kSlice) {}

  // Of tokens [begin, end).
  void run(int64_t strip, int64_t begin, int64_t end) const {
    const int64_t count = end - begin, groups = (count + kIntegerTokens - 1) / kIntegerTokens;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t token = begin + count * group / groups;
      const Ahead ahead{strip_at(strip + 1), group, groups};
      switch (begin + count * (group + 1) / groups - token) {
        case 1: tile<1>(strip, token, ahead); break;
        case 2: tile<2>(strip, token, ahead); break;
        case 3: tile<3>(strip, token, ahead); break;
        case 4: tile<4>(strip, token, ahead); break;
        case 5: tile<5>(strip, token, ahead); break;
        default: tile<6>(strip, token, ahead);
      }
    }
  }

 private:
  static constexpr bool kScaledUnits = std::is_same_v<Slices, Int4Slices>;
  static constexpr int64_t kFetchedAhead = 4096, kScalesAhead = 4 * kStripOutputs;  // bytes, floats

  // A group of tokens' share of the next strip, fetched while it passes as much of its own.
  struct Ahead {
    const char* from;
    int64_t group, groups;
    void fetch_share(int64_t begin, int64_t bytes) const {
      const int64_t end = begin + bytes * (group + 1) / groups;
      for (int64_t i = begin + bytes * group / groups; i < end; i += 64) {
        _mm_prefetch(from + i, _MM_HINT_T1);
      }
    }
  };

  const char* strip_at(int64_t strip) const {
    return static_cast<const char*>(a.weight) + strip * strip_bytes;
  }

  enum Fetches { kAlong, kPastCaches, kByShares };

  template <int C>
  void tile(int64_t strip, int64_t token, const Ahead& ahead) const {
    if (ahead.groups > 1) return tile<C, kByShares>(strip, token, ahead);
    if (a.reads_once) return tile<C, kPastCaches>(strip, token, ahead);
    tile<C, kAlong>(strip, token, ahead);
  }

  // C tokens.
  template <int C, Fetches How>
  void tile(int64_t strip, int64_t token, const Ahead& ahead) const {
    const int64_t inputs = a.inputs, unit_slices = x.unit / Slices::kInputs;
    const char* slice = strip_at(strip);
    const int64_t unit_bytes = strip_bytes / x.units;
    const int8_t* values = x.values + token * inputs;
    vf results[C][kVectors] = {};
    for (int64_t unit = 0; unit < x.units; ++unit) {
      const float* scales = kScaledUnits ? scales_of(a, strip, unit, x.unit) : nullptr;
      if (How == kByShares) ahead.fetch_share(unit * unit_bytes, unit_bytes);
      vi sums[C][kVectors];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
        for (vi& sum : sums[c]) sum = vi{} + x.offsets[(token + c) * x.units + unit];
      }
      if (kScaledUnits) fetch_slice<How>(scales + kScalesAhead);
      for (int64_t i = 0; i < unit_slices; ++i, slice += kSlice, values += Slices::kInputs) {
        fetch_slice<How>(slice + kFetchedAhead);
        add_part<C, 0>(sums, slice, values, inputs);
        if constexpr (Slices::kInputs == 8) add_part<C, 1>(sums, slice, values + 4, inputs);
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const vf step = (vf)_mm512_set1_ps(x.steps[(token + c) * x.units + unit]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          vf factor = step;
          if constexpr (kScaledUnits) factor = factor * load(scales + v * W);
          results[c][v] = add_scaled(results[c][v], sums[c][v], factor);
        }
      }
    }
    for (int c = 0; c < C; ++c) {
      float wide[kStripOutputs];
      for (int v = 0; v < kVectors; ++v) store(wide + v * W, results[c][v]);
      finish(a, strip, token + c, wide);
    }
  }

  template <Fetches How>
  static void fetch_slice(const void* slice) {
    if (How == kByShares) return;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kSlice; i += 64) {
      fetch(static_cast<const char*>(slice) + i, How == kPastCaches);
    }
  }

  template <int C, int Part>
  static void add_part(vi (&sums)[C][kVectors], const char* slice, const int8_t* values,
                       int64_t inputs) {
    vq weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) weights[v] = weights_of<Slices, Part>(slice + v * 64);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      int32_t four;
      std::memcpy(&four, values + c * inputs, sizeof four);
      const vq some = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[c][v] = (vi)_mm512_dpbusd_epi32((vq)sums[c][v], weights[v], some);
      }
    }
  }

  const Projection& a;
  const RoundedTokens& x;
  FinishFunction* const finish;  // by address, for what is above is the same for every dtype
  const int64_t strip_bytes;
};

#else

// A strip of a token in plain loops.
template <class Slices, class T>
void run_plainly(const LinearArgs& a, const RoundedTokens& x, int64_t strip, int64_t token) {
  const int64_t slices = a.inputs / Slices::kInputs;
  const auto* slice = static_cast<const uint8_t*>(a.weight) + strip * slices * kSlice;
  const int8_t* values = x.values + token * a.inputs;
  float results[kStripOutputs] = {};
  for (int64_t unit = 0; unit < x.units; ++unit) {
    const float* scales = Slices::kInputs == 8 ? scales_of(a, strip, unit, x.unit) : nullptr;
    int32_t sums[kStripOutputs];
    std::fill_n(sums, kStripOutputs, x.offsets[token * x.units + unit]);
    for (int64_t k = 0; k < x.unit; k += Slices::kInputs) {
      for (int i = 0; i < kStripOutputs; ++i) {
        const uint8_t* four = slice + 4 * i;
        for (int j = 0; j < 4; ++j) {
          if (Slices::kInputs == 4) {
            sums[i] += four[j] * values[j];
          } else {
            sums[i] += (four[j] & 15) * values[j] + (four[j] >> 4) * values[4 + j];
          }
        }
      }
      slice += kSlice;
      values += Slices::kInputs;
    }
    const float step = x.steps[token * x.units + unit];
    for (int i = 0; i < kStripOutputs; ++i) {
      results[i] += float(sums[i]) * (Slices::kInputs == 8 ? step * scales[i] : step);
    }
  }
  finish_strip<T>(a, strip, token, results);
}

#endif

template <class Slices, class T>
void run_strip(const Projection& a, const RoundedTokens& tokens, int64_t strip, int64_t begin,
               int64_t end) {
#if defined(__AVX512VNNI__)
  IntegerLinear<Slices>(a, tokens, finish_strip<T>).run(strip, begin, end);
#else
  for (int64_t t = begin; t < end; ++t) run_plainly<Slices, T>(a, tokens, strip, t);
#endif
}

// Needs a whole number of units.
template <class Slices, class T>
void run_strips(const Projection& a) {
  const bool divides = a.kind == kInt8Strips || a.group % kLargestUnit == 0;
  const int64_t unit = divides ? kLargestUnit : kPackedGroup;
  const RoundedTokens tokens = round_inputs<T>(a, unit, Slices::kOffset);
  const double weights = double(a.outputs * a.inputs);
  const double work = std::max(weights * 4.0 / Slices::kInputs / kIntegerBytesPerMicrosecond,
                               weights * double(a.tokens) / kIntegerProductsPerMicrosecond);
  const int64_t strips = (a.outputs + kStripOutputs - 1) / kStripOutputs;
  // Where strips are too few for all threads, many tokens are cut as well.
  const int64_t most = std::max<int64_t>(1, a.tokens / kTokensOfAPiece);
  const int64_t ranges = std::min(most, (4 * a.threads + strips - 1) / strips);
  const int64_t pieces = strips * ranges, parts = worthwhile_parts(a.threads, work, pieces);
  parallel(a.threads, parts, [&](int64_t part) {
    for (int64_t i = pieces * part / parts; i < pieces * (part + 1) / parts; ++i) {
      const int64_t range = i % ranges;
      run_strip<Slices, T>(a, tokens, i / ranges, a.tokens * range / ranges,
                           a.tokens * (range + 1) / ranges);
    }
  });
}

}  // namespace
