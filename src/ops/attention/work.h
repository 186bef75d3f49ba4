// The work of one call of attention: items for threads, and how their results are joined.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "runtime/abi.h"
#include "attention/cached_rows.h"
#include "attention/latent_rows.h"
#include "attention/like_one.h"
#include "attention/reach.h"
#include "attention/strips.h"
#include "attention/tiles.h"

namespace {

constexpr int64_t kDotSplit = 256;     // keys of a split where few query rows share them
constexpr int64_t kGemmSplit = 2048;   // keys of a split of a short prefill chunk
constexpr int64_t kLatentSplit = 512;  // keys of a split of keys that are values too
constexpr int64_t kSplitRows = 256;    // rows with more packed queries are hardly split over keys
constexpr int64_t kFixedSplit = 256;   // deterministic: keys of every split
constexpr int64_t kTileBytes = 256 << 10;  // of keys and values in a tile, for all heads of an item
constexpr double kUneven = 1.0 / 4;        // excess over its equal share that a thread may have

// Packed query rows [first, first + count) of a batch row, for each of `kv_heads` kv heads from
// `kv_head` on, against keys [begin, end).
struct Item {
  int32_t row, kv_head, kv_heads, first, count;
  int64_t begin, end;
  int32_t group;             // index of the first kv head's merge group, -1 when not split
  int32_t split;             // index inside the group
  // A shared item has all query heads of several decoding rows; `row` is the first of these. Each
  // member has a merge group of its own.
  int32_t member, members;   // range in Plan::members; `members` is 0 if nothing is shared
  double cost;
};

// The splits of one tile; the thread that finishes the last one merges them.
struct Group {
  int32_t splits;
  int64_t partial;  // offset of its partial results in floats
  std::atomic<int32_t> left;
  Group(int32_t splits, int64_t partial) : splits(splits), partial(partial), left(splits) {}
  Group(Group&& other) noexcept
      : splits(other.splits), partial(other.partial), left(other.left.load()) {}
};

struct Plan {
  std::vector<Item> items;
  std::vector<Group> groups;
  std::vector<float> partials;
  int64_t partial_floats = 0;
  std::vector<int32_t> members;
  std::vector<int32_t> shared;      // batch row -> number of leading splits in shared items
  std::vector<int32_t> row_groups;  // batch row -> its merge group for the first kv head
  std::vector<double> loads;        // per thread, while items are cut for threads

  void clear(int64_t rows) {
    items.clear();
    groups.clear();
    members.clear();
    partial_floats = 0;
    shared.assign(size_t(rows), 0);
    row_groups.assign(size_t(rows), -1);
  }
};

// How a row is computed. It depends only on the call's dtype, on the row, and on whether it is like one.
struct Path {
  bool few;            // few query rows, of one token if it is like one: bound by reading keys and values
  bool strips;         // strips of bfloat16 (strips.h)
  bool pairs;          // without strips: bfloat16 keys and values are read in place
  int lanes;           // bfloat16 keys that are values too: query rows of a vector (latent_rows.h), else 0
  bool dot;            // without strips: scores by dot products, not by packed keys
  int64_t rows;        // packed query rows of an item
  int64_t split;       // keys of an item
  int64_t fold;        // number of keys after which an item's sums are folded and reset
  double row_cost;     // of a query row against a key
  double key_cost;     // of loading and converting or packing a key, in units of query rows
};

// How a row of `query_len` tokens is computed.
//
// A row that is `like_one` takes the path of one token, which decodes: its order of sums, and its splits.
// So its tokens get the bits that they get one at a time. Where it has many query rows, one item folds its
// sums wherever the items of one token are split.
Path choose_path(const AttentionArgs& a, int64_t query_len, int64_t seq_len, bool like_one) {
  const int64_t heads = a.num_heads / a.num_kv_heads, all = query_len * heads;
  const int64_t packed = like_one ? heads : all;
  const bool folds = like_one && packed > kDotRows && all > kSplitRows;
  Path path{};
  path.few = packed <= kDotRows;
  path.split = path.few ? kDotSplit : packed <= kSplitRows ? kGemmSplit : seq_len;
  path.fold = path.split;
  if (a.deterministic) {
    path.fold = kFixedSplit;
    path.split = packed <= kGemmRows ? kFixedSplit : seq_len;
  }
  if (folds) path.split = seq_len;
#if defined(SLIPSTREAM_PAIRS)
  path.lanes = latent_lanes(a, packed);
  if (path.lanes > 0) {
    if (!a.deterministic && packed <= kSplitRows) path.split = path.fold = kLatentSplit;
    if (folds) path.split = seq_len;
    path.rows = std::clamp<int64_t>(all / 8 / kStrip * kStrip, kGemmRows, kTileRows);
    path.row_cost = 1.0 / 4;
    path.key_cost = 4;
    return path;
  }
  path.strips = uses_strips(a, packed);
  path.pairs = uses_pairs(a) && !path.strips;
  if (path.strips) {
    // An item's rows share the packing of keys; but a short prompt must give every thread an item.
    path.rows = std::clamp<int64_t>(all / 8 / kStrip * kStrip, kGemmRows, kTileRows);
    path.row_cost = 1.0 / 16;
    path.key_cost = 32;
    return path;
  }
  if (path.pairs) {
    path.rows = kDotRows;
    path.row_cost = 0.3;
    path.key_cost = 10;
    return path;
  }
#endif
  path.dot = path.few || a.deterministic;
  path.rows = path.few ? kDotRows : kGemmRows;
  path.row_cost = 1.0;
  path.key_cost = 4;
  return path;
}

double cost_of(const AttentionArgs& a, const Path& path, int64_t rows, int64_t keys) {
  return (double(rows) + path.key_cost) * path.row_cost * double(keys) * double(a.head_dim) * 2;
}

// Keys per tile.
inline int tile_keys([[maybe_unused]] const Path& path) {
#if defined(SLIPSTREAM_PAIRS)
  if (path.strips || path.lanes > 0) return kStep;
#endif
  return kKeys;
}

// How many kv heads an item of `count` query rows per head covers. Preferably all: memory is then read
// sequentially. The limit is the room for their query rows, and for a tile of their keys and values and
// the next one in the L2 cache. A head's bits do not depend on the other heads.
inline int64_t kv_heads_together(const AttentionArgs& a, const Path& path, int64_t count) {
  int64_t rows = kGemmRows / count;
#if defined(SLIPSTREAM_PAIRS)
  if (path.strips) rows = kTileRows / strip_rows(count);
#endif
  const int64_t coded = a.head_dim + kFactorBytes, plain = a.head_dim * (a.dtype == kFloat32 ? 4 : 2);
  const int64_t key_bytes = 2 * (a.cache_kind == kAsQueries ? plain : coded);
  const int64_t room = std::min(rows, kTileBytes / (tile_keys(path) * key_bytes));
  return std::clamp<int64_t>(room, 1, a.num_kv_heads);
}

// Adds an item for every `together` kv heads; `first` describes one head, with its cost.
inline void add_for_heads(const AttentionArgs& a, const Item& first, int64_t together, Plan& plan) {
  for (int64_t head = 0; head < a.num_kv_heads; head += together) {
    Item item = first;
    item.kv_head = int32_t(head);
    item.kv_heads = int32_t(std::min(together, a.num_kv_heads - head));
    if (item.group >= 0) item.group += item.kv_head;
    item.cost *= item.kv_heads;
    plan.items.push_back(item);
  }
}

// Splits an item after `heads` kv heads; the rest becomes a new item behind it.
inline void cut_item(Plan& plan, size_t index, int32_t heads) {
  Item rest = plan.items[index];
  Item& item = plan.items[index];
  item.cost *= double(heads) / item.kv_heads;
  item.kv_heads = heads;
  rest.cost -= item.cost;
  rest.kv_head += heads;
  rest.kv_heads -= heads;
  if (rest.group >= 0) rest.group += heads;
  plan.items.insert(plan.items.begin() + int64_t(index) + 1, rest);
}

// Cuts items between kv heads if one of `threads` threads would otherwise finish late, assuming that each
// takes the next item when it is done. It cuts no more than that: a cut item is not read sequentially,
// and where memory is the bottleneck, a finished thread leaves more bandwidth to the others.
inline void cut_for_threads(Plan& plan, int64_t threads) {
  double total = 0, largest = 0;
  for (const Item& item : plan.items) total += item.cost, largest = std::max(largest, item.cost);
  const double share = total / double(threads);
  if (largest <= kUneven * share) return;
  plan.loads.assign(size_t(threads), 0);
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const Item& item = plan.items[i];
    double& load = *std::min_element(plan.loads.begin(), plan.loads.end());
    if (load + item.cost > (1 + kUneven) * share && item.kv_heads > 1) {
      const double heads = std::round((share - load) / item.cost * item.kv_heads);
      cut_item(plan, i, int32_t(std::clamp<double>(heads, 1, item.kv_heads - 1)));
    }
    load += plan.items[i].cost;
  }
}

Status plan_row(const AttentionArgs& a, int64_t row, Plan& plan) {
  const int64_t begin = a.query_start_loc[row], end = a.query_start_loc[row + 1];
  const int64_t seq_len = a.seq_lens[row], query_len = end - begin;
  if (begin < 0 || query_len < 0 || end > a.tokens || seq_len < query_len) return kBadLengths;
  if (query_len == 0) return kOk;
  if (seq_len > a.max_blocks * a.block_size) return kBadLengths;
  const int64_t position = seq_len - query_len;
  const int32_t* table = a.block_tables + row * a.block_table_stride;
  for (int64_t block = first_visible(position, *a.spec) / a.block_size;
       block * a.block_size < seq_len; ++block) {
    if (table[block] < 0 || table[block] >= a.num_blocks) return kBadBlock;
  }
  const int64_t heads = a.num_heads / a.num_kv_heads, packed = query_len * heads;
  const Path path = choose_path(a, query_len, seq_len, is_like_one(a, row));
  const int64_t tile = path.rows, split = path.split;
  for (int64_t first = 0; first < packed; first += tile) {
    const int64_t count = std::min(tile, packed - first);
    const int64_t low = first_visible(position + first / heads, *a.spec);
    const int64_t high = std::min(seq_len, visible_end(position + (first + count - 1) / heads, *a.spec));
    const int64_t split_first = low / split, splits = (high - 1) / split - split_first + 1;
    int32_t group = -1;
    if (splits > 1) {
      group = int32_t(plan.groups.size());
      for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
        plan.groups.emplace_back(int32_t(splits), plan.partial_floats);
        plan.partial_floats += splits * count * (padded(int(a.head_dim)) + 2);
      }
      plan.row_groups[size_t(row)] = group;
    }
    for (int64_t s = plan.shared[size_t(row)]; s < splits; ++s) {
      const int64_t from = std::max(low, (split_first + s) * split);
      const int64_t to = std::min(high, (split_first + s + 1) * split);
      const Item item{int32_t(row), 0, 0, int32_t(first), int32_t(count), from, to, group,
                      int32_t(s), 0, 0, cost_of(a, path, count, to - from)};
      add_for_heads(a, item, path.few ? kv_heads_together(a, path, count) : 1, plan);
    }
  }
  return kOk;
}

// Into how many items the shared keys of one split and kv head are cut: `members` rows with `heads`
// packed query rows each, while `splits` counts the shared splits of all kv heads.
//
// This alone decides about sharing, and only by counts. Sharing changes nothing in what each row sums up
// and leaves for the merge; it only reads, and widens or packs, keys and values once for several rows. So
// fewer items are better, within two limits: an item has room for kGemmRows query rows, and there must be
// at least two items per thread so that threads finish evenly. If that leaves one row per item, nothing
// is shared.
inline int64_t shared_items(int64_t members, int64_t heads, int64_t splits, int64_t threads) {
  const int64_t most = kGemmRows / heads;
  return std::min(members,
                  std::max((members + most - 1) / most, (2 * threads + splits - 1) / splits));
}

// False only to measure the gain of sharing.
std::atomic<bool> shares_prefixes{true};

// Finds decoding rows whose block tables begin with the same blocks and creates shared items for their
// keys (cascade attention): keys and values are read and widened once for all of them. A shared item is
// one KV split, and each row's sums are formed as usual, so no bit changes.
class Sharing {
 public:
  Sharing(const AttentionArgs& args, Plan& plan)
      : a(args), plan(plan), heads(args.num_heads / args.num_kv_heads), path(choose_path(a, 1, 1, false)) {}

  // Call before rows are planned. Determines how many splits of each row are shared.
  void find() {
    if (!(path.few || path.strips || path.lanes > 0) || path.split % a.block_size) return;
    if (a.spec->window > 0 || a.spec->chunk > 0) return;
    // A row that needs several items has a merge group for each; `row_groups` holds only one.
    if (heads > kGemmRows || a.rows < 2 || !shares_prefixes.load(std::memory_order_relaxed)) return;
    for (int64_t row = 0; row < a.rows; ++row) {
      if (splits_of(row) > 0) rows.push_back(int32_t(row));
    }
    spread(0, rows.size(), 0);
    drop_lone();
  }

  // Adds the shared items to the plan; an item's cost is estimated like any other's.
  void add_items() {
    for (const Company& company : companies) add(company);
  }

 private:
  struct Company {
    size_t begin, end;  // range in `plan.members`
    int32_t split;
  };

  // Number of whole splits before the one that contains a decoding row's last key.
  int64_t splits_of(int64_t row) const {
    const bool decodes = a.query_start_loc[row + 1] - a.query_start_loc[row] == 1;
    const int64_t seq_len = a.seq_lens[row];
    return decodes && seq_len <= a.max_blocks * a.block_size ? (seq_len - 1) / path.split : 0;
  }

  const int32_t* blocks(int32_t row, int64_t split) const {
    return a.block_tables + row * a.block_table_stride + split * (path.split / a.block_size);
  }

  // Rows [begin, end) share all splits before `split`; finds groups that share this split, too.
  void spread(size_t begin, size_t end, int32_t split) {
    const int64_t count = path.split / a.block_size;
    end = size_t(std::partition(rows.begin() + begin, rows.begin() + end,
                                [&](int32_t row) { return splits_of(row) > split; }) - rows.begin());
    if (end - begin < 2) return;
    const auto same = [&](int32_t x, int32_t y) {
      return std::equal(blocks(x, split), blocks(x, split) + count, blocks(y, split));
    };
    const bool all = std::all_of(rows.begin() + begin, rows.begin() + end,
                                 [&](int32_t row) { return same(rows[begin], row); });
    if (!all) {
      std::sort(rows.begin() + begin, rows.begin() + end, [&](int32_t x, int32_t y) {
        return std::lexicographical_compare(blocks(x, split), blocks(x, split) + count,
                                            blocks(y, split), blocks(y, split) + count);
      });
    }
    for (size_t first = begin, next; first < end; first = next) {
      for (next = all ? end : first + 1; next < end && same(rows[first], rows[next]);) ++next;
      if (next - first < 2) continue;
      const size_t member = plan.members.size();
      for (size_t i = first; i < next; ++i) {
        plan.members.push_back(rows[i]);
        plan.shared[size_t(rows[i])] = split + 1;
      }
      companies.push_back({member, plan.members.size(), split});
      spread(first, next, split + 1);
    }
  }

  int64_t parts_of(const Company& company, size_t splits) const {
    return shared_items(int64_t(company.end - company.begin), heads, int64_t(splits) * a.num_kv_heads,
                        a.threads);
  }

  // Drops groups in which each member would have an item of its own; their splits become ordinary ones. A
  // group of a later split is no larger, so it is dropped as well.
  void drop_lone() {
    const size_t splits = companies.size();
    const auto is_lone = [&](const Company& company) {
      if (size_t(parts_of(company, splits)) < company.end - company.begin) return false;
      for (size_t i = company.begin; i < company.end; ++i) {
        int32_t& shared = plan.shared[size_t(plan.members[i])];
        shared = std::min(shared, company.split);
      }
      return true;
    };
    companies.erase(std::remove_if(companies.begin(), companies.end(), is_lone), companies.end());
  }

  void add(const Company& company) {
    const int64_t members = int64_t(company.end - company.begin);
    const int64_t parts = parts_of(company, companies.size());
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = members * part / parts, count = members * (part + 1) / parts - from;
      const size_t member = company.begin + size_t(from);
      const int64_t packed = count * heads;
      const Item item{plan.members[member], 0, 0, 0, int32_t(packed), company.split * path.split,
                      (company.split + 1) * path.split, -1, company.split, int32_t(member),
                      int32_t(count), cost_of(a, path, packed, path.split)};
      add_for_heads(a, item, kv_heads_together(a, path, packed), plan);
    }
  }

  const AttentionArgs& a;
  Plan& plan;
  const int64_t heads;
  const Path path;
  std::vector<int32_t> rows;
  std::vector<Company> companies;
};

}  // namespace
