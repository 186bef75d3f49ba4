// Layouts of quantized weights in strips, and the scales of a unit of inputs.
#pragma once
#include "rounded_inputs.h"
#include "weight_strips.h"

namespace {

// Of each kind of weights: the offset that makes them unsigned, and the number of inputs of a slice.
struct Int8Slices {
  static constexpr int kOffset = 128, kInputs = 4;
};

struct Int4Slices {
  static constexpr int kOffset = 8, kInputs = 8;
};

// int4 scales of a strip for a unit of inputs: [kStripOutputs].
inline const float* scales_of(const LinearArgs& a, int64_t strip, int64_t unit, int64_t unit_size) {
  const int64_t group = unit * unit_size / a.group;
  return a.scales + (strip * (a.inputs / a.group) + group) * kStripOutputs;
}

}  // namespace
