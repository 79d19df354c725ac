#include "control.hpp"

#include <sys/mman.h>

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

bool Header::fits() const {
  const Identity& id = identity();
  const bool plausible = id.slots > 0 && id.slots <= kMaxSlots && id.readers > 0 && id.readers <= kMaxReaders &&
                         id.manifest_bytes <= file_bytes;  // else it could wrap around in the sums of Layout::of()
  return plausible && layout().segment_bytes == file_bytes;
}

Layout Header::layout() const { return Layout::of(identity().slots, identity().readers, identity().manifest_bytes); }

std::uint32_t crc_of(const Identity& identity) {
  std::uint32_t crc = ~0u;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&identity);
  for (std::size_t i = 0; i < sizeof(Identity); ++i) {
    if (i == offsetof(Identity, crc)) i = offsetof(Identity, slab_handle);
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

std::string failure_in(const ReplyLine& line) {
  std::string text(line.failure, strnlen(line.failure, kFailureBytes));
  for (char& each : text)
    if (each < ' ' || each > '~') each = '?';
  return text;
}

Control* Control::create(int fd, Identity& identity, std::string_view manifest) {
  const Layout layout = Layout::of(identity.slots, identity.readers, manifest.size());
  std::byte* base = map(fd, layout.segment_bytes, PROT_READ | PROT_WRITE);
  auto* control = new Control(base, layout, identity.slots, identity.readers);
  SHMSYNC_FAILPOINT("create.mapped");

  identity.magic = kMagic;
  identity.abi = kAbi;
  identity.endian = kEndianTag;
  identity.segment_bytes = layout.segment_bytes;
  identity.manifest_offset = layout.manifest_offset;
  identity.manifest_bytes = manifest.size();
  identity.crc = crc_of(identity);
  std::memcpy(base, &identity, sizeof identity);
  new (base + kPublicationOffset) PublicationLine{};
  for (std::uint32_t k = 0; k < identity.slots; ++k) new (base + kSlotsOffset + k * sizeof(SlotLine)) SlotLine{};

  const std::uint64_t length = manifest.size();
  std::memcpy(base + layout.manifest_offset - sizeof length, &length, sizeof length);
  std::memcpy(base + layout.manifest_offset, manifest.data(), manifest.size());
  control->readers().format();
  new (base + layout.reply_offset) ReplyLine{};
  SHMSYNC_FAILPOINT("create.written");
  return control;
}

Control* Control::attach(int fd, const Header& header) {
  if (!header.fits()) throw std::invalid_argument("the file of the control segment has another size than it needs");
  const Layout layout = header.layout();
  std::byte* base = map(fd, layout.segment_bytes, PROT_READ);
  void* rows = mmap(base + layout.rows_offset, layout.segment_bytes - layout.rows_offset, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(layout.rows_offset));
  if (rows == MAP_FAILED) {
    munmap(base, layout.segment_bytes);
    throw std::system_error(errno, std::generic_category(), "mmap of the reader table");
  }
  SHMSYNC_FAILPOINT("attach.mapped");
  return new Control(base, layout, header.identity().slots, header.identity().readers);
}

Control::~Control() { munmap(base_, layout_.segment_bytes); }

void Control::make_ready() {
  SHMSYNC_FAILPOINT("ready.before");
  // SYNC ready: release; pairs with read_identity(). A process that sees it sees a complete segment.
  identity().ready.store(1, std::memory_order_release);
  SHMSYNC_FAILPOINT("ready.after");
}

}  // namespace shmsync::bind
