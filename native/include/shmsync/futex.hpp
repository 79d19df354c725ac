// Wait and wake on a 32-bit word in shared memory, with a deadline. The only file that knows the system.
//
// Both are hints: a wait may end early, and a wake may find no waiter. Callers look at their own condition
// again after every return, and slice long waits so that a dead partner and a signal are noticed.
#pragma once

#include <chrono>

#include "shmsync/layout.hpp"

namespace shmsync {

using Nanoseconds = std::chrono::nanoseconds;

inline constexpr Nanoseconds kSlice = std::chrono::milliseconds(50);  // the longest single sleep

// Sleeps while `word` holds `expected`, at most `timeout`. The word may be mapped read-only.
void futex_wait(const Word32& word, std::uint32_t expected, Nanoseconds timeout);

// Wakes every sleeper on `word`, in every process.
void futex_wake_all(const Word32& word);

// CLOCK_MONOTONIC: one clock for all processes of a machine.
std::uint64_t monotonic_ns();

// Gives the processor away: with few cores the partner can only move when we do not.
void yield_processor();

}  // namespace shmsync
