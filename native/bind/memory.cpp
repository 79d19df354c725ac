// Memory services for Python: populating, mapping the slab read-only; the control segment.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <system_error>
#include <tuple>
#include <vector>

#include "control.hpp"
#include "gil.hpp"
#include "shmsync/faults.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

std::atomic<std::uint64_t> g_forks{0};

void in_child() {
  g_forks.fetch_add(1, std::memory_order_relaxed);
  faults_after_fork();
}

void map_readonly_over(std::uintptr_t address, std::size_t bytes, int fd) {
  if (mmap(reinterpret_cast<void*>(address), bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "mapping the slab read-only");
}

// Touches every page now, so that the first publish does not fault them in one by one.
void populate(std::uintptr_t address, std::size_t bytes) {
  const WithoutGil released;
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; the headers may be older than the kernel
#endif
  if (madvise(reinterpret_cast<void*>(address), bytes, MADV_POPULATE_WRITE) == 0) return;
  auto* page = reinterpret_cast<volatile unsigned char*>(address);
  for (std::size_t i = 0; i < bytes; i += 4096) page[i] = page[i];  // what is written there already stays
}

// How errors name a row.
nb::object name_of(std::uint64_t owner, std::int32_t worker) {
  if (worker >= 0) return nb::int_(worker);
  return nb::str(("pid " + std::to_string(pid_of(owner))).c_str());
}

// The claimed rows; with `left` also those of workers that have given theirs back.
nb::list rows_of(const Control& control, bool left) {
  nb::list rows;
  const auto table = control.readers();
  for (std::uint32_t i = 0; i < table.size(); ++i)
    if (const auto row = table.look(i); row.owner != 0 || (left && row.worker >= 0)) rows.append(nb::cast(row));
  return rows;
}

// What the segment says at this moment, whatever became of its processes.
nb::dict look(const Control& control) {
  constexpr auto acquire = std::memory_order_acquire;
  nb::dict d;
  d["rows"] = rows_of(control, false);  // first: an ack that is seen is not newer than the version that is seen
  nb::list seqs;
  for (std::uint32_t k = 0; k < control.slot_count(); ++k) seqs.append(control.slots()[k].seq.load(acquire));
  d["seqs"] = seqs;
  const std::uint64_t current = control.publication().current.load(acquire);
  d["version"] = version_of(current);
  d["slot"] = slot_of(current);
  d["gated"] = gated(current);
  d["state"] = control.publication().state.load(acquire);
  d["failure"] = failure_in(control.reply());
  return d;
}

}  // namespace

std::uint64_t fork_generation() { return g_forks.load(std::memory_order_relaxed); }

void bind_memory(nb::module_& m) {
  // What the system refused reaches Python as an OSError with its errno.
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
  pthread_atfork(nullptr, nullptr, in_child);

  m.attr("MAGIC") = kMagic;
  m.attr("ABI") = kAbi;
  m.attr("SLAB_CUDA") = static_cast<std::uint32_t>(SlabKind::cuda);
  m.attr("MAX_DEVICE_SLOTS") = kMaxDeviceSlots;
  m.attr("HANDLE_BYTES") = kHandleBytes;
  m.attr("SLAB_MEMFD") = static_cast<std::uint32_t>(SlabKind::memfd);
  m.attr("MAX_SLOTS") = kMaxSlots;
  m.attr("MAX_READERS") = kMaxReaders;
  m.def(
      "segment_bytes",
      [](std::uint32_t slots, std::uint32_t readers, std::size_t manifest_bytes) {
        return Layout::of(slots, readers, manifest_bytes).segment_bytes;
      },
      "slots"_a, "readers"_a, "manifest_bytes"_a, "Size of a control segment in bytes.");
  m.attr("MAX_VERSION") = kMaxVersion;
  m.def("pack_owner", &pack_owner, "pid"_a, "start_ticks"_a, "image"_a, "The owner word of a program in a process.");
  m.def("image_from", &image_from<std::vector<std::uint64_t>>, "words"_a,
        "The image of a program, from where its parts begin in memory; 0 when that is hidden.");
  m.def("may_be_same_owner", &may_be_same_owner, "a"_a, "b"_a,
        "Can these owner words be of the same program in the same process? An unknown image may be any.");
  m.def("pid_of", &pid_of, "owner"_a, "The pid in an owner word.");
  m.def("fork_generation", &fork_generation, "Number of forks between the load of this module and this process.");
  m.def("map_readonly_over", &map_readonly_over, "address"_a, "bytes"_a, "fd"_a,
        "Replace the mapping at address by a read-only one of fd.");
  m.def("watch_faults", &watch_faults, "address"_a, "bytes"_a, "name"_a,
        "Have a fault in this range explained by the name of its arena; False when too many are watched.");
  m.def("unwatch_faults", &unwatch_faults, "address"_a, "The range that starts there is no arena's any more.");
  m.def("is_watched", &is_watched, "address"_a, "Does it lie in a range that is watched?");
  m.def("populate", &populate, "address"_a, "bytes"_a, "Touch every page of a writable mapping.");
  nb::class_<ReaderTable::Row>(m, "Row",
                               "One row of the reader table at one look. `acked` is that of `worker`, or 0; the other "
                               "words may each be from another moment.")
      .def_ro("number", &ReaderTable::Row::number)
      .def_ro("owner", &ReaderTable::Row::owner, "The owner word of its process; 0: the row is free.")
      .def_prop_ro(
          "id", [](const ReaderTable::Row& r) { return std::make_tuple(r.number, r.owner); },
          "(number, owner): the row, for as long as it has this owner.")
      .def_prop_ro(
          "worker", [](const ReaderTable::Row& r) { return r.worker < 0 ? std::nullopt : std::optional(r.worker); },
          "The index that its subscriber has; None: none was given.")
      .def_prop_ro(
          "name", [](const ReaderTable::Row& r) { return name_of(r.owner, r.worker); },
          nb::sig("def name(self) -> int | str"), "How an error names it: its worker index, else its process.")
      .def_prop_ro("pid", [](const ReaderTable::Row& r) { return pid_of(r.owner); })
      .def_prop_ro(
          "pinned",
          [](const ReaderTable::Row& r) { return r.pin == 0 ? std::nullopt : std::optional(version_of(r.pin - 1)); },
          "The version that a section holds; None: none does.")
      .def_prop_ro(
          "pin_age",
          [](const ReaderTable::Row& r) {
            const std::uint64_t now = monotonic_ns();
            return r.pin == 0 || now < r.pinned_at ? 0.0 : static_cast<double>(now - r.pinned_at) / 1e9;
          },
          "How long, in seconds; 0.0 when none does.")
      .def_ro("acked", &ReaderTable::Row::acked, "The version that it has applied; 0: none yet.")
      .def_ro("reads", &ReaderTable::Row::reads)
      .def_ro("torn", &ReaderTable::Row::torn)
      .def_ro("retries", &ReaderTable::Row::retries);

  nb::class_<Control>(m, "Control", "A mapped control segment.")
      .def_static(
          "create",
          [](int fd, nb::bytes session, std::uint64_t owner, nb::bytes boot_id, std::uint64_t pid_namespace,
             std::uint32_t slots, std::uint32_t readers, std::uint64_t slot_bytes, std::uint32_t slab_kind,
             std::int32_t slab_fd, std::uint64_t slab_inode, nb::bytes slab_handle, std::uint64_t fingerprint,
             nb::bytes manifest) {
            Identity identity{};
            if (session.size() != sizeof identity.session || boot_id.size() != sizeof identity.boot_id)
              throw std::invalid_argument("session and boot id are 16 bytes");
            if (slab_handle.size() > kHandleBytes) throw std::invalid_argument("the handle of a slab is too long");
            std::memcpy(identity.session, session.c_str(), session.size());
            identity.owner = owner;
            std::memcpy(identity.boot_id, boot_id.c_str(), boot_id.size());
            identity.pid_namespace = pid_namespace;
            identity.slots = slots;
            identity.readers = readers;
            identity.slot_bytes = slot_bytes;
            identity.slab_kind = slab_kind;
            identity.slab_fd = slab_fd;
            identity.slab_inode = slab_inode;
            std::memcpy(identity.slab_handle, slab_handle.c_str(), slab_handle.size());
            identity.fingerprint = fingerprint;
            return Control::create(fd, identity, {manifest.c_str(), manifest.size()});
          },
          nb::kw_only(), "fd"_a, "session"_a, "owner"_a, "boot_id"_a, "pid_namespace"_a, "slots"_a, "readers"_a,
          "slot_bytes"_a, "slab_kind"_a, "slab_fd"_a, "slab_inode"_a, "slab_handle"_a, "fingerprint"_a, "manifest"_a,
          nb::rv_policy::take_ownership)
      .def_static("attach", &Control::attach, "fd"_a, "header"_a, nb::rv_policy::take_ownership)
      .def("make_ready", &Control::make_ready)
      .def_prop_rw(
          "failure", [](const Control& c) { return failure_in(c.reply()); },
          [](Control& c, std::string_view text) {
            char* const to = c.reply().failure;
            std::memset(to, 0, kFailureBytes);
            std::memcpy(to, text.data(), std::min(text.size(), kFailureBytes));
          },
          "How a worker failed, for people; \"\": none has. What is longer than its place is cut off.")
      .def(
          "claim", [](Control& c, std::uint64_t me, std::int32_t worker) { return c.readers().claim(me, worker); },
          "me"_a, "worker"_a)
      .def(
          "take_over",
          [](Control& c, std::uint32_t row, std::uint64_t dead, std::uint64_t me, std::int32_t worker) {
            const bool taken = c.readers().take_over(row, dead, me, worker);
            if (taken)
              wake_writer(c.publication(), c.reply());  // the writer may wait for the pin or the ack of the dead
            return taken;
          },
          "row"_a, "dead"_a, "me"_a, "worker"_a)
      .def(
          "reap",
          [](Control& c, std::uint32_t row, std::uint64_t dead, std::uint64_t me) {
            const bool freed = c.readers().reap(row, dead, me);
            if (freed) wake_writer(c.publication(), c.reply());
            return freed;
          },
          "row"_a, "dead"_a, "me"_a)
      .def(
          "forget", [](Control& c, std::uint32_t row, std::uint64_t me) { c.readers().forget(row, me); }, "row"_a,
          "me"_a, "Take the index and the ack of the last owner off a free row.")
      .def("rows", &rows_of, "left"_a = false, nb::sig("def rows(self, left: bool = False) -> list[Row]"),
           "Every claimed row; with `left` also those of workers that have given theirs back.")
      .def("look", &look, nb::sig("def look(self) -> dict"),
           "What publication, slots and reader table say now: version, slot, gated, state, failure, seqs of the slots, "
           "rows that are claimed.")
      .def(
          "row",
          [](const Control& c, std::uint32_t i) {
            const auto table = c.readers();
            if (i >= table.size()) throw nb::index_error("row out of range");
            return table.look(i);
          },
          "row"_a, "One row, claimed or not.")
      .def(
          "name_of",
          [](const Control& c, std::tuple<std::uint32_t, std::uint64_t> row) {
            const auto [number, owner] = row;
            const auto table = c.readers();
            const auto found = number < table.size() ? table.look(number) : ReaderTable::Row{};
            return name_of(owner, found.owner == owner ? found.worker : kNoWorker);
          },
          "row"_a, nb::sig("def name_of(self, row: tuple[int, int]) -> int | str"),
          "As Row.name, of the row with this number as long as it has this owner.");
}

}  // namespace shmsync::bind
