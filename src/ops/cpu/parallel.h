// Runs a function for part 0..parts-1 on several threads.
//
// The threads are those of the OpenMP runtime that torch has loaded (Python passes the address of
// its GOMP_parallel), so one process has one pool: a second runtime's idle threads would spin on
// the cores that the first one needs. Without such a runtime, plain threads are started.
#pragma once
#include <atomic>
#include <thread>
#include <vector>

typedef void GompParallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);

extern GompParallel* slipstream_gomp_parallel;

namespace {

template <class F>
struct Team {
  const F* function;
  int parts;
  std::atomic<int> next{0};

  // Parts are taken by ticket, not by thread number, so a smaller team than asked for is right too.
  static void work(void* self) {
    auto* team = static_cast<Team*>(self);
    for (int part; (part = team->next.fetch_add(1, std::memory_order_relaxed)) < team->parts;) {
      (*team->function)(part);
    }
  }
};

template <class F>
void parallel(int parts, const F& function) {
  Team<F> team{&function, parts};
  if (parts <= 1) {
    Team<F>::work(&team);
  } else if (slipstream_gomp_parallel != nullptr) {
    slipstream_gomp_parallel(&Team<F>::work, &team, unsigned(parts), 0);
  } else {
    std::vector<std::thread> helpers;
    helpers.reserve(size_t(parts - 1));
    for (int i = 1; i < parts; ++i) helpers.emplace_back(&Team<F>::work, &team);
    Team<F>::work(&team);
    for (auto& helper : helpers) helper.join();
  }
}

}  // namespace
