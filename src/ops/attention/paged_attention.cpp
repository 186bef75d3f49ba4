// Paged attention for CPUs: varlen prefill and decode in one call.
//
// A call becomes a list of work items: row x kv heads x tile of packed query rows x KV split. Threads
// take the items in order, in parts of about equal estimated cost. All query heads of a kv head are
// packed into one tile, so each key is loaded once for all of them. Splits have a fixed size and start at
// multiples of it, and the code path of a row depends on that row alone. So results do not depend on the
// rest of the batch, nor on the number of threads.
//
// An item of few query rows is bound by reading memory. It covers all kv heads, which are adjacent in
// memory. It is cut between kv heads only where a thread would otherwise finish late.
//
// Decoding rows that share a prefix share the items for its keys (`Sharing`). That changes no bit of a
// result.
//
// Without `deterministic`, results still depend on how many tokens of a sequence come at once, unless they
// verify drafts (like_one.h). How many come depends on the batch's token budget, on prefix caching and on
// preemption. `deterministic` removes this dependence. Then every query row, in decode and in long prompts,
// sums its scores in one order: that of tile products, where they are used, else that of dot products. Its
// keys are cut into the same splits, which are joined in order, whether the splits are separate items or
// follow one another within an item.
#include <memory>
#include <new>

#include "attention/attend.h"
#include "runtime/parallel.h"

namespace {

constexpr double kCostPerMicrosecond = 3e4;
constexpr double kCopiedPerMicrosecond = 6e3;  // elements

template <class T, class C>
void execute(const AttentionArgs& a, Plan& plan) {
  const Attention<T, C> attention(a, plan);
  const double copied = double(a.tokens * a.num_kv_heads * a.head_dim);
  const int64_t writers = worthwhile_parts(a.threads, copied / kCopiedPerMicrosecond, a.tokens);
  parallel(a.threads, writers, [&](int64_t part) {
    attention.write_cache(a.tokens * part / writers, a.tokens * (part + 1) / writers);
  });
  const int64_t end = a.rows > 0 ? a.query_start_loc[a.rows] : 0;
  const int64_t row_bytes = a.num_heads * a.head_dim * int64_t(sizeof(T));
  // A step without tokens has no output to point to.
  if (end < a.tokens)
    std::memset(static_cast<char*>(a.out) + end * row_bytes, 0, size_t((a.tokens - end) * row_bytes));

  double total = 0;
  for (const Item& item : plan.items) total += item.cost;
  const int64_t parts = worthwhile_parts(a.threads, total / kCostPerMicrosecond);
  cut_for_threads(plan, std::min<int64_t>(parts, a.threads));
  std::vector<size_t> bounds(size_t(parts) + 1, plan.items.size());
  bounds[0] = 0;
  double sum = 0;
  int64_t part = 1;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    // An item belongs to the part that contains its middle.
    const double middle = sum + plan.items[i].cost / 2;
    while (part < parts && middle >= total * double(part) / double(parts)) bounds[size_t(part++)] = i;
    sum += plan.items[i].cost;
  }
  parallel(a.threads, parts, [&](int64_t index) {
#if defined(SLIPSTREAM_TILES)
    const TileRegisters registers(uses_pairs(a) && tiles_permitted());
#endif
    thread_local std::unique_ptr<Scratch> scratch(new Scratch);
    scratch->ahead->item = nullptr;  // left over from another call
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
  // Shared items cost most, so they come first: no thread starts one at the very end.
  sharing.add_items();
  for (int64_t row = 0; row < a.rows; ++row) {
    if (Status status = plan_row(a, row, plan)) return status;
  }
  return kOk;
}

template <class T>
void execute(const AttentionArgs& a, Plan& plan) {
  if (a.cache_kind == kAsQueries) return execute<T, T>(a, plan);
  execute<T, Code>(a, plan);
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

// Returns the number of items of a call, or its status, negated. `shares` are in units of an equal share
// of the work per thread: [0] the load of the busiest thread, [1] the largest cost of one kv head of an
// item.
SLIPSTREAM_EXPORT int64_t slipstream_attention_items(const AttentionArgs* args, double* shares) {
  Plan plan;
  if (const Status status = plan_work(*args, plan)) return -int64_t(status);
  cut_for_threads(plan, args->threads);
  plan.loads.assign(size_t(args->threads), 0);
  double total = 0, head = 0;
  for (const Item& item : plan.items) {
    *std::min_element(plan.loads.begin(), plan.loads.end()) += item.cost;
    total += item.cost, head = std::max(head, item.cost / item.kv_heads);
  }
  const double share = plan.items.empty() ? 1 : total / args->threads;
  shares[0] = *std::max_element(plan.loads.begin(), plan.loads.end()) / share;
  shares[1] = head / share;
  return int64_t(plan.items.size());
}

// Whether rows that share a prefix read it together from now on.
SLIPSTREAM_EXPORT void slipstream_share_prefixes(int share) {
  shares_prefixes.store(share != 0, std::memory_order_relaxed);
}

SLIPSTREAM_EXPORT int slipstream_abi() { return SLIPSTREAM_ABI; }
