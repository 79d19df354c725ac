// The guards of bound modules, for Python.
#include <atomic>
#include <memory>

#include "reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

// What the guards of a bound module share: the readers whose sections cover each of its calls. A module that is bound
// to two arenas has two. Python's half decides what is rare (see shmsync/engine/cover.py).
//
// INV: `thread_` is set only by a thread that is in sections of all readers.
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

  // inner(*args, **kwargs) in one section of each reader. kwargs may be null.
  nb::object run(nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
    if (readers_->empty()) return call(inner, args, kwargs);
    if (inside()) {
      for (const Covered& each : *readers_) each.reader->check();
      const Running running(*this, inner);
      return call(inner, args, kwargs);  // the outermost call looks at what comes out
    }
    if (!plain_)
      return call_method(self, "_repeat", inner, args, kwargs.is_valid() ? nb::borrow(kwargs) : nb::object(nb::dict()));
    if (!looked && grad_enabled()) call_method(self, "_look");
    for (;;) {
      const std::uint64_t generation = generation_;
      Entered entered(*this);
      if (generation != generation_) continue;  // bound elsewhere while this thread waited
      const Running running(*this, inner);
      return finished(self, call(inner, args, kwargs), args, kwargs);
    }
  }

  // Run inner inside sections that the caller has entered.
  nb::object run_inside(nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
    const Mark mark(*this);
    const Running running(*this, inner);
    return finished(self, call(inner, args, kwargs), args, kwargs);
  }

  // What the innermost guard of this thread calls; None outside of a call.
  nb::object running() const { return inside() && running_ != nullptr ? nb::borrow(running_) : nb::object(nb::none()); }

  bool inside() const { return thread_.load(std::memory_order_relaxed) == this_thread(); }

  bool aliases(nb::handle tensor) const {
    for (const Covered& each : *readers_)
      if (each.reader->aliases(tensor)) return true;
    return false;
  }

  static nb::object call(nb::handle inner, nb::handle args, nb::handle kwargs) {
    PyObject* result = in_python([&] { return PyObject_Call(inner.ptr(), args.ptr(), kwargs.ptr()); });
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

  nb::object finished(nb::handle self, nb::object out, nb::handle args, nb::handle kwargs) {
    if (out.is_none() || PyBool_Check(out.ptr())) return out;
    if (out.type().is(tensor_type())) return clones_ && aliases(out) ? nb::object(out.attr("clone")()) : out;
    return kwargs.is_valid() ? call_method(self, "_finish", out, args, kwargs)
                             : call_method(self, "_finish", out, args);
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

  struct Running {
    Running(Cover& cover, nb::handle inner) : cover(cover), before(cover.running_) { cover.running_ = inner.ptr(); }
    ~Running() { cover.running_ = before; }
    Cover& cover;
    PyObject* const before;
  };

  // Sections of all readers, entered in their order and left in the opposite one.
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
      while (count > 0) {
        const Covered& each = (*readers)[--count];
        try {
          each.reader->leave(each.owner);
        } catch (nb::python_error& error) {  // what a device has failed with; the next call of its driver says it too
          error.discard_as_unraisable("leaving the read section of a guarded call");
        }
      }
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
  PyObject* running_ = nullptr;  // borrowed from the call
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
      return call_method(cover, "_held", generator).release().ptr();
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

void bind_cover(nb::module_& m) {
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
      .def_prop_ro("running", &Cover::running, nb::sig("def running(self) -> typing.Any"),
                   "What the innermost guard of this thread calls.")
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
