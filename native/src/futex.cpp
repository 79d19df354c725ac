#include "shmsync/futex.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace shmsync {
namespace {

// Not FUTEX_PRIVATE_FLAG: the waiter and the waker are different processes.
long futex(const Word32& word, int op, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), op, value, timeout, nullptr, 0);
}

}  // namespace

void futex_wait(const Word32& word, std::uint32_t expected, Nanoseconds timeout) {
  timeout = std::clamp(timeout, Nanoseconds(0), kSlice);
  const timespec ts{0, static_cast<long>(timeout.count())};
  static_assert(kSlice < std::chrono::seconds(1), "tv_sec is always 0");
  futex(word, FUTEX_WAIT, expected, &ts);  // EAGAIN, EINTR, ETIMEDOUT: the caller looks again anyway
}

void futex_wake_all(const Word32& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

std::uint64_t monotonic_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<std::uint64_t>(ts.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(ts.tv_nsec);
}

void yield_processor() { sched_yield(); }

}  // namespace shmsync
