// Threads for large pieces of work, which sleep in between.
//
// An OpenMP team waits by spinning: the next piece of work is begun at once, and meanwhile whoever
// else wants the CPU goes without. With as many threads as CPUs that is the event loop; and where
// there is little work between two barriers, a thread that has lost its CPU keeps all others waiting.
// Here a piece of work is begun by its caller at once, who wakes takes of its parts what is left, and
// nobody waits for one who comes too late to take any.
#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "parallel.h"

namespace {

typedef void Function(void*);

constexpr int kPatience = 2000;  // looks at who still works, before the caller sleeps too

class Pool {
 public:
  void run(int64_t threads, Function* function, void* data) {
    // One piece of work at a time: who finds the threads taken works alone.
    if (is_taken_.exchange(true, std::memory_order_acquire)) return function(data);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(threads - 1);
      function_ = function, data_ = data, wanted_ = std::min(threads - 1, size_);
    }
    wake(threads - 1);
    function(data);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;
    }
    for (int i = 0; i < kPatience && working_.load(std::memory_order_acquire) > 0; ++i) relax();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      end_.wait(lock, [this] { return working_.load(std::memory_order_relaxed) == 0; });
    }
    is_taken_.store(false, std::memory_order_release);
  }

 private:
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Two at most: who is awake wakes the next ones, so that nobody spends long on it.
  void wake(int64_t wanted) {
    for (int64_t i = std::min<int64_t>(wanted, 2); i > 0; --i) begin_.notify_one();
  }

  void grow(int64_t helpers) {
    if (size_ >= helpers) return;
    sigset_t others, before;
    sigfillset(&others);
    // Signals are for the threads that Python knows, but for those of a thread's own fault.
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, own);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; size_ < helpers; ++size_) std::thread(&Pool::serve, this).detach();
    } catch (const std::exception&) {
      // The system gives no more threads, or no memory for one.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      begin_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      working_.fetch_add(1, std::memory_order_relaxed);
      Function* function = function_;
      void* data = data_;
      const int64_t missing = wanted_;
      lock.unlock();
      wake(missing);
      function(data);
      lock.lock();
      if (working_.fetch_sub(1, std::memory_order_release) == 1) end_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable begin_, end_;
  std::atomic<bool> is_taken_{false};
  std::atomic<int64_t> working_{0};  // helpers that have joined and are not through
  int64_t size_ = 0, wanted_ = 0;    // helpers there are; that may still join
  Function* function_ = nullptr;
  void* data_ = nullptr;
};

// Never destroyed: its threads end with the process.
Pool* pool = nullptr;

Pool& the_pool() {
  static const bool made = [] {
    pool = new Pool;
    // A child has none of these threads, and may find a lock that nobody will release.
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return true;
  }();
  (void)made;
  return *pool;
}

}  // namespace

double slipstream_wake_cost = 50;

// So that tests have small pieces of work cut too.
SLIPSTREAM_EXPORT void slipstream_assume_wake_cost(double microseconds) {
  slipstream_wake_cost = microseconds;
}

void slipstream_run_together(int64_t threads, Function* function, void* data) {
  the_pool().run(threads, function, data);
}
