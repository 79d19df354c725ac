// What a control segment says at this moment, for tools that look at an arena from outside.
//
// It is read, not mapped: nothing in it can be changed by mistake, no row of the reader table is taken, and a file that
// another process shortens meanwhile ends no process. The processes of the arena may run, stand still or be dead. A
// subscriber, too, reads and checks identity and manifest before it maps anything (shmsync/memory/segment_file.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <system_error>

#include "control.hpp"
#include "shmsync/reader_table.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

constexpr auto relaxed = std::memory_order_relaxed;

bool read_at(int fd, void* to, std::size_t size, std::size_t at) {
  auto* next = static_cast<std::byte*>(to);
  while (size > 0) {
    const ssize_t count = pread(fd, next, size, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category(), "reading the control segment");
    if (count == 0) return false;  // it ends here
    next += count, at += static_cast<std::size_t>(count), size -= static_cast<std::size_t>(count);
  }
  return true;
}

template <auto Member>
auto word(const Header& header) {
  return header.identity().*Member;
}

template <auto Member>
nb::bytes octets(const Header& header) {
  const auto& field = header.identity().*Member;
  return nb::bytes(reinterpret_cast<const char*>(field), sizeof field);
}

std::optional<Header> read_identity(int fd) {
  std::uint32_t ready = 0;
  Header header;
  if (!read_at(fd, &ready, sizeof ready, offsetof(Identity, ready))) return {};
  // SYNC ready: acquire; pairs with make_ready(). What is read after it is complete if it was ready.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!read_at(fd, header.bytes.data(), header.bytes.size(), 0)) return {};
  struct stat info;
  if (fstat(fd, &info) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  header.ready = ready != 0;
  header.file_bytes = static_cast<std::uint64_t>(info.st_size);
  return header;
}

nb::object read_state(int fd, const Header& header) {
  if (!header.fits()) return nb::none();
  const Layout layout = header.layout();
  const std::uint32_t slots = header.identity().slots, readers = header.identity().readers;
  alignas(SlotLine) std::byte lines[kMaxSlots * sizeof(SlotLine)];
  alignas(PublicationLine) std::byte publication[sizeof(PublicationLine)];
  alignas(ReplyLine) std::byte reply[sizeof(ReplyLine)];
  const std::unique_ptr<ReaderRow[]> table(new ReaderRow[readers]);
  // The rows come first: an ack that is seen is not newer than the version that is seen.
  if (!read_at(fd, table.get(), readers * sizeof(ReaderRow), layout.rows_offset) ||
      !read_at(fd, lines, slots * sizeof(SlotLine), kSlotsOffset) ||
      !read_at(fd, publication, sizeof publication, kPublicationOffset) ||
      !read_at(fd, reply, sizeof reply, layout.reply_offset))
    return nb::none();

  nb::list seqs, rows;
  for (std::uint32_t k = 0; k < slots; ++k) seqs.append(reinterpret_cast<const SlotLine*>(lines)[k].seq.load(relaxed));
  const ReaderTable readers_seen(reinterpret_cast<std::byte*>(table.get()), readers);
  for (std::uint32_t i = 0; i < readers; ++i)
    if (const auto row = readers_seen.look(i); row.owner != 0) rows.append(nb::cast(row));
  const auto& line = *reinterpret_cast<const PublicationLine*>(publication);
  const std::uint64_t current = line.current.load(relaxed);
  nb::dict d;
  d["version"] = version_of(current);
  d["slot"] = slot_of(current);
  d["gated"] = gated(current);
  d["state"] = line.state.load(relaxed);
  d["failure"] = failure_in(*reinterpret_cast<const ReplyLine*>(reply));
  d["seqs"] = seqs;
  d["rows"] = rows;
  return d;
}

nb::object read_manifest(int fd, const Header& header) {
  if (!header.fits()) return nb::none();
  const std::size_t size = header.identity().manifest_bytes;
  const std::unique_ptr<char[]> text(new char[size]);
  if (!read_at(fd, text.get(), size, header.layout().manifest_offset)) return nb::none();
  return nb::bytes(text.get(), size);
}

}  // namespace

void bind_observe(nb::module_& m) {
  nb::class_<Header>(
      m, "Header",
      "The identity of a control segment as it was read, not checked yet: native/include/shmsync/layout.hpp.")
      .def_ro("ready", &Header::ready)
      .def_ro("file_bytes", &Header::file_bytes, "Size of the file.")
      .def_prop_ro("fits", &Header::fits, "Do slots, rows and manifest, within their limits, fill the file?")
      .def_prop_ro(
          "intact", [](const Header& header) { return header.identity().crc == crc_of(header.identity()); },
          "Is the crc that of these words?")
      .def_prop_ro("magic", &word<&Identity::magic>)
      .def_prop_ro("abi", &word<&Identity::abi>)
      .def_prop_ro("session", &octets<&Identity::session>)
      .def_prop_ro("owner", &word<&Identity::owner>)
      .def_prop_ro("boot_id", &octets<&Identity::boot_id>)
      .def_prop_ro("pid_namespace", &word<&Identity::pid_namespace>)
      .def_prop_ro("slots", &word<&Identity::slots>)
      .def_prop_ro("readers", &word<&Identity::readers>)
      .def_prop_ro("slot_bytes", &word<&Identity::slot_bytes>)
      .def_prop_ro("slab_kind", &word<&Identity::slab_kind>)
      .def_prop_ro("slab_fd", &word<&Identity::slab_fd>)
      .def_prop_ro("slab_inode", &word<&Identity::slab_inode>)
      .def_prop_ro("slab_handle", &octets<&Identity::slab_handle>,
                   "By which the memory of a device is opened; else zeros.")
      .def_prop_ro("manifest_bytes", &word<&Identity::manifest_bytes>)
      .def_prop_ro("fingerprint", &word<&Identity::fingerprint>);
  m.def("read_identity", &read_identity, "fd"_a,
        "The identity of a control segment; None when the file is too short to hold one.");
  m.def("read_state", &read_state, "fd"_a, "header"_a,
        nb::sig("def read_state(fd: int, header: Header) -> dict | None"),
        "What publication, slots and reader table of a segment say now, without mapping it; None when it is shorter "
        "than its header says. `rows`: a Row for each that is claimed.");
  m.def("read_manifest", &read_manifest, "fd"_a, "header"_a,
        nb::sig("def read_manifest(fd: int, header: Header) -> bytes | None"),
        "The manifest of a segment, without mapping it; None when it is shorter than its header says.");
}

}  // namespace shmsync::bind
