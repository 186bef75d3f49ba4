// Runs a function for part 0..parts-1 on several threads of the pool.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <new>

// Calls function(data) on the calling thread and on up to threads - 1 helpers, those that start in
// time. It must not throw.
void slipstream_run_together(int64_t threads, void (*function)(void*), void* data);

// Estimated time until a helper has begun, in microseconds; shorter while helpers are polling.
double slipstream_begin_cost();

// Announces small pieces of work: up to threads - 1 helpers poll for it instead of sleeping.
void slipstream_rouse(int64_t threads);

// The same until slipstream_end_step(), with a longer time of polling.
void slipstream_begin_step(int64_t threads);
void slipstream_end_step();

namespace {

// Into how many parts (at most `most`) to cut work that takes one thread `microseconds`.
inline int64_t worthwhile_parts(int64_t threads, double microseconds,
                                int64_t most = std::numeric_limits<int64_t>::max()) {
  if (threads <= 1 || most <= 1) return 1;
  const double cost = slipstream_begin_cost();
  if (microseconds < 3 * cost) return 1;
  // More parts than threads: woken threads start late, and may lose their CPU.
  const double parts = std::min(microseconds / cost, 4.0 * double(threads));
  return std::min(int64_t(parts), most);
}

template <class F>
struct Team {
  const F* function;
  int64_t parts;
  std::atomic<int64_t> next{0};
  std::atomic<bool> lacks_memory{false};

  // Parts are taken by ticket, so any number of threads may take part.
  static void work(void* self) noexcept {
    auto* team = static_cast<Team*>(self);
    for (int64_t part; (part = team->next.fetch_add(1, std::memory_order_relaxed)) < team->parts;) {
      try {
        (*team->function)(part);
      } catch (const std::bad_alloc&) {
        team->lacks_memory.store(true, std::memory_order_relaxed);
      }
    }
  }
};

// Runs all parts. Raises std::bad_alloc at the end if a part did.
template <class F>
void parallel(int64_t threads, int64_t parts, const F& function) {
  Team<F> team{&function, parts};
  const int64_t wanted = std::min<int64_t>(threads, parts);
  if (wanted <= 1) {
    Team<F>::work(&team);
  } else {
    slipstream_run_together(wanted, &Team<F>::work, &team);
  }
  // Only here: other threads may still have used the function's captures before this point.
  if (team.lacks_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// A contiguous range of parts.
struct alignas(64) Stretch {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

constexpr int64_t kMostStretches = 32;

// The same for parts that are adjacent in memory. Each thread takes parts from a contiguous range of its
// own, so that hardware prefetching works and threads do not prefetch for each other. When its range is
// done, it helps with the others.
template <class F>
void parallel_along(int64_t threads, int64_t parts, const F& function) {
  const int64_t comers = std::min(threads, parts), count = std::min(comers, kMostStretches);
  if (comers <= 1) return parallel(1, parts, function);
  Stretch stretches[kMostStretches];
  for (int64_t i = 0; i < count; ++i) {
    stretches[i].next.store(parts * i / count, std::memory_order_relaxed);
    stretches[i].end = parts * (i + 1) / count;
  }
  parallel(threads, comers, [&](int64_t first) {
    for (int64_t i = first; i < first + count; ++i) {
      Stretch& along = stretches[i % count];
      while (along.next.load(std::memory_order_relaxed) < along.end) {
        const int64_t part = along.next.fetch_add(1, std::memory_order_relaxed);
        if (part < along.end) function(part);
      }
    }
  });
}

}  // namespace
