// What quantized weights in strips are, and which of their scales belong to a unit of inputs.
#pragma once
#include "rounded_inputs.h"
#include "weight_strips.h"

namespace {

// Of weights: what they are larger by than their values, and how many inputs' are in a slice.
struct Int8Slices {
  static constexpr int kOffset = 128, kInputs = 4;
};

struct Int4Slices {
  static constexpr int kOffset = 8, kInputs = 8;
};

// Scales of int4, of a unit of a strip: [kStripOutputs].
inline const float* scales_of(const LinearArgs& a, int64_t strip, int64_t unit, int64_t unit_size) {
  const int64_t group = unit * unit_size / a.group;
  return a.scales + (strip * (a.inputs / a.group) + group) * kStripOutputs;
}

}  // namespace
