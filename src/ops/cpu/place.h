// On which CPUs a thread may be put while it sleeps.
//
// A system that wakes a thread may put it on its waker's CPU, since as a rule who wakes another one is
// about to sleep. Here the waker goes on working; and in a virtual machine the CPU beside it, halted,
// does not count as idle (Linux, `available_idle_cpu`: KVM says of it that it was preempted). Two
// threads then take turns on one CPU, for tens of milliseconds, until the system thinks again.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <cstring>

namespace {

#ifdef __linux__

inline int current_cpu() { return sched_getcpu(); }

// Of the thread that makes it. Where an error comes back the system decides, as ever.
class Place {
 public:
  // Anywhere but there: by the thread itself before it sleeps, or by its waker while it does.
  void avoid(int cpu) {
    if (cpu < 0 || cpu == avoided_) return;
    const bool is_known = is_restricted_ && is_as_given();
    if (!is_known && pthread_getaffinity_np(thread_, sizeof before_, &before_) != 0) return;
    if (!CPU_ISSET(cpu, &before_) || CPU_COUNT(&before_) == 1) return;
    cpu_set_t others = before_;
    CPU_CLR(cpu, &others);
    if (restrict_to(others)) avoided_ = cpu;
  }

  // Only where it is now: by the thread itself, before it sleeps.
  void stay() {
    release();
    const int cpu = current_cpu();
    if (cpu < 0 || pthread_getaffinity_np(thread_, sizeof before_, &before_) != 0) return;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(cpu, &here);
    restrict_to(here);
  }

  // Wherever it could be before, unless somebody else has told it another place meanwhile.
  void release() {
    if (!is_restricted_) return;
    const bool is_ours = is_as_given();
    is_restricted_ = false;
    avoided_ = kNone;
    if (!is_ours) return;
    // If it could be anywhere that the process may be, it is told so: Linux remembers what a thread
    // asked for, and CPUs that the process is given later would not be for it.
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
