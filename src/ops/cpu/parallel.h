// Runs a function for part 0..parts-1 on several threads of the pool.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <new>

// The calling thread calls function(data), and so do threads - 1 of the pool that come in time. It
// may not throw.
void slipstream_run_together(int64_t threads, void (*function)(void*), void* data);

// About what it takes until another thread has begun, in microseconds: less while one keeps watch.
double slipstream_begin_cost();

// There will soon be small pieces of work: up to threads - 1 of the pool wait for them awake.
void slipstream_rouse(int64_t threads);

// The same for as long as a step takes: who waits, waits longer.
void slipstream_begin_step(int64_t threads);
void slipstream_end_step();

namespace {

// Into how many parts work is worth being cut that takes one thread so long, at most `most`.
inline int64_t worthwhile_parts(int64_t threads, double microseconds,
                                int64_t most = std::numeric_limits<int64_t>::max()) {
  if (threads <= 1 || most <= 1) return 1;
  const double cost = slipstream_begin_cost();
  if (microseconds < 3 * cost) return 1;
  // More than threads, for who sleeps comes late, and may have to give its CPU away.
  const double parts = std::min(microseconds / cost, 4.0 * double(threads));
  return std::min(int64_t(parts), most);
}

template <class F>
struct Team {
  const F* function;
  int64_t parts;
  std::atomic<int64_t> next{0};
  std::atomic<bool> lacks_memory{false};

  // Parts are taken by ticket, so it does not matter who comes.
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

// Raises std::bad_alloc where a part did, once all others are done.
template <class F>
void parallel(int64_t threads, int64_t parts, const F& function) {
  Team<F> team{&function, parts};
  const int64_t wanted = std::min<int64_t>(threads, parts);
  if (wanted <= 1) {
    Team<F>::work(&team);
  } else {
    slipstream_run_together(wanted, &Team<F>::work, &team);
  }
  // Only here: others may have been at work on what an exception would have taken down.
  if (team.lacks_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// Parts that follow one another in memory: a stretch of them.
struct alignas(64) Stretch {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

constexpr int64_t kMostStretches = 32;

// The same for parts that follow one another in memory: who comes goes along a stretch of its own, which
// hardware reads ahead and what is fetched ahead is not another's, and then helps along those of others.
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
