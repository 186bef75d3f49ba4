// Paged attention for CPUs: varlen prefill and decode in one call.
//
// A call is an explicit list of work items (row x kv head x tile of packed query rows x split of
// the keys), cut into one contiguous part a thread by estimated cost. All query heads of a kv head
// are packed into one tile, so a key is loaded once for them. Splits have a fixed size and start
// at multiples of it, and which path serves a row depends on that row alone: results do not depend
// on what else is in the batch, nor on the number of threads.
//
// Decoding rows that share a prefix share items for its keys (`Sharing`), at no change of any bit.
//
// That leaves how many tokens of a sequence come at once, which depends on the batch's budget, on
// what was cached and on preemption. `deterministic` takes that away too. Every query row, in decode
// and in a prompt of thousands, then has its scores summed in one order (that of tile products, else
// of dot products; values are summed key by key in any case) and its keys cut into the same splits,
// folded in their order, whether the splits are items of their own or follow each other in one.
#include <memory>
#include <new>

#include "parallel.h"
#include "work.h"


namespace {

constexpr double kCostPerMicrosecond = 3e4;
constexpr double kCopiedPerMicrosecond = 6e3;  // elements

template <class T>
class Attention {
 public:
  Attention(const AttentionArgs& args, Plan& plan)
      : a(args),
        plan(plan),
        head_dim(int(args.head_dim)),
        width(padded(head_dim)),
        heads(args.num_heads / args.num_kv_heads),
        token_stride(args.num_kv_heads * args.head_dim) {}

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

  // `next`, if any, is what this thread runs then.
  void run(const Item& item, const Item* next, Scratch& s) const {
    const Path path = choose_path(a, query_len(item.row) * heads, a.seq_lens[item.row]);
#if defined(SLIPSTREAM_PAIRS)
    if constexpr (std::is_same_v<T, bf16>) {
      if (path.strips) return run_strips(item, path, s);
      if (path.pairs) return run_pairs(item, next, path, s);
    }
#endif
    start(item, s);
    bool folded = false;
    for (int64_t tile = item.begin / kKeys * kKeys; tile < item.end; tile += kKeys) {
      if (tile > item.begin && tile % path.fold == 0) fold(item.count, item.count, s, folded);
      turn_to(item, tile, next, s);
      const int64_t* offsets = s.now->offsets;
      const int first = s.now->first, last = s.now->last;
      if (path.few) {
        point_to_rows(a.value_cache, offsets, s.values, s.value_rows, first, last);
      } else {
        copy_values(s, first, last);
      }
      if (path.dot) {
        point_to_rows(a.key_cache, offsets, s.keys, s.key_rows, first, last);
        dot_scores(s, item.count, width, first, last, path.few ? s.value_rows : nullptr);
      } else {
        pack_keys(s.keys, static_cast<const T*>(a.key_cache), offsets, head_dim, first, last);
        multiply<false>(s.query, width, s.keys, kKeys, s.scores, kKeys, item.count, kKeys, head_dim,
                        s.rescale);
      }
      softmax(item, tile, first, last, s);
      if (path.few) {
        weigh_and_fetch(s, [&](int key) { return s.value_rows[key]; }, item.count);
      } else {
        multiply<true>(s.scores, kKeys, s.values, width, s.out, width, item.count, width, kKeys,
                       s.rescale);
        if (path.dot) fetch_keys(*s.ahead, s.ahead->first, s.ahead->last);
      }
    }
    finish(item, s, folded);
  }

 private:
#if defined(SLIPSTREAM_PAIRS)
  void run_strips(const Item& item, const Path& path, Scratch& s) const {
    thread_local std::unique_ptr<TileScratch> scratch(new TileScratch);
    TileScratch& t = *scratch;
    const int rows = (item.count + kStrip - 1) / kStrip * kStrip;
    for (int row = 0; row < item.count; ++row) {
      int64_t token, head;
      locate(item, row, &token, &head);
      pack_query_row(t, static_cast<const bf16*>(a.query) + token * a.query_stride + head * head_dim,
                     row, head_dim);
      t.positions[row] = query_position(item, row);
    }
    begin_sums(rows, s);
    bool folded = false;
    TileStep products(s, t, item.count, head_dim, float(a.scale), a.sliding_window);
    for (int64_t step = item.begin / kStep * kStep; step < item.end; step += kStep) {
      if (step > item.begin && step % path.fold == 0) fold(item.count, rows, s, folded);
      const int first = int(std::max<int64_t>(0, item.begin - step));
      const int last = int(std::min<int64_t>(kStep, item.end - step));
      locate_keys(item, step, first, last, t.offsets);
      pack_keys(t, static_cast<const bf16*>(a.key_cache), head_dim, first, last);
      pack_values(t, static_cast<const bf16*>(a.value_cache), head_dim, first, last);
      products.run(step, first, last);
    }
    finish(item, s, folded);
  }

  void run_pairs(const Item& item, const Item* next, const Path& path, Scratch& s) const {
    const auto* keys = static_cast<const bf16*>(a.key_cache);
    const auto* values = static_cast<const bf16*>(a.value_cache);
    alignas(64) bf16 queries[kGemmRows * kMaxHeadDim];
    for (int row = 0; row < item.count; ++row) {
      int64_t token, head;
      locate(item, row, &token, &head);
      const bf16* query = static_cast<const bf16*>(a.query) + token * a.query_stride + head * head_dim;
      std::memcpy(queries + row * head_dim, query, size_t(head_dim) * sizeof(bf16));
    }
    begin_sums(item.count, s);
    bool folded = false;
    for (int64_t tile = item.begin / kKeys * kKeys; tile < item.end; tile += kKeys) {
      if (tile > item.begin && tile % path.fold == 0) fold(item.count, item.count, s, folded);
      turn_to(item, tile, next, s);
      const int first = s.now->first, last = s.now->last;
      dot_pairs(s, queries, keys, values, item.count, head_dim, float(a.scale), first, last);
      softmax(item, tile, first, last, s);
      weigh_and_fetch(s, [&](int key) { return values + s.now->offsets[key]; }, item.count);
    }
    finish(item, s, folded);
  }
#endif

  // Weights of keys [first, last) of a tile from their scores.
  void softmax(const Item& item, int64_t tile, int first, int last, Scratch& s) const {
    for (int row = 0; row < item.count; ++row) {
      const int64_t position = query_position(item, row);
      const int64_t low = first_visible(position, a.sliding_window) - tile;
      softmax_row(s, row, int(std::clamp<int64_t>(low, first, kKeys)),
                  int(std::clamp<int64_t>(position + 1 - tile, 0, last)));
    }
  }

  int64_t query_len(int64_t row) const {
    return a.query_start_loc[row + 1] - a.query_start_loc[row];
  }

  int64_t query_position(const Item& item, int row) const {
    if (item.members) return a.seq_lens[member(item, row)] - 1;
    return a.seq_lens[item.row] - query_len(item.row) + (item.first + row) / heads;
  }

  // Batch row of a packed query row of an item that is shared.
  int32_t member(const Item& item, int row) const {
    return plan.members[size_t(item.member + row / heads)];
  }

  // Offset of a packed query row in [tokens, num_heads]: its token and its head.
  void locate(const Item& item, int row, int64_t* token, int64_t* head) const {
    *token = item.members ? a.query_start_loc[member(item, row)]
                          : a.query_start_loc[item.row] + (item.first + row) / heads;
    *head = item.kv_head * heads + (item.first + row) % heads;
  }

  // Offsets into the caches of keys [first, last) of a tile.
  void locate_keys(const Item& item, int64_t tile, int first, int last, int64_t* offsets) const {
    int64_t block = (tile + first) / a.block_size, slot = (tile + first) % a.block_size;
    const int32_t* table = a.block_tables + item.row * a.block_table_stride;
    for (int key = first; key < last; ++block, slot = 0) {
      const int end = int(std::min<int64_t>(last, key + a.block_size - slot));
      int64_t offset = (table[block] * a.block_size + slot) * token_stride + item.kv_head * head_dim;
      for (; key < end; ++key, offset += token_stride) offsets[key] = offset;
    }
  }

  void look_up(const Item& item, int64_t tile, KeyTile& to) const {
    to.item = &item, to.begin = tile;
    to.first = int(std::max<int64_t>(0, item.begin - tile));
    to.last = int(std::min<int64_t>(kKeys, item.end - tile));
    locate_keys(item, tile, to.first, to.last, to.offsets);
    std::fill(to.offsets, to.offsets + to.first, to.offsets[to.first]);
    std::fill(to.offsets + to.last, to.offsets + kKeys, to.offsets[to.last - 1]);
  }

  // Looks up a tile of an item, unless it was looked up when it was ahead, and what comes after it.
  void turn_to(const Item& item, int64_t tile, const Item* next, Scratch& s) const {
    std::swap(s.now, s.ahead);
    if (s.now->item != &item || s.now->begin != tile) look_up(item, tile, *s.now);
    if (tile + kKeys < item.end) {
      look_up(item, tile + kKeys, *s.ahead);
    } else if (next != nullptr) {
      look_up(*next, next->begin / kKeys * kKeys, *s.ahead);
    } else {
      s.ahead->item = nullptr, s.ahead->first = s.ahead->last = 0;
    }
  }

  // Weighs the values of the tile, and meanwhile has the keys of what is ahead fetched: rows of a
  // paged cache are too short and too far apart for the hardware to foresee, and all at once they
  // would keep what is computed waiting.
  template <class Row>
  void weigh_and_fetch(Scratch& s, const Row& value_row, int rows) const {
    const KeyTile &now = *s.now, &ahead = s.ahead->item == nullptr ? now : *s.ahead;
    const auto fetch = [&](int key) { fetch_keys(ahead, key, key + 1); };
    weigh_values(s, value_row, fetch, rows, width, now.first, now.last);
    fetch_keys(ahead, ahead.first, now.first);
    fetch_keys(ahead, now.last, ahead.last);
  }

  void fetch_keys(const KeyTile& tile, int first, int last) const {
    for (int key = first; key < last; ++key) {
      const auto* row = static_cast<const T*>(a.key_cache) + tile.offsets[key];
      for (int d = 0; d < head_dim; d += int(64 / sizeof(T))) __builtin_prefetch(row + d);
    }
  }

  void start(const Item& item, Scratch& s) const {
    for (int row = 0; row < item.count; ++row) {
      int64_t token, head;
      locate(item, row, &token, &head);
      convert_row(static_cast<const T*>(a.query) + token * a.query_stride + head * head_dim,
                  s.query + row * width, head_dim, float(a.scale));
    }
    begin_sums(item.count, s);
  }

  void begin_sums(int rows, Scratch& s) const {
    std::fill(s.maximum, s.maximum + rows, -kInfinity);
    std::fill(s.sum, s.sum + rows, 0.0f);
    std::fill(s.out, s.out + rows * width, 0.0f);
  }

  // Floats of each key's row of a cache: where they lie if they are floats, else in `room`.
  void point_to_rows(const void* cache, const int64_t* offsets, float* room, const float** rows,
                     int first, int last) const {
    for (int key = first; key < last; ++key) {
      const T* row = static_cast<const T*>(cache) + offsets[key];
      if constexpr (std::is_same_v<T, float>) {
        if (head_dim == width) {
          rows[key] = row;
          continue;
        }
      }
      convert_row(row, room + key * width, head_dim);
      rows[key] = room + key * width;
    }
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

  void write_out(const Item& item, int row, const float* from, float sum) const {
    int64_t token, head;
    locate(item, row, &token, &head);
    T* to = static_cast<T*>(a.out) + (token * a.num_heads + head) * head_dim;
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    // A sum that is NaN must show, not turn into zeros.
    const float safe = sum != sum ? sum : factor;
    // Adding 0 turns -0, which products with weights of 0 may leave or take, into 0.
    for (int d = 0; d < head_dim; ++d) from_float(from[d] * safe + 0.0f, to + d);
  }

  // Puts the sums of `count` rows of an item behind those of the splits before, and begins anew.
  void fold(int count, int rows, Scratch& s, bool& folded) const {
    if (!folded) {
      std::fill(s.folded_maximum, s.folded_maximum + count, -kInfinity);
      std::fill(s.folded_sum, s.folded_sum + count, 0.0f);
      std::fill(s.folded, s.folded + count * width, 0.0f);
    }
    for (int row = 0; row < count; ++row) {
      join_splits(s.folded + row * width, s.folded_maximum[row], s.folded_sum[row],
                  s.out + row * width, s.maximum[row], s.sum[row], width);
    }
    begin_sums(rows, s);
    folded = true;
  }

  void finish(const Item& item, Scratch& s, bool folded) const {
    if (folded) fold(item.count, item.count, s, folded);
    if (item.members) {
      // Joining needs the room of what has not been left with its row yet.
      for (int i = 0; i < item.members; ++i) leave(own(item, i), i * int(heads), s);
      for (int i = 0; i < item.members; ++i) settle(own(item, i), s);
      return;
    }
    if (item.group >= 0) {
      leave(item, 0, s);
      return settle(item, s);
    }
    const float* out = folded ? s.folded : s.out;
    const float* sum = folded ? s.folded_sum : s.sum;
    for (int row = 0; row < item.count; ++row) write_out(item, row, out + row * width, sum[row]);
  }

  // What a member of a shared item would have had for itself.
  Item own(const Item& item, int index) const {
    const int32_t row = plan.members[size_t(item.member + index)];
    const int32_t group = plan.row_groups[size_t(row)] + item.kv_head;
    return {row, item.kv_head, 0, int32_t(heads), item.begin, item.end, group, item.split, 0, 0, 0};
  }

  // Puts the sums that begin at row `first` of the scratch among the partial results of the group.
  void leave(const Item& item, int first, const Scratch& s) const {
    float* mine = plan.partials.data() + plan.groups[size_t(item.group)].partial +
                  int64_t(item.split) * item.count * (width + 2);
    for (int row = first; row < first + item.count; ++row, mine += width + 2) {
      std::memcpy(mine, s.out + row * width, size_t(width) * sizeof(float));
      mine[width] = s.maximum[row];
      mine[width + 1] = s.sum[row];
    }
  }

  // Joins the splits of the group, in their order, once all of them are there.
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
      write_out(item, row, s.out, sum);
    }
  }

  const AttentionArgs& a;
  Plan& plan;
  const int head_dim, width;
  const int64_t heads, token_stride;
};

template <class T>
void execute(const AttentionArgs& a, Plan& plan) {
  const Attention<T> attention(a, plan);
  const double copied = double(a.tokens * a.num_kv_heads * a.head_dim);
  const int64_t writers = worthwhile_parts(a.threads, copied / kCopiedPerMicrosecond, a.tokens);
  parallel(a.threads, writers, [&](int64_t part) {
    attention.write_cache(a.tokens * part / writers, a.tokens * (part + 1) / writers);
  });
  const int64_t end = a.rows > 0 ? a.query_start_loc[a.rows] : 0;
  const int64_t row_bytes = a.num_heads * a.head_dim * int64_t(sizeof(T));
  std::memset(static_cast<char*>(a.out) + end * row_bytes, 0, size_t((a.tokens - end) * row_bytes));

  double total = 0;
  for (const Item& item : plan.items) total += item.cost;
  const int64_t parts = worthwhile_parts(a.threads, total / kCostPerMicrosecond);
  std::vector<size_t> bounds(size_t(parts) + 1, plan.items.size());
  bounds[0] = 0;
  double sum = 0;
  int64_t part = 1;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    // An item belongs to the part in which its middle lies.
    const double middle = sum + plan.items[i].cost / 2;
    while (part < parts && middle >= total * double(part) / double(parts)) bounds[size_t(part++)] = i;
    sum += plan.items[i].cost;
  }
  parallel(a.threads, parts, [&](int64_t index) {
#if defined(SLIPSTREAM_TILES)
    const TileRegisters registers(uses_pairs(a) && tiles_permitted());
#endif
    thread_local std::unique_ptr<Scratch> scratch(new Scratch);
    scratch->ahead->item = nullptr;  // it was another call's
    for (size_t i = bounds[size_t(index)]; i < bounds[size_t(index) + 1]; ++i) {
      const bool is_last = i + 1 == bounds[size_t(index) + 1];
      attention.run(plan.items[i], is_last ? nullptr : &plan.items[i + 1], *scratch);
    }
  });
}

Status plan_work(const AttentionArgs& a, Plan& plan) {
  if (a.head_dim < 8 || a.head_dim > kMaxHeadDim || a.head_dim % 8 || a.num_kv_heads < 1 ||
      a.num_heads % a.num_kv_heads || a.block_size < 1) {
    return kBadShape;
  }
  for (int64_t token = 0; token < a.tokens; ++token) {
    if (a.slot_mapping[token] >= a.num_blocks * a.block_size) return kBadSlot;
  }
  plan.clear(a.rows);
  Sharing sharing(a, plan);
  sharing.find();
  for (int64_t row = 0; row < a.rows; ++row) {
    if (Status status = plan_row(a, row, plan)) return status;
  }
  sharing.add_items();
  return kOk;
}

Status attend(const AttentionArgs& a) {
  thread_local Plan plan;
  if (Status status = plan_work(a, plan)) return status;
  if (int64_t(plan.partials.size()) < plan.partial_floats) {
    plan.partials.resize(size_t(plan.partial_floats));
  }
  switch (a.dtype) {
    case kFloat32: execute<float>(a, plan); break;
    case kBFloat16: execute<bf16>(a, plan); break;
    case kFloat16: execute<f16>(a, plan); break;
    default: return kBadShape;
  }
  return kOk;
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_paged_attention(const AttentionArgs* args) {
  try {
    return attend(*args);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

// Of a call: how many items of work it is, or its status, negated.
SLIPSTREAM_EXPORT int64_t slipstream_attention_items(const AttentionArgs* args) {
  Plan plan;
  const Status status = plan_work(*args, plan);
  return status == kOk ? int64_t(plan.items.size()) : -int64_t(status);
}

// Whether rows that share a prefix read it together, from now on.
SLIPSTREAM_EXPORT void slipstream_share_prefixes(int share) {
  shares_prefixes.store(share != 0, std::memory_order_relaxed);
}

SLIPSTREAM_EXPORT int slipstream_abi() { return SLIPSTREAM_ABI; }
