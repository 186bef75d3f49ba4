// Vectors of W floats, written once and compiled per instruction set: the width follows the
// compiler's target, the operations are GCC/Clang vector extensions.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// `x - 0` instead of `x + 0`: adding would turn -0 to 0, so it costs an instruction.
inline vf splat(float x) { return x - vf{}; }

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// GCC converts vectors of halves element by element unless the instruction is named.
inline vf load(const bf16* p) {
#if defined(__AVX512F__)
  const auto* words = reinterpret_cast<const __m256i*>(p);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(words)), 16);
#elif defined(__AVX2__)
  const auto* words = reinterpret_cast<const __m128i*>(p);
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(words)), 16);
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  vu w = __builtin_convertvector(h, vu);
  // With the exponent shifted into place, the value is too small by 2^112. The product corrects that,
  // for subnormals too. Infinity and NaN get their exponent explicitly.
  vf magnitude = (vf)((w & 0x7fffu) << 13) * 0x1p112f;
  vi special = (vi)(w & 0x7c00u) == 0x7c00;
  vu bits = (vu)magnitude | ((vu)special & 0x7f800000u);
  return (vf)(bits | ((w & 0x8000u) << 16));
#endif
}

// Loads 2 * W elements. For bfloat16: those at even places, then those at odd ones; half the instructions.
template <class T>
inline void load_two(const T* p, vf& a, vf& b) {
  a = load(p), b = load(p + W);
}

inline void load_two(const bf16* p, vf& a, vf& b) {
  vu pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  a = (vf)(pairs << 16), b = (vf)(pairs & 0xffff0000u);
}

// The first `count` elements, then zeros.
template <class T>
inline vf load_some(const T* p, int64_t count) {
  T some[W] = {};
  std::memcpy(some, p, size_t(count) * sizeof(T));
  return load(some);
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline float as_float(const float* p) { return *p; }

inline float as_float(const bf16* p) {
  const uint32_t bits = uint32_t(p->bits) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <class T>
inline float as_float(const T* p) {
  T one[W] = {*p};
  return load(one)[0];
}

inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    to->bits = uint16_t((bits >> 16) | 0x40u);
  } else {
    to->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

inline void from_float(float x, f16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {
    // Adding 1/2 shifts a subnormal result to the low bits; the adder rounds it to nearest even.
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&half, &magnitude, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
  }
  to->bits = uint16_t(sign | half);
}

// Converts W floats at once, rounding to nearest.
template <class T>
inline void from_floats(const float* from, T* to) {
  for (int i = 0; i < W; ++i) from_float(from[i], to + i);
}

inline void from_floats(const float* from, float* to) { std::memcpy(to, from, W * sizeof(float)); }

inline void from_floats(const float* from, bf16* to) {
  vu bits;
  std::memcpy(&bits, from, sizeof bits);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vi is_nan = (vi)(bits & 0x7fffffffu) > 0x7f800000;
  const vh result = __builtin_convertvector(is_nan ? (bits >> 16) | 0x40u : rounded, vh);
  std::memcpy(to, &result, sizeof result);
}

// Converts n elements to float; dst has room for n rounded up to W, the excess becomes 0.
template <class T>
inline void convert_row(const T* src, float* dst, int n, float factor = 1.0f) {
  int i = 0;
  for (; i + W <= n; i += W) store(dst + i, load(src + i) * factor);
  if (i < n) {
    T tail[W] = {};
    std::memcpy(tail, src + i, size_t(n - i) * sizeof(T));
    store(dst + i, load(tail) * factor);
  }
}

// The same in the order of load_two(); elements beyond the last 2 * W keep their order.
template <class T>
inline void convert_lanes(const T* src, float* dst, int n, float factor = 1.0f) {
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    vf a, b;
    load_two(src + i, a, b);
    store(dst + i, a * factor);
    store(dst + i + W, b * factor);
  }
  convert_row(src + i, dst + i, n - i, factor);
}

// Lanes in blocks of 2 * H: the first half of each block from a, the second from b. Both are taken from
// the lower (Upper = false) or upper half of the corresponding block.
template <int H, bool Upper>
constexpr int exchange_lane(int lane) {
  const int block = lane / (2 * H) * (2 * H), offset = lane % (2 * H);
  return offset < H ? block + offset + (Upper ? H : 0)
                    : W + block + offset - (Upper ? 0 : H);
}

template <int H, bool Upper, int... Lane>
inline vf exchange(vf a, vf b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, exchange_lane<H, Upper>(Lane)...);
#else
  return __builtin_shuffle(a, b, vi{exchange_lane<H, Upper>(Lane)...});
#endif
}

template <int H, bool Upper>
inline vf exchange(vf a, vf b) {
  return exchange<H, Upper>(a, b, std::make_integer_sequence<int, W>{});
}

// Interleaves the lower (or upper) halves of a and b.
template <bool Upper, int... Lane>
inline vf zip(vf a, vf b, std::integer_sequence<int, Lane...>) {
  constexpr int kFrom = Upper ? W / 2 : 0;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFrom + Lane / 2 + Lane % 2 * W)...);
#else
  return __builtin_shuffle(a, b, vi{(kFrom + Lane / 2 + Lane % 2 * W)...});
#endif
}

// Brings n floats from the order of load_two() for elements of T back to their own order.
template <class T>
inline void put_in_order(float* row, int n) {
  if constexpr (!std::is_same_v<T, bf16>) return;
  constexpr auto lanes = std::make_integer_sequence<int, W>{};
  for (int i = 0; i + 2 * W <= n; i += 2 * W) {
    const vf a = load(row + i), b = load(row + i + W);
    store(row + i, zip<false>(a, b, lanes));
    store(row + i + W, zip<true>(a, b, lanes));
  }
}

inline vf add(vf a, vf b) { return a + b; }

// Lane i of the result is the reduction of v[i]'s lanes by an associative operation.
template <int H = W / 2, class F>
__attribute__((always_inline)) inline vf reduce_each(vf* v, const F& join) {
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i) {
    v[i] = join(exchange<H, false>(v[i], v[i + H]), exchange<H, true>(v[i], v[i + H]));
  }
  if constexpr (H > 1) {
    return reduce_each<H / 2>(v, join);
  } else {
    return v[0];
  }
}

// Transposes the W x W matrix whose rows are v[0..W).
template <int H = W / 2>
inline void transpose(vf* v) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (!(i & H)) {
      const vf low = exchange<H, false>(v[i], v[i + H]);
      v[i + H] = exchange<H, true>(v[i], v[i + H]);
      v[i] = low;
    }
  }
  if constexpr (H > 1) transpose<H / 2>(v);
}

inline vf maximum(vf a, vf b) { return a > b ? a : b; }

// Reduces a vector's lanes by an associative operation, half by half.
template <int H = W / 2, class F>
inline float reduce(vf v, const F& join) {
  v = join(v, exchange<H, true>(v, v));
  if constexpr (H > 1) {
    return reduce<H / 2>(v, join);
  } else {
    return v[0];
  }
}

inline vi iota() {
  vi v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

// exp for x below about 80; 0 below -87. Range reduction and polynomial of Cephes' expf (S. Moshier).
inline vf exponential(vf x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer
  const vi underflow = x < -87.0f;
  x = underflow ? splat(-87.0f) : x;
  const vf shifted = x * 1.44269504088896341f + kMagic;
  const vf n = shifted - kMagic;
  const vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vf result = (vf)((vi)p + (((vi)shifted - 0x4b400000) << 23));
  return underflow ? splat(0.0f) : result;
}

// Hyperbolic tangent, to 1e-7 of its value. Near 0, where the quotient would lose digits, it is the
// polynomial of Cephes' tanhf (S. Moshier).
inline vf tangent(vf x) {
  const vu sign = (vu)x & 0x80000000u;
  const vf magnitude = (vf)((vu)x ^ sign);
  const vf t = exponential(magnitude * -2.0f);
  const vf far = (1.0f - t) / (1.0f + t);
  const vf s = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  p = p * s * x + x;
  return magnitude < 0.625f ? p : (vf)((vu)far | sign);
}

}  // namespace
