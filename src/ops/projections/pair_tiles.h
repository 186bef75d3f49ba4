// Linear layers of bfloat16 tokens and weights in strips, by AMX tile products.
//
//   tokens [16, 32 inputs] x weights [32 inputs, 16 outputs] -> sums [16, 16], float32
//
// A strip (weight_strips.h) of bfloat16 weights is right-hand tiles as it lies: 16 of its slices, 64 bytes of
// each. Quantized strips are first spread out in the same way, as bfloat16, for a block of tokens. Sums
// have tokens as rows, so results are written as they come.
//
// Up to 16 tokens are read where they are, against the 64 outputs of a strip at once. More are packed as
// tiles, and two tiles of tokens meet two of weights: four loads for four products. Tokens that no cache
// holds are packed by each thread, as many at a time as it multiplies, so that they are in its cache when
// it does; and results that no cache holds are written past the caches. A sum always runs along all inputs
// in the order of the strip, and the rows of a tile do not mix. So a token's result does not depend on the
// others.
#pragma once
#include <atomic>
#include <numeric>

#include "projections/integer_slices.h"
#include "projections/pair_strips.h"
#include "runtime/tile_registers.h"

#if defined(SLIPSTREAM_TILES)

namespace {

constexpr Speed kPairTileSpeed = {15e3, 800e3};
constexpr double kTokensPackedPerMicrosecond = 8e3;  // inputs
constexpr int64_t kStreamedBytes = 2 << 20;           // results that are not kept in caches
constexpr int64_t kPackedApartBytes = 512 << 10;      // of tokens, per thread
constexpr int64_t kChunkBytes = kDepth / 2 * kSlice;  // of a strip: 32 inputs

// Whether a layer's tokens and inputs are whole tiles.
inline bool fits_pair_tiles(const LinearArgs& a) {
  return a.dtype == kBFloat16 && a.inputs % kDepth == 0 && tiles_permitted();
}

// The tokens of a call as left-hand tiles: [groups of 16 tokens, inputs / 32], or, up to 16, as they lie.
// Where there are many, each thread packs those that it multiplies.
class LeftTiles {
 public:
  explicit LeftTiles(const LinearArgs& a) : a(a), chunks(a.inputs / kDepth) {
    if (a.tokens <= kTile) return;
    is_packed_apart = a.threads * kPackedApartBytes <= a.tokens * a.inputs * int64_t(sizeof(bf16));
    if (is_packed_apart) {
      static std::atomic<uint64_t> calls{0};
      call = ++calls;
      return;
    }
    const int64_t groups = (a.tokens + kTile - 1) / kTile;
    thread_local std::vector<Memory> memory;
    if (int64_t(memory.size()) < groups * chunks) memory.resize(size_t(groups * chunks));
    Memory* const to = memory.data();
    packed = to->values;
    const double work = double(a.tokens * a.inputs) / kTokensPackedPerMicrosecond;
    const int64_t parts = worthwhile_parts(a.threads, work, groups);
    parallel(a.threads, parts, [&](int64_t part) {
      const int64_t end = std::min(a.tokens, groups * (part + 1) / parts * kTile);
      pack(groups * part / parts * kTile, end, to[0].values + groups * part / parts * chunks * kTileSize);
    });
  }

  // The tiles of tokens [begin, end), for this thread; `begin` is a multiple of 16.
  const bf16* from(int64_t begin, int64_t end) const {
    if (!is_packed_apart) {
      return packed != nullptr ? packed + begin * a.inputs : static_cast<const bf16*>(a.x);
    }
    thread_local std::vector<Memory> memory;
    thread_local uint64_t held = 0;
    thread_local int64_t held_begin = 0, held_end = 0;
    const int64_t needed = (end - begin + kTile - 1) / kTile * chunks;
    if (held != call || held_begin != begin || held_end != end) {
      if (int64_t(memory.size()) < needed) memory.resize(size_t(needed));
      pack(begin, end, memory.data()->values);
      held = call, held_begin = begin, held_end = end;
    }
    return memory.data()->values;
  }

  // Rows of the tiles: of those that are packed, the last ones may be whatever lies there.
  int rows() const { return int(std::min<int64_t>(kTile, a.tokens)); }
  // Of a tile's rows, in bytes, and of the tiles of a group, in elements.
  int64_t row_stride() const { return is_packed() ? 64 : a.x_stride * int64_t(sizeof(bf16)); }
  int64_t chunk_step() const { return is_packed() ? kTileSize : kDepth; }

 private:
  struct alignas(64) Memory {
    bf16 values[kTileSize];
  };

  bool is_packed() const { return is_packed_apart || packed != nullptr; }

  // Packs tokens as tiles, from the beginning of one on.
  void pack(int64_t begin, int64_t end, bf16* to) const {
    for (int64_t t = begin; t < end; ++t) {
      const bf16* from = static_cast<const bf16*>(a.x) + t * a.x_stride;
      bf16* row = to + (t - begin) / kTile * chunks * kTileSize + (t - begin) % kTile * kDepth;
      for (int64_t chunk = 0; chunk < chunks; ++chunk, row += kTileSize, from += kDepth) {
        std::memcpy(row, from, kDepth * sizeof(bf16));
      }
    }
  }

  const LinearArgs& a;
  const int64_t chunks;
  const bf16* packed = nullptr;
  bool is_packed_apart = false;
  uint64_t call = 0;  // by which a thread knows its packed tokens again
};

// Lines of memory that are prefetched beside products, a few per 32 inputs.
struct Coming {
  const char* at;
  int64_t lines, step = 0;  // that are left; for each 32 inputs
  void fetch() {
    const int64_t some = std::min(step, lines);
    for (int64_t i = 0; i < some; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
    at += some * 64, lines -= some;
  }
};

// Multiplies tokens by a strip of bfloat16 weights.
class PairTiles {
 public:
  PairTiles(const LinearArgs& args, const LeftTiles& left)
      : a(args),
        left(left),
        chunks(args.inputs / kDepth),
        streams(args.tokens * args.outputs * int64_t(sizeof(bf16)) >= kStreamedBytes &&
                reinterpret_cast<uintptr_t>(args.out) % 64 == 0) {}

  // Computes tokens [begin, end) of a strip whose weights are at `right`; `begin` is a multiple of 32.
  // `next` is what will be read after it, or null.
  void run(int64_t strip, const char* right, const char* next, int64_t begin, int64_t end) const {
    const TileRegisters registers(true, 64, left.rows());
    const int64_t pairs = (end - begin + 2 * kTile - 1) / (2 * kTile);
    Coming coming{next, next == nullptr ? 0 : chunks * kChunkBytes / 64};
    coming.step = (coming.lines + pairs * 2 * chunks - 1) / (pairs * 2 * chunks);
    const bf16* tokens = left.from(begin, end);
    for (int64_t token = begin; token < end; token += 2 * kTile, tokens += 2 * chunks * kTileSize) {
      alignas(64) float sums[2 * kTile][kStripOutputs];
      const int64_t count = std::min<int64_t>(2 * kTile, end - token);
      if (count > kTile) {
        multiply_two(tokens, right, sums[0], coming);
        multiply_two(tokens, right + 128, sums[0] + 2 * kTile, coming);
      } else {
        multiply_one(tokens, right, sums[0], coming);
      }
      for (int64_t i = 0; i < count; ++i) finish(strip * kStripOutputs, token + i, sums[i]);
    }
    // Whoever reads the results next may be another thread.
    if (streams) _mm_sfence();
  }

 private:
  static constexpr int64_t kSumStride = kStripOutputs * int64_t(sizeof(float));

  // Two groups of tokens by half of a strip's outputs.
  void multiply_two(const bf16* upper, const char* right, float* sums, Coming& coming) const {
    tile_loads_follow();
    const bf16* lower = upper + chunks * kTileSize;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < chunks; ++i, right += kChunkBytes, upper += kTileSize, lower += kTileSize) {
      coming.fetch();
      _tile_loadd(6, right, kSlice);
      _tile_loadd(4, upper, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + 64, kSlice);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, sums + kTile, kSumStride);
    _tile_stored(2, sums + kTile * kStripOutputs, kSumStride);
    _tile_stored(3, sums + kTile * kStripOutputs + kTile, kSumStride);
    tile_loads_follow();
  }

  // A group of tokens by all outputs of a strip.
  void multiply_one(const bf16* from, const char* right, float* sums, Coming& coming) const {
    tile_loads_follow();
    const int64_t stride = left.row_stride(), step = left.chunk_step();
    coming.step *= 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < chunks; ++i, right += kChunkBytes, from += step) {
      coming.fetch();
      _tile_loadd(4, from, stride);
      _tile_loadd(6, right, kSlice);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + 64, kSlice);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, right + 128, kSlice);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, right + 192, kSlice);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, sums + kTile, kSumStride);
    _tile_stored(2, sums + 2 * kTile, kSumStride);
    _tile_stored(3, sums + 3 * kTile, kSumStride);
    tile_loads_follow();
  }

  void finish(int64_t n, int64_t token, const float* sums) const {
    const bf16* bias = static_cast<const bf16*>(a.bias);
    bf16* to = static_cast<bf16*>(a.out) + token * a.outputs + n;
#pragma GCC unroll 2
    for (int v = 0; v < kStripVectors; v += 2, to += kRun) {
      vf low = load(sums + v * W), high = load(sums + (v + 1) * W);
      if (bias != nullptr) low += load(bias + n + v * W), high += load(bias + n + (v + 1) * W);
      const vb both = (vb)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      if (streams) {
        _mm512_stream_si512((__m512i*)to, (__m512i)both);
      } else {
        std::memcpy(to, &both, sizeof both);
      }
    }
  }

  const LinearArgs& a;
  const LeftTiles& left;
  const int64_t chunks;
  const bool streams;  // results past the caches, which do not hold all of them
};

// Calls run(strip, begin, end) for all work; `begin` is a multiple of two groups of tokens.
template <class Run>
void over_pair_tiles(const LinearArgs& a, double weight_bytes, const Run& run) {
  constexpr int64_t kBlock = 2 * kTile;
  // A core's cache takes three times as many of these tokens as over_strips assumes.
  const int64_t token_bytes = a.inputs * int64_t(sizeof(bf16)) / 3;
  over_strips(a, weight_bytes, token_bytes, kPairTileSpeed,
              [&](int64_t strip, int64_t begin, int64_t end) {
                begin = begin / kBlock * kBlock;
                if (end < a.tokens) end = end / kBlock * kBlock;
                if (begin < end) run(strip, begin, end);
              });
}

// Requires fits_pair_tiles(), and a multiple of kStripOutputs outputs.
inline void run_pair_tiles(const LinearArgs& a) {
  const LeftTiles left(a);
  const PairTiles tiles(a, left);
  const int64_t strip_bytes = a.inputs / 2 * kSlice;
  over_pair_tiles(a, double(a.outputs * a.inputs) * sizeof(bf16),
                  [&](int64_t strip, int64_t begin, int64_t end) {
                    const char* at = static_cast<const char*>(a.weight) + strip * strip_bytes;
                    tiles.run(strip, at, at + strip_bytes, begin, end);
                  });
}

// Spreads quantized strips out as bfloat16: level * scale - offset, rounded once.
template <class Slices>
class SpreadStrips {
 public:
  explicit SpreadStrips(const LinearArgs& args) : a(args), unit(std::gcd(args.group, int64_t(kDepth))) {}

  // Writes a strip: [inputs / 2, 64, 2].
  void write(int64_t strip, char* to) const {
    const char* slice =
        static_cast<const char*>(a.weight) + strip * (a.inputs / Slices::kInputs) * kSlice;
    UnitPlaces<Slices> places(a, strip, unit);
    for (int64_t k = 0; k < a.inputs; k += unit) {
      const int64_t place = places.next();
      vf scales[kStripVectors], shifts[kStripVectors];
      load_numbers(a.scales, a, place, scales);
      // Levels are unsigned here.
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) shifts[v] = scales[v] * -float(Slices::kOffset);
      if (a.offsets != nullptr) {
        vf offsets[kStripVectors];
        load_numbers(a.offsets, a, place, offsets);
#pragma GCC unroll 4
        for (int v = 0; v < kStripVectors; ++v) shifts[v] -= offsets[v];
      }
      for (int64_t i = 0; i < unit; i += Slices::kInputs) {
        fetch_slice(slice + kFetchedAhead);
#pragma GCC unroll 4
        for (int v = 0; v < kStripVectors; ++v) {
          vu bytes;
          std::memcpy(&bytes, slice + v * 64, sizeof bytes);
          char* at = to + v * 64;
          if constexpr (Slices::kInputs == 4) {
            write_four(bytes, scales[v], shifts[v], at);
          } else {
            write_four(bytes & 0x0f0f0f0fu, scales[v], shifts[v], at);
            write_four((bytes >> 4) & 0x0f0f0f0fu, scales[v], shifts[v], at + 2 * kSlice);
          }
        }
        slice += kSlice, to += Slices::kInputs / 2 * kSlice;
      }
    }
  }

 private:
  // Writes weights of four inputs, 16 outputs, as two slices of pairs.
  static void write_four(vu bytes, vf scales, vf shifts, char* to) {
    write_pair(bytes & 255u, (bytes >> 8) & 255u, scales, shifts, to);
    write_pair((bytes >> 16) & 255u, bytes >> 24, scales, shifts, to + kSlice);
  }

  static void write_pair(vu first, vu second, vf scales, vf shifts, char* to) {
    const vf a = (vf)_mm512_cvtepi32_ps((__m512i)first) * scales + shifts;
    const vf b = (vf)_mm512_cvtepi32_ps((__m512i)second) * scales + shifts;
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    const __m512i pairs = (__m512i)_mm512_permutexvar_epi16(interleaved(), both);
    std::memcpy(to, &pairs, sizeof pairs);
  }

  static __m512i interleaved() {
    typedef uint16_t Index __attribute__((vector_size(64)));
    constexpr Index kIndex = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (__m512i)kIndex;
  }

  const LinearArgs& a;
  const int64_t unit;
};

// The same for quantized strips in groups; outputs as above.
template <class Slices>
void run_spread_tiles(const LinearArgs& a) {
  const LeftTiles left(a);
  const PairTiles tiles(a, left);
  const SpreadStrips<Slices> strips(a);
  over_pair_tiles(a, double(a.outputs * a.inputs) * 4.0 / Slices::kInputs,
                  [&](int64_t strip, int64_t begin, int64_t end) {
                    struct alignas(64) Line {
                      char bytes[64];
                    };
                    thread_local std::vector<Line> memory;
                    const size_t lines = size_t(a.inputs / 2 * kSlice / 64);
                    if (memory.size() < lines) memory.resize(lines);
                    char* const spread = memory.data()->bytes;
                    strips.write(strip, spread);
                    tiles.run(strip, spread, nullptr, begin, end);
                  });
}

}  // namespace
#endif
