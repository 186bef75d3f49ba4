// Restricts the CPUs on which a thread may wake up.
//
// The scheduler may put a woken thread on the waker's CPU, because a waker usually sleeps soon. Here the
// waker goes on working. And in a virtual machine, a neighbouring halted CPU does not count as idle
// (Linux, `available_idle_cpu`: KVM reports it as preempted). Two threads then share one CPU for tens of
// milliseconds, until the scheduler rebalances.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <cstring>

namespace {

#ifdef __linux__

inline int current_cpu() { return sched_getcpu(); }

// The CPU affinity of the thread that constructs it. If a call fails, the affinity stays as it is.
class Place {
 public:
  // Excludes a CPU. Called by the thread before it sleeps, or by its waker while it sleeps.
  void avoid(int cpu) {
    if (cpu < 0 || cpu == avoided_) return;
    const bool is_known = is_restricted_ && is_as_given();
    if (!is_known && pthread_getaffinity_np(thread_, sizeof before_, &before_) != 0) return;
    if (!CPU_ISSET(cpu, &before_) || CPU_COUNT(&before_) == 1) return;
    cpu_set_t others = before_;
    CPU_CLR(cpu, &others);
    if (restrict_to(others)) avoided_ = cpu;
  }

  // Restricts the thread to its current CPU. Called by the thread itself before it sleeps.
  void stay() {
    release();
    const int cpu = current_cpu();
    if (cpu < 0 || pthread_getaffinity_np(thread_, sizeof before_, &before_) != 0) return;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(cpu, &here);
    restrict_to(here);
  }

  // Restores the former affinity, unless something else has changed it meanwhile.
  void release() {
    if (!is_restricted_) return;
    const bool is_ours = is_as_given();
    is_restricted_ = false;
    avoided_ = kNone;
    if (!is_ours) return;
    // If the thread was unrestricted, ask for all CPUs instead of the former set. Linux remembers a
    // requested set, and would keep the thread off CPUs that the process is given later.
    cpu_set_t any, now;
    std::memset(&any, 0xff, sizeof any);
    pthread_setaffinity_np(thread_, sizeof any, &any);
    if (pthread_getaffinity_np(thread_, sizeof now, &now) == 0 && CPU_EQUAL(&now, &before_)) return;
    pthread_setaffinity_np(thread_, sizeof before_, &before_);
  }

 private:
  static constexpr int kNone = -1;

  bool is_as_given() const {
    cpu_set_t now;
    return pthread_getaffinity_np(thread_, sizeof now, &now) == 0 && CPU_EQUAL(&now, &given_);
  }

  bool restrict_to(const cpu_set_t& cpus) {
    given_ = cpus;
    return is_restricted_ = pthread_setaffinity_np(thread_, sizeof given_, &given_) == 0;
  }

  const pthread_t thread_ = pthread_self();
  cpu_set_t before_, given_;
  bool is_restricted_ = false;
  int avoided_ = kNone;
};

#else

inline int current_cpu() { return -1; }

class Place {
 public:
  void avoid(int) {}
  void stay() {}
  void release() {}
};

#endif

}  // namespace
