// Computes the items of one attention call: the code paths, and how their sums become output.
#pragma once
#include <memory>

#include "item_places.h"
#include "pair_rows.h"

namespace {

template <class T>
class Attention : ItemPlaces<T> {
  using Places = ItemPlaces<T>;
  using Places::a;
  using Places::plan;
  using Places::head_dim;
  using Places::width;
  using Places::heads;
  using Places::token_stride;
  using Places::path_of;
  using Places::query_position;
  using Places::member;
  using Places::locate;
  using Places::query_row;
  using Places::turn_to;
  using Places::next_tile;

 public:
  using Places::Places;

  void write_cache(int64_t begin, int64_t end) const {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = a.slot_mapping[token];
      if (slot < 0) continue;
      const size_t bytes = size_t(token_stride) * sizeof(T);
      std::memcpy(static_cast<T*>(a.key_cache) + slot * token_stride,
                  static_cast<const T*>(a.key) + token * a.key_stride, bytes);
      std::memcpy(static_cast<T*>(a.value_cache) + slot * token_stride,
                  static_cast<const T*>(a.value) + token * a.value_stride, bytes);
    }
  }

  // `next` is the item that this thread runs afterwards, or null; its first keys are prefetched.
  void run(const Item& item, const Item* next, Scratch& s) const {
    const Path path = path_of(item);
#if defined(SLIPSTREAM_PAIRS)
    if constexpr (std::is_same_v<T, bf16>) {
      if (path.lanes == 4) return run_latents<4>(item, next, path, s);
      if (path.lanes == 8) return run_latents<8>(item, next, path, s);
      if (path.lanes == 16) return run_latents<16>(item, next, path, s);
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
      ReadAhead<T> ahead = path.dot ? next_tile(item, 1, s) : ReadAhead<T>();
      const int64_t* offsets = s.now->offsets;
      const int first = s.now->first, last = s.now->last;
      copy_values(s, first, last);
      if (path.dot) {
        for (int key = first / W * W; key < last; key += W) {
          const float* rows[W];
          widen(static_cast<const T*>(a.key_cache), key, key + W, s, s.keys, rows);
          dot_scores(s, rows, 0, item.count, width, key, [](int) {});
        }
      } else {
        pack_keys(s.keys, static_cast<const T*>(a.key_cache), offsets, head_dim, first, last);
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
      ReadAhead<T> ahead(*s.now, *s.ahead, a.key_cache, a.value_cache, head_dim, item.kv_heads,
                         blocks_of(item.count));
      const auto each = [&](int visits) { ahead.visit(visits); };
      for (int key = first / Scored * Scored; key < last; key += Scored) {
        for (int head = 0; head < item.kv_heads; ++head) {
          score(head * item.count, head * head_dim, key, each);
        }
      }
      for (int head = 0; head < item.kv_heads; ++head) softmax(item, tile, head * item.count, s);
      rescale(rows, s);
      begin(rows);
      const int stop = (last + Beside - 1) / Beside * Beside;
      for (int key = first / Beside * Beside, end; key < stop; key = end) {
        end = std::min(stop, key + Weighed);
        for (int head = 0; head < item.kv_heads; ++head) {
          weigh(head * item.count, head * head_dim, key, end, each);
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
      put_in_order<T>(s.out + row * width, head_dim);
    }
    finish(item, item.count, s, false);
  }

  void run_dots(const Item& item, const Item* next, Scratch& s) const {
    start(item, true, s);
    const T* const keys = static_cast<const T*>(a.key_cache);
    const T* const values = static_cast<const T*>(a.value_cache);
    // Few query rows widen keys and values at each use; many widen them once, into a buffer.
    if (head_dim == width && (std::is_same_v<T, float> || item.count <= kWidening)) {
      const auto score = [&](int row, int offset, int key, const auto& each) {
        const T* rows[W];
        point_to_rows(keys + offset, key, key + W, s, rows);
        dot_scores(s, rows, row, item.count, width, key, each);
      };
      const T* rows[kWeighed];
      return run_dots<kWeighed>(item, next, s, score, [&](int offset, int key, int end) {
        return point_to_rows(values + offset, key, end, s, rows);
      });
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
    const auto* keys = static_cast<const bf16*>(a.key_cache);
    const auto* values = static_cast<const bf16*>(a.value_cache);
    alignas(64) bf16 queries[kGemmRows * kMaxHeadDim];
    alignas(64) bf16 weights[kGemmRows * kKeys];
    const int rows = item.count * item.kv_heads;
    for (int row = 0; row < rows; ++row) {
      std::memcpy(queries + row * head_dim, query_row(item, row / item.count, row % item.count),
                  size_t(head_dim) * sizeof(bf16));
    }
    const int groups = (item.count + R - 1) / R;
    const auto score = [&](int row, int offset, int key, const auto& each) {
      each_rows<R>(row, item.count, [&](int row, auto rows) {
        each(W / R * blocks_of(item.count) / groups);
        dot_pairs<R, rows>(s, queries, keys + offset, row, head_dim, a.spec->scale, key);
      });
    };
    const auto begin = [&](int rows) { round_weights(s, rows, weights); };
    const bf16* rows_of_values[kWidened];
    // One product covers two neighbouring keys; zeros replace a key outside of the item.
    static constexpr bf16 kZeros[kMaxHeadDim] = {};
    const auto find = [&](int offset, int key, int end) {
      for (int i = key; i < end; ++i) rows_of_values[i - key] = values + s.now->offsets[i] + offset;
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
        find(offset, key, end);
        add(row, key, end, ValueRows{rows_of_values}, each);
      };
      run_few<W / R, kWeighed, 2>(item, next, s, score, begin, weigh);
    } else {
      alignas(64) bf16 packed[kWidened * kMaxHeadDim];
      const auto weigh = [&](int row, int offset, int key, int end, const auto& each) {
        find(offset, key, end);
        interleave(packed, rows_of_values, end - key, head_dim);
        add(row, key, end, PackedValues{packed, head_dim}, each);
      };
      run_few<W / R, kWidened, 2>(item, next, s, score, begin, weigh);
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
      ReadAhead<T> ahead = path.few ? next_tile(item, 2, s) : ReadAhead<T>();
      const auto each = [&](int visits) { ahead.visit(visits); };
      const int first = s.now->first, last = s.now->last;
      t.offsets = s.now->offsets;
      for (int head = 0; head < item.kv_heads; ++head) {
        const int offset = head * head_dim, row = head * stride;
        pack_keys(t, static_cast<const bf16*>(a.key_cache) + offset, head_dim, first, last, each);
        pack_values(t, static_cast<const bf16*>(a.value_cache) + offset, head_dim, first, last, each);
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
      ReadAhead<T> ahead = next_tile(item, head_dim / kDepth, s);  // a visit per line
      const bf16* keys[kStep];
      for (int key = 0; key < kStep; ++key) {
        keys[key] = static_cast<const bf16*>(a.key_cache) + s.now->offsets[key];
      }
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
                  int(std::clamp<int64_t>(position + 1 - tile, 0, last)));
    }
  }

  // Widens query rows to floats; for dot products (`lanes`), in the order of load_two().
  void start(const Item& item, bool lanes, Scratch& s) const {
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

  void begin_sums(int begin, int end, Scratch& s) const {
    std::fill(s.maximum + begin, s.maximum + end, -kInfinity);
    std::fill(s.sum + begin, s.sum + end, 0.0f);
    std::fill(s.out + begin * width, s.out + end * width, 0.0f);
  }

  // Pointers to rows of keys or values of the tile in a cache.
  const T* const* point_to_rows(const T* cache, int begin, int end, const Scratch& s,
                                const T** rows) const {
    for (int key = begin; key < end; ++key) rows[key - begin] = cache + s.now->offsets[key];
    return rows;
  }

  // Widens rows to floats in `room`, in the order of load_two(), and returns pointers to them.
  const float* const* widen(const T* cache, int begin, int end, const Scratch& s, float* room,
                            const float** rows) const {
    for (int key = begin; key < end; ++key, room += width) {
      convert_lanes(cache + s.now->offsets[key], room, head_dim);
      rows[key - begin] = room;
    }
    return rows;
  }

  void copy_values(Scratch& s, int first, int last) const {
    for (int key = 0; key < kKeys; ++key) {
      float* row = s.values + key * width;
      if (key >= first && key < last) {
        convert_row(static_cast<const T*>(a.value_cache) + s.now->offsets[key], row, head_dim);
      } else {
        std::fill(row, row + width, 0.0f);
      }
    }
  }

  // Normalises and writes one row; `sum` is the sum of weights relative to `maximum`.
  void write_out(const Item& item, int head, int row, const float* from, float maximum, float sum) const {
    int64_t token, query_head;
    locate(item, head, row, &token, &query_head);
    if (a.spec->sinks != nullptr && sum > 0.0f) sum += std::exp(a.spec->sinks[query_head] - maximum);
    T* to = static_cast<T*>(a.out) + (token * a.num_heads + query_head) * head_dim;
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    // A NaN sum must show in the output, not turn into zeros.
    const float safe = sum != sum ? sum : factor;
    // Adding 0 turns -0 into 0: whether -0 survives products with weights of 0 depends on the path.
    for (int d = 0; d < head_dim; ++d) from_float(from[d] * safe + 0.0f, to + d);
  }

  // Joins the sums of an item's rows (kv heads `stride` rows apart) with those of the splits before it,
  // and resets them.
  void fold(const Item& item, int stride, Scratch& s, bool& folded) const {
    const int end = stride * item.kv_heads;
    if (!folded) {
      std::fill(s.folded_maximum, s.folded_maximum + end, -kInfinity);
      std::fill(s.folded_sum, s.folded_sum + end, 0.0f);
      std::fill(s.folded, s.folded + end * width, 0.0f);
    }
    for (int first = 0; first < end; first += stride) {
      for (int row = first; row < first + item.count; ++row) {
        join_splits(s.folded + row * width, s.folded_maximum[row], s.folded_sum[row],
                    s.out + row * width, s.maximum[row], s.sum[row], width);
      }
    }
    begin_sums(0, end, s);
    folded = true;
  }

  void finish(const Item& item, int stride, Scratch& s, bool folded) const {
    if (folded) fold(item, stride, s, folded);
    if (item.members || item.group >= 0) {
      const int parts = std::max(1, item.members), rows = item.count / parts;
      // In two passes: settle() overwrites scratch rows that leave() still needs.
      each_own(item, [&](const Item& own, int head, int i) { leave(own, head * stride + i * rows, s); });
      each_own(item, [&](const Item& own, int, int) { settle(own, s); });
      return;
    }
    const float *out = folded ? s.folded : s.out, *sum = folded ? s.folded_sum : s.sum;
    const float* maximum = folded ? s.folded_maximum : s.maximum;
    for (int head = 0; head < item.kv_heads; ++head) {
      for (int row = 0; row < item.count; ++row) {
        const int at = head * stride + row;
        write_out(item, head, row, out + at * width, maximum[at], sum[at]);
      }
    }
  }

  // Calls function(item, head, member) with the unshared item of each kv head and, if the item is shared,
  // of each of its members.
  template <class F>
  void each_own(const Item& item, const F& function) const {
    for (int head = 0; head < item.kv_heads; ++head) {
      Item own = item;
      own.kv_head += head, own.kv_heads = 1;
      if (!item.members) {
        own.group += head;
        function(own, head, 0);
        continue;
      }
      own.count = int32_t(heads), own.members = 0;
      for (int i = 0; i < item.members; ++i) {
        own.row = plan.members[size_t(item.member + i)];
        own.group = plan.row_groups[size_t(own.row)] + own.kv_head;
        function(own, head, i);
      }
    }
  }

  // Stores the sums from scratch row `first` on as this split's partial results of the merge group.
  void leave(const Item& item, int first, const Scratch& s) const {
    float* mine = plan.partials.data() + plan.groups[size_t(item.group)].partial +
                  int64_t(item.split) * item.count * (width + 2);
    for (int row = first; row < first + item.count; ++row, mine += width + 2) {
      std::memcpy(mine, s.out + row * width, size_t(width) * sizeof(float));
      mine[width] = s.maximum[row];
      mine[width + 1] = s.sum[row];
    }
  }

  // Joins the splits of the merge group in order, if this split was the last to finish.
  void settle(const Item& item, Scratch& s) const {
    Group& group = plan.groups[size_t(item.group)];
    if (group.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const float* base = plan.partials.data() + group.partial;
    const int64_t stride = int64_t(item.count) * (width + 2);
    for (int row = 0; row < item.count; ++row) {
      const float* partial = base + row * (width + 2);
      float maximum = -kInfinity, sum = 0.0f;
      std::fill(s.out, s.out + width, 0.0f);
      for (int i = 0; i < group.splits; ++i, partial += stride) {
        join_splits(s.out, maximum, sum, partial, partial[width], partial[width + 1], width);
      }
      write_out(item, 0, row, s.out, maximum, sum);
    }
  }
};

}  // namespace
