// Weights in strips for CPUs without an instruction that multiplies neighbouring inputs into one sum
// (AVX2, early AVX-512). There, registers are scarce.
//
// A strip is processed in chunks of slices that fit into a core's cache. All tokens meet a chunk before
// the next one: in groups of up to kPanelTokens, each against as many vectors of the strip's outputs as
// there are registers for sums. Between chunks, sums are stored in memory, which changes none of their
// bits. So a strip is read from memory once for any number of tokens, and the next chunk is prefetched
// meanwhile.
#pragma once
#include <vector>

#include "projections/weight_strips.h"

#if defined(__AVX2__) && !(defined(__AVX512BF16__) && defined(__AVX512VNNI__))
#define SLIPSTREAM_PANELS 1

namespace {

constexpr int kPanelTokens = 6;
constexpr int64_t kChunkSlices = 128;  // 32 KB
// Cache footprint of a token: its inputs of a chunk, and its sums.
constexpr int64_t kPanelTokenBytes = 1536;

// Number of output vectors that are computed at a time for a group of tokens.
constexpr int panel_vectors(int tokens) {
  if (W == 16) return kStripVectors;  // 32 registers
  return tokens == 1 ? kStripVectors : tokens == 2 ? kStripVectors / 2 : kStripVectors / 4;
}

// `count` slices of a strip from address `at` on; `first` is the index of the first one.
struct Chunk {
  const char* at;
  int64_t first, count;
};

// Prefetches along the current chunk: a single token waits for memory.
struct FetchNear {
  const char* at;
  void next() {
    fetch_slice(at);
    at += kSlice;
  }
};

// Several passes along a chunk share the prefetching of the next one, into L2. Each pass advances by
// `step` bytes per slice, which may be less than a line. Fetching all lines at once would delay the
// products, and so would a branch per slice.
template <int Lines>
struct FetchShare {
  const char* at;
  int64_t step;
  void next() {
#pragma GCC unroll 4
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    at += step;
  }
};

// Kernel has `projection`, the number of `slices` of a strip, and `template <int C, int V, class F>
// add(chunk, strip, token, vector, fetcher, sums)`. `add` adds a chunk's products to the sums of C
// tokens, which are kStripOutputs apart, for V vectors of outputs from `vector` on.
template <class Kernel, class T>
class StripPanels {
 public:
  explicit StripPanels(const Kernel& kernel) : kernel(kernel) {}

  // Computes tokens [begin, end).
  void run(int64_t strip, int64_t begin, int64_t end) const {
    thread_local std::vector<float> memory;
    const int64_t count = end - begin, groups = (count + kPanelTokens - 1) / kPanelTokens;
    if (int64_t(memory.size()) < count * kStripOutputs) memory.resize(size_t(count * kStripOutputs));
    float* const sums = memory.data();
    std::fill_n(sums, count * kStripOutputs, 0.0f);
    const char* at = static_cast<const char*>(kernel.projection.weight) + strip * kernel.slices * kSlice;
    for (int64_t first = 0; first < kernel.slices; first += kChunkSlices) {
      const Chunk chunk{at + first * kSlice, first, std::min(kChunkSlices, kernel.slices - first)};
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t token = count * group / groups, next = count * (group + 1) / groups;
        add_group(chunk, strip, begin + token, int(next - token), group, groups,
                  sums + token * kStripOutputs);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      finish_strip<T>(kernel.projection, strip, begin + t, sums + t * kStripOutputs);
    }
  }

 private:
  void add_group(const Chunk& chunk, int64_t strip, int64_t token, int size, int64_t group,
                 int64_t groups, float* sums) const {
    switch (size) {
      case 1: return add<1>(chunk, strip, token, group, groups, sums);
      case 2: return add<2>(chunk, strip, token, group, groups, sums);
      case 3: return add<3>(chunk, strip, token, group, groups, sums);
      case 4: return add<4>(chunk, strip, token, group, groups, sums);
      case 5: return add<5>(chunk, strip, token, group, groups, sums);
      default: return add<6>(chunk, strip, token, group, groups, sums);
    }
  }

  template <int C>
  void add(const Chunk& chunk, int64_t strip, int64_t token, int64_t group, int64_t groups,
           float* sums) const {
    constexpr int V = panel_vectors(C), kPasses = kStripVectors / V;
    if (kPasses == 1 && groups == 1) {
      const FetchNear near{chunk.at + kFetchedAhead};
      return kernel.template add<C, V>(chunk, strip, token, 0, near, sums);
    }
    const int64_t passes = groups * kPasses;
    if (passes < kSliceLines) {
      pass_along<C, 2>(chunk, strip, token, group * kPasses, passes, sums);
    } else {
      pass_along<C, 1>(chunk, strip, token, group * kPasses, passes, sums);
    }
  }

  // Runs the passes of C tokens; `first` is the number of the first among all `passes` along the chunk.
  template <int C, int Lines>
  void pass_along(const Chunk& chunk, int64_t strip, int64_t token, int64_t first, int64_t passes,
                  float* sums) const {
    constexpr int V = panel_vectors(C);
    const int64_t bytes = chunk.count * kSlice, step = (kSlice + passes - 1) / passes;
    for (int64_t pass = 0; pass < kStripVectors / V; ++pass) {
      const FetchShare<Lines> ahead{chunk.at + bytes + bytes * (first + pass) / passes, step};
      kernel.template add<C, V>(chunk, strip, token, int(pass) * V, ahead, sums + pass * V * W);
    }
  }

  static constexpr int kSliceLines = int(kSlice / 64);

  const Kernel& kernel;
};

// Makes the compiler finish a sum before it begins the next one. Otherwise it would compute all products
// first, for which sixteen registers are too few.
template <class Vector>
inline void finish_first(Vector& sum) {
#if defined(__GNUC__)
  if constexpr (sizeof(Vector) == 32) asm volatile("" : "+x"(sum));
#endif
}

template <int C, int V>
inline void load_sums(vf (&sums)[C][V], const float* from) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[c][v] = load(from + c * kStripOutputs + v * W);
  }
}

template <int C, int V>
inline void store_sums(const vf (&sums)[C][V], float* to) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(to + c * kStripOutputs + v * W, sums[c][v]);
  }
}

}  // namespace
#endif
