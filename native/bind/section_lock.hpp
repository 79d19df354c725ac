// The lock around a Subscriber's sections. One thread at a time holds it, that one again and again; the others queue.
//
// INV: every member is read and written under the GIL, which this module needs and only a wait lets go. So there is
//      nothing atomic here but the word that a waiter sleeps on.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>

#include "gil.hpp"
#include "shmsync/futex.hpp"

namespace shmsync::bind {

class SectionLock {
 public:
  bool try_lock() {
    const unsigned long me = PyThread_get_thread_ident();
    if (holds_ > 0 && owner_ != me) return false;
    owner_ = me;
    ++holds_;
    return true;
  }

  // Waits for the lock, behind those who wait already. False at the deadline: then this thread does not hold it.
  bool wait(double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    Waiter waiter(*this);
    for (;;) {
      if (waiter.take()) return true;
      const double left = seconds - std::chrono::duration<double>(Clock::now() - start).count();
      if (left <= 0) return false;
      {
        const WithoutGil released;
        futex_wait(waiter.granted, 0, Nanoseconds(static_cast<std::int64_t>(std::min(left, 0.05) * 1e9)));
      }
      if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    }
  }

  void unlock() {
    if (--holds_ > 0 || queue_.empty()) return;
    // It is the waiter's at once. If it were free, a thread that enters again and again would always be first.
    Waiter* next = queue_.front();
    queue_.pop_front();
    owner_ = next->thread;
    holds_ = 1;
    next->granted.store(1, std::memory_order_release);
    futex_wake_all(next->granted);
  }

  bool mine() const { return holds_ > 0 && owner_ == PyThread_get_thread_ident(); }
  // The thread that holds it, or held it last, as Python's threading numbers it.
  unsigned long owner() const { return owner_; }

 private:
  struct Waiter {
    explicit Waiter(SectionLock& lock) : lock(lock) { lock.queue_.push_back(this); }
    ~Waiter() {
      if (taken) return;
      if (granted.load(std::memory_order_acquire) != 0)
        lock.unlock();  // it came while we gave up
      else
        std::erase(lock.queue_, this);
    }
    bool take() { return taken = granted.load(std::memory_order_acquire) != 0; }

    SectionLock& lock;
    const unsigned long thread = PyThread_get_thread_ident();
    Word32 granted{0};
    bool taken = false;
  };

  unsigned long owner_ = 0;
  int holds_ = 0;
  std::deque<Waiter*> queue_;
};

}  // namespace shmsync::bind
