// A thread pool for large pieces of work, and for small ones during a step.
//
// An OpenMP team waits by spinning. The next piece of work then starts at once, but spinning threads keep
// the CPU from others. With as many threads as CPUs, that starves the event loop. And with little work
// between two barriers, one preempted thread keeps all others waiting. In this pool the caller starts a
// piece of work at once, other threads take the parts that are left, and nobody waits for a thread that
// arrives too late to take any.
//
// Waking a sleeping thread takes tens of microseconds, as long as a projection of a small model. So at
// the start of a layer, and after any piece of work, all threads poll ("watch") for a moment before they
// sleep, and yield their CPU to whoever wants it. Helpers wake on a CPU other than their caller's, and
// the caller wakes where it ran before (`place.h`).
//
// During a step they watch longer. Its pieces of work follow closely on one another. If one is late,
// something else occupies the caller's CPU. In a virtual machine that is the host, which would also have
// to reschedule the CPU of a sleeping helper.
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/place.h"

namespace {

typedef void Function(void*);
typedef std::chrono::steady_clock Clock;

constexpr int kFirstLooks = 2000;  // polls of a caller for working helpers, before it yields its CPU
constexpr auto kPatience = std::chrono::microseconds(200);  // after that, before it sleeps
constexpr auto kWatch = std::chrono::microseconds(200);
constexpr auto kWatchInStep = std::chrono::milliseconds(5);
constexpr int kLooks = 16;            // polls of a watching thread between two yields of its CPU
constexpr double kWatcherCost = 4;    // microseconds, about, until a watching thread has begun
constexpr int kMeetings = 3;          // in a row, before a thread leaves the event loop's CPU
constexpr auto kStay = std::chrono::milliseconds(2);  // minimal time between two such moves

struct Helper {
  Place place;
  bool is_asleep = false;
  Helper* next = nullptr;
};

class Pool {
 public:
  void run(int64_t threads, Function* function, void* data) {
    // One piece of work at a time: a caller that finds the pool busy works alone.
    if (is_taken_.exchange(true, std::memory_order_acquire)) return function(data);
    int64_t missing = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      prepare(threads - 1);
      function_ = function, data_ = data;
      const int64_t wanted = std::min(threads - 1, size_);
      wanted_.store(wanted, std::memory_order_release);
      missing = std::min(wanted - watching_.load(std::memory_order_relaxed), asleep_);
    }
    wake(missing);
    function(data);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_.store(0, std::memory_order_relaxed);
      watch_on();
    }
    await_end();
    is_taken_.store(false, std::memory_order_release);
  }

  // Makes `threads - 1` helpers watch.
  void rouse(int64_t threads) {
    int64_t missing = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      prepare(threads - 1);
      const int64_t wanted = std::min(threads - 1, size_);
      missing = std::min(wanted - watching_.load(std::memory_order_relaxed), asleep_);
      if (missing <= 0) return;
      roused_ = missing;
    }
    wake(missing);
  }

  // Between begin_step() and end_step(), helpers watch longer.
  void begin_step() { steps_.fetch_add(1, std::memory_order_relaxed); }

  void end_step() {
    watch_on();
    steps_.fetch_sub(1, std::memory_order_relaxed);
  }

  bool is_watched() const { return watching_.load(std::memory_order_relaxed) > 0; }

 private:
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void watch_on() {
    seen_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed);
  }

  // Wakes at most two helpers; these wake further ones, so that no thread spends long on it.
  void wake(int64_t wanted) {
    for (int64_t i = std::min<int64_t>(wanted, 2); i > 0; --i) begin_.notify_one();
  }

  void await_end() {
    const auto is_over = [this] { return working_.load(std::memory_order_acquire) == 0; };
    for (int i = 0; i < kFirstLooks && !is_over(); ++i) relax();
    if (look_for(is_over, [end = Clock::now() + kPatience] { return Clock::now() < end; })) return;
    Place place;
    place.stay();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      end_.wait(lock, is_over);
    }
    place.release();
  }

  // Call with the lock held.
  void prepare(int64_t helpers) {
    grow(helpers);
    watch_on();
    const int cpu = current_cpu();
    if (cpu == callers_cpu_.load(std::memory_order_relaxed)) return;
    callers_cpu_.store(cpu, std::memory_order_relaxed);
    for (Helper* helper = helpers_; helper; helper = helper->next) {
      if (helper->is_asleep) helper->place.avoid(cpu);
    }
  }

  void grow(int64_t helpers) {
    if (size_ >= helpers) return;
    sigset_t others, before;
    sigfillset(&others);
    // Helpers block all signals (Python's threads handle them) except those of their own faults.
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, own);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; size_ < helpers; ++size_) std::thread(&Pool::serve, this).detach();
    } catch (const std::exception&) {
      // The system has no more threads, or no memory for one.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve() {
    Helper self;
    std::unique_lock<std::mutex> lock(mutex_);
    self.next = helpers_, helpers_ = &self;
    for (;;) {
      while (wanted_.load(std::memory_order_relaxed) == 0) watch_or_sleep(lock, self);
      const int64_t missing = wanted_.load(std::memory_order_relaxed) - 1;
      wanted_.store(missing, std::memory_order_relaxed);
      working_.fetch_add(1, std::memory_order_relaxed);
      Function* function = function_;
      void* data = data_;
      const int64_t more = std::min(missing - watching_.load(std::memory_order_relaxed), asleep_);
      lock.unlock();
      wake(more);
      self.place.release();
      function(data);
      watch_on();
      lock.lock();
      if (working_.fetch_sub(1, std::memory_order_release) == 1) end_.notify_one();
    }
  }

  // Call with the lock held; it is released while this waits.
  void watch_or_sleep(std::unique_lock<std::mutex>& lock, Helper& self) {
    watching_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    const bool has_work = watch();
    if (!has_work) self.place.avoid(callers_cpu_.load(std::memory_order_relaxed));
    lock.lock();
    watching_.fetch_sub(1, std::memory_order_relaxed);
    if (has_work || may_watch()) return;
    self.place.avoid(callers_cpu_.load(std::memory_order_relaxed));
    self.is_asleep = true, ++asleep_;
    begin_.wait(lock, [this] { return wanted_.load(std::memory_order_relaxed) > 0 || roused_ > 0; });
    self.is_asleep = false, --asleep_;
    if (roused_ == 0) return;
    --roused_;
    const int64_t more = std::min(roused_, asleep_);
    lock.unlock();
    wake(more);
    self.place.release();
    lock.lock();
  }

  // Waits by polling. Returns whether there is work; gives up after the watch time.
  bool watch() const {
    return look_for([this] { return wanted_.load(std::memory_order_acquire) > 0; },
                    [this] { return may_watch(); });
  }

  // Polls until is_there() or until !may_wait(). Returns whether is_there().
  template <class IsThere, class MayWait>
  static bool look_for(const IsThere& is_there, const MayWait& may_wait) {
    do {
      for (int i = 0; i < kLooks; ++i) {
        if (is_there()) return true;
        relax();
      }
      sched_yield();
    } while (may_wait());
    return false;
  }

  bool may_watch() const {
    const Clock::duration moment =
        steps_.load(std::memory_order_relaxed) > 0 ? Clock::duration(kWatchInStep) : kWatch;
    return Clock::now().time_since_epoch() < seen_.load(std::memory_order_relaxed) + moment;
  }

  std::mutex mutex_;
  std::condition_variable begin_, end_;
  std::atomic<bool> is_taken_{false};
  std::atomic<int64_t> working_{0};   // helpers that are running the current work
  std::atomic<int64_t> watching_{0};  // helpers that poll for work
  std::atomic<int64_t> wanted_{0};    // helpers that may still join the current work
  std::atomic<int64_t> steps_{0};     // steps that are running
  // When there was work last, since the clock's epoch.
  std::atomic<Clock::duration> seen_{Clock::duration::zero()};
  int64_t size_ = 0, asleep_ = 0, roused_ = 0;  // helpers: all; asleep; woken only to watch
  std::atomic<int> callers_cpu_{-1};  // CPU of the last caller that asked for helpers
  Helper* helpers_ = nullptr;
  Function* function_ = nullptr;
  void* data_ = nullptr;
};

// Never destroyed: its threads run until the process ends.
Pool* pool = nullptr;

Pool& the_pool() {
  static const bool made = [] {
    pool = new Pool;
    // A forked child has none of these threads, and a lock may stay locked forever there.
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return true;
  }();
  (void)made;
  return *pool;
}

double wake_cost = 50;
std::atomic<int> loops_cpu{-1};  // CPU on which an event loop last reported itself

}  // namespace

// Tests lower the cost so that small pieces of work are cut, too.
SLIPSTREAM_EXPORT void slipstream_assume_wake_cost(double microseconds) { wake_cost = microseconds; }

SLIPSTREAM_EXPORT void slipstream_loop_is_here() {
  loops_cpu.store(current_cpu(), std::memory_order_relaxed);
}

// Whether the calling thread should leave the event loop's CPU.
SLIPSTREAM_EXPORT int slipstream_meets_loop() {
  thread_local int meetings = 0;
  thread_local Clock::time_point last;
  const int cpu = current_cpu();
  meetings = cpu >= 0 && cpu == loops_cpu.load(std::memory_order_relaxed) ? meetings + 1 : 0;
  if (meetings < kMeetings || Clock::now() < last + kStay) return 0;
  meetings = 0;
  last = Clock::now();
  return 1;
}

// Changing the affinity moves a running thread at once, and it may come back later. On a busy
// machine that takes a while.
SLIPSTREAM_EXPORT void slipstream_change_cpu() {
  Place place;
  place.avoid(current_cpu());
  place.release();
}

double slipstream_begin_cost() {
  return the_pool().is_watched() ? std::min(wake_cost, kWatcherCost) : wake_cost;
}

void slipstream_rouse(int64_t threads) {
  if (threads > 1) the_pool().rouse(threads);
}

void slipstream_begin_step(int64_t threads) {
  the_pool().begin_step();
  slipstream_rouse(threads);
}

void slipstream_end_step() { the_pool().end_step(); }

void slipstream_run_together(int64_t threads, Function* function, void* data) {
  the_pool().run(threads, function, data);
}
