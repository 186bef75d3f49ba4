// Attention of packed bfloat16 query rows by tile products (AMX) or dot products of pairs (AVX-512),
// in steps of 128 keys and strips of 32 query rows:
//
//   queries [32, head_dim] x keys [head_dim, 128] -> scores [32, 128], float32
//   softmax -> weights [32, 128], rounded to bfloat16; weights x values [128, head_dim] -> out, float32
//
// Operands lie in memory as whole tiles of 16 rows x 64 bytes, one after another, so a tile is 16
// adjacent cache lines.
//
// Limits of AMX, by counting instructions. Units are cycles per score (one query row against one key);
// the tile unit does 1024 FLOP per cycle. Products take head_dim / 256: 0.25 for 64, 0.5 for 128. exp,
// maximum, sum and rounding are 11 to 12 vector operations per 16 scores on two ports: 0.35 to 0.4. One
// after the other, head_dim 64 would stay below 40 % of the tile unit's rate. So the products of the
// neighbouring strips are issued between the rows of a strip's softmax: they use other units, and
// out-of-order execution overlaps the two. Packing keys and values adds about 12 cycles per key and 64
// of head_dim, shared by up to 256 query rows. So head_dim 64 is bound by the vector ports (at best
// about 60 % of the rate). head_dim 128 is bound by the 1.5 KiB of tile loads per 16-cycle product, a
// third of it from L2.
//
// If there are too few rows to share the packing of a key, scores are dot products with the keys in
// place (pair_rows.h), unless results must not depend on the number of rows.
//
// A row's result depends only on its own query and keys: steps start at multiples of 128 keys, a masked
// key has weight 0 exactly, and the rows of a tile do not mix.
#pragma once
#include "runtime/abi.h"
#include "attention/reach.h"
#include "attention/strip_operands.h"
#include "runtime/tile_registers.h"

#if defined(SLIPSTREAM_PAIRS)
#include <memory>

namespace {

// Fewer packed rows use dot products, even if several rows share their keys.
#if defined(SLIPSTREAM_TILES)
constexpr int64_t kMinStripRows = 3;
#else
constexpr int64_t kMinStripRows = 5;
#endif

// Whether scores are sums of bfloat16 pair products. Strips take the maximum before scaling, which
// needs a positive scale.
inline bool uses_pairs(const AttentionArgs& a) { return a.dtype == kBFloat16 && a.spec->scale > 0; }

// Whether a row of `packed` query rows is computed in strips.
inline bool uses_strips(const AttentionArgs& a, int64_t packed) {
  return uses_pairs(a) && (packed >= kMinStripRows || a.deterministic || a.head_dim % kDepth != 0);
}

// 2**x for x <= 0, 0 for -infinity; off by 7.5e-5 at most, a fiftieth of a bfloat16's rounding.
inline vf power_of_two(vf x) {
  const vf r = (vf)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
  const vf p = ((r * 0.07802452f + 0.22606716f) * r + 0.69583354f) * r + 0.99992522f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}

inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }

// One strip in one step: the keys that its rows see, and its operands.
struct Strip {
  int row;          // first query row in the item
  int rows;         // valid ones, up to kStrip
  int begin, end;   // visible keys as weight tiles of 32 keys; empty if none is visible
  bool masked;      // some row does not see all of [begin, end)
  const bf16* query;
  float* scores;
  bf16* weights;
};

// One step of 128 keys for query rows of an item.
class TileStep {
 public:
  TileStep(Scratch& s, TileScratch& t, int head_dim, const AttentionSpec& spec)
      : s(s),
        t(t),
        chunks(chunks_of(head_dim)),
        width(padded(head_dim)),
        // With a cap, scores are scaled before the maximum is taken.
        scale(spec.cap > 0 ? 1.0f : spec.scale),
        cap(spec.cap),
        scale_of_cap(spec.cap > 0 ? spec.scale / spec.cap : 0.0f),
        spec(spec) {}

  // Computes query rows [begin, end) against keys [step + first, step + last), which are packed.
  void run(int64_t step, int first, int last, int begin, int end) {
    Strip strips[kTileRows / kStrip];
    int count = 0;
    for (int row = begin; row < end; row += kStrip) {
      Strip& strip = strips[count];
      if (place(strip, row, end, step, first, last)) {
        strip.scores = t.scores[count % 2];
        strip.weights = t.weights[count % 2];
        ++count;
      }
    }
    if (count == 0) return;
    score(strips[0], strips[0].begin * 2, strips[0].end * 2);
    for (int i = 0; i < count; ++i) {
      const Strip* before = i > 0 ? &strips[i - 1] : nullptr;
      const Strip* after = i + 1 < count ? &strips[i + 1] : nullptr;
      softmax(strips[i], step, first, last, [&](int row) { products(before, after, row); });
    }
    weigh(strips[count - 1], 0, width / kTile);
  }

 private:
  int low(int row, int64_t step, int first) const {
    return int(std::clamp<int64_t>(first_visible(t.positions[row], spec) - step, first, kStep));
  }

  int high(int row, int64_t step, int last) const {
    return int(std::clamp<int64_t>(visible_end(t.positions[row], spec) - step, 0, last));
  }

  // Sets up the strip that starts at `row`; returns whether any of its rows sees a key of this step.
  bool place(Strip& strip, int row, int end, int64_t step, int first, int last) const {
    strip.row = row;
    strip.rows = std::min(kStrip, end - row);
    strip.query = t.query + row / kTile * chunks * kTileSize;
    const int latest = row + strip.rows - 1;  // later rows see later keys
    const int from = low(row, step, first), to = high(latest, step, last);
    strip.begin = from / kDepth;
    strip.end = (to + kDepth - 1) / kDepth;
    strip.masked = low(latest, step, first) > strip.begin * kDepth ||
                   high(row, step, last) < strip.end * kDepth;
    return from < to;
  }

  // Computes scores[32 rows, keys] for tiles [tile, end) of 16 keys.
  void score(const Strip& strip, int tile, int end) const {
    const int64_t apart = chunks * kTileSize;
#if defined(SLIPSTREAM_TILES)
    if (with_registers) {
      for (; tile < end; ++tile) {
        score_with_registers(strip, t.keys + tile * apart, strip.scores + tile * kTile * kTile);
      }
      return;
    }
#endif
    by_rows(strip, [&](auto size, int row) {
      const bf16* query = strip.query + (row / kTile * chunks * kTile + row % kTile) * kDepth;
      float* to = strip.scores + row / kTile * kTile * kStep + row % kTile * kTile;
      by_tiles<size()>(tile, end, [&](auto count, int at) {
        vf sums[count()][size()] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
          add_products(sums, query + chunk * kTileSize, t.keys + at * apart + chunk * kTileSize, apart);
        }
        for (int n = 0; n < count(); ++n) {
          for (int i = 0; i < size(); ++i) store(to + ((at + n) * kTile + i) * kTile, sums[n][i]);
        }
      });
    });
  }

  // Computes out[32 rows, columns] += weights x values, for tiles [column, end) of 16 of head_dim; out
  // must be rescaled already.
  void weigh(const Strip& strip, int column, int end) const {
    float* out = s.out + strip.row * width;
#if defined(SLIPSTREAM_TILES)
    if (with_registers) {
      for (; column < end; ++column) {
        weigh_with_registers(strip, t.values + column * kTileSize, out + column * kTile);
      }
      return;
    }
#endif
    const int columns = width / kTile;
    by_rows(strip, [&](auto size, int row) {
      const bf16* weights =
          strip.weights + row / kTile * kWeightTiles * kTileSize + row % kTile * kDepth;
      by_tiles<size()>(column, end, [&](auto count, int at) {
        vf sums[count()][size()];
        float* to = out + row * width + at * kTile;
        for (int n = 0; n < count(); ++n) {
          for (int i = 0; i < size(); ++i) sums[n][i] = load(to + i * width + n * kTile);
        }
        for (int tile = strip.begin; tile < strip.end; ++tile) {
          add_products(sums, weights + tile * kTileSize,
                       t.values + (tile * columns + at) * kTileSize, kTileSize);
        }
        for (int n = 0; n < count(); ++n) {
          for (int i = 0; i < size(); ++i) store(to + i * width + n * kTile, sums[n][i]);
        }
      });
    });
  }

  // Calls function(count, tile) for tiles [tile, end). `count` is a constant: with it, R rows have 16
  // independent sums, which hide the latency of an addition.
  template <int R, class F>
  static void by_tiles(int tile, int end, const F& function) {
    constexpr int kMost = std::clamp(kTile / R, 1, 4);
    for (; tile + kMost <= end; tile += kMost) function(std::integral_constant<int, kMost>{}, tile);
    for (; tile < end; ++tile) function(std::integral_constant<int, 1>{}, tile);
  }

  // Calls function(size, row) for blocks of a strip's rows. `size` is a constant, and no block crosses
  // the two tiles of a strip.
  template <class F>
  static void by_rows(const Strip& strip, const F& function) {
    int row = 0;
    const auto blocks = [&](auto size) {
      for (; row + size() <= strip.rows; row += size()) function(size, row);
    };
    blocks(std::integral_constant<int, 16>{});
    blocks(std::integral_constant<int, 8>{});
    blocks(std::integral_constant<int, 4>{});
    blocks(std::integral_constant<int, 2>{});
    blocks(std::integral_constant<int, 1>{});
  }

#if defined(SLIPSTREAM_TILES)
  void score_with_registers(const Strip& strip, const bf16* keys, float* to) const {
    tile_loads_follow();
    const bool two = strip.rows > kTile;
    _tile_zero(0);
    _tile_zero(1);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      _tile_loadd(2, keys + chunk * kTileSize, 64);
      _tile_loadd(3, strip.query + chunk * kTileSize, 64);
      _tile_dpbf16ps(0, 3, 2);
      if (two) {
        _tile_loadd(4, strip.query + (chunks + chunk) * kTileSize, 64);
        _tile_dpbf16ps(1, 4, 2);
      }
    }
    _tile_stored(0, to, 64);
    if (two) _tile_stored(1, to + kTile * kStep, 64);
  }

  void weigh_with_registers(const Strip& strip, const bf16* values, float* out) const {
    tile_loads_follow();
    const int columns = width / kTile;
    const bool two = strip.rows > kTile;
    const size_t stride = size_t(width) * sizeof(float);
    _tile_loadd(5, out, stride);
    if (two) _tile_loadd(6, out + kTile * width, stride);
    for (int tile = strip.begin; tile < strip.end; ++tile) {
      _tile_loadd(7, values + tile * columns * kTileSize, 64);
      _tile_loadd(3, strip.weights + tile * kTileSize, 64);
      _tile_dpbf16ps(5, 3, 7);
      if (two) {
        _tile_loadd(4, strip.weights + (kWeightTiles + tile) * kTileSize, 64);
        _tile_dpbf16ps(6, 4, 7);
      }
    }
    _tile_stored(5, out, stride);
    if (two) _tile_stored(6, out + kTile * width, stride);
  }
#endif

  // Issues the part of the neighbouring strips' products that belongs to one row of a softmax: scores of
  // the next strip, one tile at every fourth row, and between these, outputs of the previous strip.
  void products(const Strip* before, const Strip* after, int row) const {
    const int slot = row / 4;
    if (after && row % 4 == 0 && slot >= after->begin * 2 && slot < after->end * 2) {
      score(*after, slot, slot + 1);
    }
    if (before && row % 4 == 2) {
      for (int column = slot; column < width / kTile; column += kStrip / 4) {
        weigh(*before, column, column + 1);
      }
    }
  }

  // Turns scores into weights, updates maximum and sum, and rescales out. Calls between(row) after each
  // of the 32 rows.
  template <class F>
  void softmax(const Strip& strip, int64_t step, int first, int last, const F& between) {
    for (int half = 0; half < 2; ++half) {
      const int row = half * kTile, valid = std::clamp(strip.rows - row, 0, kTile);
      if (valid > 0) {
        if (cap > 0) cap_scores(strip, row, valid);
        const vf shift = strip.masked ? maxima<true>(strip, row, valid, step, first, last)
                                      : maxima<false>(strip, row, valid, step, first, last);
        weights(strip, row, valid, shift, between);
      }
      for (int i = valid; i < kTile; ++i) between(row + i);
    }
  }

  // Scales the raw products and applies the cap.
  void cap_scores(const Strip& strip, int row, int valid) const {
    for (int tile = strip.begin * 2; tile < strip.end * 2; ++tile) {
      float* place = strip.scores + row * kStep + tile * kTile * kTile;
      for (int i = 0; i < valid; ++i, place += kTile) {
        store(place, tangent(load(place) * scale_of_cap) * cap);
      }
    }
  }

  // Updates the maxima of 16 rows. Returns what to subtract from their scores, as exponents of 2.
  template <bool Masked>
  vf maxima(const Strip& strip, int row, int valid, int64_t step, int first, int last) const {
    vf highest[kTile];
    for (int i = 0; i < kTile; ++i) highest[i] = splat(-kInfinity);
    float* scores = strip.scores + row * kStep;
    for (int i = 0; i < valid; ++i) {
      const int from = Masked ? low(strip.row + row + i, step, first) : 0;
      const int to = Masked ? high(strip.row + row + i, step, last) : 0;
      for (int tile = strip.begin * 2; tile < strip.end * 2; ++tile) {
        float* place = scores + (tile * kTile + i) * kTile;
        vf x = load(place);
        if (Masked) {
          const vi key = iota() + tile * kTile;
          x = ((key >= from) & (key < to)) ? x : splat(-kInfinity);
          store(place, x);
        }
        highest[i] = larger(x, highest[i]);
      }
    }
    const vf before = load(s.maximum + strip.row + row);
    const vf now = larger(reduce_each(highest, larger) * scale, before);
    store(s.maximum + strip.row + row, now);
    const vi none = before == -kInfinity;
    store(s.rescale + strip.row + row, none ? splat(0.0f) : exponential(before - now));
    return (now == -kInfinity ? splat(0.0f) : now) * kLog2E;
  }

  template <class F>
  void weights(const Strip& strip, int row, int valid, vf shift, const F& between) {
    const vf one = (vf)(vu{} + 0x3f803f80u);  // pairs of bfloat16 1.0
    const vf factor = splat(scale * kLog2E);
    float shifts[kTile];
    store(shifts, shift);
    vf sums[kTile] = {};
    for (int i = 0; i < valid; ++i) {
      between(row + i);
      const float* scores = strip.scores + row * kStep + i * kTile;
      bf16* to = strip.weights + row * kStep + i * kDepth;
      for (int tile = strip.begin; tile < strip.end; ++tile) {
        const float* from = scores + tile * 2 * kTile * kTile;
        const vf a = power_of_two(load(from) * factor - shifts[i]);
        const vf b = power_of_two(load(from + kTile * kTile) * factor - shifts[i]);
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to + tile * kTileSize, &pairs, sizeof pairs);
        // Sum the rounded weights, so that they add up to 1 after the division.
        sums[i] = (vf)_mm512_dpbf16_ps((__m512)sums[i], pairs, (__m512bh)one);
      }
      rescale(strip.row + row + i);
    }
    float* sum = s.sum + strip.row + row;
    store(sum, load(sum) * load(s.rescale + strip.row + row) + reduce_each(sums, add));
  }

  void rescale(int row) const {
    if (s.rescale[row] == 1.0f) return;
    float* out = s.out + row * width;
    for (int d = 0; d < width; d += W) store(out + d, load(out + d) * s.rescale[row]);
  }

  static constexpr float kLog2E = 1.44269504088896341f;
#if defined(SLIPSTREAM_TILES)
  const bool with_registers = tiles_permitted();
#endif
  Scratch& s;
  TileScratch& t;
  const int chunks, width;
  const float scale, cap, scale_of_cap;
  const AttentionSpec& spec;
};

}  // namespace
#endif
