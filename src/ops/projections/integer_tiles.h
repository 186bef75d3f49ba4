// Linear layers of quantized weights and rounded inputs for many tokens, by AMX tile products of bytes.
//
//   inputs [16 tokens, unit] x weights [unit, 16 outputs] -> sums [16, 16], int32
//
// Weights lie in the same strips as for few tokens (integer_linear.h). A strip is first spread out: levels
// of 8 bits, signed, a tile per unit and 16 outputs. All tokens of a piece of work then read it from the
// core's cache. Inputs are rounded in the same way, and their rows are tiles as they lie.
//
// A unit's products are integers, so tiles sum them exactly; units are added as floats in the order of
// integer_linear.h, by the same operations. So a token's result has the same bits here and there, and the
// number of tokens may decide which of the two computes it.
#pragma once
#include "projections/integer_slices.h"
#include "runtime/tile_registers.h"

#if defined(SLIPSTREAM_TILES) && defined(__AVX512VNNI__)
#define SLIPSTREAM_BYTE_TILES 1

namespace {

constexpr Speed kByteTileSpeed = {15e3, 600e3};

template <class Slices, class T>
class IntegerTiles {
 public:
  IntegerTiles(const LinearArgs& args, const RoundedTokens<int8_t>& tokens)
      : a(args), x(tokens), unit_bytes(tokens.unit * kTile) {}

  // Computes tokens [begin, end) of a strip.
  void run(int64_t strip, int64_t begin, int64_t end) const {
    thread_local std::vector<Tile> tiles;
    thread_local std::vector<Numbers> held;
    const int64_t needed = (a.inputs * kStripOutputs + int64_t(sizeof(Tile)) - 1) / int64_t(sizeof(Tile));
    if (int64_t(tiles.size()) < needed) tiles.resize(size_t(needed));
    int8_t* const levels = tiles.data()->levels;
    spread_out(strip, levels);
    if (kScaledUnits && int64_t(held.size()) < kStripVectors * x.units) {
      held.resize(size_t(kStripVectors * x.units));
    }
    Numbers* const numbers = held.data();
    if (kScaledUnits) spread_numbers(strip, numbers);
    const TileRegisters registers(true, int(x.unit));
    for (int64_t token = begin; token < end; token += kTile) {
      float wide[kTile][kStripOutputs];
      for (int v = 0; v < kStripVectors; ++v) {
        const int8_t* right = levels + v * a.inputs * kTile;
        if (kScaledUnits && a.offsets != nullptr) {
          add_up<true>(token, v, right, numbers + v * x.units, wide);
        } else {
          add_up<false>(token, v, right, numbers + v * x.units, wide);
        }
      }
      const int64_t count = std::min<int64_t>(kTile, end - token);
      for (int64_t i = 0; i < count; ++i) finish_strip<T>(a, strip, token + i, wide[i]);
    }
  }

 private:
  static constexpr bool kScaledUnits = Slices::kInGroups;
  static constexpr int kTogether = 4;  // units whose sums are in tile registers at once
  typedef int8_t Levels __attribute__((vector_size(64)));
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  struct alignas(64) Tile {
    int8_t levels[1024];
  };
  struct alignas(64) Numbers {  // of a unit and 16 outputs
    float scales[W], offsets[W];
  };

  // Writes a strip's levels: [vectors, inputs / 4, 16, 4].
  void spread_out(int64_t strip, int8_t* to) const {
    const int64_t slices = a.inputs / Slices::kInputs;
    const char* slice = static_cast<const char*>(a.weight) + strip * slices * kSlice;
    for (int64_t i = 0; i < slices; ++i, slice += kSlice) {
      fetch_slice(slice + kFetchedAhead);
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        int8_t* at = to + v * a.inputs * kTile + i * Slices::kInputs * kTile;
        Bytes bytes;
        std::memcpy(&bytes, slice + v * 64, sizeof bytes);
        if constexpr (Slices::kInputs == 4) {
          bytes ^= uint8_t(Slices::kOffset);
          std::memcpy(at, &bytes, sizeof bytes);
        } else {
          const Levels low = (Levels)(bytes & 15) - int8_t(Slices::kOffset);
          const Levels high = (Levels)(bytes >> 4) - int8_t(Slices::kOffset);
          std::memcpy(at, &low, sizeof low);
          std::memcpy(at + 64, &high, sizeof high);
        }
      }
    }
  }

  // Writes the scales and offsets of a strip's units: [vectors, units].
  void spread_numbers(int64_t strip, Numbers* to) const {
    for (int64_t unit = 0; unit < x.units; ++unit) {
      const int64_t place = place_of_unit(a, strip, unit, x.unit);
      vf numbers[kStripVectors];
      load_numbers(a.scales, a, place, numbers);
      for (int v = 0; v < kStripVectors; ++v) store(to[v * x.units + unit].scales, numbers[v]);
      if (a.offsets == nullptr) continue;
      load_numbers(a.offsets, a, place, numbers);
      for (int v = 0; v < kStripVectors; ++v) store(to[v * x.units + unit].offsets, numbers[v]);
    }
  }

  // Computes 16 outputs, vector v of the strip, of 16 tokens. Tokens behind the last are whatever lies
  // there: they change no other, and nobody reads their sums.
  template <bool HasOffsets>
  void add_up(int64_t token, int v, const int8_t* right, const Numbers* numbers,
              float (&wide)[kTile][kStripOutputs]) const {
    alignas(64) int32_t sums[kTogether][kTile * kTile];
    vf results[kTile] = {};
    for (int64_t unit = 0; unit < x.units; unit += kTogether, right += kTogether * unit_bytes) {
      const int64_t count = std::min<int64_t>(kTogether, x.units - unit);
      multiply(x.values + token * a.inputs + unit * x.unit, right, count, sums);
      for (int64_t i = 0; i < count; ++i) {
        add_unit<HasOffsets>(token, unit + i, numbers + unit + i, sums[i], results);
      }
    }
    for (int i = 0; i < kTile; ++i) store(wide[i] + v * W, results[i]);
  }

  void multiply(const int8_t* left, const int8_t* right, int64_t count,
                int32_t (*sums)[kTile * kTile]) const {
    tile_loads_follow();
    _tile_zero(0);
    _tile_loadd(4, left, a.inputs);
    _tile_loadd(6, right, 64);
    _tile_dpbssd(0, 4, 6);
    if (count > 1) {
      _tile_zero(1);
      _tile_loadd(5, left + x.unit, a.inputs);
      _tile_loadd(7, right + unit_bytes, 64);
      _tile_dpbssd(1, 5, 7);
    }
    if (count > 2) {
      _tile_zero(2);
      _tile_loadd(4, left + 2 * x.unit, a.inputs);
      _tile_loadd(6, right + 2 * unit_bytes, 64);
      _tile_dpbssd(2, 4, 6);
    }
    if (count > 3) {
      _tile_zero(3);
      _tile_loadd(5, left + 3 * x.unit, a.inputs);
      _tile_loadd(7, right + 3 * unit_bytes, 64);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    if (count > 1) _tile_stored(1, sums[1], 64);
    if (count > 2) _tile_stored(2, sums[2], 64);
    if (count > 3) _tile_stored(3, sums[3], 64);
    tile_loads_follow();
  }

  template <bool HasOffsets>
  void add_unit(int64_t token, int64_t unit, const Numbers* numbers, const int32_t* sums,
                vf (&results)[kTile]) const {
    vf scales{}, offsets{};
    if (kScaledUnits) scales = load(numbers->scales);
    if (HasOffsets) offsets = load(numbers->offsets);
    const float* steps = x.steps + unit * x.unit_step + token;
    const float* sums_of_inputs = HasOffsets ? x.sums + unit * x.unit_step + token : nullptr;
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      vi products;
      std::memcpy(&products, sums + i * kTile, sizeof products);
      vf factor = (vf)_mm512_set1_ps(steps[i]);
      if constexpr (kScaledUnits) factor = factor * scales;
      results[i] = add_scaled(results[i], products, factor);
      if constexpr (HasOffsets) {
        results[i] = subtract_scaled(results[i], offsets, sums_of_inputs[i]);
      }
    }
  }

  const LinearArgs& a;
  const RoundedTokens<int8_t>& x;
  const int64_t unit_bytes;  // of a tile of weights
};

}  // namespace
#endif
