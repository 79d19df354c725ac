// A copy that several threads share.
//
// It is cut into chunks, and each thread has a share of them, the same one in each copy, whose bytes its own caches may
// still have. A thread that is done with its share goes on with the others'. The caller takes chunks as the others do,
// and in the end waits only for those that another thread has begun: a helper that has not been given a processor by
// then is called no more. So a machine whose processors are busy costs the caller at most the rest of one chunk
// (docs/adr/0003-copy.md).
//
// Helpers stay for a while between copies:
//
//   absent ── called, with a new thread ──> called ──> working ──> asleep ──> absent
//                                             ^ └─ dismissed ────────^ │  no call for kStay
//                                             └──────── called ────────┘
//
// A call needs no lock and nothing that another thread holds. Helpers are not there in a forked child, which starts its
// own.
//
// INV: a helper that has begun a copy is counted among its users until it touches it no more.
#pragma once

#include <cstddef>

#include "shmsync/copy.hpp"

namespace shmsync {

inline constexpr std::size_t kChunk = std::size_t{512} << 10;      // the largest
inline constexpr std::size_t kLeastChunk = std::size_t{64} << 10;  // of a copy of 1 MB

// Copies these, and ends with whatever fence its stores need before a later release.
using CopyPieces = void (*)(const CopyOp* ops, std::size_t count);

// The caller and at most threads - 1 others call `copy` on parts of the operations. Without memory for the plan, or a
// thread that can be started, the caller copies alone.
void copy_by_several(const CopyOp* ops, std::size_t count, unsigned threads, CopyPieces copy);

// Helpers of this process now, asleep or not.
unsigned helpers_present();

}  // namespace shmsync
