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

// Room for the scales or the offsets of a strip's outputs.
typedef float OfOutputs[kStripOutputs];

// Scales or offsets of a strip's outputs for a unit of inputs: [kStripOutputs], in place or widened.
inline const float* of_unit(const void* groups, const LinearArgs& a, int64_t strip, int64_t unit,
                            int64_t unit_size, OfOutputs& wide) {
  const int64_t group = unit * unit_size / a.group;
  const int64_t first = (strip * (a.inputs / a.group) + group) * kStripOutputs;
  if (a.group_dtype == kFloat32) return static_cast<const float*>(groups) + first;
  const bf16* from = static_cast<const bf16*>(groups) + first;
#pragma GCC unroll 16
  for (int i = 0; i < kStripOutputs; i += W) store(wide + i, load(from + i));
  return wide;
}

// The inputs that share one scale: as many as possible of a group's.
template <class Slices>
inline int64_t unit_of(const LinearArgs& a) {
  if (!Slices::kInGroups) return kLargestUnit;
  return std::gcd(a.group, kLargestUnit);
}

}  // namespace
