#include "control.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "shmsync/failpoints.hpp"

namespace shmsync::bind {
namespace {

std::byte* map(int fd, std::size_t bytes, int protection) {
  void* at = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the control segment");
  return static_cast<std::byte*>(at);
}

}  // namespace

Control* Control::create(int fd, const IdentitySpec& spec, const std::string& manifest) {
  if (spec.session.size() != 16 || spec.boot_id.size() != 16)
    throw std::invalid_argument("session and boot id are 16 bytes");
  if (spec.slab_handle.size() > kHandleBytes) throw std::invalid_argument("the handle of a slab is too long");
  const Layout layout = Layout::of(spec.slots, spec.readers, manifest.size());
  std::byte* base = map(fd, layout.segment_bytes, PROT_READ | PROT_WRITE);
  auto* control = new Control(base, layout, spec.slots, spec.readers, manifest.size());

  SHMSYNC_FAILPOINT("create.mapped");
  // No reader looks before the first version. Should this publisher die until then, the next one finds here where the
  // numbers go on: in the slot's counter while the only slot is written, else in `current`. Before the identity: what
  // has that has these.
  (new (base + kPublicationOffset) PublicationLine{})->current = pack_current(spec.follows, 0);
  for (std::uint32_t k = 0; k < spec.slots; ++k) new (base + kSlotsOffset + k * sizeof(SlotLine)) SlotLine{};
  if (spec.slots == 1) control->slots()[0].seq = 2 * spec.follows;
  auto& identity = *new (base) Identity{};
  identity.magic = kMagic;
  identity.abi = kAbi;
  identity.endian = kEndianTag;
  identity.segment_bytes = layout.segment_bytes;
  std::memcpy(identity.session, spec.session.data(), 16);
  identity.owner = spec.owner;
  std::memcpy(identity.boot_id, spec.boot_id.data(), 16);
  identity.pid_namespace = spec.pid_namespace;
  identity.slots = spec.slots;
  identity.readers = spec.readers;
  identity.slot_bytes = spec.slot_bytes;
  identity.slab_kind = spec.slab_kind;
  identity.slab_fd = spec.slab_fd;
  identity.slab_inode = spec.slab_inode;
  std::memcpy(identity.slab_handle, spec.slab_handle.data(), spec.slab_handle.size());
  identity.manifest_offset = layout.manifest_offset;
  identity.manifest_bytes = manifest.size();
  identity.fingerprint = spec.fingerprint;

  const std::uint64_t length = manifest.size();
  std::memcpy(base + layout.manifest_offset - sizeof length, &length, sizeof length);
  std::memcpy(base + layout.manifest_offset, manifest.data(), manifest.size());
  control->readers().format();
  new (base + layout.reply_offset) ReplyLine{};
  SHMSYNC_FAILPOINT("create.written");
  return control;
}

Control* Control::attach(int fd, std::uint32_t slots, std::uint32_t readers, std::uint64_t manifest_bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) throw std::system_error(errno, std::generic_category(), "fstat of the control segment");
  const auto file = static_cast<std::uint64_t>(info.st_size);
  // A size that the file does not have could wrap around in the sums of Layout::of(), or end the process with SIGBUS.
  const bool plausible =
      slots > 0 && slots <= kMaxSlots && readers > 0 && readers <= kMaxReaders && manifest_bytes <= file;
  const Layout layout = plausible ? Layout::of(slots, readers, manifest_bytes) : Layout{};
  if (!plausible || layout.segment_bytes > file)
    throw std::invalid_argument("the control segment is shorter than its sizes need");
  std::byte* base = map(fd, layout.segment_bytes, PROT_READ);
  void* rows = mmap(base + layout.rows_offset, layout.segment_bytes - layout.rows_offset, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(layout.rows_offset));
  if (rows == MAP_FAILED) {
    munmap(base, layout.segment_bytes);
    throw std::system_error(errno, std::generic_category(), "mmap of the reader table");
  }
  SHMSYNC_FAILPOINT("attach.mapped");
  return new Control(base, layout, slots, readers, manifest_bytes);
}

Control::~Control() { munmap(base_, layout_.segment_bytes); }

std::string covered_by_crc(const Identity& identity) {
  const char* bytes = reinterpret_cast<const char*>(&identity);
  constexpr std::size_t rest = offsetof(Identity, slab_handle);
  return std::string(bytes, offsetof(Identity, crc)) + std::string(bytes + rest, sizeof(Identity) - rest);
}

std::string Control::identity_bytes() const { return covered_by_crc(identity()); }

void Control::make_ready(std::uint32_t crc) {
  identity().crc = crc;
  SHMSYNC_FAILPOINT("ready.before");
  // SYNC ready: release; pairs with read_identity(). A process that sees it sees a complete segment.
  identity().ready.store(1, std::memory_order_release);
  SHMSYNC_FAILPOINT("ready.after");
}

std::string Control::manifest() const {
  return {reinterpret_cast<const char*>(base_ + layout_.manifest_offset), manifest_bytes_};
}

}  // namespace shmsync::bind
