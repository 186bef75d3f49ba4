// Linear layers of quantized weights and rounded inputs, by integer dot products (AVX512_VNNI).
//
//   4 weights, unsigned, of 16 outputs x 4 inputs, signed -> added to 16 sums, int32
//
// Weights lie in strips (weight_strips.h). A slice has the weights of four inputs for each output; for
// int4, of eight inputs, the first four in the low nibbles. Weights are made unsigned by an offset, whose
// effect is subtracted by means of the tokens' sums (rounded_inputs.h).
//
// With AMX many tokens are multiplied by tiles: of bytes, to the same bits (integer_tiles.h), or of bfloat16
// (pair_tiles.h). Which way is taken is measured (ways.h).
//
// A unit's products are summed as integers, exactly, in any order. Units are added as floats, in order.
// So a token's result does not depend on the other tokens.
#pragma once
#include "projections/integer_panels.h"
#include "projections/integer_slices.h"
#include "projections/integer_tiles.h"
#include "projections/pair_tiles.h"
#include "projections/ways.h"

namespace {

constexpr Speed kIntegerSpeed = {30e3, 300e3};
constexpr Speed kIntegerPanelSpeed = {15e3, 45e3};

#if defined(__AVX512VNNI__)

typedef __m512i vq;  // 64 bytes

// Weights of inputs [4 * Part, 4 * Part + 4) of a slice, for 16 outputs.
template <class Slices, int Part>
inline vq weights_of(const char* slice) {
  const vq bytes = _mm512_loadu_si512(slice);
  if constexpr (Slices::kInputs == 4) return bytes;
  return _mm512_and_si512(Part == 0 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
}

typedef void FinishFunction(const LinearArgs&, int64_t strip, int64_t token, const float* sums);

template <class Slices>
class IntegerStrips : public StripTiles<IntegerStrips<Slices>> {
 public:
  IntegerStrips(const LinearArgs& args, const RoundedTokens<int8_t>& tokens, FinishFunction* finish)
      : projection(args),
        x(tokens),
        finish(finish),
        strip_bytes(args.inputs / Slices::kInputs * kSlice) {}

  const char* strip_at(int64_t strip) const {
    return static_cast<const char*>(projection.weight) + strip * strip_bytes;
  }

  // Computes C tokens.
  template <int C, Fetches How>
  void tile(int64_t strip, int64_t token, const Ahead& ahead) const {
    if (!kScaledUnits) fetch_scales(strip);
    float wide[C][kStripOutputs];
    // For many tokens: the strip in two halves. The second is in the cache and prefetches nothing.
    if (kScaledUnits && C > 2 && How == kByShares && ahead.groups > 2) {
      constexpr int V = kStripVectors / 2;
      add_up<C, V, How>(strip, token, 0, ahead, wide);
      add_up<C, V, How>(strip, token, V, ahead, wide);
    } else {
      add_up<C, kStripVectors, How>(strip, token, 0, ahead, wide);
    }
    for (int c = 0; c < C; ++c) finish(projection, strip, token + c, wide[c]);
  }

  const LinearArgs& projection;

 private:
  static constexpr bool kScaledUnits = Slices::kInGroups;

  // Computes vectors [first, first + V) of the strip. The sums of the current unit and those of all
  // previous units are in registers at once; there are 32.
  template <int C, int V, Fetches How>
  void add_up(int64_t strip, int64_t token, int first, const Ahead& ahead,
              float (&wide)[C][kStripOutputs]) const {
    const int64_t inputs = projection.inputs, unit_slices = x.unit / Slices::kInputs;
    const char* slice = strip_at(strip) + first * 64;
    const int64_t unit_bytes = strip_bytes / x.units;
    const int8_t* values = x.values + token * inputs;
    vf results[C][V] = {};
    UnitPlaces<Slices> places(projection, strip, x.unit);
    for (int64_t unit = 0; unit < x.units; ++unit) {
      const int64_t place = places.next() + first * W;
      if (How == kByShares && first == 0) ahead.fetch_share(unit * unit_bytes, unit_bytes);
      vi sums[C][V];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
        for (vi& sum : sums[c]) sum = vi{} + x.offsets[(token + c) * x.units + unit];
      }
      if (kScaledUnits) {
        fetch_slice<How>(number_at(projection.scales, projection, place) + kFetchedAhead);
      }
      for (int64_t i = 0; i < unit_slices; ++i, slice += kSlice, values += Slices::kInputs) {
        fetch_slice<How>(slice + kFetchedAhead);
        add_part<C, V, 0>(sums, slice, values, inputs);
        if constexpr (Slices::kInputs == 8) add_part<C, V, 1>(sums, slice, values + 4, inputs);
      }
      vf numbers[V];
      if constexpr (kScaledUnits) load_numbers(projection.scales, projection, place, numbers);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const vf step = (vf)_mm512_set1_ps(x.steps[(token + c) * x.units + unit]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          vf factor = step;
          if constexpr (kScaledUnits) factor = factor * numbers[v];
          results[c][v] = add_scaled(results[c][v], sums[c][v], factor);
        }
      }
      if (!kScaledUnits || projection.offsets == nullptr) continue;
      fetch_slice<How>(number_at(projection.offsets, projection, place) + kFetchedAhead);
      load_numbers(projection.offsets, projection, place, numbers);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const float sum = x.sums[(token + c) * x.units + unit];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          results[c][v] = subtract_scaled(results[c][v], numbers[v], sum);
        }
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(wide[c] + (first + v) * W, results[c][v]);
    }
  }

  // int8: prefetches the scales that are needed at the end of the strip.
  void fetch_scales(int64_t strip) const {
    const float* scales = static_cast<const float*>(projection.scales) + strip * kStripOutputs;
#pragma GCC unroll 8
    for (int v = 0; v < kStripVectors; ++v) __builtin_prefetch(scales + v * W);
  }

  template <int C, int V, int Part>
  static void add_part(vi (&sums)[C][V], const char* slice, const int8_t* values,
                       int64_t inputs) {
    vq weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) weights[v] = weights_of<Slices, Part>(slice + v * 64);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      int32_t four;
      std::memcpy(&four, values + c * inputs, sizeof four);
      const vq some = _mm512_set1_epi32(four);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums[c][v] = (vi)_mm512_dpbusd_epi32((vq)sums[c][v], weights[v], some);
      }
    }
  }

  const RoundedTokens<int8_t>& x;
  FinishFunction* const finish;  // a pointer, so that this class is compiled once for all dtypes
  const int64_t strip_bytes;
};

#elif !defined(SLIPSTREAM_PANELS)

// Computes a strip of a token in plain loops.
template <class Slices, class T>
void run_plainly(const LinearArgs& a, const RoundedTokens<int8_t>& x, int64_t strip,
                 int64_t token) {
  const int64_t slices = a.inputs / Slices::kInputs;
  const auto* slice = static_cast<const uint8_t*>(a.weight) + strip * slices * kSlice;
  const int8_t* values = x.values + token * a.inputs;
  float results[kStripOutputs] = {};
  for (int64_t unit = 0; unit < x.units; ++unit) {
    float scales[kStripOutputs], offsets[kStripOutputs];
    const bool has_offsets = Slices::kInGroups && a.offsets != nullptr;
    for (int i = 0; Slices::kInGroups && i < kStripOutputs; i += W) {
      const int64_t place = place_of_unit(a, strip, unit, x.unit) + i;
      vf numbers[1];
      load_numbers(a.scales, a, place, numbers);
      store(scales + i, numbers[0]);
      if (!has_offsets) continue;
      load_numbers(a.offsets, a, place, numbers);
      store(offsets + i, numbers[0]);
    }
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
      results[i] += float(sums[i]) * (Slices::kInGroups ? step * scales[i] : step);
      if (has_offsets) results[i] -= offsets[i] * x.sums[token * x.units + unit];
    }
  }
  finish_strip<T>(a, strip, token, results);
}

#endif

// Requires that `inputs` is a multiple of the unit.
template <class Slices, class T>
void run_strips(const LinearArgs& a) {
  const int64_t unit = unit_of<Slices>(a);
  const double bytes = double(a.outputs * a.inputs) * 4.0 / Slices::kInputs;
#if defined(__AVX512VNNI__)
#if defined(SLIPSTREAM_BYTE_TILES)
  constexpr bool kIsBFloat16 = std::is_same_v<T, bf16>;
  const Way way = ways().of(format_of<Slices>(unit, a.offsets != nullptr), a.tokens, !kIsBFloat16);
  if constexpr (kIsBFloat16 && Slices::kInGroups) {
    if (way == kSpreadTiles && fits_pair_tiles(a)) return run_spread_tiles<Slices>(a);
  }
  if (way != kFours && tiles_permitted()) {
    const auto tokens = round_inputs<int8_t, T>(a, unit, Slices::kOffset, true);
    const IntegerTiles<Slices, T> tiles(a, tokens);
    return over_strips(a, bytes, a.inputs / 2, kByteTileSpeed,
                       [&](int64_t strip, int64_t begin, int64_t end) {
                         tiles.run(strip, begin, end);
                       });
  }
#endif
  const auto tokens = round_inputs<int8_t, T>(a, unit, Slices::kOffset);
  over_strips(a, bytes, a.inputs, kIntegerSpeed, [&](int64_t strip, int64_t begin, int64_t end) {
    IntegerStrips<Slices>(a, tokens, finish_strip<T>).run(strip, begin, end);
  });
#elif defined(SLIPSTREAM_PANELS)
  typedef IntegerPanels<Slices> Panels;
  const auto tokens = round_inputs<typename Panels::Value, T>(a, unit, Slices::kOffset);
  const Panels kernel(a, tokens);
  over_strips(a, bytes, kPanelTokenBytes, kIntegerPanelSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
                StripPanels<Panels, T>(kernel).run(strip, begin, end);
              });
#else
  const auto tokens = round_inputs<int8_t, T>(a, unit, Slices::kOffset);
  over_strips(a, bytes, a.inputs, kIntegerPanelSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) run_plainly<Slices, T>(a, tokens, strip, t);
              });
#endif
}

}  // namespace
