// Where the keys and values of an item of attention lie in the caches, and their prefetching.
#pragma once
#include "attention/read_ahead.h"
#include "attention/results.h"

namespace {

// T: element of queries and of the output. C: element of the caches, T or Code.
template <class T, class C>
class ItemPlaces : protected Results<T> {
 public:
  ItemPlaces(const AttentionArgs& args, Plan& plan)
      : Results<T>(args, plan),
        cached(args, head_dim),
        keys_of_cache(static_cast<const C*>(args.key_cache)),
        values_of_cache(static_cast<const C*>(args.value_cache)),
        token_stride(args.num_kv_heads * cached.size) {}

 protected:
  using Results<T>::a, Results<T>::head_dim, Results<T>::heads, Results<T>::query_len;

  Path path_of(const Item& item) const {
    return choose_path(a, query_len(item.row), a.seq_lens[item.row], is_like_one(a, item.row));
  }

  // Finds the offsets of keys [first, last) of a tile in the caches.
  void locate_keys(const Item& item, int64_t tile, int first, int last, int64_t* offsets) const {
    int64_t block = (tile + first) / a.block_size, slot = (tile + first) % a.block_size;
    const int32_t* table = a.block_tables + item.row * a.block_table_stride;
    for (int key = first; key < last; ++block, slot = 0) {
      const int end = int(std::min<int64_t>(last, key + a.block_size - slot));
      int64_t offset = (table[block] * a.block_size + slot) * token_stride + item.kv_head * cached.size;
      for (; key < end; ++key, offset += token_stride) offsets[key] = offset;
    }
  }

  void look_up(const Item& item, int64_t tile, int size, KeyTile& to) const {
    to.item = &item, to.begin = tile, to.fetched = 0;
    to.first = int(std::max<int64_t>(0, item.begin - tile));
    to.last = int(std::min<int64_t>(size, item.end - tile));
    locate_keys(item, tile, to.first, to.last, to.offsets);
    std::fill(to.offsets, to.offsets + to.first, to.offsets[to.first]);
    std::fill(to.offsets + to.last, to.offsets + size, to.offsets[to.last - 1]);
  }

  // Makes a tile the current one, looks it up if that was not done ahead, and looks up the one after it.
  void turn_to(const Item& item, int64_t tile, int size, const Item* next, Scratch& s) const {
    std::swap(s.now, s.ahead);
    if (s.now->item != &item || s.now->begin != tile) look_up(item, tile, size, *s.now);
    if (tile + size < item.end) {
      look_up(item, tile + size, size, *s.ahead);
    } else if (next != nullptr) {
      const int next_size = tile_keys(path_of(*next));
      look_up(*next, next->begin / next_size * next_size, next_size, *s.ahead);
    } else {
      s.ahead->item = nullptr;
    }
  }

  // Prefetches the next tile while this one is computed, in `visits` visits per key.
  ReadAhead<C> next_tile(const Item& item, int visits, const Scratch& s) const {
    if (s.ahead->item == nullptr) return {};
    return {*s.ahead, a.key_cache, a.value_cache, cached.size, s.ahead->item->kv_heads,
            int64_t(s.now->last - s.now->first) * item.kv_heads * visits};
  }

  const CachedRows<C> cached;
  const C *const keys_of_cache, *const values_of_cache;
  const int64_t token_stride;
};

}  // namespace
