// Reads rows of weights of each kind, widened in registers, and finishes a row's sums.
//
// Weights are widened to floats, exactly; or to bfloat16 for dot products of pairs: int8 and e2m1 exactly,
// int4 times its scale and rounded once, like the bfloat16 weights of a checkpoint.
#pragma once
#include <algorithm>
#include <vector>

#include "runtime/abi.h"
#include "projections/float8.h"
#include "runtime/pairs.h"
#include "runtime/vector.h"

namespace {

constexpr uintptr_t kPage = 4096;  // bytes

// Whether an address lies in the first half of its page.
inline bool begins_page(const void* line) {
  return reinterpret_cast<uintptr_t>(line) % kPage < kPage / 2;
}

// Prefetches a line about a page ahead into L2, but only in the first half of each page. The hardware
// prefetcher reads ahead well, but only within a page. It has to be led into the next page; prefetching
// more would disturb it.
inline void fetch_ahead(const char* line) {
  if (begins_page(line)) __builtin_prefetch(line, 0, 2);
}

constexpr int64_t kSmallestGroup = 16;  // weights of int8 that share a scale
constexpr int64_t kPackedGroup = 32;  // int4: weights in 16 bytes, the first half in the low nibbles

inline vf widen(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = float(p[i]);
  return v;
#endif
}

// The low (High = false) or high nibbles of W bytes, 0 to 15.
template <bool High>
inline vf widen_half(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return (vf)_mm512_cvtepi32_ps(High ? _mm512_srli_epi32(wide, 4)
                                     : _mm512_and_si512(wide, _mm512_set1_epi32(15)));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return (vf)_mm256_cvtepi32_ps(High ? _mm256_srli_epi32(wide, 4)
                                     : _mm256_and_si256(wide, _mm256_set1_epi32(15)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = float(High ? p[i] >> 4 : p[i] & 15);
  return v;
#endif
}

// The numbers of a table that the low (High = false) or high nibbles of W bytes stand for.
template <bool High>
inline vf look_up_half(const float (&table)[16], const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  // A lookup takes the low four bits.
  return (vf)_mm512_permutexvar_ps(High ? _mm512_srli_epi32(wide, 4) : wide, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i at = High ? _mm256_srli_epi32(wide, 4) : wide;
  // A lookup takes the low three bits; the fourth, moved to the top, chooses between two.
  const __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
  const __m256 second = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
  return (vf)_mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = table[High ? p[i] >> 4 : p[i] & 15];
  return v;
#endif
}

// How rows of weights are read. `read` widens kStep weights from (n, k) on into vectors; `read_some`
// reads the rest of a row (quantized rows have none). kBytes is the size of a step. `runs` goes along a
// row and yields kRun weights as bfloat16 at a time, kRunBytes each; `rest` yields the rest. For up to
// kFewTokens tokens, kTogether rows are read at once: one, or several if the sums of one row would wait
// for each other. kFetchedAhead is the prefetch distance in bytes.
template <class T>
struct Dense {
  const T* weights;
  int64_t inputs;
  Dense(const T* weights, int64_t inputs) : weights(weights), inputs(inputs) {}
  Dense(const LinearArgs& a) : Dense(static_cast<const T*>(a.weight), a.inputs) {}
  static constexpr int64_t kStep = W, kBytes = W * int64_t(sizeof(T));
  int64_t row_bytes() const { return inputs * int64_t(sizeof(T)); }
  const char* row(int64_t n) const { return reinterpret_cast<const char*>(weights + n * inputs); }
  void read(int64_t n, int64_t k, vf* v) const { v[0] = load(weights + n * inputs + k); }
  vf read_some(int64_t n, int64_t k, int64_t count) const {
    return load_some(weights + n * inputs + k, count);
  }
#if defined(SLIPSTREAM_PAIRS)
  static constexpr int64_t kRunBytes = kRun * int64_t(sizeof(T)), kFetchedAhead = 2048;
  static constexpr int kFewTokens = 3, kTogether = 1;
  struct Runs {
    const bf16* p;
    vb next() {
      const vb v = load_run(p);
      p += kRun;
      return v;
    }
    vb rest(int64_t count) const { return load_some_run(p, count); }
  };
  Runs runs(int64_t n) const { return {weights + n * inputs}; }
#endif
  float scale(int64_t) const { return 1.0f; }
};

template <class Level>  // of 8 bits
struct ByRow {  // one scale per row, applied to the sum
  const Level* weights;
  const float* scales;
  int64_t inputs;
  ByRow(const LinearArgs& a)
      : weights(static_cast<const Level*>(a.weight)),
        scales(static_cast<const float*>(a.scales)),
        inputs(a.inputs) {}
  static constexpr int64_t kStep = W, kBytes = W;
  int64_t row_bytes() const { return inputs; }
  const char* row(int64_t n) const { return reinterpret_cast<const char*>(weights + n * inputs); }
  void read(int64_t n, int64_t k, vf* v) const { v[0] = widen(weights + n * inputs + k); }
  vf read_some(int64_t, int64_t, int64_t) const { return vf{}; }
#if defined(SLIPSTREAM_PAIRS)
  static constexpr int64_t kRunBytes = kRun, kFetchedAhead = 4096;
  static constexpr int kFewTokens = 8, kTogether = 1;
  struct Runs {
    const Level* p;
    vb next() {
      // The upper halves suffice: floats of levels, which have few bits, have empty lower halves.
      const vb v = upper_halves(widen(p), widen(p + W));
      p += kRun;
      return v;
    }
    vb rest(int64_t) const { return vb{}; }
  };
  Runs runs(int64_t n) const { return {weights + n * inputs}; }
#endif
  float scale(int64_t n) const { return scales[n]; }
};

// 2^(exponent - 127), infinite for 255.
inline float power_of_two(uint8_t exponent) {
  const uint32_t bits = std::max(uint32_t(exponent) << 23, uint32_t(1) << 22);
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Numbers of groups: float32, bfloat16 or kPowers.
struct OfGroups {
  const void* at = nullptr;  // null: all are zero
  int64_t dtype = kFloat32;
  float operator[](int64_t i) const {
    if (at == nullptr) return 0.0f;
    if (dtype == kFloat32) return static_cast<const float*>(at)[i];
    if (dtype == kPowers) return power_of_two(static_cast<const uint8_t*>(at)[i]);
    return as_float(static_cast<const bf16*>(at) + i);
  }
};

constexpr int kRowsAtOnce = 4;  // of which numbers are at hand at the same time, neighbours

// Scales and offsets of groups of `size` weights of a row: [outputs, count].
struct Groups {
  const OfGroups scales, offsets;
  int64_t size, count;
  // This thread's memory for the numbers of kRowsAtOnce rows as floats; null if they are floats.
  float* room = nullptr;
  Groups(const LinearArgs& a)
      : scales{a.scales, a.group_dtype},
        offsets{a.offsets, a.group_dtype},
        size(a.group),
        count(a.inputs / a.group) {
    if (scales.dtype == kFloat32) return;
    thread_local std::vector<float> memory;
    const int64_t floats = 2 * kRowsAtOnce * (count + W);
    if (int64_t(memory.size()) < floats) memory.resize(size_t(floats));
    room = memory.data();
  }
  int64_t at(int64_t n, int64_t k) const { return n * count + k / size; }
};

// The numbers of a row as floats, one group after the other.
struct AlongRow {
  const float* next = nullptr;
  int64_t step = 0;
  AlongRow() = default;

  // `which` is 0 for scales, 1 for offsets. Those that are no floats are widened; they are valid until
  // those of the row kRowsAtOnce further on are.
  AlongRow(const Groups& groups, int64_t n, int which) {
    static constexpr float kZero = 0;
    const OfGroups& numbers = which == 0 ? groups.scales : groups.offsets;
    next = &kZero;
    if (numbers.at == nullptr) return;
    step = 1;
    const int64_t first = n * groups.count;
    if (numbers.dtype == kFloat32) {
      next = static_cast<const float*>(numbers.at) + first;
      return;
    }
    float* const to = groups.room + (n % kRowsAtOnce * 2 + which) * (groups.count + W);
    next = to;
    int64_t i = 0;
    if (numbers.dtype == kPowers) {
      const uint8_t* from = static_cast<const uint8_t*>(numbers.at) + first;
      for (; i < groups.count; ++i) to[i] = power_of_two(from[i]);
      return;
    }
    const bf16* from = static_cast<const bf16*>(numbers.at) + first;
    for (; i + W <= groups.count; i += W) store(to + i, load(from + i));
    for (; i < groups.count; ++i) to[i] = as_float(from + i);
  }
};

using Int8 = ByRow<int8_t>;
using Float8 = ByRow<float8>;

template <class Level>  // of 8 bits
struct ByGroup {  // a scale, and perhaps an offset, per group of a multiple of kSmallestGroup weights
  const Level* weights;
  const Groups groups;
  int64_t inputs;
  ByGroup(const LinearArgs& a)
      : weights(static_cast<const Level*>(a.weight)), groups(a), inputs(a.inputs) {}
  static constexpr int64_t kStep = W, kBytes = W;
  int64_t row_bytes() const { return inputs; }
  const char* row(int64_t n) const { return reinterpret_cast<const char*>(weights + n * inputs); }
  void read(int64_t n, int64_t k, vf* v) const {
    const int64_t group = groups.at(n, k);
    v[0] = widen(weights + n * inputs + k) * groups.scales[group] - groups.offsets[group];
  }
  vf read_some(int64_t, int64_t, int64_t) const { return vf{}; }
#if defined(SLIPSTREAM_PAIRS)
  static constexpr int64_t kRunBytes = kRun, kFetchedAhead = 4096;
  static constexpr int kFewTokens = 8, kTogether = 2;
  // Each half of a run lies in one group. Weights are rounded to bfloat16.
  struct Runs {
    const Level* p;
    const float *scale, *offset;  // of the next group
    int64_t offset_step, halves;  // of a group
    int64_t left = 0;
    float factor = 0, shift = 0;
    vf half() {
      if (left == 0) {
        factor = *scale++, shift = *offset;
        offset += offset_step;
        left = halves;
      }
      --left;
      const vf weights = widen(p) * factor - shift;
      p += W;
      return weights;
    }
    vb next() {
      const vf first = half(), second = half();
      return (vb)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
    vb rest(int64_t) const { return vb{}; }
  };
  Runs runs(int64_t n) const {
    Runs runs{};
    const AlongRow scales(groups, n, 0), offsets(groups, n, 1);
    runs.p = weights + n * inputs, runs.scale = scales.next, runs.offset = offsets.next;
    runs.offset_step = offsets.step, runs.halves = groups.size / W;
    return runs;
  }
#endif
  float scale(int64_t) const { return 1.0f; }
};

using Int8Groups = ByGroup<int8_t>;
using Float8Groups = ByGroup<float8>;

struct Levels {  // of int4: q - 8
  static constexpr float kNumbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  // Numbers of W nibbles, but for a shift.
  template <bool High>
  static vf of(const uint8_t* p) { return widen_half<High>(p); }
  static vf shift(vf factor) { return factor * -8.0f; }
};

struct E2M1Numbers {  // a sign, two bits of exponent, one of the mantissa
  static constexpr float kNumbers[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  template <bool High>
  static vf of(const uint8_t* p) { return look_up_half<High>(kNumbers, p); }
  static vf shift(vf) { return vf{}; }
};

template <class Numbers>
struct FourBits {  // the same for groups of a multiple of kPackedGroup weights of four bits
  const uint8_t* weights;
  const Groups groups;
  int64_t inputs;
  FourBits(const LinearArgs& a)
      : weights(static_cast<const uint8_t*>(a.weight)), groups(a), inputs(a.inputs) {}
  static constexpr int64_t kStep = kPackedGroup, kBytes = kPackedGroup / 2;
  int64_t row_bytes() const { return inputs / 2; }
  const char* row(int64_t n) const {
    return reinterpret_cast<const char*>(weights + n * (inputs / 2));
  }
  void read(int64_t n, int64_t k, vf* v) const {
    const uint8_t* p = weights + (n * inputs + k) / 2;
    const int64_t group = groups.at(n, k);
    const vf factor = splat(groups.scales[group]);
    const vf offset = Numbers::shift(factor) - groups.offsets[group];
    constexpr int kHalf = int(kPackedGroup) / 2 / W;
#pragma GCC unroll 4
    for (int i = 0; i < kHalf; ++i) {
      v[i] = Numbers::template of<false>(p + i * W) * factor + offset;
      v[kHalf + i] = Numbers::template of<true>(p + i * W) * factor + offset;
    }
  }
  vf read_some(int64_t, int64_t, int64_t) const { return vf{}; }
#if defined(SLIPSTREAM_PAIRS)
  static constexpr int64_t kRunBytes = kRun / 2, kFetchedAhead = 4096;
  static constexpr int kFewTokens = 8, kTogether = 4;
  // Scales and rounds each of the sixteen values once per group, then looks weights up. That gives the
  // same results as converting each weight, and is faster.
  struct Runs {
    const __m128i* p;
    const float *scale, *offset;  // of the next group
    int64_t offset_step, size;    // of a group, in runs
    int64_t left = 0;
    __m512i table{};
    vb next() {
      if (left == 0) {
        const __m512 values = (__m512)(load(Numbers::kNumbers) * *scale++ - *offset);
        offset += offset_step;
        // Twice, because the fifth bit of the lookup index belongs to the other nibble.
        table = (__m512i)_mm512_cvtne2ps_pbh(values, values);
        left = size;
      }
      --left;
      const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128(p++)), high = _mm256_srli_epi16(low, 4);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      return (vb)_mm512_permutexvar_epi16(both, table);
    }
    vb rest(int64_t) const { return vb{}; }
  };
  Runs runs(int64_t n) const {
    const uint8_t* p = weights + n * (inputs / 2);
    Runs runs{};
    runs.p = reinterpret_cast<const __m128i*>(p);
    const AlongRow scales(groups, n, 0), offsets(groups, n, 1);
    runs.scale = scales.next, runs.offset = offsets.next;
    runs.offset_step = offsets.step, runs.size = groups.size / kRun;
    return runs;
  }
#endif
  float scale(int64_t) const { return 1.0f; }
};

using Int4 = FourBits<Levels>;
using E2M1 = FourBits<E2M1Numbers>;

// Finishes sums of R rows: times a factor, plus a bias, both repeated to fill a vector.
template <int R>
struct Finish {
  static constexpr int kLength = std::max(R, W);
  float scales[kLength], biases[kLength];
  vf operator()(vf sums, int lane) const {
    return sums * load(scales + lane % kLength) + load(biases + lane % kLength);
  }
};

}  // namespace
