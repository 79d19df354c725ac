// The turn of those who call a model and those who move its weights: one thread at a time, that one again and again.
//
// Who must not wait for its turn (a thread that serves other models too) leaves its work with ask(). The thread that
// has the turn does it when its turn ends, in _ring() of Python's half
// (shmsync/integrations/torchrl/worker/model_lock.py).
//
// In C++ so that a call of the model enters and leaves without running Python.
#pragma once

#include <nanobind/nanobind.h>

#include <limits>

#include "gil.hpp"
#include "section_lock.hpp"

namespace shmsync::bind {

class ModelTurn {
 public:
  void enter() {
    if (!lock_.try_lock()) lock_.wait(std::numeric_limits<double>::infinity(), [] { return false; });
  }

  // Enters if no other thread has the turn.
  bool try_enter() { return lock_.try_lock(); }

  void leave(nanobind::handle self) {
    if (!lock_.mine()) raise("ProtocolError", "this thread does not have the turn; enter it first");
    const bool outermost = lock_.holds() == 1;
    lock_.unlock();
    if (outermost && asked) call_method(self, "_ring");
  }

  bool asked = false;  // a thread has left work

 private:
  SectionLock lock_;
};

// One call of a policy at a time: has it begun, and is what follows from it not done yet?
struct Flight {
  bool under_way = false;
  bool due = false;  // the next call has something to do before it begins
};

}  // namespace shmsync::bind
