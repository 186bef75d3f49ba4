// Gumbel-max sampling over Philox4x32-10, see gumbel_argmax.py for the definition.
//
// A token can only win if its noise exceeds best - logit / T. The noise is below -log(w) for its uniform
// w, so w < exp(logit / T - best) is necessary. All tokens are screened with vectors (even Philox is
// skipped where no noise could suffice), and only the few survivors need two logarithms in double
// precision.
#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr float kGreedyBelow = 1e-5f;
constexpr int64_t kNoChoice = -1;  // NO_TOKEN of gumbel_argmax.py
constexpr double kLogitsPerMicrosecond = 1600;
constexpr double kHighestNoise = 22.88;  // -log(2**-33) = 22.874

constexpr int L = W / 2;  // counters computed at once, one per 64-bit lane
typedef uint64_t vq __attribute__((vector_size(L * 8)));

// Product of the lower 32 bits of each lane.
inline vq multiply_low(vq a, vq b) {
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vq)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Words of L consecutive counters (position, group + lane); only the lower 32 bits of a lane are used.
inline void philox(uint64_t seed, uint64_t position, vq group, vq* words) {
  vq c0 = vq{} + (position & 0xffffffffu), c1 = vq{} + (position >> 32);
  vq c2 = group & 0xffffffffu, c3 = group >> 32;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  const vq m0 = vq{} + kMultiplier0, m1 = vq{} + kMultiplier1;
  for (int round = 0; round < 10; ++round) {
    const vq p0 = multiply_low(c0, m0), p1 = multiply_low(c2, m1);
    c0 = (p1 >> 32) ^ c1 ^ uint64_t(k0);
    c2 = (p0 >> 32) ^ c3 ^ uint64_t(k1);
    c1 = p1;
    c3 = p0;
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

inline double noise(uint32_t word) {
  const float rounded = float((double(word) + 0.5) * 0x1p-32);
  const double uniform = std::min(rounded, 1.0f - 0x1p-24f);
  return -std::log(-std::log1p(-uniform));
}

uint32_t random_word(uint64_t seed, uint64_t position, int64_t token) {
  vq words[4];
  philox(seed, position, vq{} + uint64_t(token / 4), words);
  return uint32_t(words[token % 4][0]);
}

// The lowest index of the maximum; kNoChoice if there is a NaN or +inf, or only -inf.
int64_t highest(const float* logits, int64_t n) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  vf best = splat(-kInfinity);
  vi numbers = best == best;  // lanes without a NaN so far
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vf some = load(logits + i);
    numbers &= some == some;
    best = maximum(some, best);
  }
  float top = reduce(best, maximum);
  bool has_nan = false;
  for (int lane = 0; lane < W; ++lane) has_nan |= numbers[lane] == 0;
  for (; i < n; ++i) {
    has_nan |= logits[i] != logits[i];
    top = logits[i] > top ? logits[i] : top;
  }
  if (has_nan || top == kInfinity || top == -kInfinity) return kNoChoice;
  for (i = 0; i + W <= n; i += W) {
    const vi hit = load(logits + i) == top;
    int32_t any = 0;
    for (int lane = 0; lane < W; ++lane) any |= hit[lane];
    if (any) break;
  }
  while (i < n && logits[i] != top) ++i;
  return i;
}

struct Sampler {
  const float* logits;
  int64_t n;
  uint64_t seed, position;
  double temperature;
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = 0;

  void consider(int64_t candidate, uint32_t word) {
    const double score = double(logits[candidate]) / temperature + noise(word);
    if (score > best || (score == best && candidate < token)) {
      best = score;
      token = candidate;
    }
  }

  // Screens 4 * L = 2 * W tokens from `start` on, all of which exist.
  void screen(int64_t start, float factor) {
    const vf low = load(logits + start), high = load(logits + start + W);
    // The margin covers float rounding, so that the screen never drops a winner.
    const float bound = float(best) - 1e-3f - 1e-5f * std::fabs(float(best));
    // Compare separately: the maximum of a number and NaN may be either.
    const float least = bound - float(kHighestNoise);
    const vi hopeful = (low * factor > least) | (high * factor > least);
    if (!any(hopeful)) return;
    vq words[4], group;
    for (int lane = 0; lane < L; ++lane) group[lane] = uint64_t(start / 4 + lane);
    philox(seed, position, group, words);
    alignas(64) uint32_t bits[2 * W];
    for (int lane = 0; lane < L; ++lane) {
      for (int word = 0; word < 4; ++word) bits[lane * 4 + word] = uint32_t(words[word][lane]);
    }
    const vi first = passes(low * factor - bound, bits), second = passes(high * factor - bound, bits + W);
    if (!any(first | second)) return;
    for (int i = 0; i < 2 * W; ++i) {
      if (i < W ? first[i] : second[i - W]) consider(start + i, bits[i]);
    }
  }

  static bool any(vi mask) {
    uint64_t parts[sizeof(vi) / 8], all = 0;
    std::memcpy(parts, &mask, sizeof mask);
    for (uint64_t part : parts) all |= part;
    return all != 0;
  }

  // Whether w < exp(gap), with w from the bits rounded down and the exponential capped.
  static vi passes(vf gap, const uint32_t* bits) {
    vu words;
    std::memcpy(&words, bits, sizeof words);
    const vf uniform = __builtin_convertvector((vi)(words >> 8), vf) * 0x1p-24f;
    const vf capped = gap > 1.0f ? splat(1.0f) : gap;
    return uniform <= exponential(capped);
  }

  int64_t run() {
    const int64_t top = highest(logits, n);
    if (top == kNoChoice) return kNoChoice;
    token = top;
    if (temperature < double(kGreedyBelow)) return top;
    consider(top, random_word(seed, position, top));
    const float factor = float(1.0 / temperature);
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) screen(i, factor);
    for (; i < n; ++i) {
      if (logits[i] > -std::numeric_limits<float>::infinity()) {
        consider(i, random_word(seed, position, i));
      }
    }
    return token;
  }
};

}  // namespace

SLIPSTREAM_EXPORT int slipstream_gumbel_argmax(const GumbelArgs* args) {
  const GumbelArgs& a = *args;
  const double work = double(a.rows * a.vocab_size) / kLogitsPerMicrosecond;
  const int64_t parts = worthwhile_parts(a.threads, work, a.rows);
  parallel(a.threads, parts, [&](int64_t part) {
    for (int64_t row = a.rows * part / parts; row < a.rows * (part + 1) / parts; ++row) {
      Sampler sampler{a.logits + row * a.logits_stride, a.vocab_size, uint64_t(a.seeds[row]),
                      uint64_t(a.positions[row]), double(a.temperatures[row])};
      a.tokens[row] = sampler.run();
    }
  });
  return kOk;
}

// The random bits alone, for the known-answer test: 4 words of counter {c0, c1, c2, c3}.
SLIPSTREAM_EXPORT void slipstream_philox(uint64_t seed, uint64_t position, uint64_t group,
                                         uint32_t* words) {
  vq result[4];
  philox(seed, position, vq{} + group, result);
  for (int word = 0; word < 4; ++word) words[word] = uint32_t(result[word][0]);
}
