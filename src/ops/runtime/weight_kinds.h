// Written by `python -m src.ops.runtime.weight_kinds` from `NUMBERS` of src/ops/matrix.py.
#pragma once
#include <cstdint>

// Values of a matrix, beside the float types of DType. Quantized weights in strips
// (integer_linear.h) are multiplied by rounded inputs.
enum WeightKind : int64_t {
  kInt4 = 4,
  kInt4Strips = 5,
  kE2M1 = 6,
  kInt8 = 8,
  kInt8Strips = 9,
  kFloat8 = 12,
  kBFloat16Strips = 17,
};
constexpr int kStripOutputs = 64;
