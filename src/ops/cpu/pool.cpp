// Threads for large pieces of work, and for small ones while a step is under way.
//
// An OpenMP team waits by spinning: the next piece of work is begun at once, and meanwhile whoever
// else wants the CPU goes without. With as many threads as CPUs that is the event loop; and where
// there is little work between two barriers, a thread that has lost its CPU keeps all others waiting.
// Here a piece of work is begun by its caller at once, who comes takes of its parts what is left, and
// nobody waits for one who comes too late to take any.
//
// To wake a sleeping thread takes tens of microseconds, as long as a small model's projection. So
// from the beginning of a layer, and from any piece of work, all threads keep watch for a moment
// before they sleep, and let whoever wants their CPU have it. They wake where their caller is not, and
// it wakes where it was (`place.h`).
//
// While a step is under way the moment is longer. Its pieces of work follow one another at once, and
// where one is late, somebody else has its caller's CPU: in a virtual machine the host, which will
// also want to be asked for the CPU of whoever sleeps.
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "parallel.h"
#include "place.h"

namespace {

typedef void Function(void*);
typedef std::chrono::steady_clock Clock;

constexpr int kFirstLooks = 2000;  // of a caller at who still works, before it offers its CPU
constexpr auto kPatience = std::chrono::microseconds(200);  // and then, before it sleeps too
constexpr auto kWatch = std::chrono::microseconds(200);
constexpr auto kWatchInStep = std::chrono::milliseconds(5);
constexpr int kLooks = 16;            // of who waits awake, before it offers its CPU
constexpr double kWatcherCost = 4;    // microseconds, about, until one who keeps watch has begun
constexpr int kMeetings = 3;          // in a row, after which a thread leaves the event loop's CPU
constexpr auto kStay = std::chrono::milliseconds(2);  // before it does so again

struct Helper {
  Place place;
  bool is_asleep = false;
  Helper* next = nullptr;
};

class Pool {
 public:
  void run(int64_t threads, Function* function, void* data) {
    // One piece of work at a time: who finds the threads taken works alone.
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

  // Has `threads - 1` of them keep watch.
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

  // Between the two, whoever keeps watch does so for longer.
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

  // Two at most: who is awake wakes the next ones, so that nobody spends long on it.
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

  // With the lock.
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

  // With the lock; without it meanwhile.
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

  // Whether there is work, before there has been none for long.
  bool watch() const {
    return look_for([this] { return wanted_.load(std::memory_order_acquire) > 0; },
                    [this] { return may_watch(); });
  }

  // Whether it is there, before one may not wait any longer.
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
  std::atomic<int64_t> working_{0};   // helpers that have joined and are not through
  std::atomic<int64_t> watching_{0};  // that have no work, and look for some
  std::atomic<int64_t> wanted_{0};    // that may still join
  std::atomic<int64_t> steps_{0};     // under way
  // When there was work last, since the clock's beginning.
  std::atomic<Clock::duration> seen_{Clock::duration::zero()};
  int64_t size_ = 0, asleep_ = 0, roused_ = 0;  // there are; that sleep; that shall keep watch
  std::atomic<int> callers_cpu_{-1};  // where the caller ran when it wanted somebody last
  Helper* helpers_ = nullptr;
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

double wake_cost = 50;
std::atomic<int> loops_cpu{-1};  // where an event loop ran when one said so last

}  // namespace

// So that tests have small pieces of work cut too.
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

// Awake, it is moved at once, and may come back later. Where all CPUs are busy that takes a while.
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
