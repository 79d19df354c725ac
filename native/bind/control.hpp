// The control segment, mapped. Owns the mapping and hands its parts to the core.
#pragma once

#include <cstdint>
#include <string>

#include "shmsync/publication.hpp"
#include "shmsync/read_side.hpp"

namespace shmsync::bind {

// What the creator of a segment writes once. The caller has sized `fd` already.
struct IdentitySpec {
  std::string session;  // 16 bytes
  std::uint64_t owner;
  std::string boot_id;  // 16 bytes
  std::uint64_t pid_namespace;
  std::uint32_t slots;
  std::uint32_t readers;
  std::uint64_t slot_bytes;
  std::uint32_t slab_kind;
  std::int32_t slab_fd;
  std::uint64_t slab_inode;
  std::string slab_handle;  // at most kHandleBytes
  std::uint64_t fingerprint;
  std::uint64_t follows;  // the last version of the dead publisher that had this name; 0: of none
};

// The bytes of an identity that its CRC covers: all but the CRC itself and `ready`.
std::string covered_by_crc(const Identity& identity);

class Control {
 public:
  static Control* create(int fd, const IdentitySpec& spec, const std::string& manifest);
  // Maps the reader rows writable, and everything before them read-only.
  static Control* attach(int fd, std::uint32_t slots, std::uint32_t readers, std::uint64_t manifest_bytes);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  std::string identity_bytes() const;  // the bytes that the CRC covers; see covered_by_crc()
  void make_ready(std::uint32_t crc);
  std::string manifest() const;

  Identity& identity() const { return *reinterpret_cast<Identity*>(base_); }
  PublicationLine& publication() const { return *reinterpret_cast<PublicationLine*>(base_ + kPublicationOffset); }
  SlotLine* slots() const { return reinterpret_cast<SlotLine*>(base_ + kSlotsOffset); }
  ReplyLine& reply() const { return *reinterpret_cast<ReplyLine*>(base_ + layout_.reply_offset); }
  ReaderTable readers() const { return {base_ + layout_.rows_offset, readers_}; }
  std::uint32_t slot_count() const { return slots_; }

 private:
  Control(std::byte* base, Layout layout, std::uint32_t slots, std::uint32_t readers, std::uint64_t manifest_bytes)
      : base_(base), layout_(layout), slots_(slots), readers_(readers), manifest_bytes_(manifest_bytes) {}

  std::byte* base_;
  Layout layout_;
  std::uint32_t slots_;
  std::uint32_t readers_;
  std::uint64_t manifest_bytes_;
};

// The number of forks between the load of this module and this process. A handle made under another number belongs to
// a parent process.
std::uint64_t fork_generation();

}  // namespace shmsync::bind
