// Computes the items of one attention call: the code paths, and how their sums become output.
#pragma once
#include <memory>

#include "attention/code_tables.h"
#include "attention/item_places.h"
#include "attention/pair_rows.h"

namespace {

// T: element of queries and of the output. C: element of the caches, T or Code.
template <class T, class C>
class Attention : ItemPlaces<T, C> {
  using Places = ItemPlaces<T, C>;
  using Places::a, Places::head_dim, Places::width, Places::cached, Places::token_stride;
  using Places::keys_of_cache, Places::values_of_cache;
  using Places::path_of, Places::query_position, Places::query_row, Places::turn_to, Places::next_tile;
  using Places::begin_sums, Places::fold, Places::finish;

 public:
  using Places::Places;

  void write_cache(int64_t begin, int64_t end) const {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = a.slot_mapping[token];
      if (slot < 0) continue;
      cached.put(static_cast<const T*>(a.key) + token * a.key_stride, a.num_kv_heads,
                 static_cast<C*>(a.key_cache) + slot * token_stride);
      cached.put(static_cast<const T*>(a.value) + token * a.value_stride, a.num_kv_heads,
                 static_cast<C*>(a.value_cache) + slot * token_stride);
    }
  }

  // `next` is the item that this thread runs afterwards, or null; its first keys are prefetched.
  void run(const Item& item, const Item* next, Scratch& s) const {
    const Path path = path_of(item);
#if defined(SLIPSTREAM_PAIRS)
    if constexpr (std::is_same_v<T, bf16>) {
      if constexpr (!kIsCoded<C>) {
        if (path.lanes == 4) return run_latents<4>(item, next, path, s);
        if (path.lanes == 8) return run_latents<8>(item, next, path, s);
        if (path.lanes == 16) return run_latents<16>(item, next, path, s);
      }
      if (path.strips) return run_strips(item, next, path, s);
      if (path.pairs) return run_pairs(item, next, s);
    }
#endif
    if (path.few) return run_dots(item, next, s);
    start(item, path.dot, s);
    begin_sums(0, item.count, s);
    bool folded = false;
    for (int64_t tile = item.begin / kKeys * kKeys; tile < item.end; tile += kKeys) {
      if (tile > item.begin && tile % path.fold == 0) fold(item, item.count, s, folded);
      turn_to(item, tile, kKeys, next, s);
      ReadAhead<C> ahead = path.dot ? next_tile(item, 1, s) : ReadAhead<C>();
      const int64_t* offsets = s.now->offsets;
      const int first = s.now->first, last = s.now->last;
      copy_values(s, first, last);
      if (path.dot) {
        for (int key = first / W * W; key < last; key += W) {
          const float* rows[W];
          widen(keys_of_cache, key, key + W, s, s.keys, rows);
          dot_scores(s, rows, 0, item.count, width, key, [](int) {});
        }
      } else {
        pack_keys(s.keys, head_dim, first, last, [&](int key, float* row) {
          cached.widen(keys_of_cache + offsets[key], row);
        });
        multiply<false>(s.query, width, s.keys, kKeys, s.scores, kKeys, item.count, kKeys, head_dim,
                        s.rescale);
      }
      softmax(item, tile, 0, s);
      multiply<true>(s.scores, kKeys, s.values, width, s.out, width, item.count, width, kKeys,
                     s.rescale);
      ahead.rest();
    }
    finish(item, item.count, s, folded);
  }

 private:
  // Few query rows: visits all kv heads of an item in the memory order of keys and values. `offset` leads
  // from the tile's offsets to a head. score(row, offset, key, each) writes the scores of keys [key, key
  // + Scored) for the head's query rows from `row` on. begin(rows) prepares a tile's weights. weigh(row,
  // offset, key, end, each) adds the weighted values of these keys to the sums, Weighed keys for one
  // head, then for the next; `key` is a multiple of Beside.
  template <int Scored, int Weighed, int Beside, class Score, class Begin, class Weigh>
  void run_few(const Item& item, const Item* next, Scratch& s, const Score& score, const Begin& begin,
               const Weigh& weigh) const {
    const int rows = item.count * item.kv_heads;
    begin_sums(0, rows, s);
    for (int64_t tile = item.begin / kKeys * kKeys; tile < item.end; tile += kKeys) {
      turn_to(item, tile, kKeys, next, s);
      const int first = s.now->first, last = s.now->last;
      ReadAhead<C> ahead(*s.now, *s.ahead, a.key_cache, a.value_cache, cached.size, item.kv_heads,
                         blocks_of(item.count));
      const auto each = [&](int visits) { ahead.visit(visits); };
      for (int key = first / Scored * Scored; key < last; key += Scored) {
        for (int head = 0; head < item.kv_heads; ++head) {
          score(head * item.count, head * cached.size, key, each);
        }
      }
      for (int head = 0; head < item.kv_heads; ++head) softmax(item, tile, head * item.count, s);
      rescale(rows, s);
      begin(rows);
      const int stop = (last + Beside - 1) / Beside * Beside;
      for (int key = first / Beside * Beside, end; key < stop; key = end) {
        end = std::min(stop, key + Weighed);
        for (int head = 0; head < item.kv_heads; ++head) {
          weigh(head * item.count, head * cached.size, key, end, each);
        }
      }
      ahead.rest();
    }
  }

  // find(offset, key, end) returns pointers to values. Their elements, and those of the sums, are in the
  // order of load_two().
  template <int Weighed, class Score, class Find>
  void run_dots(const Item& item, const Item* next, Scratch& s, const Score& score,
                const Find& find) const {
    run_few<W, Weighed, 1>(
        item, next, s, score, [](int) {},
        [&](int row, int offset, int key, int end, const auto& each) {
          weigh_values(s, find(offset, key, end), row, item.count, width, key, end, each);
        });
    // An item of few query rows is one split, so nothing was folded.
    for (int row = 0; row < item.count * item.kv_heads; ++row) {
      put_in_order<C>(s.out + row * width, head_dim);
    }
    finish(item, item.count, s, false);
  }

  void run_dots(const Item& item, const Item* next, Scratch& s) const {
    start(item, true, s);
    const C *const keys = keys_of_cache, *const values = values_of_cache;
    if constexpr (!kIsCoded<C>) {
      // Few query rows widen keys and values at each use; many widen them once, into a buffer.
      if (head_dim == width && (std::is_same_v<T, float> || item.count <= kWidening)) {
        const auto score = [&](int row, int offset, int key, const auto& each) {
          const C* rows[W];
          point_to_rows(keys + offset, key, key + W, s, rows);
          dot_scores(s, rows, row, item.count, width, key, each);
        };
        const C* rows[kWeighed];
        return run_dots<kWeighed>(item, next, s, score, [&](int offset, int key, int end) {
          return point_to_rows(values + offset, key, end, s, rows);
        });
      }
    }
    const auto score = [&](int row, int offset, int key, const auto& each) {
      const float* rows[W];
      widen(keys + offset, key, key + W, s, s.keys, rows);
      dot_scores(s, rows, row, item.count, width, key, each);
    };
    const float* rows[kWidened];
    run_dots<kWidened>(item, next, s, score, [&](int offset, int key, int end) {
      return widen(values + offset, key, end, s, s.values, rows);
    });
  }

#if defined(SLIPSTREAM_PAIRS)
  void run_pairs(const Item& item, const Item* next, Scratch& s) const {
    if (item.count == 1) return run_pairs<1>(item, next, s);
    if (item.count == 2) return run_pairs<2>(item, next, s);
    run_pairs<4>(item, next, s);
  }

  // Computes R query rows of a kv head at a time; the larger R, the fewer keys at a time.
  template <int R>
  void run_pairs(const Item& item, const Item* next, Scratch& s) const {
    alignas(64) bf16 queries[kGemmRows * kMaxHeadDim];
    alignas(64) bf16 weights[kGemmRows * kKeys];
    const int rows = item.count * item.kv_heads;
    for (int row = 0; row < rows; ++row) {
      std::memcpy(queries + row * head_dim, query_row(item, row / item.count, row % item.count),
                  size_t(head_dim) * sizeof(bf16));
    }
    const int groups = (item.count + R - 1) / R;
    // Codes are taken for more keys at a time.
    constexpr int kTogether = W / R, kScored = kIsCoded<C> ? W : kTogether;
    constexpr int kSummed = kIsCoded<C> ? 2 * kWeighed : kWeighed;
    const auto score = [&](int row, int offset, int key, const auto& each) {
      const bf16* keys[kScored];
      float factors[kScored];
      point_to_pairs(keys_of_cache + offset, key, key + kScored, s, s.keys, keys, factors);
      for (int i = 0; i < kScored; i += kTogether) {
        vf scale = splat(a.spec->scale);
        if constexpr (kIsCoded<C>) scale *= repeated<kTogether>(factors + i);
        each_rows<R>(row, item.count, [&](int row, auto rows) {
          each(kTogether * blocks_of(item.count) / groups);
          dot_pairs<R, rows>(s, queries, keys + i, row, head_dim, scale, key + i);
        });
      }
    };
    const auto begin = [&](int rows) {
      if (!kIsCoded<C>) round_weights(s, rows, weights);
    };
    const bf16* rows_of_values[kWidened];
    // One product covers two neighbouring keys; zeros replace a key outside of the item.
    static constexpr bf16 kZeros[kMaxHeadDim] = {};
    const auto find = [&](int row, int offset, int key, int end) {
      float factors[kWidened];
      point_to_pairs(values_of_cache + offset, key, end, s, s.values, rows_of_values, factors);
      if constexpr (kIsCoded<C>) {
        scale_weights(s, row, item.count, key, end, factors, weights);
      }
      if (key < s.now->first) rows_of_values[0] = kZeros;
      if (end > s.now->last) rows_of_values[end - 1 - key] = kZeros;
    };
    const auto add = [&](int row, int key, int end, const auto& values, const auto& each) {
      each_rows<R>(row, item.count, [&](int row, auto rows) {
        weigh_pairs<rows>(s.out + row * width, weights + row * kKeys + key, values, width, end - key,
                          [&](int keys) { each(keys * blocks_of(item.count) / groups); });
      });
    };
    if (item.count <= kWidening) {
      const auto weigh = [&](int row, int offset, int key, int end, const auto& each) {
        find(row, offset, key, end);
        add(row, key, end, ValueRows{rows_of_values}, each);
      };
      run_few<kScored, kSummed, 2>(item, next, s, score, begin, weigh);
    } else {
      alignas(64) bf16 packed[kWidened * kMaxHeadDim];
      const auto weigh = [&](int row, int offset, int key, int end, const auto& each) {
        find(row, offset, key, end);
        interleave(packed, rows_of_values, end - key, head_dim);
        add(row, key, end, PackedValues{packed, head_dim}, each);
      };
      run_few<kScored, kWidened, 2>(item, next, s, score, begin, weigh);
    }
    for (int row = 0; row < rows; ++row) put_pairs_in_order(s.out + row * width, width);
    finish(item, item.count, s, false);
  }

  // Calls function(row, number of rows) for `count` rows from `row` on, R at a time.
  template <int R, class F>
  static void each_rows(int row, int count, const F& function) {
    const int end = row + count;
    for (; row + R <= end; row += R) function(row, std::integral_constant<int, R>());
    if (row + 2 < end) return function(row, std::integral_constant<int, std::min(R, 3)>());
    if (row + 1 < end) return function(row, std::integral_constant<int, std::min(R, 2)>());
    if (row < end) function(row, std::integral_constant<int, 1>());
  }

  void run_strips(const Item& item, const Item* next, const Path& path, Scratch& s) const {
    thread_local std::unique_ptr<TileScratch> scratch(new TileScratch);
    TileScratch& t = *scratch;
    const int stride = int(strip_rows(item.count));
    for (int head = 0; head < item.kv_heads; ++head) {
      for (int row = 0; row < item.count; ++row) {
        pack_query_row(t, query_row(item, head, row), head * stride + row, head_dim);
        t.positions[head * stride + row] = query_position(item, row);
      }
    }
    begin_sums(0, stride * item.kv_heads, s);
    bool folded = false;
    TileStep products(s, t, head_dim, *a.spec);
    for (int64_t step = item.begin / kStep * kStep; step < item.end; step += kStep) {
      if (step > item.begin && step % path.fold == 0) fold(item, stride, s, folded);
      turn_to(item, step, kStep, next, s);
      ReadAhead<C> ahead = path.few ? next_tile(item, 2, s) : ReadAhead<C>();
      const auto each = [&](int visits) { ahead.visit(visits); };
      const int first = s.now->first, last = s.now->last;
      t.offsets = s.now->offsets;
      for (int head = 0; head < item.kv_heads; ++head) {
        const int offset = head * cached.size, row = head * stride;
        pack_keys(t, cached, keys_of_cache + offset, first, last, each);
        pack_values(t, cached, values_of_cache + offset, first, last, each);
        products.run(step, first, last, row, row + item.count);
      }
      ahead.rest();
    }
    finish(item, stride, s, folded);
  }

  // Keys are values too, of one kv head.
  template <int Lanes>
  void run_latents(const Item& item, const Item* next, const Path& path, Scratch& s) const {
    thread_local std::unique_ptr<LatentScratch> scratch(new LatentScratch);
    LatentScratch& t = *scratch;
    const int rows = (item.count + Lanes - 1) / Lanes * Lanes;
    const LatentStep<Lanes> products(s, t, head_dim, int(a.value_dim), a.spec->scale);
    static constexpr bf16 kNoQuery[kMaxHeadDim] = {};
    for (int row = 0; row < rows; ++row) {
      products.pack_query_row(row < item.count ? query_row(item, 0, row) : kNoQuery, row);
      t.ends[row] = row < item.count ? int32_t(query_position(item, row) + 1) : t.ends[row - 1];
    }
    begin_sums(0, rows, s);
    bool folded = false;
    for (int64_t step = item.begin; step < item.end; step += kStep) {
      if (step > item.begin && step % path.fold == 0) {
        products.put_in_order(item.count);
        fold(item, item.count, s, folded);
      }
      turn_to(item, step, kStep, next, s);
      ReadAhead<C> ahead = next_tile(item, head_dim / kDepth, s);  // a visit per line
      const bf16* keys[kStep];
      point_to_rows(keys_of_cache, 0, kStep, s, keys);
      products.run(step, s.now->last, keys, rows, [&](int lines) { ahead.visit(lines); });
      ahead.rest();
    }
    products.put_in_order(item.count);
    finish(item, item.count, s, folded);
  }
#endif

  // Turns scores of the tile's keys into weights, for rows from `begin` on.
  void softmax(const Item& item, int64_t tile, int begin, Scratch& s) const {
    const int first = s.now->first, last = s.now->last;
    if (a.spec->cap > 0) cap_rows(s, begin, begin + item.count, a.spec->cap);
    for (int row = 0; row < item.count; ++row) {
      const int64_t position = query_position(item, row);
      const int64_t low = first_visible(position, *a.spec) - tile;
      softmax_row(s, begin + row, int(std::clamp<int64_t>(low, first, kKeys)),
                  int(std::clamp<int64_t>(visible_end(position, *a.spec) - tile, 0, last)));
    }
  }

  // Widens query rows to floats; for dot products (`lanes`), in the order of load_two() for the caches.
  void start(const Item& item, bool lanes, Scratch& s) const {
    lanes = lanes && !kIsCoded<C>;
    for (int row = 0; row < item.count * item.kv_heads; ++row) {
      const T* from = query_row(item, row / item.count, row % item.count);
      float* to = s.query + row * width;
      lanes ? convert_lanes(from, to, head_dim, a.spec->scale) : convert_row(from, to, head_dim, a.spec->scale);
    }
  }

  // Rescales the sums so far to the new maximum.
  void rescale(int rows, Scratch& s) const {
    for (int row = 0; row < rows; ++row) {
      const float factor = s.rescale[row];
      if (factor == 1.0f) continue;
      float* out = s.out + row * width;
      for (int d = 0; d < width; d += W) store(out + d, load(out + d) * factor);
    }
  }

  // Pointers to rows of keys or values of the tile in a cache.
  const C* const* point_to_rows(const C* cache, int begin, int end, const Scratch& s,
                                const C** rows) const {
    for (int key = begin; key < end; ++key) rows[key - begin] = cache + s.now->offsets[key];
    return rows;
  }

  // Widens rows to floats in `room`, in the order of load_two(), and returns pointers to them.
  const float* const* widen(const C* cache, int begin, int end, const Scratch& s, float* room,
                            const float** rows) const {
    for (int key = begin; key < end; ++key, room += width) {
      cached.widen_lanes(cache + s.now->offsets[key], room);
      rows[key - begin] = room;
    }
    return rows;
  }

#if defined(SLIPSTREAM_PAIRS)
  // Pointers to rows of bfloat16: those of a cache, or codes as such, in `room`, and their factors.
  void point_to_pairs(const C* cache, int begin, int end, const Scratch& s, [[maybe_unused]] float* room,
                      const bf16** rows, [[maybe_unused]] float* factors) const {
    if constexpr (std::is_same_v<C, bf16>) {
      point_to_rows(cache, begin, end, s, rows);
    } else if constexpr (kIsCoded<C>) {
      const C* from[kWidened];
      point_to_rows(cache, begin, end, s, from);
      bf16* to = reinterpret_cast<bf16*>(room);
      for (int i = 0; i < end - begin; ++i) {
        rows[i] = to + i * head_dim;
        factors[i] = cached.factor(from[i]);
      }
#if defined(SLIPSTREAM_CODE_TABLES)
      if (has_code_tables()) {
        return cached.is_int8 ? look_up_codes<true>(from, end - begin, head_dim, to)
                              : look_up_codes<false>(from, end - begin, head_dim, to);
      }
#endif
      for (int i = 0; i < end - begin; ++i) cached.take(from[i], to + i * head_dim);
    }
  }
#endif

  void copy_values(Scratch& s, int first, int last) const {
    for (int key = 0; key < kKeys; ++key) {
      float* row = s.values + key * width;
      if (key >= first && key < last) {
        cached.widen(values_of_cache + s.now->offsets[key], row);
      } else {
        std::fill(row, row + width, 0.0f);
      }
    }
  }
};

}  // namespace
