// Prefetches the next keys and values while others are computed.
//
// A kv head's rows in a paged cache are short and far apart. Visited head after head, two cores of a Zen
// 4 get 10 to 16 GB/s from memory that delivers 33, and 8 if software prefetches those rows. In memory
// order (all heads of a token, then the next token) they get 26 to 32, with blocks in any order. So
// prefetching follows memory order. Only a few lines are requested at a time: a CPU can have 10 to 24
// requests outstanding, and drops further ones (a Zen 3 seems to) or waits.
//
// Few query rows are computed in memory order too, so prefetching a few keys ahead is enough. Where heads
// are computed one after the other, a whole tile of all heads is prefetched, into L2 because it exceeds
// L1.
#pragma once
#include <algorithm>

#include "attention/tiles.h"

namespace {

// Prefetch distance in keys, in memory order.
#if defined(__AVX512F__)
constexpr int kLead = 16;
#else
constexpr int kLead = 8;
#endif

template <class T>
class ReadAhead {
 public:
  ReadAhead() = default;

  // Prefetches the whole tile `next`, for `kv_heads` heads from that of its offsets on, spread over
  // `visits` calls of visit(). A head's row has `size` elements.
  ReadAhead(const KeyTile& next, const void* keys, const void* values, int size, int kv_heads,
            int64_t visits)
      : runs{{&next, static_cast<const T*>(keys)}, {&next, static_cast<const T*>(values)}},
        row_bytes(int64_t(size) * kv_heads * int64_t(sizeof(T))),
        left((keys == values ? 1 : 2) * count(next) * row_bytes),
        pace((left / 64 + visits - 1) / visits * 64),
        key(next.first) {
    if (left > 0) begin_row();
  }

  // Prefetches kLead keys ahead of the computation: the keys of tile `now`, its values, and the first
  // keys of `next`, if there is one. There are `visits` visits for each key and each value of every head.
  ReadAhead(const KeyTile& now, KeyTile& next, const void* keys, const void* values, int size,
            int kv_heads, int visits)
      : runs{{&now, static_cast<const T*>(keys)},
             {&now, static_cast<const T*>(values)},
             {&next, static_cast<const T*>(keys)}},
        row_bytes(int64_t(size) * kv_heads * int64_t(sizeof(T))),
        pace((int64_t(size) * int64_t(sizeof(T)) / visits + 63) / 64 * 64),
        key(now.first + now.fetched) {
    next.fetched = next.item == nullptr ? 0 : std::min(kLead, count(next));
    left = (2 * count(now) - now.fetched + next.fetched) * row_bytes;
    if (key == now.last) ++run, key = now.first;
    begin_row();
    fetch(std::min(left, (kLead - now.fetched) * row_bytes));
  }

  void visit(int visits) { fetch(std::min(left, visits * pace)); }
  void rest() { fetch(left); }

 private:
  struct Run {
    const KeyTile* tile;
    const T* cache;
  };

  static int count(const KeyTile& tile) { return tile.last - tile.first; }

  void fetch(int64_t bytes) {
    left -= bytes;
    while (bytes > 0) {
      const int64_t size = std::min(bytes, int64_t(row_end - at));
      for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(at + byte, 0, 2);
      at += size, bytes -= size;
      if (at == row_end && (bytes > 0 || left > 0)) next_row();
    }
  }

  void next_row() {
    if (++key == runs[run].tile->last) key = runs[++run].tile->first;
    begin_row();
  }

  void begin_row() {
    at = reinterpret_cast<const char*>(runs[run].cache + runs[run].tile->offsets[key]);
    row_end = at + row_bytes;
  }

  Run runs[3] = {};
  int64_t row_bytes = 0, left = 0, pace = 0;
  int run = 0, key = 0;
  const char *at = nullptr, *row_end = nullptr;
};

}  // namespace
