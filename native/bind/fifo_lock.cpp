// A lock that threads get in the order in which they came, each within its own deadline.
//
// In C++ for the same reason as WriterLock: an interrupt may land between any two lines of Python, and no code would
// give back a lock that was taken on the line before. Everything here is looked at with the GIL only; a thread that
// waits sleeps on a futex, because a mutex that another thread held at a fork() would stay locked in the child.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "gil.hpp"
#include "shmsync/futex.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

class FifoLock {
 public:
  FifoLock() : serial_(next_serial_++) {}
  std::uint64_t serial() const { return serial_; }

  bool locked() {
    leave_what_the_parent_held();
    return !line_.empty();
  }
  bool mine() {
    leave_what_the_parent_held();
    return !line_.empty() && pthread_equal(line_.front().thread, pthread_self()) != 0;
  }
  // Gets in line; the ticket. Its thread has the lock when the ticket is at the front.
  std::uint64_t line_up() {
    leave_what_the_parent_held();
    line_.push_back({pthread_self(), ++tickets_});
    return tickets_;
  }
  bool at_front(std::uint64_t ticket) const { return !line_.empty() && line_.front().ticket == ticket; }
  // Leaves the line, wherever in it; does nothing when the ticket is not there any more.
  void leave(std::uint64_t ticket) {
    if (std::erase_if(line_, [&](const Place& place) { return place.ticket == ticket; }) == 0) return;
    bell_.fetch_add(1, std::memory_order_relaxed);
    futex_wake_all(bell_);
  }
  std::uint32_t rung() const { return bell_.load(std::memory_order_relaxed); }
  void sleep(std::uint32_t rung, Nanoseconds timeout) const {
    const WithoutGil released;
    futex_wait(bell_, rung, timeout);
  }

 private:
  struct Place {
    pthread_t thread;
    std::uint64_t ticket;
  };
  void leave_what_the_parent_held() {  // the threads of the parent do not run in a child forked from it
    if (const pid_t now = ::getpid(); now != pid_) {
      line_.clear();
      pid_ = now;
    }
  }

  static inline std::uint64_t next_serial_ = 0;
  std::uint64_t serial_;
  std::deque<Place> line_;  // the one at the front has the lock
  std::uint64_t tickets_ = 0;
  Word32 bell_{0};
  pid_t pid_ = ::getpid();
};

// One or several locks in a `with` statement, taken in one order for all threads.
class ScopedLock {
 public:
  ScopedLock(nb::list locks, double deadline, std::string inside, std::string late)
      : deadline_(deadline), inside_(std::move(inside)), late_(std::move(late)) {
    for (nb::handle lock : locks) add(lock);
    std::sort(held_.begin(), held_.end(),
              [](const Held& a, const Held& b) { return a.lock->serial() < b.lock->serial(); });
    held_.erase(std::unique(held_.begin(), held_.end(), [](const Held& a, const Held& b) { return a.lock == b.lock; }),
                held_.end());
  }

  void enter() {
    for (Held& held : held_)
      if (held.lock->mine()) raise("WriterBusy", inside_.c_str());
    try {
      for (Held& held : held_) take(held);
    } catch (...) {
      exit();
      throw;
    }
  }

  void exit() {
    for (Held& held : held_)
      if (held.ticket != 0) held.lock->leave(std::exchange(held.ticket, 0));
  }

 private:
  struct Held {
    nb::object object;
    FifoLock* lock;
    std::uint64_t ticket = 0;
  };

  void add(nb::handle lock) { held_.push_back({nb::borrow(lock), nb::cast<FifoLock*>(lock)}); }

  void take(Held& held) {
    held.ticket = held.lock->line_up();
    while (!held.lock->at_front(held.ticket)) {
      const auto rung = held.lock->rung();
      const double left = deadline_ - static_cast<double>(monotonic_ns()) / 1e9;
      if (!(left > 0)) raise("WriterBusy", late_.c_str());
      held.lock->sleep(rung, Nanoseconds(static_cast<std::int64_t>(std::min(left, 0.05) * 1e9)));
      // A handler that raises leaves the line; see enter().
      if (in_python([] { return PyErr_CheckSignals(); }) != 0) throw nb::python_error();
    }
  }

  std::vector<Held> held_;
  double deadline_;
  std::string inside_;  // what WriterBusy says to a thread that has one of the locks already
  std::string late_;    // and to one that does not get them by the deadline
};

}  // namespace

void bind_fifo_lock(nb::module_& m) {
  nb::class_<FifoLock>(m, "FifoLock", "One call at a time, in the order in which threads came. See ScopedLock.")
      .def(nb::init<>())
      .def("locked", &FifoLock::locked, "Does any thread have it?")
      .def("mine", &FifoLock::mine, "Does the calling thread have it?");
  nb::class_<ScopedLock>(m, "ScopedLock",
                         "These locks, held in a with statement; taken in one order, whatever theirs is.")
      .def(nb::init<nb::list, double, std::string, std::string>(), "locks"_a, "deadline"_a, "inside"_a, "late"_a,
           nb::sig("def __init__(self, locks: list[FifoLock], deadline: float, inside: str, late: str) -> None"))
      .def("__enter__", &ScopedLock::enter,
           "Wait for the locks. Raises WriterBusy(late) at the monotonic time `deadline`, and WriterBusy(inside) to a "
           "thread that has one of them already.")
      .def(
          "__exit__", [](ScopedLock& self, nb::handle, nb::handle, nb::handle) { self.exit(); }, "exc_type"_a.none(),
          "exc"_a.none(), "traceback"_a.none());
}

}  // namespace shmsync::bind
