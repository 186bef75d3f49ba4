// Rounds weights to int8 by row or to int4 by group, bit for bit like the reference in
// src/ops/projections/rounding.py. The result is in rows, or in strips for integer products (weight_strips.h).
#include <cstring>
#include <limits>
#include <vector>

#include "projections/rounded_inputs.h"
#include "projections/weight_strips.h"

namespace {

constexpr double kWeightsPerMicrosecond = 1e3;
constexpr int64_t kLargestGroup = 8192;  // of int4

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
  const float largest = largest_magnitude(row, inputs);
  *scale = largest == 0 ? 1.0f : largest / 127.0f;
  for (int64_t k = 0; k < inputs; k += W) {
    store_bytes(reinterpret_cast<int8_t*>(to + k), rounded(load(row + k), *scale, -127, 127));
  }
  if (!in_strips) return;
  for (int64_t k = 0; k < inputs; ++k) to[k] ^= 128;
}

inline float least_lane(vf v) {
  float least = v[0];
  for (int i = 1; i < W; ++i) least = v[i] < least ? v[i] : least;
  return least;
}

inline vi within(vi v, int least, int most) {
  v = v < least ? vi{} + least : v;
  return v > most ? vi{} + most : v;
}

// How a group becomes int4: (weight + offset) / scale is nearest to its level.
struct Fit {
  float scale, offset;
};

inline float as_bf16(double x) {
  bf16 narrow;
  from_float(float(x), &narrow);
  return as_float(&narrow);
}

constexpr int kParts = 256;  // of a step

// Levels 0 to 15 from the least weight to the greatest, and the scale and the offset that meet the
// weights of these levels with the least squared error; or no offset, where that is clearly nearer. Sums
// are of integers: weights are rounded to parts of a step.
template <class T>
Fit fit(const T* group, int64_t size) {
  vf low = load(group), negative_high = -low;
  for (int64_t k = W; k < size; k += W) {
    const vf weights = load(group + k);
    low = weights < low ? weights : low;
    negative_high = -weights < negative_high ? -weights : negative_high;
  }
  const float least = least_lane(low), greatest = -least_lane(negative_high);
  const float extent = greatest - least, largest = -least >= greatest ? least : greatest;
  if (!(extent >= kNothing && extent < std::numeric_limits<float>::infinity())) {
    return {0.0f, as_bf16(-double(least))};
  }
  const float inverse = float(15 * kParts) / extent, centred_inverse = float(-8 * kParts) / largest;
  vi ones = {}, squares = {}, values = {}, products = {}, errors = {}, centred_errors = {};
  for (int64_t k = 0; k < size; k += W) {
    const vf weights = load(group + k);
    // Weights are finite; what is not stays within these bounds, so that no sum overflows.
    const vi parts = within(nearest((weights - least) * inverse), 0, 15 * kParts);
    const vi level = (parts + kParts / 2) >> 8, rest = parts - level * kParts;
    ones += level, squares += level * level, values += parts, products += level * parts;
    errors += rest * rest;
    const vi centred = within(nearest(weights * centred_inverse), -8 * kParts, 8 * kParts);
    const vi centred_rest = centred - within((centred + kParts / 2) >> 8, -8, 7) * kParts;
    centred_errors += centred_rest * centred_rest;
  }
  const double step = double(extent / 15.0f), centred_step = double(largest / -8.0f);
  const double error = double(sum_of_lanes(errors)) * (step * step);
  const double centred_error = double(sum_of_lanes(centred_errors)) * (centred_step * centred_step);
  if (centred_error * 8 < error * 7) return {float(as_bf16(centred_step)), 0.0f};
  // Integers that double holds exactly.
  const int64_t levels = sum_of_lanes(ones), all = sum_of_lanes(values);
  const int64_t covariance = size * sum_of_lanes(products) - levels * all;
  const int64_t variance = size * sum_of_lanes(squares) - levels * levels;
  const double part = double(extent / 15.0f / float(kParts)), count = double(size);
  const double scale = as_bf16(double(covariance) / double(variance) * part);
  const double mean = double(least) + part * double(all) / count;
  return {float(scale), as_bf16(scale * double(levels - 8 * size) / count - mean)};
}

// Quantizes a row to int4. In each run of 32 weights, the first 16 are in the low nibbles; in strips, the
// first 4 of 8.
template <class T>
void round_to_int4(const T* row, int64_t inputs, int64_t group, bool in_strips, uint8_t* to,
                   bf16* scales, bf16* offsets) {
  const int half = in_strips ? 4 : int(kPackedGroup) / 2;
  for (int64_t first = 0; first < inputs; first += group, ++scales, ++offsets) {
    const Fit its = fit(row + first, group);
    from_float(its.scale, scales), from_float(its.offset, offsets);
    const float step = its.scale == 0 ? 1.0f : its.scale;
    for (int64_t k = first; k < first + group; k += kPackedGroup) {
      int8_t levels[kPackedGroup];
      for (int64_t i = 0; i < kPackedGroup; i += W) {
        store_bytes(levels + i, rounded(load(row + k + i) + its.offset, step, -8, 7) + 8);
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
    round_to_int8(from, a.inputs, in_strips, to, static_cast<float*>(a.scales) + row);
    return;
  }
  const int64_t first = row * (a.inputs / a.group);
  round_to_int4(from, a.inputs, a.group, in_strips, to, static_cast<bf16*>(a.scales) + first,
                static_cast<bf16*>(a.offsets) + first);
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
      // Sums of a group fit into 32 bits.
      return a.group >= kPackedGroup && a.group <= kLargestGroup && a.group % kPackedGroup == 0 && a.inputs % a.group == 0;
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
