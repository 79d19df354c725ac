// A copy that several threads share.
//
// It is cut into chunks, which the caller takes from the first on and its helpers from the last. The caller waits in
// the end only for chunks that a helper has begun; one that has not been given a processor by then finds nothing left
// to do, and ends. So a machine whose processors are busy costs the caller at most the rest of one chunk
// (docs/adr/0003-copy.md).
//
// Helpers stay for a while between copies. They are not there in a forked child, which starts its own.
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

// Helpers of this process now.
std::size_t helpers_present();

}  // namespace shmsync
