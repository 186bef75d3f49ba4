// Attention of bfloat16 query rows over vectors that are keys and values in one (AVX512_BF16): the
// absorbed way of latent attention. It reads each vector from memory once, and needs no copy of keys.
//
//   scores: a vector of sums has one lane per query row. A pair of a key's elements is broadcast and
//           multiplied by the same pair of the rows' queries, which lie pair by pair.
//   values: pairs of neighbouring vectors are interleaved, 64 elements of all keys of a step at a time.
//           That stays in L1 and serves all rows.
//
// So products take the least number of instructions, one per 32 multiplications, but for lanes without a
// row. With few rows a vector has 4 or 8 lanes for them, and several pairs of a key beside one another.
//
// A row's result depends only on its own query and keys: steps start at multiples of 128 keys, a masked
// key has weight 0 exactly, and lanes do not mix.
#pragma once
#include "attention/pair_rows.h"
#include "attention/strips.h"

#if defined(SLIPSTREAM_PAIRS)

namespace {

constexpr int kTogether = 8;                   // keys whose scores are summed at once
constexpr int kColumns = 2 * int(kRun);        // elements of values that are interleaved at once
constexpr int kParts = kColumns / kTile;       // vectors of sums of as many elements
// Cache lines of the next keys that are requested per line of 8 keys whose scores are summed, and per pair
// of keys whose values are interleaved. A few at a time: a CPU that gets more waits for them.
constexpr int kFetchedInScores = 5, kFetchedInPairs = 2;
constexpr int kRowsAtOnce = 4;                 // query rows whose values are summed at once

// Per-thread operands of one work item.
struct alignas(64) LatentScratch {
  bf16 query[kTileRows * kMaxHeadDim];         // [groups, vectors, rows, kSome]
  float scores[2][kStep * kTile];              // of two groups: [vectors, rows, kBeside keys]
  bf16 weights[kTileRows * kStep];             // [groups, keys / 2, rows, 2]
  bf16 values[kStep * kColumns];               // [keys / 2, kParts vectors of pairs]
  alignas(64) int32_t ends[kTileRows];         // of each row: number of keys of its sequence that it sees
};

// Query rows of a vector, or 0: not by this kernel. Tiles are faster for many rows.
inline int latent_lanes(const AttentionArgs& a, int64_t packed) {
  if (a.value_dim == 0 || a.cache_kind != kAsQueries || !uses_pairs(a)) return 0;
  if (a.num_kv_heads != 1 || a.head_dim % kDepth != 0) return 0;
#if defined(SLIPSTREAM_TILES)
  if (a.deterministic || packed > 8) return 0;
#endif
  if (a.deterministic || packed > 8) return 16;
  return packed > 4 ? 8 : 4;
}

// Query rows of an item, in groups of `Lanes` rows.
template <int Lanes>
class LatentStep {
 public:
  LatentStep(Scratch& s, LatentScratch& t, int head_dim, int value_dim, float scale)
      : s(s), t(t), head_dim(head_dim), runs((value_dim + int(kRun) - 1) / int(kRun)), scale(scale) {}

  void pack_query_row(const bf16* query, int row) const {
    bf16* to = t.query + row / Lanes * head_dim * Lanes + row % Lanes * kSome;
    for (int d = 0; d < head_dim; d += kSome) std::memcpy(to + d * Lanes, query + d, kSome * sizeof(bf16));
  }

  // Computes `rows` query rows (whole groups) against keys [step, step + last), at `keys`. Calls
  // fetch(lines) on the way.
  template <class Fetch>
  void run(int64_t step, int last, const bf16* const* keys, int rows, const Fetch& fetch) const {
    const int groups = rows / Lanes;
    int seen[kTileRows / Lanes];
    for (int group = 0; group < groups; ++group) {
      const int32_t* ends = t.ends + group * Lanes;
      seen[group] = int(std::clamp<int64_t>(*std::max_element(ends, ends + Lanes) - step, 0, last));
    }
    for (int group = 0; group < groups;) {
      const bool two = Lanes == kTile && group + 1 < groups;
      const int count = two ? std::max(seen[group], seen[group + 1]) : seen[group];
      for (int key = 0; key < count; key += kTogether) {
        const int lines = group == 0 ? kFetchedInScores : 0;
        two ? score<2>(group, key, keys + key, lines, fetch) : score<1>(group, key, keys + key, lines, fetch);
      }
      for (int i = 0; i < (two ? 2 : 1); ++i, ++group) {
        if (seen[group] > 0) softmax(group, t.scores[i], step, seen[group]);
      }
    }
    for (int run = 0; run < runs; run += 2) {
      const int count = std::min(2, runs - run);
      interleave(run, count, last, keys, fetch);
      for (int group = 0; group < groups; ++group) {
        if (seen[group] == 0) continue;
        for (int row = 0; row < Lanes; row += kRowsAtOnce) {
          count == 2 ? weigh<2>(group, row, run, (seen[group] + 1) / 2)
                     : weigh<1>(group, row, run, (seen[group] + 1) / 2);
        }
      }
    }
  }

  // Brings the sums of rows from interleaved order into the elements' order.
  void put_in_order(int rows) const {
    for (int row = 0; row < rows; ++row) put_pairs_in_order(s.out + row * head_dim, runs * int(kRun));
  }

 private:
  // Keys, or pairs of a key, of a row that lie beside one another in a vector.
  static constexpr int kBeside = kTile / Lanes, kSome = 2 * kBeside;

  // As many pairs of a key as lie beside one another, again for each row.
  static vb spread_pairs(const bf16* key) {
    if constexpr (kBeside == 1) {
      return splat_pair(key);
    } else if constexpr (kBeside == 2) {
      int64_t pairs;
      std::memcpy(&pairs, key, sizeof pairs);
      return (vb)_mm512_set1_epi64(pairs);
    } else {
      return (vb)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(key)));
    }
  }

  // One number per row, for all keys of a vector.
  static vf spread_rows(const float* rows) {
    if constexpr (kBeside == 1) return load(rows);
    float all[W];
    for (int i = 0; i < W; ++i) all[i] = rows[i / kBeside];
    return load(all);
  }

  static void store_rows(float* to, vf rows) {
    float all[W];
    store(all, rows);
    for (int i = 0; i < Lanes; ++i) to[i] = all[i * kBeside];
  }

  // Joins the numbers of each row; all of its lanes then have the result.
  template <class F>
  static vf join_rows(vf x, const F& join) {
    if constexpr (kBeside >= 2) x = join(x, (vf)_mm512_permute_ps((__m512)x, 0xb1));
    if constexpr (kBeside == 4) x = join(x, (vf)_mm512_permute_ps((__m512)x, 0x4e));
    return x;
  }

  // Scores of kTogether keys for N groups.
  template <int N, class Fetch>
  void score(int group, int key, const bf16* const* keys, int lines, const Fetch& fetch) const {
    const bf16* const query = t.query + group * head_dim * Lanes;
    const int64_t apart = int64_t(head_dim) * Lanes;
    vf sums[N][kTogether] = {};
    const bf16* at[kTogether];
    for (int i = 0; i < kTogether; ++i) at[i] = keys[i];
    for (int64_t line = 0; line < head_dim; line += kRun) {
      fetch(lines);
      for (int64_t d = line; d < line + kRun; d += kSome) {
        vb rows[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) rows[n] = load_run(query + n * apart + d * Lanes);
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) {
          const vb pairs = spread_pairs(at[i] + d);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) sums[n][i] = add_pairs(sums[n][i], rows[n], pairs);
        }
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* to = t.scores[n] + key * Lanes;
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; i += kBeside, to += W) store(to, keys_beside(sums[n] + i) * scale);
    }
  }

  // The sums of kBeside keys beside one another.
  static vf keys_beside(const vf* sums) {
    if constexpr (kBeside == 1) return sums[0];
    if constexpr (kBeside == 2) return halves<1>(sums[0], sums[1]);
    if constexpr (kBeside == 4) return halves<1>(halves<2>(sums[0], sums[2]), halves<2>(sums[1], sums[3]));
  }

  template <int H>
  static vf halves(vf a, vf b) {
    return exchange<H, false>(a, b) + exchange<H, true>(a, b);
  }

  // Turns scores of `count` keys into weights, updates maximum and sum, and rescales what is summed.
  void softmax(int group, float* scores, int64_t step, int count) const {
    const int first = group * Lanes;
    const int32_t* const ends = t.ends + first;
    const int vectors = (count + kSome - 1) / kSome * 2;
    if (*std::min_element(ends, ends + Lanes) < step + vectors * kBeside) mask(scores, ends, step, vectors);
    vf highest = splat(-kInfinity);
    for (int i = 0; i < vectors; ++i) highest = larger(load(scores + i * W), highest);
    const vf before = spread_rows(s.maximum + first);
    const vf now = larger(join_rows(highest, larger), before);
    const vf rescale = before == -kInfinity ? splat(0.0f) : exponential(before - now);
    const vf shift = (now == -kInfinity ? splat(0.0f) : now) * kLog2E;
    const vf one = (vf)(vu{} + 0x3f803f80u);  // pairs of bfloat16 1.0
    bf16* to = t.weights + first * kStep;
    vf total = {};
    for (int i = 0; i < vectors; i += 2, to += kRun) {
      const vf a = power_of_two(load(scores + i * W) * kLog2E - shift);
      const vf b = power_of_two(load(scores + i * W + W) * kLog2E - shift);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      const __m512i pairs = (__m512i)_mm512_permutexvar_epi16(_mm512_load_si512(kPairing.words), both);
      std::memcpy(to, &pairs, sizeof pairs);
      // Sum the rounded weights, so that they add up to 1 after the division.
      total = add_pairs(total, (vb)pairs, (vb)one);
    }
    store_rows(s.maximum + first, now);
    store_rows(s.rescale + first, rescale);
    float totals[W];
    store(totals, total);
    for (int row = first; row < first + Lanes; ++row) {
      const float factor = s.rescale[row];
      s.sum[row] *= factor;
      for (int i = row - first; i < W; i += Lanes) s.sum[row] += totals[i];
      if (factor == 1.0f) continue;
      float* out = s.out + row * head_dim;
      for (int d = 0; d < runs * int(kRun); d += W) store(out + d, load(out + d) * factor);
    }
  }

  static void mask(float* scores, const int32_t* ends, int64_t step, int vectors) {
    int32_t left[W];
    for (int i = 0; i < W; ++i) left[i] = int32_t(ends[i / kBeside] - step) - i % kBeside;
    vi limits;
    std::memcpy(&limits, left, sizeof left);
    for (int i = 0; i < vectors; ++i) {
      const vf x = load(scores + i * W);
      store(scores + i * W, limits > i * kBeside ? x : splat(-kInfinity));
    }
  }

  // Interleaves `count` runs of 32 elements of the values of `last` keys, in whole pairs of keys.
  template <class Fetch>
  void interleave(int run, int count, int last, const bf16* const* keys, const Fetch& fetch) const {
    static constexpr bf16 kZeros[kRun] = {};
    const int pairs = (last + 1) / 2;
    for (int pair = 0; pair < pairs; ++pair) {
      fetch(kFetchedInPairs);
      for (int i = 0; i < count; ++i) {
        const int d = (run + i) * int(kRun);
        const bf16* odd = 2 * pair + 1 < last ? keys[2 * pair + 1] + d : kZeros;
        const Interleaved some(keys[2 * pair] + d, odd);
        bf16* to = t.values + (pair * kParts + 2 * i) * kRun;
        std::memcpy(to, &some.low, sizeof some.low);
        std::memcpy(to + kRun, &some.high, sizeof some.high);
      }
    }
  }

  // Adds weighted values of `pairs` pairs of keys, N runs of elements, for kRowsAtOnce rows.
  template <int N>
  void weigh(int group, int row, int run, int pairs) const {
    float* out = s.out + (group * Lanes + row) * head_dim + run * int(kRun);
    const bf16* weights = t.weights + group * Lanes * kStep + row * 2;
    vf sums[kRowsAtOnce][2 * N];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 2 * N; ++i) sums[r][i] = load(out + r * head_dim + i * W);
    }
    for (int pair = 0; pair < pairs; ++pair) {
      vb values[2 * N];
#pragma GCC unroll 4
      for (int i = 0; i < 2 * N; ++i) values[i] = load_run(t.values + (pair * kParts + i) * kRun);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const vb weight = splat_pair(weights + pair * 2 * Lanes + r * 2);
#pragma GCC unroll 4
        for (int i = 0; i < 2 * N; ++i) sums[r][i] = add_pairs(sums[r][i], values[i], weight);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 2 * N; ++i) store(out + r * head_dim + i * W, sums[r][i]);
    }
  }

  // Brings the keys of two vectors into the order [pairs of keys, rows, 2].
  struct Pairing {
    alignas(64) uint16_t words[kRun] = {};
    constexpr Pairing() {
      for (int i = 0; i < int(kRun); ++i) {
        const int key = i / (2 * Lanes) * 2 + i % 2, row = i / 2 % Lanes;
        words[i] = uint16_t(key / kBeside * W + row * kBeside + key % kBeside);
      }
    }
  };
  static constexpr Pairing kPairing{};
  static constexpr float kLog2E = 1.44269504088896341f;

  Scratch& s;
  LatentScratch& t;
  const int head_dim, runs;
  const float scale;
};

}  // namespace
#endif
