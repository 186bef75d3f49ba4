// What an engine has the kernels' threads do, watched by ThreadSanitizer (sanitized.py).
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "abi.h"
#include "parallel.h"

extern "C" void slipstream_assume_wake_cost(double microseconds);

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
  const AttentionSpec spec{0.2f, 5.0f, 0, 0, sinks.data()};
  for (int round = 0; round < rounds; ++round) {
    const AttentionArgs args{query.data(), query.data(), query.data(), keys.data(), values.data(),
                             tables.data(), starts, lengths, slots.data(), out.data(), &spec,
                             kHeads * kHeadDim, 2 * kHeadDim, 2 * kHeadDim, kBlocks,
                             kTokens, kRows, kHeads, 2, kHeadDim, kRows * kBlocks, kBlock, kBlocks,
                             kFloat32, 1 + round % 4, round % 2};
    if (slipstream_paged_attention(&args) != kOk) return false;
  }
  return true;
}

}  // namespace

int main() {
  slipstream_assume_wake_cost(1e-3);
  std::atomic<bool> good{true};
  // Two callers: of one engine's steps and of another's; who finds the threads taken works alone.
  std::thread other([&] {
    if (!pieces(300) || !attend(20)) good = false;
  });
  if (!pieces(300) || !attend(20)) good = false;
  other.join();
  std::puts(good ? "threads: nothing found" : "threads: a piece of work was lost");
  return good ? 0 : 1;
}
