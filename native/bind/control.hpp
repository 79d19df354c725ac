// The control segment, mapped. Owns the mapping and hands its parts to the core.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "shmsync/publication.hpp"
#include "shmsync/read_section.hpp"

namespace shmsync::bind {

// The identity of a control segment as it was read from its file, not checked yet.
struct Header {
  alignas(Identity) std::array<std::byte, sizeof(Identity)> bytes;
  bool ready = false;
  std::uint64_t file_bytes = 0;

  const Identity& identity() const { return *reinterpret_cast<const Identity*>(bytes.data()); }
  // Are slots, readers and manifest as many as there may be, and do they fill the file? All others read past its end.
  bool fits() const;
  Layout layout() const;  // of one that fits
};

// CRC-32 of the bytes of an identity, but for the CRC itself and `ready`.
std::uint32_t crc_of(const Identity& identity);

// What the line says of a worker that failed; "" while none has. Any process may have written it.
std::string failure_in(const ReplyLine& line);

class Control {
 public:
  // The caller has sized `fd`. Of the identity it gives what depends on neither the layout nor the manifest.
  static Control* create(int fd, Identity& identity, std::string_view manifest);
  // Maps the reader rows writable, and everything before them read-only.
  static Control* attach(int fd, const Header& header);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  void make_ready();

  Identity& identity() const { return *reinterpret_cast<Identity*>(base_); }
  PublicationLine& publication() const { return *reinterpret_cast<PublicationLine*>(base_ + kPublicationOffset); }
  SlotLine* slots() const { return reinterpret_cast<SlotLine*>(base_ + kSlotsOffset); }
  ReplyLine& reply() const { return *reinterpret_cast<ReplyLine*>(base_ + layout_.reply_offset); }
  ReaderTable readers() const { return {base_ + layout_.rows_offset, readers_}; }
  std::uint32_t slot_count() const { return slots_; }

 private:
  Control(std::byte* base, Layout layout, std::uint32_t slots, std::uint32_t readers)
      : base_(base), layout_(layout), slots_(slots), readers_(readers) {}

  std::byte* base_;
  Layout layout_;
  std::uint32_t slots_;
  std::uint32_t readers_;
};

// The number of forks between the load of this module and this process. A handle made under another number belongs to
// a parent process.
std::uint64_t fork_generation();

}  // namespace shmsync::bind
