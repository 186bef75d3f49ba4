// What an engine has the kernels' threads do, watched by ThreadSanitizer (sanitized.py).
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"

extern "C" void slipstream_assume_wake_cost(double microseconds);
extern "C" int slipstream_self_check(const char* kernel, void* other);

namespace {

// Parts write what the caller reads then, and no atomic of ours orders that.
bool pieces(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int64_t threads = 1 + round % 5, parts = 1 + round % 37;
    std::vector<int> written(static_cast<size_t>(parts)), along(written.size());
    if (round % 3 == 0) slipstream_rouse(threads);
    if (round % 7 == 0) slipstream_begin_step(threads);
    parallel(threads, parts, [&](int64_t part) { written[size_t(part)] += 1; });
    parallel_along(threads, parts, [&](int64_t part) { along[size_t(part)] += written[size_t(part)]; });
    if (round % 7 == 0) slipstream_end_step();
    for (const int times : along) {
      if (times != 1) return false;
    }
  }
  return true;
}

// Decoding rows with a common prefix and of several splits, and a prompt: items are joined by whoever is
// last.
bool attend(int rounds) {
  constexpr int64_t kRows = 5, kBlocks = 80, kBlock = 16, kHeads = 4, kHeadDim = 32, kTokens = 104;
  const int32_t starts[kRows + 1] = {0, 1, 2, 3, 4, kTokens};
  const int32_t lengths[kRows] = {1100, 1000, 700, 5, 300};
  std::vector<float> query(kTokens * kHeads * kHeadDim, 0.5f), out(query.size());
  std::vector<float> keys(kRows * kBlocks * kBlock * 2 * kHeadDim, 0.25f), values = keys;
  std::vector<int32_t> tables;
  for (int32_t i = 0; i < kRows * kBlocks; ++i) tables.push_back(i);
  for (int32_t i = 0; i < 32; ++i) tables[size_t(kBlocks + i)] = i;
  const std::vector<int64_t> slots(kTokens, -1);
  const std::vector<float> sinks(kHeads, 0.5f);
  AttentionSpec spec{};
  spec.scale = 0.2f, spec.cap = 5.0f, spec.window = 0, spec.chunk = 0, spec.sinks = sinks.data();
  for (int round = 0; round < rounds; ++round) {
    AttentionArgs args{};
    args.query = query.data(), args.key = query.data(), args.value = query.data();
    args.key_cache = keys.data(), args.value_cache = values.data();
    args.block_tables = tables.data(), args.query_start_loc = starts, args.seq_lens = lengths;
    args.slot_mapping = slots.data(), args.out = out.data(), args.spec = &spec;
    args.query_stride = kHeads * kHeadDim, args.key_stride = 2 * kHeadDim;
    args.value_stride = 2 * kHeadDim, args.block_table_stride = kBlocks, args.tokens = kTokens;
    args.rows = kRows, args.num_heads = kHeads, args.num_kv_heads = 2, args.head_dim = kHeadDim;
    args.num_blocks = kRows * kBlocks, args.block_size = kBlock, args.max_blocks = kBlocks;
    args.dtype = kFloat32, args.threads = 1 + round % 4, args.deterministic = round % 2;
    args.cache_kind = kAsQueries, args.value_dim = 0;
    if (slipstream_paged_attention(&args) != kOk) return false;
  }
  return true;
}

// The cases by which a level is compared with another one; here it is compared with itself. Every kernel
// has some, and cuts them for two threads.
bool checks(int count, char** kernels) {
  for (int i = 0; i < count; ++i) {
    void* const kernel = dlsym(RTLD_DEFAULT, (std::string("slipstream_") + kernels[i]).c_str());
    if (kernel == nullptr || slipstream_self_check(kernels[i], kernel) != 0) {
      std::printf("%s: %s\n", kernels[i], kernel == nullptr ? "not there" : "differs from itself");
      return false;
    }
  }
  return true;
}

}  // namespace

// Its arguments are the names of all kernels.
int main(int count, char** kernels) {
  slipstream_assume_wake_cost(1e-3);
  std::atomic<bool> good{count > 1};
  // Two callers: of one engine's steps and of another's; who finds the threads taken works alone.
  std::thread other([&] {
    if (!pieces(300) || !attend(20)) good = false;
  });
  if (!pieces(300) || !attend(20)) good = false;
  other.join();
  if (!checks(count - 1, kernels + 1)) good = false;
  std::puts(good ? "threads: nothing found" : "threads: a piece of work was lost");
  return good ? 0 : 1;
}
