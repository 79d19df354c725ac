// The identity of a control segment: read and checked before anything is mapped (shmsync/memory/segment_file.py), so
// that a file which is no segment, or which another process shortens at that moment, ends no process.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>

#include "control.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

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

}  // namespace

void bind_header(nb::module_& m) {
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
      .def_prop_ro(
          "manifest_offset", [](const Header& header) { return header.layout().manifest_offset; },
          "Where the manifest begins in the file of one that fits.")
      .def_prop_ro("fingerprint", &word<&Identity::fingerprint>);
  m.def("read_identity", &read_identity, "fd"_a,
        "The identity of a control segment; None when the file is too short to hold one.");
}

}  // namespace shmsync::bind
