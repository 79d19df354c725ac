// PublicationWriter for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "control.hpp"
#include "gil.hpp"
#include "shmsync/device_reads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

class Writer : public PublicationWriter {
 public:
  Writer(Control& control, std::uint64_t me, bool on_device)
      : PublicationWriter(control.publication(), control.slots(), control.slot_count(), control.readers(),
                          control.reply(), me, on_device) {}
};

bool begin(Writer& writer) {
  if (writer.next_version() > kMaxVersion)
    raise("ProtocolError", "this arena has the largest version that there is; close it and make a new Publisher");
  if (!writer.may_wait_for_readers()) return writer.begin() == Begin::ready;
  const WithoutGil released;  // a reader that waits for its turn may be a thread of this process
  return writer.begin() == Begin::ready;
}

bool wait_begin(Writer& writer, std::int64_t timeout_ns) {
  const WithoutGil released;
  return writer.wait_begin(Nanoseconds(timeout_ns)) == Begin::ready;
}

// The writer's lock: it refuses instead of waiting. In C++, because an interrupt may land between any two lines of
// Python: right after the lock was taken, no code would know to release it.
class WriterLock {
 public:
  void acquire(nb::handle holder) {
    if (holder_.is_valid())
      raise("WriterBusy", "another publish() or update() of this Publisher is under way; let it finish first");
    holder_ = nb::borrow(holder);
    thread_ = PyThread_get_thread_ident();
  }
  bool held_by(nb::handle holder) const { return holder_.is(holder); }
  // A no-op when another holder has it, so that cleaning up twice is safe.
  void release(nb::handle holder) {
    if (held_by(holder)) holder_ = nb::object();
  }
  bool mine() const { return holder_.is_valid() && thread_ == PyThread_get_thread_ident(); }

 private:
  nb::object holder_;
  unsigned long thread_ = 0;  // of the holder
};

using Rows = std::vector<std::tuple<std::uint32_t, std::uint64_t>>;

// Waits for the given (row, owner) pairs; returns those that still owe an ack after at most one slice.
Rows wait_acks(Writer& writer, std::uint64_t version, const Rows& rows, std::int64_t timeout_ns) {
  std::vector<PublicationWriter::Awaited> awaited;
  for (const auto& [row, owner] : rows) awaited.push_back({row, owner});
  {
    const WithoutGil released;
    writer.wait_acks(version, awaited, Nanoseconds(timeout_ns));
  }
  Rows left;
  for (const auto& a : awaited) left.emplace_back(a.row, a.owner);
  return left;
}

}  // namespace

void bind_writer(nb::module_& m) {
  nb::class_<WriterLock>(m, "WriterLock", "A lock that refuses instead of waiting, and knows its holder.")
      .def(nb::init<>())
      .def("acquire", &WriterLock::acquire, "holder"_a, "Take the lock. Raises WriterBusy while it is held.")
      .def("held_by", &WriterLock::held_by, "holder"_a)
      .def("release", &WriterLock::release, "holder"_a, "Give the lock back; a no-op when another holder has it.")
      .def_prop_ro("mine", &WriterLock::mine, "Does the calling thread hold it?")
      .def("__enter__", [](nb::handle self) { nb::inst_ptr<WriterLock>(self)->acquire(self); })
      .def(
          "__exit__",
          [](nb::handle self, nb::handle, nb::handle, nb::handle) { nb::inst_ptr<WriterLock>(self)->release(self); },
          "exc_type"_a.none(), "exc"_a.none(), "traceback"_a.none());

  nb::class_<Writer>(m, "Writer", "The writer's side of the protocol. Calls are not thread-safe: hold a lock.")
      .def(nb::init<Control&, std::uint64_t, bool>(), "control"_a, "me"_a, "on_device"_a = false,
           nb::keep_alive<1, 2>())
      .def("begin", &begin, "Close the gate (slots = 1) and look once for a free slot. True: `slot` may be written.")
      .def("wait_begin", &wait_begin, "timeout_ns"_a,
           "Wait at most one slice for a free slot. True: `slot` may be written.")
      .def(
          "skip_to", [](Writer& w, std::uint64_t version) { return w.skip_to(version); }, "version"_a,
          "Number the next version; False if it would not grow, or if writing has begun.")
      .def(
          "commit", [](Writer& w) { return w.commit(); }, "Publish what was written; the new version.")
      .def(
          "commit_later", [](Writer& w) { return commit_later(w); },
          "A commit() that a device makes. Until it is done or cancelled, use only `published` of this writer.",
          nb::keep_alive<0, 1>())
      .def("abort", [](Writer& w) { w.abort(); })
      .def("poison", [](Writer& w) { w.poison(); })
      .def("close", [](Writer& w) { w.close(); })
      .def_prop_ro("slot", [](const Writer& w) { return w.slot(); })
      .def_prop_ro("current_slot", [](const Writer& w) { return w.current_slot(); })
      .def_prop_ro("version", [](const Writer& w) { return w.version(); })
      .def_prop_ro(
          "published",
          [](const Writer& w) {
            const std::uint64_t current = w.published();
            return std::make_tuple(version_of(current), slot_of(current));
          },
          "Version and slot that readers find now; any thread may ask, while a device commits too.")
      .def_prop_ro("next_version", [](const Writer& w) { return w.next_version(); })
      .def_prop_ro("writing", [](const Writer& w) { return w.writing(); })
      .def_prop_ro("poisoned", [](const Writer& w) { return w.poisoned(); })
      .def(
          "blockers",
          [](const Writer& w) {
            std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> found;
            for (const auto& b : w.blockers()) found.emplace_back(b.row, b.owner, b.version);
            return found;
          },
          "(row, owner, pinned version) of each row in the way.")
      .def("claimed_rows",
           [](const Writer& w) {
             Rows rows;
             for (const auto& a : w.claimed_rows()) rows.emplace_back(a.row, a.owner);
             return rows;
           })
      .def("wait_acks", &wait_acks, "version"_a, "rows"_a, "timeout_ns"_a,
           "Wait at most one slice for acks of `version`; the (row, owner) pairs that have not acked.");
}

}  // namespace shmsync::bind
