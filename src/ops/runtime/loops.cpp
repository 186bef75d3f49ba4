// Runs the loops of compiled code on the threads of the pool.
//
// Inductor writes its loops over tokens for OpenMP: a function asks for its thread number and the number
// of threads, and computes that part. The compiler's process replaces OpenMP's names with those below
// (src/compile/replace_openmp.py). OpenMP's teams would spin beside the pool, and would be started even for
// loops of one microsecond. Here a loop is cut like any other work, if it takes long enough. Its duration
// is not known beforehand, so it is measured.
#include <chrono>
#include <unordered_map>

#include "runtime/abi.h"
#include "runtime/bound.h"
#include "runtime/parallel.h"

thread_local int64_t slipstream_tokens = 0;

namespace {

typedef void Loop(void*);
typedef std::chrono::steady_clock Clock;

constexpr double kNewest = 1.0 / 8;  // weight of the newest measurement in the moving average

thread_local int this_part = 0, all_parts = 1;
std::atomic<int64_t> loops_cut{0};

struct Part {
  Part(int64_t part, int64_t parts) { this_part = int(part), all_parts = int(parts); }
  ~Part() { this_part = 0, all_parts = 1; }
};

// Runs all parts. Returns the sum of their durations in microseconds.
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

// The cost of a token in this loop, in microseconds; null if memory is lacking.
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

// GOMP_parallel: runs a loop's parts in any order. GCC assumes that neither it nor the loop throws; an
// exception would end the process.
SLIPSTREAM_EXPORT void slipstream_do(Loop* loop, void* data, unsigned, unsigned) {
  const int64_t tokens = slipstream_tokens;
  if (slipstream_threads <= 1 || tokens <= 1) return loop(data);
  bool is_new = false;
  double* known = cost_of(loop, is_new);
  if (known == nullptr) return loop(data);
  double& cost = *known;
  const int64_t parts = worthwhile_parts(slipstream_threads, cost * double(tokens), tokens);
    // Too short to be worth the clock calls, unless it was never measured.
  if (parts <= 1 && !is_new) return loop(data);
  if (parts > 1) loops_cut.fetch_add(1, std::memory_order_relaxed);
  const double now = run(loop, data, parts) / double(tokens);
  cost = is_new ? now : cost + (now - cost) * kNewest;
}

// GOMP_barrier: stands at a loop's end, and nothing follows it.
SLIPSTREAM_EXPORT void slipstream_0() {}

// omp_get_thread_num and omp_get_num_threads
SLIPSTREAM_EXPORT int slipstream_my_part() { return this_part; }
SLIPSTREAM_EXPORT int slipstream_in_parts() { return all_parts; }

SLIPSTREAM_EXPORT int64_t slipstream_count_cut_loops() {
  return loops_cut.load(std::memory_order_relaxed);
}
