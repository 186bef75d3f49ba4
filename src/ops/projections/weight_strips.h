// Weights packed in strips of kStripOutputs outputs, for instructions that multiply neighbouring inputs.
// A slice of a strip has the weights of a few neighbouring inputs for each of the outputs. So nothing is
// shuffled, each lane sums one output and lanes are never reduced. A strip is read sequentially, for few
// and for many tokens.
#pragma once
#include <algorithm>
#include <cstring>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "projections/weights.h"

namespace {

constexpr int kStripVectors = kStripOutputs / W;
constexpr int64_t kSlice = kStripOutputs * 4;  // bytes
constexpr int64_t kTokensOfAPiece = 24;        // minimal number of tokens of a thread's piece of work
constexpr int64_t kCloseTokenBytes = 384 * 1024;

// Whether scales are of outputs and applied at the end.
inline bool scales_outputs(const LinearArgs& a) { return a.kind == kInt8Strips && a.group == 0; }

// Finishes W sums of a token.
template <class T>
inline void finish(const LinearArgs& a, const float* sums, const float* scales,
                   const T* bias, T* to) {
  vf results = load(sums);
  if (scales_outputs(a)) results = results * load(scales);
  if (a.bias != nullptr) results = results + load(bias);
  float wide[W];
  store(wide, results);
  from_floats(wide, to);
}

// Finishes the sums of a token and a strip.
template <class T>
inline void finish_strip(const LinearArgs& a, int64_t strip, int64_t token, const float* sums) {
  int64_t n = strip * kStripOutputs;
  const int64_t end = std::min(a.outputs, n + kStripOutputs);
  const float* scales = static_cast<const float*>(a.scales);
  const T* bias = static_cast<const T*>(a.bias);
  T* const to = static_cast<T*>(a.out) + token * a.outputs;
  for (; n + W <= end; n += W, sums += W) finish(a, sums, scales + n, bias + n, to + n);
  if (n == end) return;
  float some_scales[W] = {};
  T some_bias[W] = {}, some[W];
  const size_t rest = size_t(end - n);
  if (scales_outputs(a)) std::memcpy(some_scales, scales + n, rest * sizeof(float));
  if (bias != nullptr) std::memcpy(some_bias, bias + n, rest * sizeof(T));
  finish(a, sums, some_scales, some_bias, some);
  std::memcpy(to + n, some, rest * sizeof(T));
}

// Throughput of one thread per microsecond: bytes of weights, and products.
struct Speed {
  double bytes, products;
};

// A thread's part should take about so long at most, so that threads finish together.
constexpr double kPartMicroseconds = 2;

// Calls run(strip, first token, last token) for all work, on as many threads as are worthwhile.
template <class Run>
void over_strips(const LinearArgs& a, double weight_bytes, int64_t token_bytes, Speed speed,
                 const Run& run) {
  const double products = double(a.outputs * a.inputs) * double(a.tokens);
  const double work = std::max(weight_bytes / speed.bytes, products / speed.products);
  const int64_t strips = (a.outputs + kStripOutputs - 1) / kStripOutputs;
  // Tokens are split where all of them would not stay in a core's cache from strip to strip, and where
  // there are too few strips for all threads.
  const int64_t close = (a.tokens * token_bytes + kCloseTokenBytes - 1) / kCloseTokenBytes;
  const int64_t spread = (4 * a.threads + strips - 1) / strips;
  const int64_t most = std::max<int64_t>(1, a.tokens / kTokensOfAPiece);
  const int64_t ranges = std::min(most, std::max(close, spread));
  const int64_t pieces = strips * ranges;
  int64_t parts = worthwhile_parts(a.threads, work, pieces);
  if (parts > 1) parts = std::clamp(int64_t(work / kPartMicroseconds), parts, pieces);
  parallel_along(a.threads, parts, [&](int64_t part) {
    for (int64_t i = pieces * part / parts; i < pieces * (part + 1) / parts; ++i) {
      const int64_t range = i / strips;
      run(i % strips, a.tokens * range / ranges, a.tokens * (range + 1) / ranges);
    }
  });
}

// Packs kStripOutputs rows of `words` words as a strip of `words` slices, in place. `scratch` has room
// for all of them.
inline void lay_out_strip(uint32_t* rows, int64_t words, uint32_t* scratch) {
  const int64_t whole = words / W * W;
  for (int64_t k = 0; k < whole; k += W) {
    for (int n = 0; n < kStripOutputs; n += W) {
      vf block[W];  // words, moved without being interpreted
      for (int i = 0; i < W; ++i) std::memcpy(&block[i], rows + (n + i) * words + k, sizeof(vf));
      transpose(block);
      for (int i = 0; i < W; ++i) {
        std::memcpy(scratch + (k + i) * kStripOutputs + n, &block[i], sizeof(vf));
      }
    }
  }
  for (int64_t k = whole; k < words; ++k) {
    for (int n = 0; n < kStripOutputs; ++n) scratch[k * kStripOutputs + n] = rows[n * words + k];
  }
  std::memcpy(rows, scratch, size_t(words) * kSlice);
}

constexpr int64_t kFetchedAhead = kPage;  // bytes

inline void fetch_slice(const void* slice) {
  if (!begins_page(slice)) return;
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSlice; i += 64) {
    __builtin_prefetch(static_cast<const char*>(slice) + i, 0, 2);
  }
}

#if defined(__AVX512F__)

constexpr int kStripTokens = 6;  // tokens of a tile

// What a tile prefetches: weights further along its own strip, or (with other tiles on the same strip) its
// share of the next strip.
enum Fetches { kAlong, kByShares };

// A token group's share of the next strip; it is prefetched in step with the current strip.
struct Ahead {
  const char* from;
  int64_t group, groups;
  void fetch_share(int64_t begin, int64_t bytes) const {
    const int64_t end = begin + bytes * (group + 1) / groups;
    for (int64_t i = begin + bytes * group / groups; i < end; i += 64) {
      _mm_prefetch(from + i, _MM_HINT_T1);
    }
  }
};

template <Fetches How>
inline void fetch_slice(const void* slice) {
  if (How == kAlong) fetch_slice(slice);
}

// Computes tokens of a strip in tiles of up to kStripTokens. Tiles has `projection`, `strip_at(strip)`
// and `template <int C, Fetches How> tile(strip, token, ahead)`, which computes C tokens.
template <class Tiles>
class StripTiles {
 public:
  // Computes tokens [begin, end).
  void run(int64_t strip, int64_t begin, int64_t end) const {
    const int64_t count = end - begin, groups = (count + kStripTokens - 1) / kStripTokens;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t token = begin + count * group / groups;
      const Ahead ahead{self().strip_at(strip + 1), group, groups};
      switch (begin + count * (group + 1) / groups - token) {
        case 1: tile<1>(strip, token, ahead); break;
        case 2: tile<2>(strip, token, ahead); break;
        case 3: tile<3>(strip, token, ahead); break;
        case 4: tile<4>(strip, token, ahead); break;
        case 5: tile<5>(strip, token, ahead); break;
        default: tile<6>(strip, token, ahead);
      }
    }
  }

 private:
  const Tiles& self() const { return static_cast<const Tiles&>(*this); }

  template <int C>
  void tile(int64_t strip, int64_t token, const Ahead& ahead) const {
    if (ahead.groups > 1) return self().template tile<C, kByShares>(strip, token, ahead);
    self().template tile<C, kAlong>(strip, token, ahead);
  }
};

#endif

}  // namespace
