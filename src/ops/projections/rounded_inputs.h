// Inputs rounded to 8 bits, for integer products. Each `unit` inputs of a token share one scale: their
// largest magnitude becomes 127.
//
// A unit has kLargestUnit inputs, or 32 or 16 where groups of weights are no multiple of more. Magnitudes
// below kNothing count as zero, because the inverse of their scale would overflow. An input that is not
// finite makes all sums of its unit NaN.
#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/parallel.h"
#include "runtime/vector.h"
#include "projections/weights.h"

namespace {

constexpr int64_t kLargestUnit = 64;
constexpr float kNothing = 0x1p-100f;
constexpr int64_t kTokensRead = 16;           // at most, by one instruction
constexpr double kRoundedPerMicrosecond = 4e3;  // inputs

// Rounds to the nearest integer, ties to even; by an instruction where there is one. The usual trick,
// adding a large number, would be fused with the product before it, which would then not be rounded.
inline vi nearest(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)x);
#else
  vi result;
  for (int i = 0; i < W; ++i) result[i] = int32_t(__builtin_nearbyintf(x[i]));
  return result;
#endif
}

inline void store_bytes(int8_t* to, vi values) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values));
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(values & 0xff);  // truncate, like the other branches
  const __m256i words = _mm256_packus_epi32(low, low);
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const int32_t halves[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
  std::memcpy(to, halves, sizeof halves);
#else
  for (int i = 0; i < W; ++i) to[i] = int8_t(values[i]);
#endif
}

inline void store_rounded(int8_t* to, vi values) { store_bytes(to, values); }

// Stores even-numbered inputs of each four before odd ones, to match widened weights (integer_panels.h).
inline void store_rounded(int16_t* to, vi values) {
  for (int i = 0; i < W; i += 4) {
    to[i] = int16_t(values[i]), to[i + 1] = int16_t(values[i + 2]);
    to[i + 2] = int16_t(values[i + 1]), to[i + 3] = int16_t(values[i + 3]);
  }
}

inline int32_t largest_lane(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

inline int32_t sum_of_lanes(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < W; ++i) sum += v[i];
  return sum;
#endif
}

// The largest magnitude, compared as integers. So NaN counts as the largest and makes everything that is
// computed with it NaN.
template <class T>
inline float largest_magnitude(const T* x, int64_t count) {
  vi largest = {};
  for (int64_t k = 0; k < count; k += W) {
    const vi magnitudes = (vi)load(x + k) & 0x7fffffff;
    largest = magnitudes > largest ? magnitudes : largest;
  }
  const int32_t bits = largest_lane(largest);
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}

// The rounded tokens of a call, one Value (see store_rounded) per input. The offset of the weights adds
// the same amount to all of a unit's sums; `offsets` subtracts it.
template <class Value>
struct RoundedTokens {
  int64_t inputs, unit, units;
  int64_t token_step, unit_step;  // from a token's or unit's number to the next one's
  Value* values;     // [tokens, inputs]
  float* steps;      // [tokens, units], or [units, tokens] for tiles; all numbers of units alike
  int32_t* offsets;
  float* sums;       // of a unit's rounded inputs; null unless weights have offsets

  template <class T>
  void round(const T* x, int64_t token, int weight_offset) const {
    for (int64_t index = 0; index < units; ++index) {
      const T* from = x + index * unit;
      Value* to = values + token * inputs + index * unit;
      const float largest = largest_magnitude(from, unit);
      const bool is_finite = largest < std::numeric_limits<float>::infinity();
      const float inverse = largest < kNothing ? 0.0f : 127.0f / largest;
      vi lanes = {};
      for (int64_t k = 0; k < unit; k += W) {
        const vi rounded = is_finite ? nearest(load(from + k) * inverse) : vi{};
        store_rounded(to + k, rounded);
        lanes += rounded;
      }
      const int64_t at = token * token_step + index * unit_step;
      steps[at] = is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
      const int32_t sum = sum_of_lanes(lanes);
      offsets[at] = -weight_offset * sum;
      if (sums != nullptr) sums[at] = float(sum) * steps[at];
    }
  }
};

// The result lies in this thread's memory and is valid until its next call. `by_units`: numbers of units are
// [units, tokens].
template <class Value, class T>
RoundedTokens<Value> round_inputs(const LinearArgs& a, int64_t unit, int weight_offset,
                                  bool by_units = false) {
  thread_local std::vector<Value> values;
  thread_local std::vector<float> steps, sums;
  thread_local std::vector<int32_t> offsets;
  const int64_t units = a.inputs / unit;
  // Tiles read whole groups of tokens, so there is memory behind the last.
  const int64_t held = a.tokens + kTokensRead - 1;
  if (int64_t(values.size()) < held * a.inputs) values.resize(size_t(held * a.inputs));
  if (int64_t(steps.size()) < held * units) steps.resize(size_t(held * units));
  if (offsets.size() < steps.size()) offsets.resize(steps.size());
  if (a.offsets != nullptr && sums.size() < steps.size()) sums.resize(steps.size());
  const RoundedTokens<Value> rounded{
      a.inputs,
      unit,
      units,
      by_units ? 1 : units,
      by_units ? held : 1,
      values.data(),
      steps.data(),
      offsets.data(),
      a.offsets == nullptr ? nullptr : sums.data()};
  const double work = double(a.tokens * a.inputs) / kRoundedPerMicrosecond;
  const int64_t parts = worthwhile_parts(a.threads, work, a.tokens);
  parallel(a.threads, parts, [&](int64_t part) {
    const int64_t last = a.tokens * (part + 1) / parts;
    for (int64_t t = a.tokens * part / parts; t < last; ++t) {
      rounded.round(static_cast<const T*>(a.x) + t * a.x_stride, t, weight_offset);
    }
  });
  return rounded;
}

}  // namespace
