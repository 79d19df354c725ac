// The control segment, byte by byte. This file is the only home of offsets and sizes.
//
//   0      identity       written once by the creator; `ready` last, with release
//   256    publication    one line, written by the writer only
//   384    slot[k]        one line per slot, written by the writer only
//   ...    manifest       u64 length + UTF-8 JSON, written once
//   ------ page boundary: everything above is mapped read-only by readers, everything below writable
//   ...    reader[i]      one line per row, written by the process that owns the row
//   ...    reply          one line, any process of the arena
//
// All words are little-endian. A line is 128 bytes: two 64-byte cache lines, because the adjacent-line
// prefetcher of x86 and the 128-byte lines of some Arm cores both share at that distance.
//
// INV: each line has one writer at a time, named beside it. The reply line alone is written by many.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace shmsync {

static_assert(std::endian::native == std::endian::little, "shmsync lays its words out little-endian");

inline constexpr std::uint64_t kMagic = 0x31434e59534d4853;  // "SHMSYNC1"
inline constexpr std::uint32_t kAbi = 9;                     // any change to this file, or to the manifest, raises it
inline constexpr std::uint32_t kEndianTag = 0x01020304;
inline constexpr std::size_t kLine = 128;
inline constexpr std::size_t kHandleBytes = 80;
inline constexpr std::size_t kFailureBytes = 64;
inline constexpr std::size_t kPage = 65536;  // the largest page size of the systems we run on (arm64)
inline constexpr std::uint32_t kMaxSlots = 127;
inline constexpr std::uint32_t kMaxDeviceSlots = 64;  // bits of `held`
inline constexpr std::uint32_t kMaxReaders = 4096;

using Word64 = std::atomic<std::uint64_t>;
using Word32 = std::atomic<std::uint32_t>;
static_assert(Word64::is_always_lock_free && sizeof(Word64) == 8);
static_assert(Word32::is_always_lock_free && sizeof(Word32) == 4);

// `current` = version << 8 | gate << 7 | slot.
inline constexpr std::uint64_t kGate = 1u << 7;
inline constexpr std::uint64_t kSlotMask = kGate - 1;
inline constexpr std::uint64_t kMaxVersion = (std::uint64_t{1} << 55) - 1;
constexpr std::uint64_t pack_current(std::uint64_t version, std::uint32_t slot) { return version << 8 | slot; }
constexpr std::uint64_t version_of(std::uint64_t current) { return current >> 8; }
constexpr std::uint32_t slot_of(std::uint64_t current) { return static_cast<std::uint32_t>(current & kSlotMask); }
constexpr bool gated(std::uint64_t current) { return (current & kGate) != 0; }

// `owner` = pid(22) << 42 | start_ticks(low 22) << 20 | image(20).
//
// The ticks tell apart two processes that had one pid, one after the other: 2^22 ticks of 10 ms are 11.6 hours, so one
// reuse of a pid in four million is missed. The image tells apart the programs that one process has run, one after the
// other: exec keeps pid and ticks, and drops all memory. 0: the image could not be read. A miss counts as alive.
//
// The pid stands at the top in every ABI: a version that does not know the rest can still tell that no process has it.
inline constexpr unsigned kImageBits = 20, kTicksBits = 22, kPidShift = kImageBits + kTicksBits;
constexpr std::uint64_t pack_owner(std::uint64_t pid, std::uint64_t start_ticks, std::uint64_t image) {
  return pid << kPidShift | (start_ticks & ((1u << kTicksBits) - 1)) << kImageBits | image;
}
constexpr std::uint64_t pid_of(std::uint64_t owner) { return owner >> kPidShift; }
constexpr std::uint64_t image_of(std::uint64_t owner) { return owner & ((1u << kImageBits) - 1); }

// Can these be the same program in the same process? An image that could not be read may be any.
constexpr bool may_be_same_owner(std::uint64_t a, std::uint64_t b) {
  return a >> kImageBits == b >> kImageBits && (image_of(a) == image_of(b) || image_of(a) == 0 || image_of(b) == 0);
}

// An image from what exec sets and nothing else changes: where code, stack, data and heap of the program begin. 0
// means unknown: one of the words is 0 or 1. The kernel shows such words to processes without permission, for a process
// that has no memory any more, and in the middle of an exec.
template <class Words>
constexpr std::uint64_t image_from(const Words& words) {
  std::uint64_t mixed = 0x9e3779b97f4a7c15;
  for (const std::uint64_t word : words) {
    if (word <= 1) return 0;
    mixed = (mixed ^ word) * 0xbf58476d1ce4e5b9;
    mixed ^= mixed >> 29;
  }
  return mixed % ((1u << kImageBits) - 1) + 1;
}

enum class State : std::uint32_t { open = 0, closed = 1, poisoned = 2 };
// What the slots lie in. A number from kOtherKinds on belongs to a device that another package brings.
enum class SlabKind : std::uint32_t { memfd = 1, cuda = 2 };
inline constexpr std::uint32_t kOtherKinds = 0x10000;

struct Identity {  // writer: the creator, before `ready`
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t endian;
  std::uint64_t segment_bytes;
  std::uint8_t session[16];
  std::uint64_t owner;  // pack_owner of the publisher
  std::uint8_t boot_id[16];
  std::uint64_t pid_namespace;  // inode of /proc/self/ns/pid
  std::uint32_t slots;
  std::uint32_t readers;
  std::uint64_t slot_bytes;
  std::uint32_t slab_kind;
  std::int32_t slab_fd;  // a descriptor number of the owner, opened through /proc/<pid>/fd/<n>
  std::uint64_t slab_inode;
  std::uint64_t manifest_offset;
  std::uint64_t manifest_bytes;
  std::uint64_t fingerprint;  // of the manifest
  std::uint32_t crc;          // CRC-32 of the other bytes of this struct, but for `ready`
  Word32 ready;
  std::uint8_t slab_handle[kHandleBytes];  // by which other processes open the memory of a device; else 0
  std::uint8_t pad[256 - 136 - kHandleBytes];
};
static_assert(sizeof(Identity) == 256);
static_assert(offsetof(Identity, owner) == 40);
static_assert(offsetof(Identity, crc) == 128);
static_assert(offsetof(Identity, ready) == 132);

struct alignas(kLine) PublicationLine {  // writer: the publisher
  Word64 current;                        // the only publication point
  Word32 state;
  Word32 notify;   // futex: readers wait for it to change
  Word32 waiting;  // 1 while the writer may sleep on `reply`
};
static_assert(sizeof(PublicationLine) == kLine);
static_assert(offsetof(PublicationLine, notify) == 12);

struct alignas(kLine) SlotLine {  // writer: the publisher
  Word64 seq;                     // 2·version when complete, 2·version − 1 while that version is written
};
static_assert(sizeof(SlotLine) == kLine);

struct alignas(kLine) ReaderRow {    // writer: the process in `owner`
  Word64 owner;                      // 0 = free; claimed by one CAS
  Word64 pin;                        // 0, or the pinned `current` + 1
  Word64 acked;                      // version
  Word32 want;                       // 1: a gate kept this reader out, let it in before the next one
  std::atomic<std::int32_t> worker;  // negative: no index given
  Word64 pinned_at;                  // CLOCK_MONOTONIC, ns
  Word64 reads;
  Word64 torn;
  Word64 retries;
  Word64 held;  // bit k: a device has still to do reads of slot k, whose section is over
};
static_assert(sizeof(ReaderRow) == kLine);
static_assert(offsetof(ReaderRow, worker) == 28);

struct alignas(kLine) ReplyLine {  // writer: any process of the arena
  Word32 reply;                    // futex: the waiting writer sleeps on it
  char failure[kFailureBytes];     // how a worker failed, for people alone: two that write at once may mix their texts
};
static_assert(sizeof(ReplyLine) == kLine);

inline constexpr std::size_t kPublicationOffset = sizeof(Identity);
inline constexpr std::size_t kSlotsOffset = kPublicationOffset + sizeof(PublicationLine);
static_assert(kPublicationOffset == 256 && kSlotsOffset == 384);

// Offsets that depend on the three sizes an arena is made with.
struct Layout {
  std::size_t manifest_offset;  // start of the JSON; its u64 length stands 8 bytes before
  std::size_t rows_offset;      // page-aligned
  std::size_t reply_offset;
  std::size_t segment_bytes;  // page-aligned

  static constexpr Layout of(std::uint32_t slots, std::uint32_t readers, std::size_t manifest_bytes) {
    constexpr auto round_up = [](std::size_t n) { return (n + kPage - 1) / kPage * kPage; };
    Layout l{};
    l.manifest_offset = kSlotsOffset + slots * sizeof(SlotLine) + sizeof(std::uint64_t);
    l.rows_offset = round_up(l.manifest_offset + manifest_bytes);
    l.reply_offset = l.rows_offset + readers * sizeof(ReaderRow);
    l.segment_bytes = round_up(l.reply_offset + sizeof(ReplyLine));
    return l;
  }
};

}  // namespace shmsync
