// Where the query rows of an item of attention are, and how their sums become output: joined with those of
// other splits, normalised and written.
#pragma once
#include "attention/work.h"

namespace {

// T: element of queries and of the output.
template <class T>
class Results {
 protected:
  Results(const AttentionArgs& args, Plan& plan)
      : a(args),
        plan(plan),
        head_dim(int(args.head_dim)),
        width(padded(head_dim)),
        heads(args.num_heads / args.num_kv_heads) {}

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

  void begin_sums(int begin, int end, Scratch& s) const {
    std::fill(s.maximum + begin, s.maximum + end, -kInfinity);
    std::fill(s.sum + begin, s.sum + end, 0.0f);
    std::fill(s.out + begin * width, s.out + end * width, 0.0f);
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

  const AttentionArgs& a;
  Plan& plan;
  const int head_dim, width;
  const int64_t heads;

 private:
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
