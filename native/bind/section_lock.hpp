// The lock around a Subscriber's sections. One thread at a time holds it, that one again and again; the others queue.
//
// INV: every member is read and written under the GIL, which this module needs and only a wait lets go. So there is
//      nothing atomic here but the word that a waiter sleeps on.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>

#include "gil.hpp"
#include "shmsync/futex.hpp"

namespace shmsync::bind {

// A thread that has held such a lock. The system uses its thread ids again; no other thread ever has this object.
struct Thread {
  const unsigned long ident = PyThread_get_thread_ident();  // of Python's threading
};

inline const std::shared_ptr<Thread>& this_thread() {
  thread_local const std::shared_ptr<Thread> thread = std::make_shared<Thread>();
  return thread;
}

class SectionLock {
 public:
  bool try_lock() {
    const auto& me = this_thread();
    if (owner_ == me)
      ++holds_;
    else if (holds_ == 0)
      hold(me);
    else
      return false;
    return true;
  }

  // Waits for the lock, behind those who wait already. False at the deadline; then this thread does not hold it.
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
    hold(next->thread);
    next->granted.store(1, std::memory_order_release);
    futex_wake_all(next->granted);
  }

  bool mine() const { return holds_ > 0 && owner_ == this_thread(); }
  // The thread that holds it, or held it last; null: none has.
  const Thread* owner() const { return owner_.get(); }

 private:
  struct Waiter {
    explicit Waiter(SectionLock& lock) : lock(lock), thread(this_thread()) { lock.queue_.push_back(this); }
    ~Waiter() {
      if (taken) return;
      if (granted.load(std::memory_order_acquire) != 0)
        lock.unlock();  // it came while we gave up
      else
        std::erase(lock.queue_, this);
    }
    bool take() { return taken = granted.load(std::memory_order_acquire) != 0; }

    SectionLock& lock;
    std::shared_ptr<Thread> thread;
    Word32 granted{0};
    bool taken = false;
  };

  void hold(const std::shared_ptr<Thread>& thread) {
    if (owner_ != thread) owner_ = thread;  // else it would count its references, which is atomic, for nothing
    holds_ = 1;
  }

  std::shared_ptr<Thread> owner_;
  int holds_ = 0;
  std::deque<Waiter*> queue_;
};

}  // namespace shmsync::bind
