// Layouts of quantized weights in strips, and the scales of a unit of inputs.
#pragma once
#include <numeric>

#include "projections/rounded_inputs.h"
#include "projections/weight_strips.h"

namespace {

// Of each kind of weights: the offset that makes them unsigned, the number of inputs of a slice, and
// whether scales (and perhaps offsets) are of groups of inputs, not of outputs.
struct Int8Slices {
  static constexpr int kOffset = 128, kInputs = 4;
  static constexpr bool kInGroups = false;
};

struct Int8GroupSlices {
  static constexpr int kOffset = 128, kInputs = 4;
  static constexpr bool kInGroups = true;
};

struct Int4Slices {
  static constexpr int kOffset = 8, kInputs = 8;
  static constexpr bool kInGroups = true;
};

// Where the numbers of a strip's outputs for a unit of inputs begin, in scales and in offsets of groups.
inline int64_t place_of_unit(const LinearArgs& a, int64_t strip, int64_t unit, int64_t unit_size) {
  const int64_t group = unit * unit_size / a.group;
  return (strip * (a.inputs / a.group) + group) * kStripOutputs;
}

// The same of a strip's units, one after the other, without a division for each. 0 where scales are of rows.
template <class Slices>
class UnitPlaces {
 public:
  UnitPlaces(const LinearArgs& a, int64_t strip, int64_t unit_size)
      : units(Slices::kInGroups ? a.group / unit_size : 1),
        left(units),
        place(Slices::kInGroups ? place_of_unit(a, strip, 0, unit_size) : 0) {}

  int64_t next() {
    const int64_t now = place;
    if (Slices::kInGroups && --left == 0) left = units, place += kStripOutputs;
    return now;
  }

 private:
  const int64_t units;  // of a group
  int64_t left, place;
};

// Loads V vectors of scales or offsets, from `place` on.
template <int V>
inline void load_numbers(const void* groups, const LinearArgs& a, int64_t place, vf (&to)[V]) {
  if (a.group_dtype == kFloat32) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) to[v] = load(static_cast<const float*>(groups) + place + v * W);
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) to[v] = load(static_cast<const bf16*>(groups) + place + v * W);
  }
}

// The address of a number.
inline const char* number_at(const void* groups, const LinearArgs& a, int64_t place) {
  return static_cast<const char*>(groups) + place * (a.group_dtype == kFloat32 ? 4 : 2);
}

// The inputs that share one scale: as many as possible of a group's.
template <class Slices>
inline int64_t unit_of(const LinearArgs& a) {
  if (!Slices::kInGroups) return kLargestUnit;
  return std::gcd(a.group, kLargestUnit);
}

#if defined(__AVX512VNNI__)

// Adds a unit's integer sums times a factor.
inline vf add_scaled(vf sums, vi products, vf factor) {
  return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)products), (__m512)factor, (__m512)sums);
}

inline vf subtract_scaled(vf sums, vf numbers, float factor) {
  return (vf)_mm512_fnmadd_ps((__m512)numbers, _mm512_set1_ps(factor), (__m512)sums);
}

#endif

}  // namespace
