// Where the queries and keys of an item of attention lie.
#pragma once
#include "read_ahead.h"
#include "work.h"

namespace {

template <class T>
class ItemPlaces {
 public:
  ItemPlaces(const AttentionArgs& args, Plan& plan)
      : a(args),
        plan(plan),
        head_dim(int(args.head_dim)),
        width(padded(head_dim)),
        heads(args.num_heads / args.num_kv_heads),
        token_stride(args.num_kv_heads * args.head_dim) {}

 protected:
  Path path_of(const Item& item) const {
    return choose_path(a, query_len(item.row) * heads, a.seq_lens[item.row]);
  }

  int64_t query_len(int64_t row) const {
    return a.query_start_loc[row + 1] - a.query_start_loc[row];
  }

  int64_t query_position(const Item& item, int row) const {
    if (item.members) return a.seq_lens[member(item, row)] - 1;
    return a.seq_lens[item.row] - query_len(item.row) + (item.first + row) / heads;
  }

  // The batch row of a packed query row of a shared item.
  int32_t member(const Item& item, int row) const {
    return plan.members[size_t(item.member + row / heads)];
  }

  // The token and the query head of a packed query row of an item's kv head.
  void locate(const Item& item, int head, int row, int64_t* token, int64_t* query_head) const {
    *token = item.members ? a.query_start_loc[member(item, row)]
                          : a.query_start_loc[item.row] + (item.first + row) / heads;
    *query_head = (item.kv_head + head) * heads + (item.first + row) % heads;
  }

  const T* query_row(const Item& item, int head, int row) const {
    int64_t token, query_head;
    locate(item, head, row, &token, &query_head);
    return static_cast<const T*>(a.query) + token * a.query_stride + query_head * head_dim;
  }

  // Finds the offsets of keys [first, last) of a tile in the caches.
  void locate_keys(const Item& item, int64_t tile, int first, int last, int64_t* offsets) const {
    int64_t block = (tile + first) / a.block_size, slot = (tile + first) % a.block_size;
    const int32_t* table = a.block_tables + item.row * a.block_table_stride;
    for (int key = first; key < last; ++block, slot = 0) {
      const int end = int(std::min<int64_t>(last, key + a.block_size - slot));
      int64_t offset = (table[block] * a.block_size + slot) * token_stride + item.kv_head * head_dim;
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
  ReadAhead<T> next_tile(const Item& item, int visits, const Scratch& s) const {
    if (s.ahead->item == nullptr) return {};
    return {*s.ahead, a.key_cache, a.value_cache, head_dim, s.ahead->item->kv_heads,
            int64_t(s.now->last - s.now->first) * item.kv_heads * visits};
  }

  const AttentionArgs& a;
  Plan& plan;
  const int head_dim, width;
  const int64_t heads, token_stride;
};

}  // namespace
