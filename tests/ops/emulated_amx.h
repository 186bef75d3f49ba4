// The AVX-512 and AMX intrinsics that the kernels use, in plain C++ after the pseudo-code of Intel's
// Software Developer's Manual. Included before everything else (-include) by tests that compile
// the AMX level for a CPU without it: packing, masks and tile arithmetic then run anywhere on x86.
// With EMULATED_AVX512 or EMULATED_AVX512_VNNI defined it is that level.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

// What a compiler defines that is told to use them.
#define __AVX512F__ 1
#if defined(EMULATED_AVX512)
#define __AVX512BW__ 1
#elif defined(EMULATED_AVX512_VNNI)
#define __AVX512VNNI__ 1
#else
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));

struct Tile {
  uint8_t bytes[16][64];
};
// Poisoned until configured: an instruction without a configuration would fault.
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;
inline thread_local int tile_rows[8], row_bytes[8];

inline float widen(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

inline Floats reduce(Floats x) {  // imm8 = 1: x - floor(x), 0 for an infinity
  for (int i = 0; i < 16; ++i) x[i] = std::isinf(x[i]) ? 0.0f : x[i] - std::floor(x[i]);
  return x;
}

inline Floats scalef(Floats a, Floats b) {
  for (int i = 0; i < 16; ++i) {
    a[i] = b[i] == -INFINITY ? 0.0f * a[i] : b[i] != b[i] ? b[i] : std::ldexp(a[i], int(std::floor(b[i])));
  }
  return a;
}

inline Floats half_to_float(__m256i halves) {
  Floats wide;
  const __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                           _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  std::memcpy(&wide, parts, sizeof wide);
  return wide;
}

typedef uint32_t Words __attribute__((vector_size(64)));

inline Words widen_words(__m256i halves) {
  uint16_t narrow[16];
  std::memcpy(narrow, &halves, sizeof narrow);
  Words wide;
  for (int i = 0; i < 16; ++i) wide[i] = narrow[i];
  return wide;
}

template <class Byte>
inline __m512i widen_bytes(__m128i bytes) {
  Byte narrow[16];
  int32_t wide[16];
  std::memcpy(narrow, &bytes, sizeof narrow);
  for (int i = 0; i < 16; ++i) wide[i] = narrow[i];
  __m512i result;
  std::memcpy(&result, wide, sizeof result);
  return result;
}

typedef int32_t Integers __attribute__((vector_size(64)));

inline Floats to_floats(__m512i integers) { return __builtin_convertvector((Integers)integers, Floats); }

inline Halves pack(Floats high, Floats low) {
  Halves packed;
  for (int i = 0; i < 16; ++i) packed[i] = narrow(low[i]), packed[16 + i] = narrow(high[i]);
  return packed;
}

inline Floats dot(Floats sum, Halves a, Halves b) {
  for (int i = 0; i < 16; ++i) {
    sum[i] = std::fma(widen(a[2 * i + 1]), widen(b[2 * i + 1]), sum[i]);
    sum[i] = std::fma(widen(a[2 * i]), widen(b[2 * i]), sum[i]);
  }
  return sum;
}

inline __m512i join(__m256i low, __m256i high) {
  __m512i joined;
  std::memcpy(&joined, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&joined) + 32, &high, 32);
  return joined;
}

inline Halves look_up(Halves index, __m512i table) {
  const Halves values = (Halves)table;
  for (int i = 0; i < 32; ++i) index[i] = values[index[i] & 31];
  return index;
}

inline Floats look_up_floats(Words index, Floats table) {
  Floats found;
  for (int i = 0; i < 16; ++i) found[i] = table[index[i] & 15];
  return found;
}

inline Floats load_floats(const void* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

// Of each eight lanes of both the four from `from` on, side by side.
template <class V>
inline V unpack(V a, V b, int from) {
  Halves result;
  for (int i = 0; i < 32; ++i) {
    result[i] = ((i % 2 ? (Halves)b : (Halves)a))[i / 8 * 8 + from + i % 8 / 2];
  }
  return (V)result;
}

inline __m512i look_up_both(__m512i low, Halves index, __m512i high) {
  const Halves a = (Halves)low, b = (Halves)high;
  for (int i = 0; i < 32; ++i) index[i] = index[i] & 32 ? b[index[i] & 31] : a[index[i] & 31];
  return (__m512i)index;
}

inline Integers to_integers(Floats floats) {
  Integers integers;
  for (int i = 0; i < 16; ++i) {
    const float nearest = std::nearbyint(floats[i]);
    integers[i] = nearest >= -0x1p31f && nearest < 0x1p31f ? int32_t(nearest) : INT32_MIN;
  }
  return integers;
}

inline __m128i low_bytes(__m512i integers) {
  int32_t wide[16];
  int8_t narrow[16];
  std::memcpy(wide, &integers, sizeof wide);
  for (int i = 0; i < 16; ++i) narrow[i] = int8_t(wide[i]);
  __m128i result;
  std::memcpy(&result, narrow, sizeof result);
  return result;
}

inline __m512i load_bytes(const void* from) {
  __m512i bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

inline __m512i splat_byte(int byte) { return (__m512i)(Words{} + 0x01010101u * uint8_t(byte)); }

// Of four unsigned bytes with four signed ones each.
inline __m512i dot_bytes(__m512i sums, __m512i left, __m512i right) {
  uint8_t a[64];
  int8_t b[64];
  std::memcpy(a, &left, sizeof a);
  std::memcpy(b, &right, sizeof b);
  Integers result = (Integers)sums;
  for (int i = 0; i < 64; ++i) result[i / 4] += a[i] * b[i];
  return (__m512i)result;
}

// A function of 256 bits, of both halves.
template <class F>
inline __m512i by_halves(__m512i left, __m512i right, const F& function) {
  __m256i a[2], b[2];
  std::memcpy(a, &left, sizeof a);
  std::memcpy(b, &right, sizeof b);
  return join(function(a[0], b[0]), function(a[1], b[1]));
}

inline __m512i sum_words(__m512i a, __m512i b) {
  return by_halves(a, b, [](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); });
}

inline __m512i sum_bytes(__m512i a, __m512i b) {
  return by_halves(a, b, [](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); });
}

inline int32_t largest_of(__m512i integers) {
  const Integers lanes = (Integers)integers;
  int32_t largest = lanes[0];
  for (int i = 1; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

inline int32_t sum_of(__m512i integers) {
  const Integers lanes = (Integers)integers;
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += lanes[i];
  return sum;
}

inline Floats fused(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}

inline uint16_t less(__m512i a, __m512i b) {
  const Integers left = (Integers)a, right = (Integers)b;
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask = uint16_t(mask | (left[i] < right[i]) << i);
  return mask;
}

inline Floats subtract_where(Floats otherwise, uint16_t mask, Floats a, Floats b) {
  for (int i = 0; i < 16; ++i) otherwise[i] = mask >> i & 1 ? a[i] - b[i] : otherwise[i];
  return otherwise;
}

// Within each four floats; two bits of `order` name the source of each.
inline Floats permute(Floats from, int order) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = from[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  return result;
}

template <class Part>
inline __m512i repeat(Part part) {
  __m512i result;
  for (size_t at = 0; at < sizeof result; at += sizeof part) {
    std::memcpy(reinterpret_cast<char*>(&result) + at, &part, sizeof part);
  }
  return result;
}

inline void need(bool condition) {
  if (!condition) __builtin_trap();
}

inline void load_configuration(const void* memory) {
  const auto* bytes = static_cast<const uint8_t*>(memory);
  need(bytes[0] == 1 && bytes[1] == 0);
  for (int tile = 0; tile < 8; ++tile) {
    row_bytes[tile] = bytes[16 + 2 * tile], tile_rows[tile] = bytes[48 + tile];
    need(row_bytes[tile] > 0 && row_bytes[tile] <= 64 && row_bytes[tile] % 4 == 0);
    need(bytes[17 + 2 * tile] == 0 && tile_rows[tile] > 0 && tile_rows[tile] <= 16);
  }
  std::memset(tiles, 0, sizeof tiles);
  configured = true;
}

inline void load_tile(int tile, const void* base, int64_t stride) {
  need(configured);
  std::memset(&tiles[tile], 0, sizeof(Tile));
  for (int row = 0; row < tile_rows[tile]; ++row) {
    std::memcpy(tiles[tile].bytes[row], static_cast<const char*>(base) + row * stride, row_bytes[tile]);
  }
}

inline void store_tile(int tile, void* base, int64_t stride) {
  need(configured);
  for (int row = 0; row < tile_rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, tiles[tile].bytes[row], row_bytes[tile]);
  }
}

inline std::atomic<int64_t> products{0};

inline void store_aligned(__m512i* to, __m512i vector) {
  need(reinterpret_cast<uintptr_t>(to) % 64 == 0);
  std::memcpy(to, &vector, sizeof vector);
}

inline void need_operands(int to, int left, int right) {
  products.fetch_add(1);
  need(configured && to != left && to != right && left != right);
  need(row_bytes[left] == 4 * tile_rows[right] && row_bytes[to] == row_bytes[right]);
  need(tile_rows[to] == tile_rows[left]);
}

// Of four signed bytes with four others.
inline void multiply_byte_tiles(int to, int left, int right) {
  need_operands(to, left, right);
  for (int m = 0; m < tile_rows[to]; ++m) {
    int32_t sums[16];
    std::memcpy(sums, tiles[to].bytes[m], sizeof sums);
    for (int k = 0; k < row_bytes[left]; ++k) {
      for (int n = 0; n < row_bytes[to] / 4; ++n) {
        sums[n] += int8_t(tiles[left].bytes[m][k]) * int8_t(tiles[right].bytes[k / 4][4 * n + k % 4]);
      }
    }
    std::memcpy(tiles[to].bytes[m], sums, sizeof sums);
  }
}

inline void multiply_tiles(int to, int left, int right) {
  need_operands(to, left, right);
  need(row_bytes[left] == 64 && tile_rows[right] == 16 && row_bytes[right] == 64);
  for (int m = 0; m < tile_rows[to]; ++m) {
    Floats even = {}, odd = {}, sum;
    uint16_t a[32], b[32];
    std::memcpy(a, tiles[left].bytes[m], 64);
    for (int k = 0; k < 16; ++k) {
      std::memcpy(b, tiles[right].bytes[k], 64);
      for (int n = 0; n < 16; ++n) {
        even[n] = std::fma(widen(a[2 * k]), widen(b[2 * n]), even[n]);
        odd[n] = std::fma(widen(a[2 * k + 1]), widen(b[2 * n + 1]), odd[n]);
      }
    }
    std::memcpy(&sum, tiles[to].bytes[m], 64);
    sum += even + odd;
    std::memcpy(tiles[to].bytes[m], &sum, 64);
  }
}

}  // namespace emulated

// How many products of tiles there were.
extern "C" __attribute__((visibility("default"), used)) inline int64_t emulated_products() {
  return emulated::products.load();
}

#define syscall(...) 0L  // Linux grants the tiles
#undef _mm512_reduce_ps
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define __m512bh emulated::Halves
#define _mm512_max_ps(a, b) emulated::maximum(a, b)
#define _mm512_reduce_ps(x, imm8) emulated::reduce(x)
#define _mm512_scalef_ps(a, b) emulated::scalef(a, b)
#define _mm512_cvtepu16_epi32(halves) emulated::widen_words(halves)
#define _mm512_slli_epi32(words, bits) ((words) << (bits))
#define _mm512_cvtepi8_epi32(bytes) emulated::widen_bytes<int8_t>(bytes)
#define _mm512_cvtepu8_epi32(bytes) emulated::widen_bytes<uint8_t>(bytes)
#define _mm512_cvtepi32_ps(integers) emulated::to_floats(integers)
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_set1_epi32(x) ((__m512i)(emulated::Integers{} + (x)))
#define _mm512_srli_epi32(words, bits) ((__m512i)((emulated::Words)(words) >> (bits)))
#define _mm512_castsi256_si512(low) (low)
#define _mm512_inserti64x4(low, high, imm8) emulated::join(low, high)
#define _mm512_permutexvar_epi16(index, table) emulated::look_up((emulated::Halves)(index), table)
#define _mm512_permutexvar_ps(index, table) \
  emulated::look_up_floats((emulated::Words)(index), table)
#define _mm512_loadu_ps(from) emulated::load_floats(from)
#define _mm512_permutex2var_epi16(low, index, high) \
  emulated::look_up_both(low, (emulated::Halves)(index), high)
#define _mm512_unpacklo_epi16(a, b) emulated::unpack(a, b, 0)
#define _mm512_unpackhi_epi16(a, b) emulated::unpack(a, b, 4)
#define _mm512_cvtph_ps(halves) emulated::half_to_float(halves)
#define _mm512_cvtne2ps_pbh(high, low) emulated::pack(high, low)
#define _mm512_stream_si512(to, vector) emulated::store_aligned(to, vector)
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot(sum, a, b)
#define _tile_loadconfig(memory) emulated::load_configuration(memory)
#define _tile_release() (emulated::configured = false)
#define _tile_loadd(tile, base, stride) emulated::load_tile(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store_tile(tile, base, stride)
#define _tile_zero(tile) std::memset(&emulated::tiles[tile], 0, 1024)
#define _tile_dpbf16ps(to, left, right) emulated::multiply_tiles(to, left, right)
#define _tile_dpbssd(to, left, right) emulated::multiply_byte_tiles(to, left, right)
#define _mm512_cvtps_epi32(floats) emulated::to_integers(floats)
#define _mm512_cvtepi32_epi8(integers) emulated::low_bytes(integers)
#define _mm512_loadu_si512(from) emulated::load_bytes(from)
#define _mm512_set1_epi8(byte) emulated::splat_byte(byte)
#define _mm512_set1_ps(x) (emulated::Floats{} + (x))
#define _mm512_srli_epi16(halves, bits) ((__m512i)((emulated::Halves)(halves) >> (bits)))
#define _mm512_fmadd_ps(a, b, c) emulated::fused(a, b, c)
#define _mm512_fnmadd_ps(a, b, c) emulated::fused(-(a), b, c)
#define _mm512_dpbusd_epi32(sums, left, right) emulated::dot_bytes(sums, left, right)
#define _mm512_reduce_max_epi32(integers) emulated::largest_of(integers)
#define _mm512_reduce_add_epi32(integers) emulated::sum_of(integers)
#define _mm512_madd_epi16(a, b) emulated::sum_words(a, b)
#define _mm512_maddubs_epi16(a, b) emulated::sum_bytes(a, b)
#undef _mm512_permute_ps
#define _mm512_castps_si512(floats) ((__m512i)(floats))
#define _mm512_castsi512_ps(words) ((emulated::Floats)(words))
#define _mm512_or_si512(a, b) ((__m512i)((a) | (b)))
#define _mm512_add_epi32(a, b) ((__m512i)((emulated::Words)(a) + (emulated::Words)(b)))
#define _mm512_cmplt_epi32_mask(a, b) emulated::less(a, b)
#define _mm512_mask_sub_ps(otherwise, mask, a, b) emulated::subtract_where(otherwise, mask, a, b)
#define _mm512_permute_ps(floats, order) emulated::permute((emulated::Floats)(floats), order)
#define _mm512_load_si512(from) emulated::load_bytes(from)
#define _mm512_set1_epi64(x) emulated::repeat(int64_t(x))
#define _mm512_broadcast_i32x4(part) emulated::repeat(part)
