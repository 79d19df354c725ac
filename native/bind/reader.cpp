// Reader for Python: the methods read() and refresh() of a Subscriber, and the section object.
//
// A read goes this way: read() makes a Section, which costs nothing yet. Its __enter__ takes the lock and enters the
// ReadSide (reader.hpp, then native/src/read_section.cpp); where there is a new version, or a closed gate, that calls
// Python's half (shmsync/engine/read/reading.py). Its __exit__ leaves both. The rest of this file are questions that
// Python's half asks of the reader, one line each.
#include "reader.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string_view>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

// `with reader.hold_lock():` holds the lock without opening a section.
class Held {
 public:
  Held(nb::object owner, nb::object timeout)
      : owner_(std::move(owner)), reader_(nb::cast<Reader*>(owner_)), timeout_(std::move(timeout)) {}
  void enter() {
    reader_->check();
    reader_->lock(owner_, timeout_);
  }
  void exit() { reader_->unlock(owner_); }

 private:
  nb::object owner_;
  Reader* reader_;
  nb::object timeout_;
};

class Section {
 public:
  Section(nb::object owner, nb::object version, nb::object timeout, bool pinned = false)
      : owner_(std::move(owner)),
        reader_(nb::cast<Reader*>(owner_)),
        asked_(std::move(version)),
        timeout_(std::move(timeout)),
        pinned_(pinned) {}

  void enter() {
    reader_->enter(owner_, asked_, timeout_, pinned_);
    ++entered_;
    version = version_of(reader_->side->held());
    session_ = reader_->thread_versions.used_session();
    torn = false;
  }
  void exit() {
    if (entered_ == 0)
      raise("ProtocolError", "this read section is not entered, or was left already; nothing to leave");
    torn = reader_->leave(owner_);
    --entered_;
  }
  nb::object weights() const { return shown("weights"); }
  nb::object numpy() const { return values().attr("arrays_of")(shown("tensors")); }
  nb::object stamp() const {
    const std::string_view session = session_ ? std::string_view(*session_) : std::string_view();
    return values().attr("VersionStamp")(nb::bytes(session.data(), session.size()), version);
  }
  void release_after(nb::object stream) const {
    if (entered_ == 0 || !reader_->in_section())
      raise("ProtocolError", "release_after() is for a read section of this thread that is open");
    call_method(owner_, "_release_after", stream);
  }

  std::uint64_t version = 0;
  bool torn = false;

 private:
  static nb::module_ values() { return nb::module_::import_("shmsync.engine.read.section_values"); }
  nb::object shown(const char* what) const {
    if (session_ == nullptr)
      raise("ProtocolError",
            "the section was not entered, so its weights would be unprotected; write "
            "`with sub.read() as section:`, or take sub.state_dict() for a private copy");
    return owner_.attr(what);
  }

  nb::object owner_;
  Reader* reader_;
  nb::object asked_, timeout_;
  bool pinned_;
  std::shared_ptr<const std::string> session_;  // of the arena that was entered; null before
  int entered_ = 0;
};

// What a Subscriber shows of its reader without a step through Python.
class ReadMethods {
 public:
  explicit ReadMethods(nb::object reader) : reader_(std::move(reader)) { nb::cast<Reader*>(reader_); }
  PyObject* reader() const { return reader_.ptr(); }

 private:
  nb::object reader_;
};

// The first import of tensordict takes over 1 s, and a section may be for `section.weights`: inside, a publisher with
// one slot would wait for it. A process that cannot import it has section.numpy() and bound modules.
void import_tensordict() {
  static bool tried = false;
  if (tried) return;
  PyObject* const tensordict = PyImport_ImportModule("tensordict");
  if (tensordict == nullptr && !PyErr_ExceptionMatches(PyExc_ImportError)) throw nb::python_error();
  PyErr_Clear();
  Py_XDECREF(tensordict);
  tried = true;
}

// read() and refresh() of a Reader, and of a Subscriber (ReadMethods). They are of plain CPython's kind: Dynamo calls
// methods of nanobind's kind without their object, when compiled code opens a section.
template <class Type>
PyObject* reader_of(PyObject* self) {
  if constexpr (std::is_same_v<Type, Reader>) return self;
  return nb::inst_ptr<ReadMethods>(self)->reader();
}

template <class Type>
PyObject* read_or_null(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"version", "timeout", nullptr};
  PyObject *version = Py_None, *timeout = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OO:read", const_cast<char**>(names), &version, &timeout))
    return nullptr;
  try {
    if (std::is_same_v<Type, ReadMethods>) import_tensordict();
    const nb::object reader = nb::borrow(reader_of<Type>(self));
    const bool sound = timeout == Py_None || (PyFloat_Check(timeout) && PyFloat_AsDouble(timeout) >= 0);
    nb::object seconds = sound ? nb::borrow(timeout) : reader.attr("_checked_timeout")(nb::handle(timeout));
    return nb::cast(Section(reader, nb::borrow(version), std::move(seconds))).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

template <class Type>
PyObject* refresh_or_null(PyObject* self, PyObject*) {
  try {
    PyObject* const reader = reader_of<Type>(self);
    return nb::bool_(nb::inst_ptr<Reader>(reader)->refresh(reader)).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (nb::builtin_exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
  return nullptr;
}

template <class Type>
PyMethodDef methods[] = {
    {"read", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(read_or_null<Type>)),
     METH_VARARGS | METH_KEYWORDS,
     "read($self, /, *, version=None, timeout=None)\n--\n\n"
     "Enter a read section: `with sub.read() as section:`.\n\n"
     "Inside, `section.weights` and bound modules show one version, `section.version`. Sections nest; the outermost\n"
     "one decides the version. With `version`, exactly that one: waits for it at most `timeout` seconds.\n\n"
     "Raises WriterBusy (the writer kept the gate closed), WriterDied, Poisoned, PublishTimeout (`version` did not\n"
     "come), ProtocolError (`version` is gone), ClosedError, ForkedHandle."},
    {"refresh", refresh_or_null<Type>, METH_NOARGS,
     "refresh($self, /)\n--\n\n"
     "Move to the newest version and ack it. False when nothing is new, and inside a section."}};

template <class Type>
void add_methods(nb::handle type) {
  for (PyMethodDef& method : methods<Type>) {
    nb::object descriptor = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
    if (!descriptor.is_valid()) throw nb::python_error();
    type.attr(method.ml_name) = descriptor;
  }
}

}  // namespace

void bind_reader(nb::module_& m) {
  nb::enum_<Consistency>(m, "Consistency")
      .value("PINNED", Consistency::pinned)
      .value("OPTIMISTIC", Consistency::optimistic)
      .value("LIVE", Consistency::live);
  nb::enum_<Enter>(m, "Enter", "How an attempt to enter a section ended; see read_section.hpp.")
      .value("SAME", Enter::same)
      .value("MOVED", Enter::moved)
      .value("GATED", Enter::gated)
      .value("POISONED", Enter::poisoned)
      .value("EVICTED", Enter::evicted)
      .value("CORRUPT", Enter::corrupt);
  nb::enum_<State>(m, "State", "The state of a publication; see layout.hpp.")
      .value("OPEN", State::open)
      .value("CLOSED", State::closed)
      .value("POISONED", State::poisoned);

  m.def(
      "when_compiling", [](nb::object tell) { g_register = tell.release(); }, "register"_a,
      nb::sig("def when_compiling(register: typing.Callable[[], object]) -> None"),
      "`register` tells Dynamo what it must know.");
  m.def("tell_dynamo", &tell_dynamo, "Call `register`, once, if Dynamo has been imported.");
  m.def("import_tensordict", &import_tensordict,
        "Import it, if that can be done: call it before a section is entered.");

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
      .def("release_after", &Section::release_after, "stream"_a,
           "Weights on a device: keep this version until this stream, or event, has done what it has to do when the\n"
           "section is left. For kernels on other streams than the current one; in host memory it does nothing.\n\n"
           "Raises ProtocolError outside of the section, TypeError for what is no stream or event of the device.")
      .def_ro("version", &Section::version, "The version used inside.")
      .def_ro("torn", &Section::torn, "After exit: did the weights change meanwhile? Always False when pinned.")
      .def_prop_ro("weights", &Section::weights, nb::sig("def weights(self) -> tensordict.TensorDictBase"),
                   "The weights, zero-copy.")
      .def_prop_ro("stamp", &Section::stamp, "Session and version used inside, as a value to keep beside a result.")
      .def("numpy", &Section::numpy, nb::sig("def numpy(self) -> dict[str, Any]"),
           "The weights by dotted key as read-only numpy arrays, zero-copy; protected only inside the section.\n\n"
           "Raises ProtocolError for weights on a device, and for a dtype that numpy lacks, such as bfloat16.");

  nb::class_<Held>(m, "HeldLock", "Holds a Subscriber's re-entrant lock.")
      .def("__enter__", &Held::enter)
      .def(
          "__exit__", [](Held& held, nb::handle, nb::handle, nb::handle) { held.exit(); }, "exc_type"_a.none(),
          "exc"_a.none(), "traceback"_a.none());

  nb::class_<Reader> reader(m, "Reader", "The reader's side of the protocol.", nb::is_weak_referenceable());
  add_methods<Reader>(reader);
  nb::class_<ReadMethods> shown(m, "ReadMethods", "read() and refresh() of a reader; base of Subscriber.");
  add_methods<ReadMethods>(shown);
  shown.def(nb::init<nb::object>(), "reader"_a, nb::sig("def __init__(self, reader: Reader) -> None"));
  reader
      .def(nb::init<nb::object, std::uint32_t, std::uint64_t, Consistency, std::shared_ptr<DeviceReads>>(), "control"_a,
           "row"_a, "me"_a, "consistency"_a, "reads"_a = nb::none(),
           nb::sig("def __init__(self, control: Control, row: int, me: int, consistency: Consistency, "
                   "reads: DeviceReads | None = None) -> None"))
      .def(
          "pinned_section", [](nb::handle self) { return Section(nb::borrow(self), nb::none(), nb::none(), true); },
          "As read(), but pinned, whatever the consistency.")
      .def(
          "hold_lock", [](nb::handle self, nb::object timeout) { return Held(nb::borrow(self), std::move(timeout)); },
          "timeout"_a = nb::none(), nb::sig("def hold_lock(self, timeout: float | None = None) -> HeldLock"))
      .def("move_to_arena", &Reader::use, "control"_a, "row"_a, "me"_a, "reads"_a = nb::none(),
           nb::sig("def move_to_arena(self, control: Control, row: int, me: int, reads: DeviceReads | None = None) -> "
                   "None"))
      .def_rw("follows", &Reader::follows, "Does it look for a publisher that was started again?")
      .def_rw("publisher_lost", &Reader::publisher_lost, "It follows, and its publisher is gone.")
      .def_rw("moves_natively", &Reader::moves_natively, "May a move to a new version be all native?")
      .def_rw("shown_slot", &Reader::shown_slot, "That of `weights`.")
      .def_rw("moves", &Reader::moves, "To new versions, so far.")
      .def(
          "try_enter",
          [](Reader& r, bool pinned) { return pinned ? r.side->try_enter(Consistency::pinned) : r.side->try_enter(); },
          "pinned"_a)
      .def_prop_ro(
          "latest_slot", [](const Reader& r) { return r.side->shown_slot(); },
          "That of `latest`, whether it is there or not.")
      .def(
          "enter_after_death", [](Reader& r) { return r.side->enter_after_death(); },
          "Enter, or tell that it is poisoned, once the writer is known to be dead.")
      .def("ack_held", &Reader::applied, "The views show the held version: ack it.")
      .def_prop_ro(
          "applied_version", [](const Reader& r) { return r.thread_versions.applied(); },
          "The version that the views show.")
      .def_prop_ro(
          "used_version", [](const Reader& r) { return r.thread_versions.version(); },
          "What the calling thread has used last; the applied one if it has used none.")
      .def_prop_ro(
          "used_session",
          [](const Reader& r) {
            return nb::bytes(r.thread_versions.session().data(), r.thread_versions.session().size());
          },
          nb::sig("def used_session(self) -> bytes"), "The session of used_version.")
      .def_prop_ro(
          "session",
          [](const Reader& r) { return nb::bytes(r.thread_versions.reads().data(), r.thread_versions.reads().size()); },
          nb::sig("def session(self) -> bytes"), "The session of the arena that is read.")
      .def_prop_ro("has_used_version", [](const Reader& r) { return r.thread_versions.has_used(); })
      .def(
          "use_applied_version", [](Reader& r) { r.thread_versions.use(r.thread_versions.applied()); },
          "As refresh(), but nothing is applied.")
      .def("forget_used_version", [](Reader& r) { r.thread_versions.forget(); })
      .def(
          "forget_applied", [](Reader& r) { r.side->forget(); },
          "What was applied may be torn: the next entry moves again.")
      .def(
          "leave_held", [](nb::handle self) { return nb::inst_ptr<Reader>(self)->leave_held(self); },
          nb::sig("def leave_held(self) -> bool"), "Leave what a hook has entered; True if it was torn.")
      .def(
          "wait_at_gate",
          [](Reader& r, std::int64_t timeout_ns) {
            const WithoutGil released;
            return r.side->wait(Nanoseconds(timeout_ns));
          },
          "timeout_ns"_a)
      .def("wait_version_slice", &Reader::wait_version, "version"_a, "timeout_ns"_a)
      .def("check_open", &Reader::check, "Raise if it is closed, or the parent's after a fork.")
      .def("count_retry", [](Reader& r) { r.side->count_retry(); })
      .def(
          "aliases", [](const Reader& r, nb::handle tensor) { return r.memory.aliases(tensor); }, "tensor"_a)
      .def(
          "set_memory", [](Reader& r, Ranges ranges) { r.memory.set(std::move(ranges)); }, "ranges"_a,
          "The addresses of what changes with the version, [begin, end) each.")
      .def_prop_ro("row", &Reader::row)
      .def_prop_ro("in_section", &Reader::in_section)
      .def_prop_ro("in_pinned_section", [](const Reader& r) { return r.in_section() && r.side->pinned(); })
      .def_prop_ro("held_version", [](const Reader& r) { return version_of(r.side->held()); })
      .def_prop_ro("held_slot", [](const Reader& r) { return slot_of(r.side->held()); })
      .def_prop_ro("latest", [](const Reader& r) { return r.side->latest(); })
      .def_prop_ro(
          "final_version", [](const Reader& r) { return r.side->last_words(); },
          "With slots=1 and a dead writer: the version of the bytes, 0 when they are half written.")
      .def_prop_ro("state", [](const Reader& r) { return r.side->state(); })
      .def_prop_ro(
          "section_counts",
          [](const Reader& r) { return nb::make_tuple(r.side->reads(), r.side->torn(), r.side->retries()); },
          nb::sig("def section_counts(self) -> tuple[int, int, int]"),
          "Sections, those that were torn, and those repeated.")
      .def_prop_ro("in_parent", &Reader::in_parent, "Was it made before a fork, by the parent process?")
      .def("retire", &Reader::close, "Give the row back. Nothing can be entered any more.")
      .def_prop_ro("closed", [](const Reader& r) { return r.closed; });
}

}  // namespace shmsync::bind
