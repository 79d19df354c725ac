// Many (destination, source, bytes) in one call.
//
// Below the threshold the bytes stay in cache, where the reader will want them. Above it, streaming stores skip
// the read-for-ownership of every line, which is a third of the traffic. On x86-64 the AVX2 loop is chosen at
// run time; elsewhere memcpy does its best.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shmsync {

struct CopyOp {
  std::byte* destination;
  const std::byte* source;
  std::size_t bytes;
};

// Where copy plus the first read by another core are faster with streaming (docs/adr/0003-copy.md).
inline constexpr std::size_t kStreamAbove = std::size_t{32} << 20;

enum class CopyPath { automatic, plain, streaming };

bool streaming_available();

// From so many bytes on, other threads help if the caller allows it (docs/adr/0003-copy.md).
inline constexpr std::size_t kShareAbove = std::size_t{3} << 20;

// At most `threads` threads copy, the calling one among them. Ends with the fence that orders streaming stores before
// a later release store (SYNC seq.end in copy.cpp).
void copy(const CopyOp* ops, std::size_t count, CopyPath path = CopyPath::automatic, unsigned threads = 1);

}  // namespace shmsync
