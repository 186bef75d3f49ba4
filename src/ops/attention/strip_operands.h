// Operands of strips (strips.h): queries, keys and values in the tiles that products take.
#pragma once
#include "attention/cached_rows.h"
#include "attention/tiles.h"

#if defined(SLIPSTREAM_PAIRS)

namespace {

constexpr int kStrip = 32;                  // query rows of a strip: two tiles
constexpr int kChunks = kMaxHeadDim / kDepth;
constexpr int kScoreTiles = kStep / kTile, kWeightTiles = kStep / kDepth;

// Per-thread operands of one work item.
struct alignas(64) TileScratch {
  bf16 query[kTileRows * kMaxHeadDim];          // tiles [strip][2][chunk of head_dim], rows x depth
  bf16 keys[kStep * kMaxHeadDim];               // tiles [16 keys][chunk], pairs of depth x keys
  bf16 values[kStep * kMaxHeadDim];             // tiles [32 keys][16 of head_dim], pairs of keys x d
  float scores[2][kStrip * kStep];              // tiles [2][16 keys], of a strip and of the next
  bf16 weights[2][kStrip * kStep];              // tiles [2][32 keys], of a strip and of the previous
  int64_t positions[kTileRows];                 // of each query row in its sequence
  const int64_t* offsets;                       // of each key of the step in the caches, in elements
  alignas(64) bf16 ends[kTile][kMaxHeadDim];    // rows padded with zeros to whole chunks
};

// `count` query rows of a kv head, rounded up to whole tiles.
inline int64_t strip_rows(int64_t count) { return (count + kTile - 1) / kTile * kTile; }

inline int chunks_of(int head_dim) { return (head_dim + kDepth - 1) / kDepth; }

// A row of the caches or the queries in whole chunks: the row itself, or a zero-padded copy in `end`.
inline const bf16* whole_chunks(const bf16* row, bf16* end, int head_dim) {
  if (head_dim % kDepth == 0) return row;
  std::memcpy(end, row, size_t(head_dim) * sizeof(bf16));
  std::fill(end + head_dim, end + chunks_of(head_dim) * kDepth, bf16{0});
  return end;
}

inline void pack_query_row(TileScratch& t, const bf16* query, int row, int head_dim) {
  const int chunks = chunks_of(head_dim);
  query = whole_chunks(query, t.ends[0], head_dim);
  bf16* to = t.query + (row / kTile * chunks) * kTileSize + row % kTile * kDepth;
  for (int i = 0; i < chunks; ++i) std::memcpy(to + i * kTileSize, query + i * kDepth, 64);
}

template <class C>
inline void prefetch_row(const C* row, int size) {
  for (int d = 0; d < size; d += 64 / int(sizeof(C))) __builtin_prefetch(row + d);
}

// The row of a key in the cache, in whole chunks of bfloat16; zeros for keys outside of [first, last).
template <class C>
inline const bf16* cached_row(TileScratch& t, const CachedRows<C>& cached, const C* cache, int key,
                              int first, int last) {
  bf16* end = t.ends[key % kTile];
  if (key >= first && key < last) {
    const C* row = cache + t.offsets[key];
    if constexpr (!kIsCoded<C>) {
      return whole_chunks(row, end, cached.head_dim);
    } else {
      cached.round(row, end);
      std::fill(end + cached.head_dim, end + chunks_of(cached.head_dim) * kDepth, bf16{0});
      return end;
    }
  }
  std::fill(end, end + kMaxHeadDim, bf16{0});
  return end;
}

// Bounds of the weight tiles that contain keys [first, last); other tiles are never read.
inline int first_packed(int first) { return first / kDepth * kDepth; }
inline int last_packed(int last) { return (last + kDepth - 1) / kDepth * kDepth; }

// Calls each(kTile) for every kTile keys.
template <class C, class Each>
inline void pack_keys(TileScratch& t, const CachedRows<C>& cached, const C* cache, int first, int last,
                      const Each& each) {
  const int chunks = chunks_of(cached.head_dim);
  bf16* to = t.keys + first_packed(first) / kTile * chunks * kTileSize;
  for (int group = first_packed(first); group < last_packed(last); group += kTile) {
    const bf16* rows[kTile];
    each(kTile);
    for (int i = 0; i < kTile; ++i) {
      rows[i] = cached_row(t, cached, cache, group + i, first, last);
      const int ahead = group + kTile + i;
      if (ahead >= first && ahead < last) prefetch_row(cache + t.offsets[ahead], cached.size);
    }
    for (int chunk = 0; chunk < chunks; ++chunk, to += kTileSize) {
      vf block[kTile];  // pairs of bfloat16, moved without being interpreted
      for (int i = 0; i < kTile; ++i) std::memcpy(&block[i], rows[i] + chunk * kDepth, 64);
      transpose(block);
      for (int i = 0; i < kTile; ++i) std::memcpy(to + i * kDepth, &block[i], 64);
    }
  }
}

// Calls each(2) for every two keys.
template <class C, class Each>
inline void pack_values(TileScratch& t, const CachedRows<C>& cached, const C* cache, int first,
                        int last, const Each& each) {
  const int columns = padded(cached.head_dim) / kTile;
  for (int key = first_packed(first); key < last_packed(last); key += 2) {
    each(2);
    const bf16* even = cached_row(t, cached, cache, key, first, last);
    const bf16* odd = cached_row(t, cached, cache, key + 1, first, last);
    const int ahead = key + kTile;
    if (ahead >= first && ahead + 1 < last) {
      prefetch_row(cache + t.offsets[ahead], cached.size);
      prefetch_row(cache + t.offsets[ahead + 1], cached.size);
    }
    bf16* to = t.values + key / kDepth * columns * kTileSize + key % kDepth / 2 * kDepth;
    for (int column = 0; column < columns; ++column) {
      vh low;
      std::memcpy(&low, even + column * kTile, sizeof low);
      const vu pairs = (vu)load(odd + column * kTile) | __builtin_convertvector(low, vu);
      std::memcpy(to + column * kTileSize, &pairs, sizeof pairs);
    }
  }
}

}  // namespace
#endif
