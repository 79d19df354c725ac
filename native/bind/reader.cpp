// ReadSide for Python: the lock around sections, nesting, and the section object.
//
// The common path (nothing new, nobody in the way) runs here. All else goes to Python through hooks of the
// subclass: _lock_slow(timeout), _enter_slow(outcome, version, timeout).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <mutex>
#include <thread>

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
  Reader(Control& control, std::uint32_t row, std::uint64_t me, std::uint32_t consistency)
      : table_(control.readers()),
        row_(row),
        side(control.publication(), control.slots(), control.slot_count(), table_[row], control.reply(), me,
             static_cast<Consistency>(consistency)) {}

  void check() const {
    if (generation_ != fork_generation())
      raise("ForkedHandle", "this Subscriber belongs to the parent process; attach again in the child");
    if (closed) raise("ClosedError", "this Subscriber is closed; attach again");
  }

  // One outermost section (or refresh) at a time; the owner thread may come again.
  void lock(nb::handle self, nb::handle timeout) {
    if (!mutex.try_lock()) self.attr("_lock_slow")(timeout);
  }

  void enter(nb::handle self, nb::handle version, nb::handle timeout) {
    check();
    lock(self, timeout);
    try {
      if (depth > 0) {
        if (!version.is_none() && nb::cast<std::uint64_t>(version) != version_of(side.held()))
          raise("ProtocolError", "a section of this Subscriber is open at another version; leave it first");
      } else {
        const Enter outcome = version.is_none() ? side.try_enter() : Enter::gated;
        if (outcome != Enter::same) self.attr("_enter_slow")(static_cast<int>(outcome), version, timeout);
        thread = std::this_thread::get_id();
      }
      ++depth;
    } catch (...) {
      mutex.unlock();
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
    if (side.unchanged()) return false;
    return nb::cast<bool>(self.attr("_refresh_slow")());
  }

  bool aliases(nb::handle tensor) const {
    DLTensor t;
    std::uintptr_t address;
    if (describe(tensor.ptr(), t))
      address = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
    else if (nb::cast<bool>(tensor.attr("is_cpu")) &&
             tensor.attr("layout").is(nb::module_::import_("torch").attr("strided")))
      address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());  // this torch has no exchange table
    else
      return false;
    return address >= slab_begin && address < slab_end;
  }

  std::uint32_t row() const { return row_; }
  bool in_parent() const { return generation_ != fork_generation(); }

 private:
  ReaderTable table_;
  std::uint32_t row_;
  std::uint64_t generation_ = fork_generation();

 public:
  ReadSide side;
  std::recursive_timed_mutex mutex;
  std::thread::id thread;
  int depth = 0;
  bool closed = false;
  std::uintptr_t slab_begin = 0, slab_end = 0;
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

}  // namespace

void bind_reader(nb::module_& m) {
  nb::class_<Section>(m, "ReadSection",
                      "A stretch in which weights are used. Made by Subscriber.read(); may be entered again.")
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

  nb::class_<Reader>(m, "Reader", "The reader's side of the protocol; base of Subscriber.", nb::is_weak_referenceable())
      .def(nb::init<Control&, std::uint32_t, std::uint64_t, std::uint32_t>(), "control"_a, "row"_a, "me"_a,
           "consistency"_a, nb::keep_alive<1, 2>())
      .def(
          "read",
          [](nb::handle self, nb::object version, nb::object timeout) {
            return Section(nb::borrow(self), std::move(version), std::move(timeout));
          },
          nb::kw_only(), "version"_a = nb::none(), "timeout"_a = nb::none(),
          nb::sig("def read(self, *, version: int | None = None, timeout: float | None = None) -> ReadSection"),
          "Enter a read section: `with sub.read() as section:`.\n\n"
          "Inside, `section.weights` and bound modules show one version, `section.version`. Sections nest; the "
          "outermost\n"
          "one decides the version. With `version`, exactly that one: waits for it at most `timeout` seconds.\n\n"
          "Raises WriterBusy (the writer kept the gate closed), WriterDied, Poisoned, PublishTimeout (`version` did "
          "not\n"
          "come), ProtocolError (`version` is gone), ClosedError, ForkedHandle.")
      .def(
          "refresh", [](nb::handle self) { return nb::inst_ptr<Reader>(self)->refresh(self); },
          nb::sig("def refresh(self) -> bool"),
          "Move to the newest version and ack it. False when nothing is new, and inside a section.")
      .def(
          "_lock_for",
          [](Reader& r, double seconds) {
            nb::gil_scoped_release release;
            return r.mutex.try_lock_for(std::chrono::duration<double>(seconds));
          },
          "seconds"_a)
      .def("_unlock", [](Reader& r) { r.mutex.unlock(); })
      .def(
          "_try_enter",
          [](Reader& r, bool pinned) {
            return static_cast<int>(pinned ? r.side.try_enter(Consistency::pinned) : r.side.try_enter());
          },
          "pinned"_a)
      .def("_enter_final", [](Reader& r) { return static_cast<int>(r.side.final()); })
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
      .def_prop_ro("_row", &Reader::row)
      .def_prop_ro("_depth", [](const Reader& r) { return r.depth; })
      .def_prop_ro("_mine", [](const Reader& r) { return r.depth > 0 && r.thread == std::this_thread::get_id(); })
      .def_prop_ro("_held", [](const Reader& r) { return r.side.held(); })
      .def_prop_ro("_latest", [](const Reader& r) { return r.side.latest(); })
      .def_prop_ro("_last_words", [](const Reader& r) { return r.side.last_words(); })
      .def_prop_ro("_state", [](const Reader& r) { return static_cast<int>(r.side.state()); })
      .def_prop_ro(
          "_counts", [](const Reader& r) { return nb::make_tuple(r.side.reads(), r.side.torn(), r.side.retries()); },
          nb::sig("def _counts(self) -> tuple[int, int, int]"))
      .def_prop_ro("_in_parent", &Reader::in_parent)
      .def_prop_rw(
          "_closed", [](const Reader& r) { return r.closed; }, [](Reader& r, bool closed) { r.closed = closed; });
}

}  // namespace shmsync::bind
