// The guards of bound modules, for Python.
//
// A call of a bound module goes this way: Guard.__call__ -> Cover::run(), which at the outermost call enters a section
// of the reader (reader.hpp), calls the method that the guard stands for, looks at what comes out, and leaves the
// section. An output that shows the weights is cloned before that. What is rare is Python's half
// (shmsync/engine/bind/guard.py): sections that have to be repeated, outputs in other containers, gradients.
#include <atomic>
#include <optional>
#include <utility>

#include "compiling.hpp"
#include "reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

// What a guard calls: `inner`, which may begin with a frame that Dynamo compiles, or the same without that frame.
//
// INV: the guard holds both as long as it lives, and whoever calls it holds the guard.
struct Target {
  nb::handle inner, plain;
  nb::object now() const { return nb::borrow(dynamo_knows_us() ? inner : plain); }
};

// What the guards of a bound module share: the reader whose sections cover each of its calls.
//
// INV: `thread_` is set only by a thread that is in a section of the reader.
class Cover {
 public:
  // None: calls are covered by nothing from now on.
  void set_reader(nb::object reader, bool plain, bool clones) {
    reader_ = reader.is_none() ? nullptr : nb::cast<Reader*>(reader);
    std::swap(owner_, reader);  // the old one goes when this returns
    plain_ = plain;
    clones_ = clones;
    ++generation_;
  }

  // Calls the target of a guard in one section. kwargs may be null.
  nb::object run(nb::handle self, const Target& target, nb::handle args, nb::handle kwargs) {
    if (reader_ == nullptr) return call(target.now(), args, kwargs);
    if (inside()) {
      reader_->check();
      const Running running(*this, target.inner);
      return call(target.now(), args, kwargs);  // the outermost call looks at what comes out
    }
    tell_dynamo();
    if (!plain_)
      return call_method(self, "_repeat", target.inner, args,
                         kwargs.is_valid() ? nb::borrow(kwargs) : nb::object(nb::dict()));
    if (!gradients_checked && (calls_ < kAskAlways || calls_ % kAskAlways == 0) && grad_enabled())
      call_method(self, "_look");
    ++calls_;
    return in_section(self, target, args, kwargs);
  }

  // Run inner inside a section that the caller has entered.
  nb::object run_inside(nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
    const Mark mark(*this);
    const Running running(*this, inner);
    return finished(self, call(inner, args, kwargs), args, kwargs);
  }

  // What the innermost guard of this thread calls; None outside of a call.
  nb::object running() const { return inside() && running_ != nullptr ? nb::borrow(running_) : nb::object(nb::none()); }

  bool inside() const { return thread_.load(std::memory_order_relaxed) == this_thread(); }

  bool aliases(nb::handle tensor) const { return reader_ != nullptr && reader_->memory.aliases(tensor); }

  static nb::object call(nb::handle inner, nb::handle args, nb::handle kwargs) {
    PyObject* result = in_python([&] { return PyObject_Call(inner.ptr(), args.ptr(), kwargs.ptr()); });
    if (result == nullptr) throw nb::python_error();
    return nb::steal(result);
  }

  bool gradients_checked = false;

 private:
  nb::object in_section(nb::handle self, const Target& target, nb::handle args, nb::handle kwargs) {
    for (;;) {
      if (reader_ == nullptr) return call(target.now(), args, kwargs);
      const std::uint64_t generation = generation_;
      Entered entered(*this);
      if (generation != generation_) continue;  // bound elsewhere while this thread waited
      nb::object out;
      {
        const Running running(*this, target.inner);
        out = finished(self, call(target.now(), args, kwargs), args, kwargs);
      }
      entered.leave();
      return out;
    }
  }

  nb::object finished(nb::handle self, nb::object out, nb::handle args, nb::handle kwargs) {
    if (out.type().is(tensor_type()) && clones_) return aliases(out) ? nb::object(out.attr("clone")()) : out;
    if (stays(out, 8)) return out;
    return kwargs.is_valid() ? call_method(self, "_finish", out, args, kwargs)
                             : call_method(self, "_finish", out, args);
  }

  // May it leave the section as it is? True only for what is surely so: values, tensors that lie elsewhere, and
  // tuples, lists, dicts and TensorDicts of them, so many levels deep. Python's half handles everything else.
  bool stays(nb::handle out, int levels) const {
    PyObject* it = out.ptr();
    if (out.is_none() || PyBool_Check(it) || PyLong_CheckExact(it) || PyFloat_CheckExact(it) ||
        PyUnicode_CheckExact(it))
      return true;
    const nb::handle type = out.type();
    if (type.is(tensor_type())) return !clones_ || !aliases(out);
    if (levels == 0) return false;
    nb::object inside;  // a private list: another thread may change the original
    if (PyTuple_CheckExact(it) || PyList_CheckExact(it)) {
      inside = nb::steal(PySequence_List(it));
    } else if (PyDict_CheckExact(it)) {
      inside = nb::steal(PyDict_Values(it));
    } else if (is_tensordict(type)) {
      const nb::object store = nb::getattr(out, "_tensordict", nb::none());
      if (!PyDict_CheckExact(store.ptr())) return false;
      inside = nb::steal(PyDict_Values(store.ptr()));
    } else {
      return false;
    }
    if (!inside.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PyList_Size(inside.ptr());
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!stays(PyList_GetItem(inside.ptr(), i), levels - 1)) return false;
    return true;
  }

  static nb::handle tensor_type() {
    static const nb::handle type = nb::object(nb::module_::import_("torch").attr("Tensor")).release();
    return type;
  }

  // False while tensordict has not been imported: then there is no TensorDict, and most workers never need one.
  static bool is_tensordict(nb::handle type) {
    static PyObject* const name = PyUnicode_InternFromString("tensordict");
    static PyObject* kind = nullptr;
    if (kind == nullptr) {
      const nb::object module = nb::steal(PyImport_GetModule(name));
      if (!module.is_valid()) {
        if (PyErr_Occurred()) throw nb::python_error();
        return false;
      }
      nb::object found = nb::getattr(module, "TensorDict", nb::none());  // none in the middle of its import
      if (found.is_none()) return false;
      kind = found.release().ptr();
    }
    return type.is(kind);
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
      // After the cover got another reader, another thread may be in its section, and this mark is that thread's.
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

  // One section of the reader.
  struct Entered {
    explicit Entered(Cover& cover) : owner(cover.owner_), reader(cover.reader_) {
      reader->enter(owner, nb::none(), nb::none());
      mark.emplace(cover);
    }
    // For an error that is on its way already.
    ~Entered() {
      if (!mark) return;
      try {
        leave();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("leaving the read section of a guarded call");
      }
    }
    void leave() {
      mark.reset();
      reader->leave(owner);
    }
    const nb::object owner;  // the cover may get another one meanwhile
    Reader* const reader;
    std::optional<Mark> mark;
  };

  nb::object owner_ = nb::none();  // of reader_
  Reader* reader_ = nullptr;       // null: no section covers the calls
  static constexpr std::uint64_t kAskAlways = 16;
  std::uint64_t calls_ = 0;  // torch is asked for gradients at the first of them, and then at each so many
  bool plain_ = true;        // no section of it has to be repeated
  bool clones_ = true;       // outputs that are views of the weights are cloned
  std::uint64_t generation_ = 0;
  std::atomic<const void*> thread_{nullptr};
  PyObject* running_ = nullptr;  // borrowed from the call
};

// The native half of a guard: an object that is called in place of a method.
struct NativeGuard {
  nb::object inner, plain, cover;
};

PyObject* guard_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  auto& guard = *nb::inst_ptr<NativeGuard>(self);
  try {
    const nb::object cover = guard.cover;  // a call below may set another
    return nb::inst_ptr<Cover>(cover)->run(cover, {guard.inner, guard.plain}, args, kwargs).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

int guard_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  auto& guard = *nb::inst_ptr<NativeGuard>(self);
  Py_VISIT(guard.inner.ptr());
  Py_VISIT(guard.plain.ptr());
  Py_VISIT(guard.cover.ptr());
  return 0;
}

int guard_clear(PyObject* self) {
  auto& guard = *nb::inst_ptr<NativeGuard>(self);
  guard.inner.reset();
  guard.plain.reset();
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
      .def("set_reader", &Cover::set_reader, "reader"_a.none(), "plain"_a, "clones"_a,
           nb::sig("def set_reader(self, reader: Reader | None, plain: bool, clones: bool) -> None"))
      .def(
          "run_inside",
          [](nb::handle self, nb::handle inner, nb::handle args, nb::handle kwargs) {
            return nb::inst_ptr<Cover>(self)->run_inside(self, inner, args, kwargs);
          },
          "inner"_a, "args"_a, "kwargs"_a,
          nb::sig("def run_inside(self, inner: typing.Any, args: tuple, kwargs: dict) -> typing.Any"))
      .def_prop_ro("running", &Cover::running, nb::sig("def running(self) -> typing.Any"),
                   "What the innermost guard of this thread calls.")
      .def_prop_ro("inside", &Cover::inside, "Does the calling thread run a covered call?")
      .def("aliases", &Cover::aliases, "tensor"_a, "Does the tensor show the reader's weights?")
      .def_rw("gradients_checked", &Cover::gradients_checked);

  nb::class_<NativeGuard>(m, "Guard", "Called in place of a method, which it calls inside a section of its cover.",
                          nb::type_slots(guard_slots), nb::is_weak_referenceable())
      .def(nb::init<>())
      .def(
          "set_target",
          [](NativeGuard& g, nb::object inner, nb::object plain, nb::object cover) {
            nb::cast<Cover*>(cover);  // TypeError for anything else
            g.inner = std::move(inner);
            g.plain = std::move(plain);
            g.cover = std::move(cover);
          },
          "inner"_a, "plain"_a, "cover"_a,
          nb::sig("def set_target(self, inner: typing.Any, plain: typing.Any, cover: Cover) -> None"),
          "`plain` is called instead of `inner` as long as nothing is compiled.");
}

}  // namespace shmsync::bind
