// Linear layers of quantized weights and rounded inputs for few registers (AVX2).
//
// AVX-VNNI sums products of four bytes. Without it, int8 weights are widened to 16 bits: the product of
// an int8 weight and an input fills 16 bits, and the instruction for pairs of bytes saturates the sum of
// two such products. Widening takes one instruction per 16 weights, whatever the number of tokens.
// Even-numbered weights meet even-numbered inputs, which are stored accordingly. int4 weights are small
// enough for byte products: the sum of eight pairs fits into 16 bits.
#pragma once
#include "projections/integer_slices.h"
#include "projections/strip_panels.h"

#if defined(SLIPSTREAM_PANELS) && !defined(__AVX512VNNI__)

namespace {

typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef uint16_t vus __attribute__((vector_size(W * 4)));

// Sums pairs of neighbouring products.
inline vi sum_pairs(vs a, vs b) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// The same for bytes, of which the first operand is unsigned; saturates at 16 bits.
inline vs sum_byte_pairs(vi bytes, vi signed_bytes) {
#if defined(__AVX512BW__)
  return (vs)_mm512_maddubs_epi16((__m512i)bytes, (__m512i)signed_bytes);
#else
  return (vs)_mm256_maddubs_epi16((__m256i)bytes, (__m256i)signed_bytes);
#endif
}

// The 32 bits at an address, in all lanes.
inline vi splat_word(const void* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return vi{} + word;
}

inline vi load_word(const char* from) {
  vi words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

#if defined(__AVXVNNI__)
constexpr bool kSumsFours = true;
inline vi add_fours(vi sums, vi bytes, vi signed_bytes) {
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, (__m256i)signed_bytes);
}
#else
constexpr bool kSumsFours = false;
inline vi add_fours(vi sums, vi, vi) { return sums; }
#endif

template <class Slices>
class IntegerPanels {
 public:
  static constexpr bool kIsInt8 = Slices::kInputs == 4;
  typedef std::conditional_t<kIsInt8 && !kSumsFours, int16_t, int8_t> Value;  // of an input

  IntegerPanels(const LinearArgs& args, const RoundedTokens<Value>& tokens)
      : projection(args), slices(args.inputs / Slices::kInputs), x(tokens) {}

  template <int C, int V, class F>
  void add(const Chunk& chunk, int64_t strip, int64_t token, int vector, F fetcher,
           float* to) const {
    const int64_t inputs = projection.inputs, unit_slices = x.unit / Slices::kInputs;
    const char* slice = chunk.at + vector * int64_t(sizeof(vi));
    const Value* values = x.values + token * inputs + chunk.first * Slices::kInputs;
    const int64_t end = (chunk.first + chunk.count) / unit_slices;
    for (int64_t unit = chunk.first / unit_slices; unit < end; ++unit) {
      vi sums[C][V];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
        for (vi& sum : sums[c]) sum = vi{} + x.offsets[(token + c) * x.units + unit];
      }
      if constexpr (kSumsFours) {
        for (int64_t i = 0; i < unit_slices; ++i, slice += kSlice, values += Slices::kInputs) {
          fetcher.next();
          add_bytes<0>(sums, slice, values);
          if constexpr (!kIsInt8) add_bytes<1>(sums, slice, values);
        }
      } else if constexpr (kIsInt8) {
        for (int64_t i = 0; i < unit_slices; ++i, slice += kSlice, values += Slices::kInputs) {
          fetcher.next();
          add_words<0>(sums, slice, values);
          add_words<1>(sums, slice, values);
        }
      } else {
        for (int64_t i = 0; i < unit_slices; i += kByteSlices) {
          add_small_bytes(sums, slice, values, fetcher);
          slice += kByteSlices * kSlice, values += kByteSlices * Slices::kInputs;
        }
      }
      vf numbers[V];
      int64_t place = 0;
      if constexpr (Slices::kInGroups) {
        place = place_of_unit(projection, strip, unit, x.unit) + vector * W;
        load_numbers(projection.scales, projection, place, numbers);
      }
      add_scaled(sums, numbers, token, unit, to);
      if (Slices::kInGroups && projection.offsets != nullptr) {
        load_numbers(projection.offsets, projection, place, numbers);
        subtract<C>(numbers, token, unit, to);
      }
    }
  }

  const LinearArgs& projection;
  const int64_t slices;

 private:
  static constexpr int kByteSlices = 4;  // slices whose sums of byte products fit into 16 bits

  // Bytes of a slice: int8, all; int4, weights of the first (Part = 0) or last four of its eight inputs.
  template <int Part>
  static vi bytes_of(const char* slice) {
    const vi bytes = load_word(slice);
    if constexpr (kIsInt8) return bytes;
    return (Part ? (vi)((vus)bytes >> 4) : bytes) & 0x0f0f0f0f;
  }

  // Adds a slice by products of four bytes.
  template <int Part, int C, int V>
  void add_bytes(vi (&sums)[C][V], const char* slice, const Value* values) const {
    vi weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) weights[v] = bytes_of<Part>(slice + v * int(sizeof(vi)));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const vi four = splat_word(values + c * projection.inputs + 4 * Part);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums[c][v] = add_fours(sums[c][v], weights[v], four);
        finish_first(sums[c][v]);
      }
    }
  }

  // int8 widened to 16 bits: the even (Odd = 0) or odd ones of a slice's four inputs.
  template <int Odd, int C, int V>
  void add_words(vi (&sums)[C][V], const char* slice, const Value* values) const {
    vs weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vi fours = load_word(slice + v * int(sizeof(vi)));
      weights[v] = Odd ? (vs)((vus)fours >> 8) : (vs)(fours & 0x00ff00ff);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const vs pair = (vs)splat_word(values + c * projection.inputs + 2 * Odd);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums[c][v] += sum_pairs(weights[v], pair);
        finish_first(sums[c][v]);
      }
    }
  }

  // int4 by products of byte pairs, for kByteSlices slices.
  template <int C, int V, class F>
  void add_small_bytes(vi (&sums)[C][V], const char* slice, const Value* values, F& fetcher) const {
    vs pairs[C][V] = {};
    for (int i = 0; i < kByteSlices; ++i, slice += kSlice, values += Slices::kInputs) {
      fetcher.next();
      add_byte_pairs<0>(pairs, slice, values);
      add_byte_pairs<1>(pairs, slice, values);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[c][v] += sum_pairs(pairs[c][v], vs{} + int16_t(1));
    }
  }

  template <int Part, int C, int V>
  void add_byte_pairs(vs (&pairs)[C][V], const char* slice, const Value* values) const {
    vi weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) weights[v] = bytes_of<Part>(slice + v * int(sizeof(vi)));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const vi four = splat_word(values + c * projection.inputs + 4 * Part);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        pairs[c][v] += sum_byte_pairs(weights[v], four);
        finish_first(pairs[c][v]);
      }
    }
  }

  // Adds a unit's sums, times the scale of the inputs and, for groups, of the weights.
  template <int C, int V>
  void add_scaled(const vi (&sums)[C][V], const vf (&scales)[V], int64_t token, int64_t unit,
                  float* to) const {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const vf step = splat(x.steps[(token + c) * x.units + unit]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const vf factor = Slices::kInGroups ? step * scales[v] : step;
        float* const sum = to + c * kStripOutputs + v * W;
        store(sum, load(sum) + __builtin_convertvector(sums[c][v], vf) * factor);
      }
    }
  }

  // Subtracts the weights' offsets, times the sum of the inputs.
  template <int C, int V>
  void subtract(const vf (&offsets)[V], int64_t token, int64_t unit, float* to) const {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const vf inputs = splat(x.sums[(token + c) * x.units + unit]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        float* const sum = to + c * kStripOutputs + v * W;
        store(sum, load(sum) - offsets[v] * inputs);
      }
    }
  }

  const RoundedTokens<Value>& x;
};

}  // namespace
#endif
