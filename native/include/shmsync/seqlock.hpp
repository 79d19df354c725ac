// The version counter of one slot: 2·version when complete, 2·version − 1 while that version is written.
//
// The bytes it protects are ordinary memory, read by torch kernels that are unaware of it; the fences below order them.
// A reader compares the counter with the version it came for, never parity alone: when a slot is reused between the
// load of `current` and the load of `seq`, parity is even for the wrong version.
#pragma once

#include "shmsync/layout.hpp"

namespace shmsync::seqlock {

inline void begin(Word64& seq, std::uint64_t version) {
  seq.store(2 * version - 1, std::memory_order_relaxed);
  // SYNC seq.begin: fence(release); pairs with still(). Any store to the data after this line is ordered
  // after the odd counter, so a reader that saw one such byte also sees the counter changed.
  std::atomic_thread_fence(std::memory_order_release);
}

inline void end(Word64& seq, std::uint64_t version) {
  // SYNC seq.end: release; pairs with complete(). Streaming stores are not ordered by it: copy() ends with the
  // sfence they need.
  seq.store(2 * version, std::memory_order_release);
}

// May an optimistic section on `version` start?
inline bool complete(const Word64& seq, std::uint64_t version) {
  // SYNC seq.end: acquire; pairs with end(). The loads of the data that follow find all of this version.
  return seq.load(std::memory_order_acquire) == 2 * version;
}

// Did the bytes stay those of `version` from complete() until now?
inline bool still(const Word64& seq, std::uint64_t version) {
  // SYNC seq.begin: fence(acquire); pairs with begin(). Loads of the data above cannot pass the load below.
  std::atomic_thread_fence(std::memory_order_acquire);
  return seq.load(std::memory_order_relaxed) == 2 * version;
}

inline bool writing(std::uint64_t seq) { return (seq & 1) != 0; }

}  // namespace shmsync::seqlock
