// ReadSide for Python: the lock around sections, nesting, and the section object.
//
// The common path (nothing new, the gate is open) runs here. All else goes to Python, through hooks of the subclass:
// _enter_slow(outcome, version, timeout) and _refresh_slow().
//
// INV: when a hook raises, or a signal interrupts it anywhere, a pin that became no section is dropped and the lock is
//      given back. So taking and giving back are both C++: Python can be interrupted between any two lines.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "control.hpp"
#include "sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

[[noreturn]] void raise(const char* type, const char* message) {
  nb::object error = nb::module_::import_("shmsync.errors").attr(type)(message);
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

class Reader {
 public:
  Reader(Control& control, std::uint32_t row, std::uint64_t me, Consistency consistency)
      : table_(control.readers()),
        row_(row),
        side(control.publication(), control.slots(), control.slot_count(), table_[row], control.reply(), me,
             consistency) {}

  void check() const {
    if (generation_ != fork_generation())
      raise("ForkedHandle", "this Subscriber belongs to the parent process; attach again in the child");
    if (closed) raise("ClosedError", "this Subscriber is closed; attach again");
  }

  // One thread at a time may be in sections or in refresh(); that thread may enter again.
  void lock(nb::handle self, nb::handle timeout) {
    if (!mutex.try_lock()) wait_for_lock(nb::cast<double>(timeout.is_none() ? self.attr("timeout") : timeout));
    try {
      check();  // it may have been closed while we waited
      if (depth == 0) {
        if (entering)
          raise("ProtocolError",
                "a signal handler or a finaliser used this Subscriber in the middle of its own entry; use another one");
        thread = std::this_thread::get_id();
      }
    } catch (...) {
      mutex.unlock();
      throw;
    }
  }

  void unlock() {
    if (depth == 0) side.drop();
    mutex.unlock();
  }

  void enter(nb::handle self, nb::handle version, nb::handle timeout) {
    check();
    lock(self, timeout);
    try {
      if (depth > 0) {
        if (!version.is_none() && !version.equal(nb::int_(version_of(side.held()))))
          raise("ProtocolError", "a section of this Subscriber is open at another version; leave it first");
      } else {
        const Enter outcome = version.is_none() ? side.try_enter() : Enter::gated;
        if (outcome != Enter::same) {
          const Entering mark(entering);
          self.attr("_enter_slow")(outcome, version, timeout);
        }
      }
      ++depth;
    } catch (...) {
      unlock();
      throw;
    }
  }

  bool leave() {
    if (generation_ != fork_generation()) return false;  // the pin is the parent's; the next call raises
    if (depth == 0 || thread != std::this_thread::get_id())
      raise("ProtocolError", "a read section must be left in the thread that entered it");
    bool torn = false;
    if (--depth == 0) {
      torn = side.leave();
      if (torn) side.forget();
    } else {
      torn = side.torn_so_far();
    }
    mutex.unlock();
    return torn;
  }

  bool refresh(nb::handle self) {
    check();
    if (side.unchanged() || inside()) return false;
    lock(self, nb::none());
    try {
      const Entering mark(entering);
      const bool moved = nb::cast<bool>(self.attr("_refresh_slow")());
      unlock();
      return moved;
    } catch (...) {
      unlock();
      throw;
    }
  }

  // Does the calling thread have a section open, or is it just entering one?
  bool inside() const { return (depth > 0 || entering) && thread == std::this_thread::get_id(); }

  void close() {
    closed = true;
    side.retire();
  }

  bool aliases(nb::handle tensor) const {
    DLTensor t;
    std::uintptr_t address;
    if (describe(tensor.ptr(), t))
      address = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
    else if (nb::cast<bool>(tensor.attr("is_cpu")) &&
             tensor.attr("layout").is(nb::module_::import_("torch").attr("strided"))) {
      try {
        address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());  // this torch has no exchange table
      } catch (nb::python_error&) {
        return false;  // no storage of its own: a tensor under vmap, grad or functionalisation
      }
    } else
      return false;
    if (address >= slab_begin && address < slab_end) return true;
    const auto after = std::upper_bound(copies_.begin(), copies_.end(), std::pair{address, ~std::uintptr_t{0}});
    return after != copies_.begin() && address < std::prev(after)->second;
  }

  // Private copies that change with the version: [(begin, end), ...].
  void set_copies(std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges) {
    std::sort(ranges.begin(), ranges.end());
    copies_ = std::move(ranges);
  }

  std::uint32_t row() const { return row_; }
  bool in_parent() const { return generation_ != fork_generation(); }

 private:
  // Holds the lock when it returns: no Python code runs after the lock was taken.
  void wait_for_lock(double seconds) {
    if (!(seconds >= 0)) throw nb::value_error("timeout must be 0 or more seconds");
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    for (;;) {
      const double left = seconds - std::chrono::duration<double>(Clock::now() - start).count();
      {
        nb::gil_scoped_release release;
        if (mutex.try_lock_for(std::chrono::duration<double>(std::clamp(left, 0.0, 0.05)))) return;
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (left <= 0)
        raise("WriterBusy",
              "another thread kept this Subscriber in a read section; make one Subscriber per thread that reads in "
              "parallel");
    }
  }

  struct Entering {
    explicit Entering(bool& flag) : flag(flag) { flag = true; }
    ~Entering() { flag = false; }
    bool& flag;
  };

  ReaderTable table_;
  std::uint32_t row_;
  std::uint64_t generation_ = fork_generation();
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> copies_;

 public:
  ReadSide side;
  std::recursive_timed_mutex mutex;
  std::thread::id thread;  // the one that took the lock last
  int depth = 0;
  bool entering = false;  // a hook is at work
  bool closed = false;
  std::uintptr_t slab_begin = 0, slab_end = 0;
};

// `with reader._exclusive():` holds the lock without opening a section.
class Exclusive {
 public:
  explicit Exclusive(nb::object owner) : owner_(std::move(owner)), reader_(nb::cast<Reader*>(owner_)) {}
  void enter() { reader_->lock(owner_, nb::none()); }
  void exit() { reader_->unlock(); }

 private:
  nb::object owner_;
  Reader* reader_;
};

class Section {
 public:
  Section(nb::object owner, nb::object version, nb::object timeout)
      : owner_(std::move(owner)),
        reader_(nb::cast<Reader*>(owner_)),
        asked_(std::move(version)),
        timeout_(std::move(timeout)) {}

  void enter() {
    reader_->enter(owner_, asked_, timeout_);
    version = version_of(reader_->side.held());
    torn = false;
  }
  void exit() { torn = reader_->leave(); }
  nb::object weights() const { return owner_.attr("weights"); }

  std::uint64_t version = 0;
  bool torn = false;

 private:
  nb::object owner_;
  Reader* reader_;
  nb::object asked_, timeout_;
};

// Methods of plain CPython's kind: Dynamo calls those of nanobind's without their object, when compiled code opens a
// section.
PyObject* read_or_null(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"version", "timeout", nullptr};
  PyObject *version = Py_None, *timeout = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OO:read", const_cast<char**>(names), &version, &timeout))
    return nullptr;
  try {
    return nb::cast(Section(nb::borrow(self), nb::borrow(version), nb::borrow(timeout))).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

PyObject* refresh_or_null(PyObject* self, PyObject*) {
  try {
    return nb::bool_(nb::inst_ptr<Reader>(self)->refresh(self)).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (nb::builtin_exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
  return nullptr;
}

PyMethodDef read_method = {
    "read", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(read_or_null)), METH_VARARGS | METH_KEYWORDS,
    "read($self, /, *, version=None, timeout=None)\n--\n\n"
    "Enter a read section: `with sub.read() as section:`.\n\n"
    "Inside, `section.weights` and bound modules show one version, `section.version`. Sections nest; the outermost\n"
    "one decides the version. With `version`, exactly that one: waits for it at most `timeout` seconds.\n\n"
    "Raises WriterBusy (the writer kept the gate closed), WriterDied, Poisoned, PublishTimeout (`version` did not\n"
    "come), ProtocolError (`version` is gone), ClosedError, ForkedHandle."};

PyMethodDef refresh_method = {
    "refresh", refresh_or_null, METH_NOARGS,
    "refresh($self, /)\n--\n\n"
    "Move to the newest version and ack it. False when nothing is new, and inside a section."};

// What the guards of a bound module share: the readers whose sections cover each of its calls. A module that is bound to
// two arenas has two. Python's half decides what is rare (see shmsync/engine/cover.py).
//
// INV: `thread` and `depth` change only while the lock of the first reader is held.
class Cover {
 public:
  void set(nb::list readers, bool plain, bool clones) {
    std::vector<Covered> next;
    for (nb::handle reader : readers) next.push_back({nb::borrow(reader), nb::cast<Reader*>(reader)});
    readers_ = std::make_shared<const std::vector<Covered>>(std::move(next));
    plain_ = plain;
    clones_ = clones;
    ++generation_;
  }

  // inner(*args, **kwargs) in one section of each reader.
  nb::object run(nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
    if (readers_->empty()) return call(inner, args, kwargs);
    if (inside()) {
      for (const Covered& each : *readers_) each.reader->check();
      return call(inner, args, kwargs);  // the outermost call looks at what comes out
    }
    if (!plain_) return self.attr("_repeat")(inner, args, kwargs.is_valid() ? nb::borrow(kwargs) : nb::object(nb::dict()));
    if (!looked && grad_enabled()) self.attr("_look")();
    for (;;) {
      const std::uint64_t generation = generation_;
      Entered entered(*this);
      if (generation != generation_) continue;  // bound elsewhere while this thread waited
      return finished(self, call(inner, args, kwargs));
    }
  }

  // Run inner inside sections that the caller has entered.
  nb::object run_inside(nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
    const Mark mark(*this);
    return finished(self, call(inner, args, kwargs));
  }

  bool inside() const { return thread_.load(std::memory_order_relaxed) == this_thread(); }

  bool aliases(nb::handle tensor) const {
    for (const Covered& each : *readers_)
      if (each.reader->aliases(tensor)) return true;
    return false;
  }

  static nb::object call(nb::handle inner, nb::handle args, nb::handle kwargs) {
    PyObject* result = PyObject_Call(inner.ptr(), args.ptr(), kwargs.ptr());  // kwargs may be null
    if (result == nullptr) throw nb::python_error();
    return nb::steal(result);
  }

  bool looked = false;

 private:
  struct Covered {
    nb::object owner;
    Reader* reader;
  };
  using Readers = std::shared_ptr<const std::vector<Covered>>;

  nb::object finished(nb::handle self, nb::object out) {
    if (out.is_none() || PyBool_Check(out.ptr())) return out;
    if (out.type().is(tensor_type())) return clones_ && aliases(out) ? nb::object(out.attr("clone")()) : out;
    return self.attr("_finish")(out);
  }

  static nb::handle tensor_type() {
    static const nb::handle type = nb::object(nb::module_::import_("torch").attr("Tensor")).release();
    return type;
  }

  static bool grad_enabled() {
    static const nb::handle enabled = nb::object(nb::module_::import_("torch").attr("is_grad_enabled")).release();
    return nb::cast<bool>(enabled());
  }

  static const void* this_thread() {
    static thread_local const char here = 0;
    return &here;
  }

  // This thread runs the covered module; a call below it is nested.
  struct Mark {
    explicit Mark(Cover& cover) : cover(cover), nested(cover.inside()) {
      cover.thread_.store(this_thread(), std::memory_order_relaxed);
    }
    ~Mark() {
      // After the cover got other readers, another thread may be in their sections, and this mark is that thread's.
      if (!nested && cover.inside()) cover.thread_.store(nullptr, std::memory_order_relaxed);
    }
    Cover& cover;
    const bool nested;
  };

  // Sections of all readers, entered in the order of binding and left in the opposite one.
  struct Entered {
    explicit Entered(Cover& cover) : readers(cover.readers_) {
      try {
        for (; count < readers->size(); ++count)
          (*readers)[count].reader->enter((*readers)[count].owner, nb::none(), nb::none());
        mark.emplace(cover);
      } catch (...) {
        leave();
        throw;
      }
    }
    ~Entered() {
      mark.reset();
      leave();
    }
    void leave() noexcept {
      while (count > 0) (*readers)[--count].reader->leave();
    }
    const Readers readers;  // the cover may get others meanwhile
    std::size_t count = 0;
    std::optional<Mark> mark;
  };

  Readers readers_ = std::make_shared<const std::vector<Covered>>();
  bool plain_ = true;   // no section of theirs has to be repeated
  bool clones_ = true;  // outputs that are views of the weights are cloned
  std::uint64_t generation_ = 0;
  std::atomic<const void*> thread_{nullptr};
};

// The native half of a guard: an object that is called in place of a method.
struct NativeGuard {
  nb::object inner, cover;
  bool generates = false;  // inner makes a generator, which does nothing before its first step
};

PyObject* guard_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  auto& guard = *nb::inst_ptr<NativeGuard>(self);
  try {
    const nb::object cover = guard.cover, inner = guard.inner;  // a call below may set others
    Cover& native = *nb::inst_ptr<Cover>(cover);
    if (guard.generates && !native.inside()) {
      nb::object generator = Cover::call(inner, args, kwargs);
      return cover.attr("_held")(generator).release().ptr();
    }
    return native.run(cover, inner, args, kwargs).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

int guard_traverse(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  if (!nb::inst_ready(self)) return 0;
  auto& guard = *nb::inst_ptr<NativeGuard>(self);
  Py_VISIT(guard.inner.ptr());
  Py_VISIT(guard.cover.ptr());
  return 0;
}

int guard_clear(PyObject* self) {
  auto& guard = *nb::inst_ptr<NativeGuard>(self);
  guard.inner.reset();
  guard.cover.reset();
  return 0;
}

PyType_Slot guard_slots[] = {{Py_tp_call, reinterpret_cast<void*>(guard_call)},
                             {Py_tp_traverse, reinterpret_cast<void*>(guard_traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(guard_clear)},
                             {0, nullptr}};

}  // namespace

void bind_reader(nb::module_& m) {
  nb::enum_<Consistency>(m, "Consistency")
      .value("PINNED", Consistency::pinned)
      .value("OPTIMISTIC", Consistency::optimistic)
      .value("LIVE", Consistency::live);
  nb::enum_<Enter>(m, "Enter", "How an attempt to enter a section ended; see read_side.hpp.")
      .value("SAME", Enter::same)
      .value("MOVED", Enter::moved)
      .value("GATED", Enter::gated)
      .value("POISONED", Enter::poisoned)
      .value("EVICTED", Enter::evicted);
  nb::enum_<State>(m, "State", "The state of a publication; see layout.hpp.")
      .value("OPEN", State::open)
      .value("CLOSED", State::closed)
      .value("POISONED", State::poisoned);

  nb::class_<Section>(
      m, "ReadSection",
      "A stretch of code that uses one version of the weights. Made by Subscriber.read(); may be entered again.")
      .def(
          "__enter__",
          [](nb::handle self) {
            nb::inst_ptr<Section>(self)->enter();
            return nb::borrow(self);
          },
          nb::sig("def __enter__(self) -> ReadSection"))
      .def(
          "__exit__", [](Section& s, nb::handle, nb::handle, nb::handle) { s.exit(); }, "exc_type"_a.none(),
          "exc"_a.none(), "traceback"_a.none())
      .def_ro("version", &Section::version, "The version used inside.")
      .def_ro("torn", &Section::torn, "After exit: did the weights change meanwhile? Always False when pinned.")
      .def_prop_ro("weights", &Section::weights, nb::sig("def weights(self) -> tensordict.TensorDictBase"),
                   "The weights, zero-copy.");

  nb::class_<Exclusive>(m, "Exclusive", "Holds a Subscriber's re-entrant lock.")
      .def("__enter__", [](Exclusive& e) { e.enter(); })
      .def(
          "__exit__", [](Exclusive& e, nb::handle, nb::handle, nb::handle) { e.exit(); }, "exc_type"_a.none(),
          "exc"_a.none(), "traceback"_a.none());

  nb::class_<Reader> reader(m, "Reader", "The reader's side of the protocol; base of Subscriber.",
                            nb::is_weak_referenceable());
  for (PyMethodDef* method : {&read_method, &refresh_method}) {
    nb::object descriptor = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(reader.ptr()), method));
    if (!descriptor.is_valid()) throw nb::python_error();
    reader.attr(method->ml_name) = descriptor;
  }
  reader
      .def(nb::init<Control&, std::uint32_t, std::uint64_t, Consistency>(), "control"_a, "row"_a, "me"_a,
           "consistency"_a, nb::keep_alive<1, 2>())
      .def(
          "_exclusive", [](nb::handle self) { return Exclusive(nb::borrow(self)); },
          nb::sig("def _exclusive(self) -> Exclusive"))
      .def(
          "_try_enter",
          [](Reader& r, bool pinned) { return pinned ? r.side.try_enter(Consistency::pinned) : r.side.try_enter(); },
          "pinned"_a)
      .def("_enter_final", [](Reader& r) { return r.side.final(); })
      .def("_applied", [](Reader& r) { r.side.applied(); })
      .def("_forget", [](Reader& r) { r.side.forget(); })
      .def("_abandon", [](Reader& r) { return r.side.leave(); })
      .def(
          "_wait",
          [](Reader& r, std::int64_t timeout_ns) {
            nb::gil_scoped_release release;
            return r.side.wait(Nanoseconds(timeout_ns));
          },
          "timeout_ns"_a)
      .def(
          "_wait_version",
          [](Reader& r, std::uint64_t version, std::int64_t timeout_ns) {
            nb::gil_scoped_release release;
            return r.side.wait_version(version, Nanoseconds(timeout_ns));
          },
          "version"_a, "timeout_ns"_a)
      .def("_check", &Reader::check)
      .def("_count_retry", [](Reader& r) { r.side.count_retry(); })
      .def("_aliases", &Reader::aliases, "tensor"_a)
      .def(
          "_set_slab",
          [](Reader& r, std::uintptr_t begin, std::uintptr_t end) {
            r.slab_begin = begin;
            r.slab_end = end;
          },
          "begin"_a, "end"_a)
      .def("_set_copies", &Reader::set_copies, "ranges"_a)
      .def_prop_ro("_row", &Reader::row)
      .def_prop_ro("_mine", [](const Reader& r) { return r.depth > 0 && r.thread == std::this_thread::get_id(); })
      .def_prop_ro(
          "_mine_and_pinned",
          [](const Reader& r) { return r.depth > 0 && r.thread == std::this_thread::get_id() && r.side.pinned(); })
      .def_prop_ro("_held_version", [](const Reader& r) { return version_of(r.side.held()); })
      .def_prop_ro("_held_slot", [](const Reader& r) { return slot_of(r.side.held()); })
      .def_prop_ro("_latest", [](const Reader& r) { return r.side.latest(); })
      .def_prop_ro("_last_words", [](const Reader& r) { return r.side.last_words(); })
      .def_prop_ro("_state", [](const Reader& r) { return r.side.state(); })
      .def_prop_ro(
          "_counts", [](const Reader& r) { return nb::make_tuple(r.side.reads(), r.side.torn(), r.side.retries()); },
          nb::sig("def _counts(self) -> tuple[int, int, int]"))
      .def_prop_ro("_in_parent", &Reader::in_parent)
      .def("_retire", &Reader::close)
      .def_prop_ro("_closed", [](const Reader& r) { return r.closed; });

  nb::class_<Cover>(m, "Cover", "The sections that cover each call of a bound module.", nb::is_weak_referenceable())
      .def(nb::init<>())
      .def("_set", &Cover::set, "readers"_a, "plain"_a, "clones"_a,
           nb::sig("def _set(self, readers: list, plain: bool, clones: bool) -> None"))
      .def(
          "run",
          [](nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
            return nb::inst_ptr<Cover>(self)->run(self, inner, args, kwargs);
          },
          "inner"_a, "args"_a, "kwargs"_a,
          nb::sig("def run(self, inner: typing.Any, args: tuple, kwargs: dict) -> typing.Any"),
          "inner(*args, **kwargs) inside the sections; at once if this thread is in such a call already.")
      .def(
          "_run_inside",
          [](nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
            return nb::inst_ptr<Cover>(self)->run_inside(self, inner, args, kwargs);
          },
          "inner"_a, "args"_a, "kwargs"_a,
          nb::sig("def _run_inside(self, inner: typing.Any, args: tuple, kwargs: dict) -> typing.Any"))
      .def_prop_ro("inside", &Cover::inside, "Does the calling thread run a covered call?")
      .def("aliases", &Cover::aliases, "tensor"_a, "Does the tensor start in a slab of these readers?")
      .def_rw("_looked", &Cover::looked);

  nb::class_<NativeGuard>(m, "Guard", "Called in place of a method: inner(*args, **kwargs) as Cover.run() does it.",
                          nb::type_slots(guard_slots), nb::is_weak_referenceable())
      .def(nb::init<>())
      .def(
          "_set",
          [](NativeGuard& g, nb::object inner, nb::object cover, bool generates) {
            nb::cast<Cover*>(cover);  // TypeError for anything else
            g.inner = std::move(inner);
            g.cover = std::move(cover);
            g.generates = generates;
          },
          "inner"_a, "cover"_a, "generates"_a,
          nb::sig("def _set(self, inner: typing.Any, cover: Cover, generates: bool) -> None"));
}

}  // namespace shmsync::bind
