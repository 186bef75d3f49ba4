// Keys and values of the tile that is next, fetched while one is computed.
//
// A kv head's rows of a paged cache are short and far apart: visited head after head, two cores of a
// Zen 4 get 10 to 16 GB/s out of memory that gives 33, and 8 if software fetches those rows. In the
// order in which they lie, all heads of a token and then the next token, they get 26 to 32, blocks in
// any order. So that is the order here, whatever the order in which heads are computed. A few lines
// are asked for with every key that is computed, for all at once keep what is computed waiting; and
// only as far as the second level, for misses of the first are few at a time, and a tile of all heads
// is more than it holds.
#pragma once
#include <algorithm>

#include "tiles.h"

namespace {

template <class T>
class ReadAhead {
 public:
  ReadAhead() = default;

  // Of `kv_heads` heads from that on to which the tile's offsets lead; spread over so many visits.
  ReadAhead(const KeyTile& tile, const void* keys, const void* values, int head_dim, int kv_heads,
            int64_t visits)
      : tile(&tile),
        caches{static_cast<const T*>(keys), static_cast<const T*>(values)},
        row_bytes(int64_t(head_dim) * kv_heads * int64_t(sizeof(T))),
        left(2 * (tile.last - tile.first) * row_bytes),
        pace((left / 64 + visits - 1) / visits * 64),
        key(tile.first) {
    if (left > 0) begin_row();
  }

  void visit(int visits) { fetch(std::min(left, visits * pace)); }
  void rest() { fetch(left); }

 private:
  void fetch(int64_t bytes) {
    left -= bytes;
    while (bytes > 0) {
      const int64_t run = std::min(bytes, int64_t(row_end - at));
      for (int64_t byte = 0; byte < run; byte += 64) __builtin_prefetch(at + byte, 0, 2);
      at += run, bytes -= run;
      if (at == row_end) next_row();
    }
  }

  void next_row() {
    if (++key == tile->last) key = tile->first, ++cache;
    if (cache < 2) begin_row();
  }

  void begin_row() {
    at = reinterpret_cast<const char*>(caches[cache] + tile->offsets[key]);
    row_end = at + row_bytes;
  }

  const KeyTile* tile = nullptr;
  const T* caches[2] = {};
  int64_t row_bytes = 0, left = 0, pace = 0;
  int key = 0, cache = 0;
  const char *at = nullptr, *row_end = nullptr;
};

}  // namespace
