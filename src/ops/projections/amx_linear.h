// Linear layers of bfloat16 tokens by AMX tile products.
//
//   weights [16 outputs, 32 inputs] x tokens [32 inputs, 16 tokens] -> sums [16, 16], float32
//
// Weights of bfloat16 are left-hand operands as they lie in the checkpoint, so only the tokens are
// packed, once per call. Quantized weights become bfloat16 strip by strip. A strip of 32 outputs against
// 32 tokens takes four tile loads for four products. It runs along all inputs before its sums leave the
// tile registers, and while the first tokens read it, the next strip is prefetched.
//
// One token takes the same path, with 15 columns of zeros, because reading its weights takes longer than
// multiplying them. A sum depends only on its own weights and token and has a fixed order, so a token's
// result does not depend on the other tokens.
#pragma once
#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/tile_registers.h"
#include "projections/weights.h"

#if defined(SLIPSTREAM_TILES)
#include <vector>

namespace {

constexpr int kTileOutputs = 2 * kTile;            // of a strip
constexpr int64_t kTileTokenBytes = 512 * 1024;    // of packed tokens that stay in a core's cache
// Minimal number of token groups for each pass over the weights. With fewer, reading weights would take
// longer than multiplying.
constexpr int64_t kFewestGroups = 8;
constexpr double kTileProductsPerMicrosecond = 300e3;
constexpr double kTileBytesPerMicrosecond = 15e3;  // of weights, by one thread
constexpr double kPackedPerMicrosecond = 4e3;      // inputs

struct alignas(64) TileMemory {
  bf16 values[kTileSize];
};

inline bool uses_tiles(const LinearArgs& a) {
  return a.dtype == kBFloat16 && a.inputs % kDepth == 0 && tiles_permitted();
}

// Packs tokens [16 * group, 16 * group + 16) as right-hand operands: a tile per 32 inputs, zeros after
// the last token.
inline void pack_tokens(const LinearArgs& a, int64_t group, TileMemory* to) {
  const int64_t first = group * kTile, tokens = std::min<int64_t>(kTile, a.tokens - first);
  const bf16* x = static_cast<const bf16*>(a.x) + first * a.x_stride;
  for (int64_t k = 0; k < a.inputs; k += kDepth, ++to) {
    if (tokens == 1) {
      std::memset(to->values, 0, sizeof to->values);
      for (int i = 0; i < kTile; ++i) std::memcpy(to->values + i * kDepth, x + k + 2 * i, 4);
      continue;
    }
    vf block[kTile] = {};  // pairs of bfloat16, moved without being interpreted
    for (int i = 0; i < tokens; ++i) std::memcpy(&block[i], x + i * a.x_stride + k, 64);
    transpose(block);
    for (int i = 0; i < kTile; ++i) std::memcpy(to->values + i * kDepth, &block[i], 64);
  }
}

template <class Weights>
class TileLinear {
 public:
  TileLinear(const LinearArgs& args, const TileMemory* packed)
      : a(args),
        w(args),
        packed(packed),
        chunks(args.inputs / kDepth),
        groups((args.tokens + kTile - 1) / kTile) {}

  // Computes outputs [begin, end).
  void run(int64_t begin, int64_t end) const {
    const TileRegisters registers(true);
    const int64_t group_bytes = chunks * int64_t(sizeof(TileMemory));
    const int64_t block = std::max(kFewestGroups, kTileTokenBytes / group_bytes / 2 * 2);
    for (int64_t first = 0; first < groups; first += block) {
      const int64_t last = std::min(groups, first + block);
      for (int64_t n = begin; n < end; n += kTileOutputs) {
        const int64_t after = n + kTileOutputs;
        // Prefetch the next strip, or the first one again for the next block of tokens, or none.
        const int64_t next = after < end ? after : begin;
        const int fetched = kInPlace && (after < end || last < groups)
                                ? int(std::min<int64_t>(kTileOutputs, end - next))
                                : 0;
        strip(n, int(std::min<int64_t>(kTileOutputs, end - n)), first, last, next, fetched);
      }
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<Weights, Dense<bf16>>;

  // Left-hand operands: `upper` and `lower` are 16 rows of weights each.
  struct Left {
    const bf16 *upper, *lower;
    bool has_lower;
  };

  // Computes outputs [n, n + rows) of token groups [first, last). Prefetches `fetched` rows from `next`
  // on meanwhile.
  void strip(int64_t n, int rows, int64_t first, int64_t last, int64_t next, int fetched) const {
    const Left left = operands(n, rows);
    for (int64_t group = first; group < last; group += 2) {
      // [upper, lower][group, group + 1]: outputs x tokens
      alignas(64) float sums[4][kTile * kTile];
      const bool two = group + 1 < last;
      const TileMemory* right = packed + group * chunks;
      if (group == first && fetched > 0) {
        multiply<true>(left, right, two, sums, w.row(next), fetched);
      } else {
        multiply<false>(left, right, two, sums, nullptr, 0);
      }
      for (int lower = 0; lower <= int(left.has_lower); ++lower) {
        const int outputs = std::min(kTile, rows - lower * kTile);
        for (int second = 0; second <= int(two); ++second) {
          put(n + lower * kTile, outputs, group + second, sums[lower * 2 + second]);
        }
      }
    }
  }

  // Bytes of kRun weights of a row.
  int64_t row_run_bytes() const { return w.row_bytes() * kRun / a.inputs; }

  // Rows [n, n + rows) as whole tiles: in place, or a copy.
  Left operands(int64_t n, int rows) const {
    if constexpr (kInPlace) {
      const bf16* from = w.weights + n * a.inputs;
      if (rows % kTile == 0) return {from, from + kTile * a.inputs, rows > kTile};
    }
    thread_local std::vector<bf16> copies;
    if (int64_t(copies.size()) < kTileOutputs * a.inputs) {
      copies.resize(size_t(kTileOutputs * a.inputs));
    }
    // Tiles are read whole, but there may be no memory after these rows.
    const int64_t whole = (rows + kTile - 1) / kTile * kTile;
    std::fill(copies.begin() + rows * a.inputs, copies.begin() + whole * a.inputs, bf16{0});
    for (int row = 0; row < rows; ++row) {
      auto runs = w.runs(n + row);
      const char* ahead = w.row(n + row + kTileOutputs);  // of the next strip
      bf16* to = copies.data() + row * a.inputs;
      for (int64_t k = 0; k < a.inputs; k += kRun, ahead += row_run_bytes()) {
        __builtin_prefetch(ahead);
        const vb run = runs.next();
        std::memcpy(to + k, &run, sizeof run);
      }
    }
    return {copies.data(), copies.data() + kTile * a.inputs, rows > kTile};
  }

  template <bool Fetches>
  void multiply(const Left& left, const TileMemory* right, bool two, float (*sums)[kTile * kTile],
                const char* next, int fetched) const {
    tile_loads_follow();
    const int64_t stride = a.inputs * int64_t(sizeof(bf16));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t k = chunk * kDepth;
      if (Fetches) {
        for (int i = 0; i < fetched; ++i) __builtin_prefetch(next + (i * a.inputs + k) * 2);
      }
      _tile_loadd(4, left.upper + k, stride);
      _tile_loadd(6, right[chunk].values, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (two) {
        _tile_loadd(7, right[chunks + chunk].values, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (left.has_lower) {
        _tile_loadd(5, left.lower + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    tile_loads_follow();
  }

  // Writes sums [16 outputs, 16 tokens] as outputs from n on of a group of tokens.
  void put(int64_t n, int outputs, int64_t group, const float* sums) const {
    vf block[kTile], bias = {};
    for (int i = 0; i < kTile; ++i) block[i] = load(sums + i * kTile);
    transpose(block);
    float scales[kTile] = {};
    for (int i = 0; i < outputs; ++i) scales[i] = w.scale(n + i);
    if (a.bias != nullptr) bias = load_some(static_cast<const bf16*>(a.bias) + n, outputs);
    const int64_t first = group * kTile, tokens = std::min<int64_t>(kTile, a.tokens - first);
    bf16* to = static_cast<bf16*>(a.out) + first * a.outputs + n;
    for (int64_t t = 0; t < tokens; ++t, to += a.outputs) {
      float wide[kTile];
      bf16 narrow[kTile];
      store(wide, block[t] * load(scales) + bias);
      from_floats(wide, narrow);
      std::memcpy(to, narrow, size_t(outputs) * sizeof(bf16));
    }
  }

  const LinearArgs& a;
  const Weights w;
  const TileMemory* packed;
  const int64_t chunks, groups;
};

template <class Weights>
void run_tiles(const LinearArgs& a) {
  const int64_t groups = (a.tokens + kTile - 1) / kTile, chunks = a.inputs / kDepth;
  thread_local std::vector<TileMemory> memory;
  if (int64_t(memory.size()) < groups * chunks) memory.resize(size_t(groups * chunks));
  // A pointer, because `memory` is thread-local: other threads would see their own vector.
  TileMemory* const packed = memory.data();
  const double moved = double(groups * kTile * a.inputs);
  const int64_t packers = worthwhile_parts(a.threads, moved / kPackedPerMicrosecond, groups);
  parallel(a.threads, packers, [&](int64_t part) {
    for (int64_t group = groups * part / packers; group < groups * (part + 1) / packers; ++group) {
      pack_tokens(a, group, packed + group * chunks);
    }
  });
  const double cells = double(a.outputs * a.inputs), padded_tokens = double(groups * kTile);
  const double bytes = double(Weights(a).row_bytes()) * double(a.outputs);
  const double work = std::max(bytes / kTileBytesPerMicrosecond,
                               cells * padded_tokens / kTileProductsPerMicrosecond);
  const int64_t strips = (a.outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t parts = worthwhile_parts(a.threads, work, strips);
  parallel_along(a.threads, parts, [&](int64_t part) {
    TileLinear<Weights>(a, packed).run(strips * part / parts * kTileOutputs,
                              std::min(a.outputs, strips * (part + 1) / parts * kTileOutputs));
  });
}

}  // namespace

#endif
