// Latent attention: the cache has one vector per token, from which keys and values of all heads are
// made by projections. There are two ways to compute a row, which give the same result but for rounding.
//
// Absorbed: the projection of keys is applied to the queries instead, and that of values to the result.
// Attention is then that of many query heads over a single key head, whose values are the keys: the
// kernel of paged attention, with the cache as keys and as values. A key costs rank + rope products per
// head and query, nothing else.
//
// Expanded: keys and values of all heads are made for the whole context, some heads at a time, so that
// memory is bounded. A key costs nope + rope products per head and query, after one projection.
//
// Which way costs fewer products depends on the row's lengths alone. With `deterministic` every row is
// absorbed, so that its bits do not depend on how its tokens are cut into calls. So are rows that verify
// drafts (like_one.h); they would be expanded behind hardly any context only.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "attention/like_one.h"
#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr int64_t kExpandedBytes = 32 << 20;   // of keys and values that are expanded at once
constexpr int64_t kBlock = 64;                 // tokens of a block of expanded keys
constexpr double kProductsPerMicrosecond = 1e4;
constexpr double kMovedPerMicrosecond = 5e3;   // elements

template <class T>
class Latent {
 public:
  explicit Latent(const LatentArgs& args)
      : a(args),
        width(args.rank + args.rope),
        query_dim(args.nope + args.rope),
        up_rows(args.nope + args.value),
        wide((std::max(query_dim, args.value) + 7) / 8 * 8) {}

  Status run() {
    for (int64_t token = 0; token < a.tokens; ++token) {
      if (a.slot_mapping[token] >= a.num_blocks * a.block_size) return kBadSlot;
    }
    for (int64_t row = 0; row < a.rows; ++row) {
      if (const Status status = check(row)) return status;
    }
    write_cache();
    const int64_t end = a.rows > 0 ? a.query_start_loc[a.rows] : 0;
    // A step without tokens has no output to point to.
    if (end < a.tokens) {
      std::memset(static_cast<void*>(static_cast<T*>(a.out) + end * a.heads * a.value), 0,
                  size_t((a.tokens - end) * a.heads * a.value) * sizeof(T));
    }
    std::vector<int64_t> absorbed;
    for (int64_t row = 0; row < a.rows; ++row) {
      if (query_len(row) == 0) continue;
      if (!is_expanded(row)) {
        absorbed.push_back(row);
      } else if (const int status = expand(row)) {
        return Status(status);
      }
    }
    return absorbed.empty() ? kOk : Status(absorb(absorbed));
  }

 private:
  int64_t query_len(int64_t row) const { return a.query_start_loc[row + 1] - a.query_start_loc[row]; }

  Status check(int64_t row) const {
    const int64_t begin = a.query_start_loc[row], end = a.query_start_loc[row + 1];
    const int64_t seq_len = a.seq_lens[row];
    if (begin < 0 || end < begin || end > a.tokens || seq_len < end - begin) return kBadLengths;
    if (begin == end) return kOk;
    if (seq_len > a.max_blocks * a.block_size) return kBadLengths;
    const int32_t* table = a.block_tables + row * a.block_table_stride;
    for (int64_t block = 0; block * a.block_size < seq_len; ++block) {
      if (table[block] < 0 || table[block] >= a.num_blocks) return kBadBlock;
    }
    return kOk;
  }

  // Products per head of both ways; either projects once, queries and results or the context.
  bool is_expanded(int64_t row) const {
    if (a.deterministic || is_like_one(a, row)) return false;
    const double queries = double(query_len(row)), keys = double(a.seq_lens[row]);
    const double pairs = queries * keys - queries * (queries - 1) / 2;
    const double projection = double(a.rank * up_rows);
    return keys * projection + pairs * double(2 * wide) <
           queries * projection + pairs * double(2 * width);
  }

  void write_cache() const {
    for (int64_t token = 0; token < a.tokens; ++token) {
      const int64_t slot = a.slot_mapping[token];
      if (slot < 0) continue;
      std::memcpy(static_cast<T*>(a.cache) + slot * width,
                  static_cast<const T*>(a.latent) + token * a.latent_stride, size_t(width) * sizeof(T));
    }
  }

  const T* query_of(int64_t token, int64_t head) const {
    return static_cast<const T*>(a.query) + token * a.query_stride + head * query_dim;
  }

  const T* up_of(int64_t head) const {
    return static_cast<const T*>(a.up) + head * up_rows * a.rank;
  }

  T* out_of(int64_t token, int64_t head) const {
    return static_cast<T*>(a.out) + (token * a.heads + head) * a.value;
  }

  int attend(AttentionArgs args) const {
    args.spec = a.spec;
    args.dtype = a.dtype, args.threads = a.threads, args.deterministic = a.deterministic;
    // Nothing is written: all slots are negative.
    args.key = args.value = args.query;
    args.key_stride = args.value_stride = 0;
    return slipstream_paged_attention(&args);
  }

  // to[r] = sum over n of query[n] * up[n, r], summed in the order of n, for NR * W numbers r (or `some`
  // of W) from `column` on, and for MR tokens.
  template <int MR, int NR>
  void absorb_block(const T* up, const T* const* queries, T* const* to, int64_t column, int64_t some) const {
    vf sums[MR][NR] = {};
    for (int64_t n = 0; n < a.nope; ++n) {
      vf row[NR];
      const T* from = up + n * a.rank + column;
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) row[j] = some == W ? load(from + j * W) : load_some(from, some);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) {
        const vf x = splat(as_float(queries[i] + n));
#pragma GCC unroll 4
        for (int j = 0; j < NR; ++j) sums[i][j] += x * row[j];
      }
    }
    for (int i = 0; i < MR; ++i) {
      for (int j = 0; j < NR; ++j) {
        float floats[W];
        T narrow[W];
        store(floats, sums[i][j]);
        from_floats(floats, narrow);
        std::memcpy(to[i] + column + j * W, narrow, size_t(some) * sizeof(T));
      }
    }
  }

  template <int MR>
  void absorb_tokens(int64_t head, const T* const* queries, T* const* to) const {
    const T* up = up_of(head);
    int64_t column = 0;
    for (; column + 4 * W <= a.rank; column += 4 * W) absorb_block<MR, 4>(up, queries, to, column, W);
    for (; column < a.rank; column += W) {
      absorb_block<MR, 1>(up, queries, to, column, std::min<int64_t>(W, a.rank - column));
    }
    for (int i = 0; i < MR; ++i) {
      std::memcpy(to[i] + a.rank, queries[i] + a.nope, size_t(a.rope) * sizeof(T));
    }
  }

  // Calls function(head) for all heads, on several threads if that is worth while for `products` in all.
  template <class F>
  void each_head(double products, const F& function) const {
    const int64_t parts = worthwhile_parts(a.threads, products / kProductsPerMicrosecond, a.heads);
    parallel(a.threads, parts, [&](int64_t part) {
      for (int64_t head = a.heads * part / parts; head < a.heads * (part + 1) / parts; ++head) function(head);
    });
  }

  int absorb(const std::vector<int64_t>& rows) const {
    std::vector<int64_t> tokens;
    std::vector<int32_t> starts{0}, lengths, tables, verifies;
    for (const int64_t row : rows) {
      for (int64_t t = a.query_start_loc[row]; t < a.query_start_loc[row + 1]; ++t) tokens.push_back(t);
      starts.push_back(int32_t(tokens.size()));
      lengths.push_back(a.seq_lens[row]);
      verifies.push_back(a.verifies == nullptr ? 0 : a.verifies[row]);
      const int32_t* table = a.block_tables + row * a.block_table_stride;
      tables.insert(tables.end(), table, table + a.max_blocks);
    }
    const int64_t count = int64_t(tokens.size()), token_size = a.heads * width;
    const std::unique_ptr<T[]> queries(new T[size_t(count * token_size)]);
    const std::unique_ptr<T[]> latents(new T[size_t(count * token_size)]);
    const std::vector<int64_t> nowhere(size_t(count), -1);
    each_head(double(count * a.heads * a.nope * a.rank), [&](int64_t head) {
      for (int64_t first = 0; first < count;) {
        const T* from[4];
        T* to[4];
        const int64_t some = std::min<int64_t>(4, count - first);
        for (int64_t i = 0; i < some; ++i) {
          from[i] = query_of(tokens[size_t(first + i)], head);
          to[i] = queries.get() + (first + i) * token_size + head * width;
        }
        if (some == 4) {
          absorb_tokens<4>(head, from, to);
        } else {
          for (int64_t i = 0; i < some; ++i) absorb_tokens<1>(head, from + i, to + i);
        }
        first += some;
      }
    });
    AttentionArgs args{};
    args.query = queries.get(), args.query_stride = token_size;
    args.key_cache = args.value_cache = a.cache;
    args.block_tables = tables.data(), args.block_table_stride = a.max_blocks;
    args.query_start_loc = starts.data(), args.seq_lens = lengths.data();
    args.verifies = verifies.data();
    args.slot_mapping = nowhere.data(), args.out = latents.get();
    args.tokens = count, args.rows = int64_t(rows.size());
    args.num_heads = a.heads, args.num_kv_heads = 1, args.head_dim = width, args.value_dim = a.rank;
    args.num_blocks = a.num_blocks, args.block_size = a.block_size, args.max_blocks = a.max_blocks;
    if (const int status = attend(args)) return status;
    // Of all heads, [heads, tokens, value]: threads ask for no memory.
    const std::unique_ptr<T[]> values(new T[size_t(count * a.heads * a.value)]);
    std::atomic<int> failed{kOk};
    each_head(double(count * a.heads * a.value * a.rank), [&](int64_t head) {
      T* const own = values.get() + head * count * a.value;
      const int status = project(latents.get() + head * width, token_size, count,
                                 up_of(head) + a.nope * a.rank, a.value, own, 1);
      if (status) failed.store(status, std::memory_order_relaxed);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(out_of(tokens[size_t(i)], head), own + i * a.value, size_t(a.value) * sizeof(T));
      }
    });
    return failed.load(std::memory_order_relaxed);
  }

  // Multiplies the first `rank` numbers of each of `count` vectors by `outputs` rows of the projection.
  int project(const T* x, int64_t stride, int64_t count, const T* weight, int64_t outputs, T* to,
              int64_t threads) const {
    LinearArgs args{};
    args.x = x, args.x_stride = stride, args.tokens = count;
    args.weight = weight, args.inputs = a.rank, args.outputs = outputs, args.out = to;
    args.dtype = args.kind = a.dtype, args.threads = threads;
    return slipstream_linear(&args);
  }

  int expand(int64_t row) const {
    const int64_t keys = a.seq_lens[row], queries = query_len(row), first = a.query_start_loc[row];
    const int64_t blocks = (keys + kBlock - 1) / kBlock;
    const int64_t head_bytes = keys * (2 * wide + up_rows) * int64_t(sizeof(T));
    const int64_t together = std::clamp<int64_t>(kExpandedBytes / head_bytes, 1, a.heads);
    const auto room = [](int64_t count) { return std::unique_ptr<T[]>(new T[size_t(count)]); };
    const std::unique_ptr<T[]> latents = room(keys * width), made = room(keys * together * up_rows);
    const std::unique_ptr<T[]> key_cache = room(blocks * kBlock * together * wide);
    const std::unique_ptr<T[]> value_cache = room(blocks * kBlock * together * wide);
    const std::unique_ptr<T[]> query = room(queries * together * wide), out = room(queries * together * wide);
    const std::vector<int64_t> nowhere(size_t(queries), -1);
    std::vector<int32_t> table(static_cast<size_t>(blocks));
    for (int64_t i = 0; i < blocks; ++i) table[size_t(i)] = int32_t(i);
    const int32_t starts[2] = {0, int32_t(queries)}, length = int32_t(keys);
    gather(row, keys, latents.get());
    for (int64_t head = 0; head < a.heads; head += together) {
      const int64_t count = std::min(together, a.heads - head);
      const int status = project(latents.get(), width, keys, up_of(head), count * up_rows, made.get(), a.threads);
      if (status) return status;
      const double moved = double(keys * count * wide * 2);
      const int64_t parts = worthwhile_parts(a.threads, moved / kMovedPerMicrosecond, keys);
      parallel(a.threads, parts, [&](int64_t part) {
        for (int64_t key = keys * part / parts; key < keys * (part + 1) / parts; ++key) {
          const T* rotated = latents.get() + key * width + a.rank;
          for (int64_t i = 0; i < count; ++i) {
            const T* from = made.get() + (key * count + i) * up_rows;
            T* to = key_cache.get() + (key * count + i) * wide;
            join(from, a.nope, rotated, a.rope, to);
            join(from + a.nope, a.value, nullptr, 0, value_cache.get() + (key * count + i) * wide);
          }
        }
      });
      for (int64_t t = 0; t < queries; ++t) {
        for (int64_t i = 0; i < count; ++i) {
          join(query_of(first + t, head + i), query_dim, nullptr, 0, query.get() + (t * count + i) * wide);
        }
      }
      AttentionArgs args{};
      args.query = query.get(), args.query_stride = count * wide;
      args.key_cache = key_cache.get(), args.value_cache = value_cache.get();
      args.block_tables = table.data(), args.block_table_stride = blocks;
      args.query_start_loc = starts, args.seq_lens = &length;
      args.slot_mapping = nowhere.data(), args.out = out.get();
      args.tokens = queries, args.rows = 1;
      args.num_heads = args.num_kv_heads = count, args.head_dim = wide;
      args.num_blocks = args.max_blocks = blocks, args.block_size = kBlock;
      if (const int failed = attend(args)) return failed;
      for (int64_t t = 0; t < queries; ++t) {
        for (int64_t i = 0; i < count; ++i) {
          std::memcpy(out_of(first + t, head + i), out.get() + (t * count + i) * wide,
                      size_t(a.value) * sizeof(T));
        }
      }
    }
    return kOk;
  }

  // A row of `wide` numbers: two runs, then zeros.
  void join(const T* one, int64_t ones, const T* two, int64_t twos, T* to) const {
    std::memcpy(to, one, size_t(ones) * sizeof(T));
    if (twos > 0) std::memcpy(to + ones, two, size_t(twos) * sizeof(T));
    std::memset(static_cast<void*>(to + ones + twos), 0, size_t(wide - ones - twos) * sizeof(T));
  }

  // Copies the vectors of the first `keys` tokens of a row one behind the other.
  void gather(int64_t row, int64_t keys, T* to) const {
    const int32_t* table = a.block_tables + row * a.block_table_stride;
    for (int64_t key = 0; key < keys; key += a.block_size) {
      const int64_t count = std::min(a.block_size, keys - key);
      std::memcpy(to + key * width, static_cast<const T*>(a.cache) + table[key / a.block_size] * a.block_size * width,
                  size_t(count * width) * sizeof(T));
    }
  }

  const LatentArgs& a;
  const int64_t width, query_dim, up_rows, wide;  // `wide`: of an expanded key, and of a value with padding
};

template <class T>
Status run(const LatentArgs& a) {
  return Latent<T>(a).run();
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_latent_attention(const LatentArgs* args) {
  const LatentArgs& a = *args;
  if (a.tokens < 0 || a.heads < 1 || a.nope < 1 || a.rope < 0 || a.rank < 1 || a.value < 1 ||
      (a.rank + a.rope) % 8 || a.block_size < 1 || a.threads < 1) {
    return kBadShape;
  }
  try {
    switch (a.dtype) {
      case kFloat32: return run<float>(a);
      case kBFloat16: return run<bf16>(a);
      case kFloat16: return run<f16>(a);
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
