// Rounds weights to int8 by row or to int4 by group, bit for bit like the reference in
// src/models/quantization.py. The result is in rows, or in strips for integer products (weight_strips.h).
#include <cmath>
#include <cstring>
#include <vector>

#include "rounded_inputs.h"
#include "weight_strips.h"

namespace {

constexpr double kWeightsPerMicrosecond = 1e3;

inline float step_of(float largest, float levels) { return largest == 0 ? 1.0f : largest / levels; }

// Quantized values of a vector of weights. If the step has underflowed to 0, quotients are infinite and
// clamped to the range.
inline vi rounded(vf weights, float step, float lowest, float highest) {
  vf levels = weights / splat(step);
  levels = levels < lowest ? splat(lowest) : levels;
  return nearest(levels > highest ? splat(highest) : levels);
}

// Quantizes a row to int8; in strips, with an offset of 128 as unsigned bytes.
template <class T>
void round_to_int8(const T* row, int64_t inputs, bool in_strips, uint8_t* to, float* scale) {
  *scale = step_of(largest_magnitude(row, inputs), 127);
  for (int64_t k = 0; k < inputs; k += W) {
    store_bytes(reinterpret_cast<int8_t*>(to + k), rounded(load(row + k), *scale, -127, 127));
  }
  if (!in_strips) return;
  for (int64_t k = 0; k < inputs; ++k) to[k] ^= 128;
}

// The weight of largest magnitude in a group; the first of several.
template <class T>
float largest_of(const T* group, int64_t size) {
  const float magnitude = largest_magnitude(group, size);
  int64_t k = 0;
  for (const vf wanted = splat(magnitude); k + W < size; k += W) {
    const vf weights = load(group + k);
    if (sum_of_lanes((weights == wanted) | (weights == -wanted)) != 0) break;
  }
  float lanes[W];
  store(lanes, load(group + k));
  int lane = 0;
  while (lane < W - 1 && std::fabs(lanes[lane]) != magnitude) ++lane;
  return lanes[lane];
}

// Quantizes a row to int4. In each run of 32 weights, the first 16 are in the low nibbles; in strips, the
// first 4 of 8.
template <class T>
void round_to_int4(const T* row, int64_t inputs, int64_t group, bool in_strips, uint8_t* to,
                   float* scales) {
  const int half = in_strips ? 4 : int(kPackedGroup) / 2;
  for (int64_t first = 0; first < inputs; first += group, ++scales) {
    // The largest magnitude maps to -8, the end of the range that has one step more.
    *scales = step_of(largest_of(row + first, group), -8);
    for (int64_t k = first; k < first + group; k += kPackedGroup) {
      int8_t levels[kPackedGroup];
      for (int64_t i = 0; i < kPackedGroup; i += W) {
        store_bytes(levels + i, rounded(load(row + k + i), *scales, -8, 7) + 8);
      }
      for (int i = 0; i < int(kPackedGroup); i += 2 * half) {
        for (int j = 0; j < half; ++j) {
          *to++ = uint8_t(levels[i + j] | levels[i + half + j] << 4);
        }
      }
    }
  }
}

template <class T>
void round_row(const QuantizeArgs& a, int64_t row, bool in_strips, uint8_t* to) {
  const T* from = static_cast<const T*>(a.weight) + row * a.inputs;
  if (a.kind == kInt8 || a.kind == kInt8Strips) {
    round_to_int8(from, a.inputs, in_strips, to, a.scales + row);
  } else {
    round_to_int4(from, a.inputs, a.group, in_strips, to, a.scales + row * (a.inputs / a.group));
  }
}

template <class T>
void quantize(const QuantizeArgs& a) {
  const bool in_strips = a.kind == kInt8Strips || a.kind == kInt4Strips;
  const int64_t bytes = a.kind == kInt4 || a.kind == kInt4Strips ? a.inputs / 2 : a.inputs;
  const int64_t strips = (a.rows + kStripOutputs - 1) / kStripOutputs, words = bytes / 4;
  const double work = double(a.rows * a.inputs) / kWeightsPerMicrosecond;
  // No more parts than threads, because each part needs memory for a strip.
  const int64_t parts = std::min(a.threads, worthwhile_parts(a.threads, work, strips));
  std::vector<uint32_t> scratch(in_strips ? size_t(parts * words * kStripOutputs) : 0);
  auto* const values = static_cast<uint8_t*>(a.values);
  parallel(a.threads, parts, [&](int64_t part) {
    for (int64_t strip = strips * part / parts; strip < strips * (part + 1) / parts; ++strip) {
      const int64_t first = strip * kStripOutputs, last = std::min(a.rows, first + kStripOutputs);
      uint8_t* const to = values + first * bytes;
      for (int64_t row = first; row < last; ++row) {
        round_row<T>(a, row, in_strips, to + (row - first) * bytes);
      }
      if (!in_strips) continue;
      // Pad the last strip of int8 with rows of zeros.
      std::memset(to + (last - first) * bytes, 128, size_t((kStripOutputs - last + first) * bytes));
      lay_out_strip(reinterpret_cast<uint32_t*>(to), words,
                    scratch.data() + part * words * kStripOutputs);
    }
  });
}

bool has_whole_rows(const QuantizeArgs& a) {
  if (a.rows < 0 || a.inputs < 1 || a.threads < 1 || a.inputs % kPackedGroup) return false;
  switch (a.kind) {
    case kInt8: return true;
    case kInt8Strips: return a.inputs % kLargestUnit == 0;
    case kInt4Strips:
      if (a.rows % kStripOutputs) return false;
      [[fallthrough]];
    case kInt4:
      return a.group >= kPackedGroup && a.group % kPackedGroup == 0 && a.inputs % a.group == 0;
    default: return false;
  }
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_quantize(const QuantizeArgs* a) {
  if (!has_whole_rows(*a)) return kBadShape;
  try {
    switch (a->dtype) {
      case kFloat32: quantize<float>(*a); return kOk;
      case kBFloat16: quantize<bf16>(*a); return kOk;
      case kFloat16: quantize<f16>(*a); return kOk;
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
