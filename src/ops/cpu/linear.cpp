// Linear layers that stream their weights once: out[T, N] = x[T, K] * weight[N, K]^T.
//
// Weights stay in the rows of the checkpoint, in their own type, and are widened in registers, so
// what is read from memory is what they take there. A tile is kRows rows of weights against up to
// kTokens tokens; sums run along K in one vector accumulator each, in the same order whatever else
// is in the batch, so a token's result does not depend on its company.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "parallel.h"
#include "vector.h"

namespace {

constexpr int kRows = 4;  // rows of weights of a tile
#if defined(__AVX512F__)
constexpr int kTokens = 6;
#else
constexpr int kTokens = 3;
#endif
constexpr int64_t kPackedGroup = 32;          // int4: weights of 16 bytes, low halves first
constexpr int64_t kActivationBytes = 384 * 1024;  // of tokens that are kept close to a core
constexpr double kWorkPerThread = 1e5;        // bytes of weights that are worth waking a thread

inline vf widen(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = float(p[i]);
  return v;
#endif
}

// The low (High = false) or high halves of W bytes, 0 to 15.
template <bool High>
inline vf widen_half(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return (vf)_mm512_cvtepi32_ps(High ? _mm512_srli_epi32(wide, 4)
                                     : _mm512_and_si512(wide, _mm512_set1_epi32(15)));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return (vf)_mm256_cvtepi32_ps(High ? _mm256_srli_epi32(wide, 4)
                                     : _mm256_and_si256(wide, _mm256_set1_epi32(15)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = float(High ? p[i] >> 4 : p[i] & 15);
  return v;
#endif
}

// The first `count` of a vector, then zeros.
template <class T>
inline vf load_some(const T* p, int64_t count) {
  T some[W] = {};
  std::memcpy(some, p, size_t(count) * sizeof(T));
  return load(some);
}

// How rows of weights are read: `read` widens kStep of them, from (n, k) on, into vectors, `read_some`
// what is left of a row. Quantized rows are a whole number of steps.
template <class T>
struct Dense {
  const T* weights;
  int64_t inputs;
  Dense(const T* weights, int64_t inputs) : weights(weights), inputs(inputs) {}
  Dense(const LinearArgs& a) : Dense(static_cast<const T*>(a.weight), a.inputs) {}
  static constexpr int64_t kStep = W;
  int64_t row_bytes() const { return inputs * int64_t(sizeof(T)); }
  const char* row(int64_t n) const { return reinterpret_cast<const char*>(weights + n * inputs); }
  void read(int64_t n, int64_t k, vf* v) const { v[0] = load(weights + n * inputs + k); }
  vf read_some(int64_t n, int64_t k, int64_t count) const {
    return load_some(weights + n * inputs + k, count);
  }
  float scale(int64_t) const { return 1.0f; }
};

struct Int8 {  // one scale a row, applied to the sum
  const int8_t* weights;
  const float* scales;
  int64_t inputs;
  Int8(const LinearArgs& a)
      : weights(static_cast<const int8_t*>(a.weight)), scales(a.scales), inputs(a.inputs) {}
  static constexpr int64_t kStep = W;
  int64_t row_bytes() const { return inputs; }
  const char* row(int64_t n) const { return reinterpret_cast<const char*>(weights + n * inputs); }
  void read(int64_t n, int64_t k, vf* v) const { v[0] = widen(weights + n * inputs + k); }
  vf read_some(int64_t, int64_t, int64_t) const { return vf{}; }
  float scale(int64_t n) const { return scales[n]; }
};

struct Int4 {  // one scale for `group` weights of a row, value (q - 8) * scale
  const uint8_t* weights;
  const float* scales;
  int64_t inputs, group, groups;
  Int4(const LinearArgs& a)
      : weights(static_cast<const uint8_t*>(a.weight)),
        scales(a.scales),
        inputs(a.inputs),
        group(a.group),
        groups(a.inputs / a.group) {}
  static constexpr int64_t kStep = kPackedGroup;
  int64_t row_bytes() const { return inputs / 2; }
  const char* row(int64_t n) const {
    return reinterpret_cast<const char*>(weights + n * (inputs / 2));
  }
  void read(int64_t n, int64_t k, vf* v) const {
    const uint8_t* p = weights + (n * inputs + k) / 2;
    const vf factor = splat(scales[n * groups + k / group]), offset = factor * -8.0f;
    constexpr int kHalf = int(kPackedGroup) / 2 / W;
#pragma GCC unroll 4
    for (int i = 0; i < kHalf; ++i) {
      v[i] = widen_half<false>(p + i * W) * factor + offset;
      v[kHalf + i] = widen_half<true>(p + i * W) * factor + offset;
    }
  }
  vf read_some(int64_t, int64_t, int64_t) const { return vf{}; }
  float scale(int64_t) const { return 1.0f; }
};

// Sums of R rows of weights, from `row` on, against C tokens, whose floats lie K apart: [R][C].
template <int R, int C, class Weights>
void tile(const Weights& w, int64_t row, const float* x, float* sums) {
  constexpr int kVectors = int(Weights::kStep) / W;
  const int64_t inputs = w.inputs, whole = inputs / Weights::kStep * Weights::kStep;
  vf acc[R][C] = {};
  for (int64_t k = 0; k < whole; k += Weights::kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      vf v[kVectors];
      w.read(row + r, k, v);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] += v[i] * load(x + c * inputs + k + i * W);
      }
    }
  }
  if (whole < inputs) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf v = w.read_some(row + r, whole, inputs - whole);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r][c] += v * load_some(x + c * inputs + whole, inputs - whole);
      }
    }
  }
  vf lanes[(R * C + W - 1) / W * W] = {};
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) lanes[r * C + c] = acc[r][c];
  }
  for (int i = 0; i < R * C; i += W) store(sums + i, reduce_each(lanes + i, add));
}

template <int R, class Weights>
void tile_tokens(int tokens, const Weights& w, int64_t row, const float* x, float* sums) {
  switch (tokens) {
    case 1: return tile<R, 1>(w, row, x, sums);
    case 2: return tile<R, 2>(w, row, x, sums);
    case 3: return tile<R, 3>(w, row, x, sums);
#if defined(__AVX512F__)
    case 4: return tile<R, 4>(w, row, x, sums);
    case 5: return tile<R, 5>(w, row, x, sums);
    case 6: return tile<R, 6>(w, row, x, sums);
#endif
  }
}

inline void write(const LinearArgs& a, int64_t index, float x) {
  switch (a.dtype) {
    case kFloat32: return from_float(x, static_cast<float*>(a.out) + index);
    case kBFloat16: return from_float(x, static_cast<bf16*>(a.out) + index);
    default: return from_float(x, static_cast<f16*>(a.out) + index);
  }
}

inline float bias(const LinearArgs& a, int64_t n) {
  if (!a.bias) return 0.0f;
  switch (a.dtype) {
    case kFloat32: return as_float(static_cast<const float*>(a.bias) + n);
    case kBFloat16: return as_float(static_cast<const bf16*>(a.bias) + n);
    default: return as_float(static_cast<const f16*>(a.bias) + n);
  }
}

// Rows [begin, end) of the weights against all tokens.
template <class Weights>
class Panel {
 public:
  Panel(const LinearArgs& args, const float* x) : a(args), w(args), x(x) {}

  void run(int64_t begin, int64_t end) const {
    const int64_t row_bytes = int64_t(sizeof(float)) * a.inputs;
    // Weights are read again for every block of tokens, the tokens of a block for every tile.
    const int64_t block =
        std::max<int64_t>(kTokens, kActivationBytes / row_bytes / kTokens * kTokens);
    for (int64_t first = 0; first < a.tokens; first += block) {
      const int64_t last = std::min(a.tokens, first + block);
      for (int64_t n = begin; n < end; n += kRows) {
        prefetch(n + kRows, end);
        rows(n, int(std::min<int64_t>(kRows, end - n)), first, last);
      }
    }
  }

 private:
  // Four rows at once are four streams; the next four begin where no prefetcher looks.
  void prefetch(int64_t n, int64_t end) const {
    for (int64_t r = n; r < std::min(end, n + kRows); ++r) {
      const char* next = w.row(r);
      for (int64_t i = 0; i < std::min<int64_t>(w.row_bytes(), 512); i += 64) {
        __builtin_prefetch(next + i);
      }
    }
  }

  void rows(int64_t n, int count, int64_t first, int64_t last) const {
    if (std::is_same_v<Weights, Dense<float>> || last - first <= kTokens) {
      tokens(w, n, n, count, first, last);
      return;
    }
    // Widened once for all tokens of the block, to the same floats as in registers.
    thread_local std::vector<float> wide;
    if (int64_t(wide.size()) < kRows * a.inputs) wide.resize(size_t(kRows * a.inputs));
    const int64_t whole = a.inputs / Weights::kStep * Weights::kStep;
    for (int r = 0; r < count; ++r) {
      if (whole < a.inputs) {
        float rest[W];
        store(rest, w.read_some(n + r, whole, a.inputs - whole));
        std::memcpy(&wide[r * a.inputs + whole], rest, size_t(a.inputs - whole) * sizeof(float));
      }
      for (int64_t k = 0; k < whole; k += Weights::kStep) {
        vf v[Weights::kStep / W];
        w.read(n + r, k, v);
        for (int i = 0; i < Weights::kStep / W; ++i) store(&wide[r * a.inputs + k + i * W], v[i]);
      }
    }
    tokens(Dense<float>(wide.data(), a.inputs), 0, n, count, first, last);
  }

  template <class Source>
  void tokens(const Source& source, int64_t row, int64_t n, int count, int64_t first,
              int64_t last) const {
    float scales[kRows], biases[kRows], sums[(kRows * kTokens + W - 1) / W * W];
    for (int r = 0; r < count; ++r) scales[r] = w.scale(n + r), biases[r] = bias(a, n + r);
    for (int64_t t = first; t < last; t += kTokens) {
      const int some = int(std::min<int64_t>(kTokens, last - t));
      const float* from = x + t * a.inputs;
      const int together = count == kRows ? kRows : 1;
      for (int begin = 0; begin < count; begin += together) {
        if (together == kRows) {
          tile_tokens<kRows>(some, source, row, from, sums);
        } else {
          tile_tokens<1>(some, source, row + begin, from, sums);
        }
        for (int i = 0; i < together * some; ++i) {
          const int r = begin + i / some;
          write(a, (t + i % some) * a.outputs + n + r, sums[i] * scales[r] + biases[r]);
        }
      }
    }
  }

  const LinearArgs& a;
  const Weights w;
  const float* x;
};

template <class T>
const float* activations(const LinearArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  if constexpr (std::is_same_v<T, float>) {
    if (a.x_stride == a.inputs) return x;
  }
  thread_local std::vector<float> wide;
  // What a row's last vector has too much, the next row overwrites.
  const int64_t floats = a.tokens * a.inputs + W;
  if (int64_t(wide.size()) < floats) wide.resize(size_t(floats));
  for (int64_t t = 0; t < a.tokens; ++t) {
    convert_row(x + t * a.x_stride, wide.data() + t * a.inputs, int(a.inputs));
  }
  return wide.data();
}

template <class Weights>
void run(const LinearArgs& a, const float* x) {
  const int64_t groups = (a.outputs + kRows - 1) / kRows;
  const double work = double(Weights(a).row_bytes()) * double(a.outputs) * double((a.tokens + 15) / 16);
  const int64_t parts = std::clamp<int64_t>(int64_t(work / kWorkPerThread), 1,
                                            std::min(a.threads, groups));
  parallel(int(parts), [&](int part) {
    Panel<Weights>(a, x).run(groups * part / parts * kRows,
                             std::min(a.outputs, groups * (part + 1) / parts * kRows));
  });
}

Status run_kind(const LinearArgs& a, const float* x) {
  switch (a.kind) {
    case kFloat32: run<Dense<float>>(a, x); return kOk;
    case kBFloat16: run<Dense<bf16>>(a, x); return kOk;
    case kFloat16: run<Dense<f16>>(a, x); return kOk;
    case kInt8: run<Int8>(a, x); return kOk;
    case kInt4:
      if (a.group < kPackedGroup || a.group % kPackedGroup || a.inputs % a.group) return kBadShape;
      run<Int4>(a, x);
      return kOk;
    default: return kBadShape;
  }
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_linear(const LinearArgs* args) {
  const LinearArgs& a = *args;
  const bool quantized = a.kind == kInt8 || a.kind == kInt4;
  if (a.inputs < 1 || a.outputs < 0 || a.threads < 1) return kBadShape;
  if (quantized && a.inputs % kPackedGroup) return kBadShape;
  if (a.tokens < 1 || a.outputs == 0) return kOk;
  try {
    switch (a.dtype) {
      case kFloat32: return run_kind(a, activations<float>(a));
      case kBFloat16: return run_kind(a, activations<bf16>(a));
      case kFloat16: return run_kind(a, activations<f16>(a));
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
