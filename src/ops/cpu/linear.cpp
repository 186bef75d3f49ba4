// Linear layers that stream their weights once: out[T, N] = x[T, K] * weight[N, K]^T.
//
// Weights stay in the rows of the checkpoint, in their own type, and are widened in registers, so
// what is read from memory is what they take there. A tile is kRows rows of weights against up to
// kTokens tokens, or twice as many rows against one token, so that there are sums enough to hide the
// latency of adding to one. They run along K in one vector accumulator each, in the same order
// whatever else is in the batch, so a token's result does not depend on its company. With AMX,
// bfloat16 goes another way (amx_linear.h).
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "amx_linear.h"
#include "parallel.h"
#include "vector.h"

namespace {

constexpr int kRows = 4;            // rows of weights of a tile
constexpr int kStrip = 2 * kRows;   // of a tile of one token
#if defined(__AVX512F__)
constexpr int kTokens = 6;
#else
constexpr int kTokens = 3;
#endif
constexpr int64_t kPackedGroup = 32;          // int4: weights of 16 bytes, low halves first
constexpr int64_t kActivationBytes = 384 * 1024;  // of tokens that are kept close to a core
constexpr double kBytesPerMicrosecond = 15e3;    // of weights, by one thread
constexpr double kWidenedPerMicrosecond = 2e3;    // inputs
constexpr double kProductsPerMicrosecond = 20e3;  // of a weight and an input

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

// How rows of weights are read: `read` widens kStep of them, from (n, k) on, into vectors, `read_some`
// what is left of a row. Quantized rows are a whole number of steps. kBytes is what a step takes.
template <class T>
struct Dense {
  const T* weights;
  int64_t inputs;
  Dense(const T* weights, int64_t inputs) : weights(weights), inputs(inputs) {}
  Dense(const LinearArgs& a) : Dense(static_cast<const T*>(a.weight), a.inputs) {}
  static constexpr int64_t kStep = W, kBytes = W * int64_t(sizeof(T));
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
  static constexpr int64_t kStep = W, kBytes = W;
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
  static constexpr int64_t kStep = kPackedGroup, kBytes = kPackedGroup / 2;
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

// What becomes of sums of R rows: times a factor, plus a bias, both repeated to fill a vector.
template <int R>
struct Finish {
  static constexpr int kLength = std::max(R, W);
  float scales[kLength], biases[kLength];
  vf operator()(vf sums, int lane) const {
    return sums * load(scales + lane % kLength) + load(biases + lane % kLength);
  }
};

// Sums of R rows of weights, from `row` on, against C tokens, whose floats lie K apart: [C][R].
// Where they come from memory, as many rows from `next` on are fetched meanwhile: several rows at
// once are several streams, and where the next ones begin no prefetcher looks.
template <int R, int C, bool Fetches, class Weights>
void tile(const Weights& w, int64_t row, int64_t next, const float* x, const Finish<R>& finish,
          float* results) {
  constexpr int kVectors = int(Weights::kStep) / W;
  const int64_t inputs = w.inputs, whole = inputs / Weights::kStep * Weights::kStep;
  vf acc[R][C] = {};
  const char* ahead = w.row(next);
  for (int64_t k = 0; k < whole; k += Weights::kStep, ahead += R * Weights::kBytes) {
#pragma GCC unroll 8
    for (int64_t i = 0; Fetches && i < R * Weights::kBytes; i += 64) __builtin_prefetch(ahead + i);
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
    for (int c = 0; c < C; ++c) lanes[c * R + r] = acc[r][c];
  }
  for (int i = 0; i < R * C; i += W) store(results + i, finish(reduce_each(lanes + i, add), i));
}

template <int R, bool Fetches, class Weights>
void tile_tokens(int tokens, const Weights& w, int64_t row, int64_t next, const float* x,
                 const Finish<R>& finish, float* results) {
  switch (tokens) {
    case 1: return tile<R, 1, Fetches>(w, row, next, x, finish, results);
    case 2: return tile<R, 2, Fetches>(w, row, next, x, finish, results);
    case 3: return tile<R, 3, Fetches>(w, row, next, x, finish, results);
#if defined(__AVX512F__)
    case 4: return tile<R, 4, Fetches>(w, row, next, x, finish, results);
    case 5: return tile<R, 5, Fetches>(w, row, next, x, finish, results);
    case 6: return tile<R, 6, Fetches>(w, row, next, x, finish, results);
#endif
  }
}

// Rows [begin, end) of the weights against all tokens; T is what tokens and results are.
template <class Weights, class T>
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
      int64_t n = begin;
      for (; last - first == 1 && n + kStrip <= end; n += kStrip) strip(n, first);
      for (; n + kRows <= end; n += kRows) rows<kRows>(n, first, last);
      for (; n < end; ++n) rows<1>(n, first, last);
    }
  }

 private:
  template <int R>
  using Results = float[(std::max(R * kTokens, kStrip) + W - 1) / W * W];

  template <int R>
  Finish<R> finish_of(int64_t n) const {
    Finish<R> finish;
    for (int i = 0; i < finish.kLength; ++i) {
      finish.scales[i] = w.scale(n + i % R);
      finish.biases[i] = a.bias ? as_float(static_cast<const T*>(a.bias) + n + i % R) : 0.0f;
    }
    return finish;
  }

  // One token.
  void strip(int64_t n, int64_t t) const {
    Results<kStrip> results;
    tile<kStrip, 1, true>(w, n, n + kStrip, x + t * a.inputs, finish_of<kStrip>(n), results);
    put<kStrip>(n, t, 1, results);
  }

  // Tokens [first, last).
  template <int R>
  void rows(int64_t n, int64_t first, int64_t last) const {
    if (std::is_same_v<Weights, Dense<float>> || last - first <= kTokens) {
      return tokens<R, true>(w, n, n, first, last);
    }
    // Widened once for all tokens of the block, to the same floats as in registers.
    thread_local std::vector<float> wide;
    if (int64_t(wide.size()) < R * a.inputs) wide.resize(size_t(R * a.inputs));
    for (int r = 0; r < R; ++r) widen_row(n + r, n + r + R, &wide[r * a.inputs]);
    tokens<R, false>(Dense<float>(wide.data(), a.inputs), 0, n, first, last);
  }

  void widen_row(int64_t row, int64_t next, float* to) const {
    const int64_t whole = a.inputs / Weights::kStep * Weights::kStep;
    const char* ahead = w.row(next);
    for (int64_t k = 0; k < whole; k += Weights::kStep, ahead += Weights::kBytes) {
      __builtin_prefetch(ahead);
      vf v[Weights::kStep / W];
      w.read(row, k, v);
      for (int i = 0; i < Weights::kStep / W; ++i) store(to + k + i * W, v[i]);
    }
    if (whole < a.inputs) {
      float rest[W];
      store(rest, w.read_some(row, whole, a.inputs - whole));
      std::memcpy(to + whole, rest, size_t(a.inputs - whole) * sizeof(float));
    }
  }

  // Rows [row, row + R) of the source, which are outputs from `n` on, against tokens.
  template <int R, bool Fetches, class Source>
  void tokens(const Source& source, int64_t row, int64_t n, int64_t first, int64_t last) const {
    const Finish<R> finish = finish_of<R>(n);
    Results<R> results;
    for (int64_t t = first; t < last; t += kTokens) {
      const int some = int(std::min<int64_t>(kTokens, last - t));
      const float* from = x + t * a.inputs;
      // The others find these rows in a cache.
      if (Fetches && t == first) {
        tile_tokens<R, true>(some, source, row, row + R, from, finish, results);
      } else {
        tile_tokens<R, false>(some, source, row, 0, from, finish, results);
      }
      put<R>(n, t, some, results);
    }
  }

  // [tokens][R] as outputs from (t, n) on.
  template <int R>
  void put(int64_t n, int64_t t, int tokens, const float* results) const {
    T narrow[sizeof(Results<R>) / sizeof(float)];
    for (int i = 0; i < tokens * R; i += W) from_floats(results + i, narrow + i);
    T* to = static_cast<T*>(a.out) + t * a.outputs + n;
    for (int i = 0; i < tokens; ++i) std::memcpy(to + i * a.outputs, narrow + i * R, R * sizeof(T));
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
  // Not by its name below: in another thread that is another vector.
  float* const to = wide.data();
  const double work = double(a.tokens * a.inputs) / kWidenedPerMicrosecond;
  const int64_t parts = a.inputs % W ? 1 : worthwhile_parts(a.threads, work, a.tokens);
  parallel(a.threads, parts, [&](int64_t part) {
    for (int64_t t = a.tokens * part / parts; t < a.tokens * (part + 1) / parts; ++t) {
      convert_row(x + t * a.x_stride, to + t * a.inputs, int(a.inputs));
    }
  });
  return to;
}

template <class Weights, class T>
void run(const LinearArgs& a, const float* x) {
  const int64_t groups = (a.outputs + kRows - 1) / kRows;
  const double outputs = double(a.outputs), products = outputs * double(a.inputs * a.tokens);
  const double work = std::max(double(Weights(a).row_bytes()) * outputs / kBytesPerMicrosecond,
                               products / kProductsPerMicrosecond);
  const int64_t parts = worthwhile_parts(a.threads, work, groups);
  parallel(a.threads, parts, [&](int64_t part) {
    Panel<Weights, T>(a, x).run(groups * part / parts * kRows,
                                std::min(a.outputs, groups * (part + 1) / parts * kRows));
  });
}

template <class T>
Status run_kind(const LinearArgs& a) {
#if defined(SLIPSTREAM_TILES)
  if (uses_tiles(a)) {
    run_tiles(a);
    return kOk;
  }
#endif
  if (a.kind != kInt8 && a.kind != kInt4) {
    if (a.kind != a.dtype) return kBadShape;
    run<Dense<T>, T>(a, activations<T>(a));
    return kOk;
  }
  if (a.inputs % kPackedGroup) return kBadShape;
  if (a.kind == kInt8) {
    run<Int8, T>(a, activations<T>(a));
    return kOk;
  }
  if (a.group < kPackedGroup || a.group % kPackedGroup || a.inputs % a.group) return kBadShape;
  run<Int4, T>(a, activations<T>(a));
  return kOk;
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_linear(const LinearArgs* args) {
  const LinearArgs& a = *args;
  if (a.inputs < 1 || a.outputs < 0 || a.threads < 1) return kBadShape;
  if (a.tokens < 1 || a.outputs == 0) return kOk;
  try {
    switch (a.dtype) {
      case kFloat32: return run_kind<float>(a);
      case kBFloat16: return run_kind<bf16>(a);
      case kFloat16: return run_kind<f16>(a);
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
