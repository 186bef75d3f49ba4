// Layouts of quantized weights in strips, and the scales of a unit of inputs.
#pragma once
#include <numeric>

#include "rounded_inputs.h"
#include "weight_strips.h"

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

// Scales (or offsets) of a strip's groups for a unit of inputs: [kStripOutputs].
inline const float* of_unit(const float* groups, const LinearArgs& a, int64_t strip, int64_t unit,
                            int64_t unit_size) {
  const int64_t group = unit * unit_size / a.group;
  return groups + (strip * (a.inputs / a.group) + group) * kStripOutputs;
}

// The inputs that share one scale: as many as possible of a group's.
template <class Slices>
inline int64_t unit_of(const LinearArgs& a) {
  if (!Slices::kInGroups) return kLargestUnit;
  return std::gcd(a.group, kLargestUnit);
}

}  // namespace
