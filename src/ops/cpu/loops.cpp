// Loops of compiled code, by the threads of the pool.
//
// Inductor writes its loops over tokens for OpenMP: a function that asks which part of how many it
// is, and computes that one. The compiler's process writes the names below over OpenMP's
// (src/compile/own_threads.py), whose teams would spin beside the pool and would begin a loop of one
// microsecond together. Here a loop is cut as other work is, where it takes long enough. How long
// that is nobody says, so it is seen.
#include <chrono>
#include <unordered_map>

#include "abi.h"
#include "bound.h"
#include "parallel.h"

thread_local int64_t slipstream_tokens = 0;

namespace {

typedef void Loop(void*);
typedef std::chrono::steady_clock Clock;

constexpr double kNewest = 1.0 / 8;  // weight of what a loop took now, against what it took before

thread_local int this_part = 0, all_parts = 1;
std::atomic<int64_t> loops_cut{0};

struct Part {
  Part(int64_t part, int64_t parts) { this_part = int(part), all_parts = int(parts); }
  ~Part() { this_part = 0, all_parts = 1; }
};

// Microseconds that it took one thread to run all parts.
double run(Loop* loop, void* data, int64_t parts) {
  std::atomic<int64_t> spent{0};
  parallel(slipstream_threads, parts, [&](int64_t part) {
    const Part taken(part, parts);
    const auto begin = Clock::now();
    loop(data);
    const auto time = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
    spent.fetch_add(time.count(), std::memory_order_relaxed);
  });
  return double(spent.load(std::memory_order_relaxed)) / 1e3;
}

// What a token takes, in microseconds; null if there is no memory to know it.
double* cost_of(Loop* loop, bool& is_new) {
  thread_local std::unordered_map<Loop*, double> costs;
  try {
    const auto [found, is_first] = costs.try_emplace(loop, 0.0);
    is_new = is_first;
    return &found->second;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

// GOMP_parallel: a loop's parts, in any order. GCC takes it, and the loop, never to throw: the process
// would end.
SLIPSTREAM_EXPORT void slipstream_do(Loop* loop, void* data, unsigned, unsigned) {
  const int64_t tokens = slipstream_tokens;
  if (slipstream_threads <= 1 || tokens <= 1) return loop(data);
  bool is_new = false;
  double* known = cost_of(loop, is_new);
  if (known == nullptr) return loop(data);
  double& cost = *known;
  const int64_t parts = worthwhile_parts(slipstream_threads, cost * double(tokens), tokens);
  // Too short to look at the clock for, unless it was never looked at.
  if (parts <= 1 && !is_new) return loop(data);
  if (parts > 1) loops_cut.fetch_add(1, std::memory_order_relaxed);
  const double now = run(loop, data, parts) / double(tokens);
  cost = is_new ? now : cost + (now - cost) * kNewest;
}

// GOMP_barrier: a loop's end, behind which nothing is.
SLIPSTREAM_EXPORT void slipstream_0() {}

// omp_get_thread_num and omp_get_num_threads
SLIPSTREAM_EXPORT int slipstream_my_part() { return this_part; }
SLIPSTREAM_EXPORT int slipstream_in_parts() { return all_parts; }

SLIPSTREAM_EXPORT int64_t slipstream_count_cut_loops() {
  return loops_cut.load(std::memory_order_relaxed);
}
