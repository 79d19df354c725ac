// ReadSide for Python: the lock around sections, and nesting.
//
// The common paths run here: the gate is open, and there is nothing new, or a version that bound modules can be moved
// to natively (follower.hpp). All else goes to Python, through hooks of the subclass: _enter_slowly(outcome, version,
// timeout, pinned), _refresh_now(), _look_for_successor() for one that follows, and _reads_end() at the end of a
// section that a device works for. read() hands a timeout that is no float, or is none, to _checked_timeout().
//
// INV: when a hook raises, or a signal interrupts it anywhere, a pin that became no section is dropped and the lock is
//      given back. So taking and giving back are both C++: Python can be interrupted between any two lines.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "compiling.hpp"
#include "control.hpp"
#include "follower.hpp"
#include "gil.hpp"
#include "section_lock.hpp"
#include "shmsync/device_reads.hpp"
#include "thread_versions.hpp"
#include "weights_memory.hpp"

namespace shmsync::bind {

namespace nb = nanobind;

// How often a subscriber that follows looks whether its publisher is gone.
inline constexpr std::uint64_t kLook = 50'000'000;  // ns

// How an error names a thread.
inline std::string name_of(const Thread& thread) {
  nb::object threads = call_method(nb::module_::import_("threading"), "enumerate");
  for (nb::handle each : threads)
    if (each.attr("ident").equal(nb::int_(thread.ident)))
      return "thread '" + nb::cast<std::string>(each.attr("name")) + "'";
  return "a thread that has ended, or that Python did not start,";
}

class Reader {
 public:
  Reader(nb::object control, std::uint32_t row, std::uint64_t me, Consistency consistency,
         std::shared_ptr<DeviceReads> reads)
      : consistency_(consistency) {
    use(std::move(control), row, me, std::move(reads));
  }

  void check() const {
    if (generation_ != fork_generation())
      raise("ForkedHandle",
            "this Subscriber belongs to the parent process; attach again in the child, with Subscriber(pub.handle)");
    if (closed) raise("ClosedError", "this Subscriber is closed; attach again");
  }

  // One thread at a time may be in sections or in refresh(); that thread may enter again.
  void lock(nb::handle self, nb::handle timeout) {
    if (!mutex.try_lock()) {
      check();
      // No Python code runs after the lock was taken.
      if (!mutex.wait(nb::cast<double>(timeout.is_none() ? self.attr("timeout") : timeout))) raise_busy();
    }
    try {
      check();  // it may have been closed while we waited
      if (depth == 0 && entering)
        raise("ProtocolError",
              "a signal handler or a finaliser used this Subscriber while a section was being entered or left; "
              "use another one");
    } catch (...) {
      mutex.unlock();
      throw;
    }
  }

  void unlock(nb::handle self) {
    if (depth == 0) drop_pin(self);
    mutex.unlock();
  }

  void enter(nb::handle self, nb::handle version, nb::handle timeout, bool pinned = false) {
    lock(self, timeout);
    try {
      if (depth > 0) {
        if (!version.is_none() && !version.equal(nb::int_(version_of(side->held()))))
          raise("ProtocolError", "a section of this Subscriber is open at another version; leave it first");
      } else {
        if (should_look()) {
          const Entering mark(entering);
          call_method(self, "_look_for_successor");
        }
        const Enter outcome =
            version.is_none() ? side->try_enter(pinned ? Consistency::pinned : consistency_) : Enter::gated;
        if (outcome != Enter::same) {
          const Entering mark(entering);
          tell_dynamo();
          if (outcome != Enter::moved || !move(self))
            call_method(self, "_enter_slowly", nb::cast(outcome), version, timeout, nb::bool_(pinned));
        }
      }
      thread_versions.use(version_of(side->held()));
      ++depth;
    } catch (...) {
      unlock(self);
      throw;
    }
  }

  bool leave(nb::handle self) {
    if (generation_ != fork_generation()) return false;  // the pin is the parent's; the next call raises
    if (depth == 0 || !mutex.mine())
      raise("ProtocolError", "a read section must be left in the thread that entered it");
    const Unlocking unlocking{mutex};
    if (--depth > 0) return side->torn_so_far();
    const Entering mark(entering);
    return leave_held(self);
  }

  // Leaves what a hook has entered, in the middle of its work, or what was a section.
  bool leave_held(nb::handle self) {
    std::exception_ptr error;
    if (side->device()) try {
        tell_device(self);
      } catch (...) {
        error = std::current_exception();
      }
    const bool torn = side->leave();
    if (torn) side->forget();  // what was applied may be torn too
    if (error) std::rethrow_exception(error);
    return torn;
  }

  bool refresh(nb::handle self) {
    check();
    if (inside()) return false;
    if (side->unchanged() && !publisher_lost && !should_look()) {
      thread_versions.use(thread_versions.applied());
      return false;
    }
    lock(self, nb::none());
    try {
      const Entering mark(entering);
      tell_dynamo();
      const bool moved = refreshed(self);
      thread_versions.use(thread_versions.applied());
      unlock(self);
      return moved;
    } catch (...) {
      unlock(self);
      throw;
    }
  }

  // Moves to another arena. Hold the lock, outside of sections.
  void use(nb::object control, std::uint32_t row, std::uint64_t me, std::shared_ptr<DeviceReads> reads) {
    Control& mapped = nb::cast<Control&>(control);
    const std::optional<ReadSide> before = side;
    side.emplace(mapped.publication(), mapped.slots(), mapped.slot_count(), mapped.readers()[row], mapped.reply(), me,
                 consistency_);
    if (before) side->go_on_from(*before);
    side->read_by(std::move(reads));
    thread_versions.move_to(
        {reinterpret_cast<const char*>(mapped.identity().session), sizeof mapped.identity().session});
    control_ = std::move(control);
    row_ = row;
  }

  // The views show the held version: ack it.
  void applied() {
    thread_versions.apply(version_of(side->held()));
    side->applied();
  }

  // Waits without the lock, so another thread may move to another arena meanwhile: this keeps the one of now.
  bool wait_version(std::uint64_t version, std::int64_t timeout_ns) const {
    const nb::object keep = control_;
    ReadSide here = *side;
    const WithoutGil released;
    return here.wait_version(version, Nanoseconds(timeout_ns));
  }

  // Does the calling thread have a section open, or is it just entering one?
  bool inside() const { return (depth > 0 || entering) && mutex.mine(); }
  bool in_section() const { return depth > 0 && mutex.mine(); }

  void close() {
    closed = true;
    side->retire();
  }

  std::uint32_t row() const { return row_; }
  bool in_parent() const { return generation_ != fork_generation(); }

 private:
  bool refreshed(nb::handle self) {
    if (moves_natively && !follows) {
      const Enter outcome = side->try_enter();
      if (outcome == Enter::same || (outcome == Enter::moved && move(self))) {
        side->leave();
        return outcome == Enter::moved;
      }
      if (outcome == Enter::moved) side->leave();
    }
    return call_method(self, "_refresh_now").is(Py_True);
  }

  // Moves all followers to the held version, and acks it. False: Python has to do it, from the start.
  bool move(nb::handle self) {
    if (!moves_natively) return false;
    const nb::object followers = nb::getattr(self, interned("followers"));
    const std::uint32_t slot = slot_of(side->held());
    // A module may go, and its follower with it, whenever Python code runs or the GIL is given up.
    const auto count = [&] { return PyList_Size(followers.ptr()); };
    for (Py_ssize_t i = 0; i < count(); ++i)
      if (!nb::inst_ptr<Follower>(followers[i])->is_ready(slot)) return false;
    for (Py_ssize_t i = 0; i < count(); ++i) {
      const nb::object kept = followers[i];
      Follower& each = *nb::inst_ptr<Follower>(kept);
      each.put_back();
      each.show(slot);
      if (!each.renew(slot)) return false;
    }
    if (count() > 0) clear_caches();
    shown_slot = slot;
    ++moves;
    applied();
    return true;
  }

  // Before a section's pin goes: what it has asked the device for is still to be done, and holds the slot until then.
  // An optimistic section has no pin: it is done when this returns, so that what it has read can be judged. The error
  // is what the device has failed with, then the slot stays held, or what a signal's handler has raised meanwhile.
  void tell_device(nb::handle self) {
    if (!side->holds_pin()) {
      if (consistency_ == Consistency::optimistic && !side->pinned()) call_method(self, "_reads_end", nb::none());
      return;
    }
    const nb::object call = nb::cast(side->device()->begin(slot_of(side->held())));
    // A hook that a signal's handler leaves half done would hold the slot for ever, and may be called again.
    constexpr int kTries = 100;
    std::optional<nb::python_error> error;
    for (int tries = 0; tries < kTries; ++tries) try {
        call_method(self, "_reads_end", call);
        break;
      } catch (nb::python_error& raised) {
        const bool final = raised.matches(shmsync_error());
        if (!error) error.emplace(raised);
        if (final) break;
      }
    if (error) throw *error;
  }

  static nb::handle shmsync_error() {
    static const nb::handle type = nb::object(nb::module_::import_("shmsync.errors").attr("ShmSyncError")).release();
    return type;
  }

  // Give up a pin that became no section; an error is on its way already.
  void drop_pin(nb::handle self) {
    if (!side->holds_pin()) return;
    if (side->device()) {
      nb::error_scope earlier;
      try {
        tell_device(self);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("telling the device that a read section was given up");
      }
    }
    side->drop();
  }

  [[noreturn]] void raise_busy() const {
    raise("SubscriberBusy", (name_of(*mutex.owner()) +
                             " kept this Subscriber in a read section; make one Subscriber per thread that reads in "
                             "parallel")
                                .c_str());
  }

  bool should_look() {
    if (!follows) return false;
    const std::uint64_t now = monotonic_ns();
    if (now - looked_ < kLook) return false;
    looked_ = now;
    return true;
  }

  struct Unlocking {
    ~Unlocking() { mutex.unlock(); }
    SectionLock& mutex;
  };

  struct Entering {
    explicit Entering(bool& flag) : flag(flag) { flag = true; }
    ~Entering() { flag = false; }
    bool& flag;
  };

  nb::object control_;  // of the arena that is read: keeps it mapped
  const Consistency consistency_;
  std::uint32_t row_ = 0;
  std::uint64_t generation_ = fork_generation();
  std::uint64_t looked_ = 0;

 public:
  std::optional<ReadSide> side;
  SectionLock mutex;
  ThreadVersions thread_versions;
  WeightsMemory memory;
  int depth = 0;  // sections that are open
  bool follows = false;
  bool publisher_lost = false;  // follows, and its publisher is gone
  bool entering = false;        // a hook is at work
  bool closed = false;
  // In the host's memory, not optimistic, no function of on_version(), and after the first move in this arena.
  bool moves_natively = false;
  std::uint32_t shown_slot = 0;  // of `weights`
  std::uint64_t moves = 0;
};

}  // namespace shmsync::bind
