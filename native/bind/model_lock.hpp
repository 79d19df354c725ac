// A re-entrant lock around one model: held to call it, and to move its weights.
//
// A thread that must not wait for the lock, since it serves other models too, leaves its work with defer() of the
// Python subclass (shmsync/integrations/torchrl/worker/safe_point.py). The thread that has the lock does that work
// when it gives the lock back, in ModelLock._ring().
//
// In C++ so that a call of the model enters and leaves without running Python.
#pragma once

#include <nanobind/nanobind.h>

#include <limits>

#include "gil.hpp"
#include "section_lock.hpp"

namespace shmsync::bind {

class ModelLock {
 public:
  void enter() {
    if (!lock_.try_lock()) lock_.wait(std::numeric_limits<double>::infinity(), [] { return false; });
  }

  // Enters if no other thread has the lock.
  bool try_enter() { return lock_.try_lock(); }

  void leave(nanobind::handle self) {
    if (!lock_.mine()) raise("ProtocolError", "this thread does not have the model lock; enter it first");
    const bool outermost = lock_.holds() == 1;
    lock_.unlock();
    if (outermost && has_work) call_method(self, "_ring");
  }

  bool has_work = false;  // a thread has left some

 private:
  SectionLock lock_;
};

// One call of a policy at a time: has it begun, and is what follows from it not done yet?
struct Flight {
  bool under_way = false;
  bool due = false;  // the next call has something to do before it begins
};

}  // namespace shmsync::bind
