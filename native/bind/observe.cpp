// What a control segment says at this moment, for tools that look at an arena from outside.
//
// It is read, not mapped: nothing in it can be changed by mistake, no row of the reader table is taken, and a file that
// another process shortens meanwhile ends no process. The processes of the arena may run, stand still or be dead.
#include <nanobind/nanobind.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <system_error>

#include "shmsync/layout.hpp"
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

// Read until two looks agree: a read() is not known to be atomic for a word.
bool read_publication(int fd, std::uint64_t& current, std::uint32_t& state) {
  alignas(PublicationLine) std::byte bytes[sizeof(PublicationLine)];
  const auto& line = *reinterpret_cast<const PublicationLine*>(bytes);
  for (int tries = 0; tries < 100; ++tries) {
    if (!read_at(fd, bytes, sizeof bytes, kPublicationOffset)) return false;
    const std::uint64_t now = line.current.load(relaxed);
    if (tries > 0 && now == current) break;
    current = now;
  }
  state = line.state.load(relaxed);
  return true;
}

nb::object read_state(int fd, std::uint32_t slots, std::uint32_t readers, std::uint64_t manifest_bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  const auto file = static_cast<std::uint64_t>(info.st_size);
  if (slots > kMaxSlots || readers > kMaxReaders || manifest_bytes > file) return nb::none();
  const Layout layout = Layout::of(slots, readers, manifest_bytes);
  if (layout.segment_bytes > file) return nb::none();

  std::uint64_t current = 0;
  std::uint32_t state = 0;
  alignas(SlotLine) std::byte lines[kMaxSlots * sizeof(SlotLine)];
  const std::size_t table_bytes = readers * sizeof(ReaderRow);
  const std::unique_ptr<ReaderRow[]> before(new ReaderRow[readers]), after(new ReaderRow[readers]);
  // The rows come first: an ack that is seen is not newer than the version that is seen.
  if (!read_at(fd, before.get(), table_bytes, layout.rows_offset) ||
      !read_at(fd, after.get(), table_bytes, layout.rows_offset) ||
      !read_at(fd, lines, slots * sizeof(SlotLine), kSlotsOffset) || !read_publication(fd, current, state))
    return nb::none();

  nb::list seqs, rows;
  for (std::uint32_t k = 0; k < slots; ++k) seqs.append(reinterpret_cast<const SlotLine*>(lines)[k].seq.load(relaxed));
  const ReaderTable earlier(reinterpret_cast<std::byte*>(before.get()), readers);
  const ReaderTable later(reinterpret_cast<std::byte*>(after.get()), readers);
  for (std::uint32_t i = 0; i < readers; ++i) {
    auto row = later.look(i);
    if (row.owner == 0) continue;
    const auto same = earlier.look(i);
    // Else its words may be of two owners, one after the other.
    if (same.owner != row.owner || same.worker != row.worker) row.acked = 0;
    rows.append(nb::cast(row));
  }
  nb::dict d;
  d["version"] = version_of(current);
  d["slot"] = slot_of(current);
  d["gated"] = gated(current);
  d["state"] = state;
  d["seqs"] = seqs;
  d["rows"] = rows;
  return d;
}

nb::object read_manifest(int fd, std::uint32_t slots, std::uint64_t manifest_bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  if (slots > kMaxSlots || manifest_bytes > static_cast<std::uint64_t>(info.st_size)) return nb::none();
  const std::unique_ptr<char[]> text(new char[manifest_bytes]);
  if (!read_at(fd, text.get(), manifest_bytes, Layout::of(slots, 0, 0).manifest_offset)) return nb::none();
  return nb::bytes(text.get(), manifest_bytes);
}

}  // namespace

void bind_observe(nb::module_& m) {
  m.def("read_state", &read_state, "fd"_a, "slots"_a, "readers"_a, "manifest_bytes"_a,
        nb::sig("def read_state(fd: int, slots: int, readers: int, manifest_bytes: int) -> dict | None"),
        "What publication, slots and reader table of a segment say now, without mapping it; None when it is shorter "
        "than these sizes need. `rows`: a Row for each that is claimed.");
  m.def("read_manifest", &read_manifest, "fd"_a, "slots"_a, "manifest_bytes"_a,
        nb::sig("def read_manifest(fd: int, slots: int, manifest_bytes: int) -> bytes | None"),
        "The manifest of a segment, without mapping it; None when the file is too short to hold it.");
}

}  // namespace shmsync::bind
