// Threads that help with copies, and stay for a while between them.
//
//   absent ── called, with a new thread ──> called ──> working ──> idle ──> asleep ──> absent
//                                             ^ └─ dismissed ─────────^ │       │ no call for kStay
//                                             └──────── called ─────────┴───────┘
//
// A caller never waits for a helper that has not begun: it takes its call back. A call needs no lock and nothing that
// another thread holds. Helpers are not there in a forked child, which starts its own.
//
// INV: a helper that has begun a job is counted among the job's users until it touches it no more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "shmsync/futex.hpp"

namespace shmsync {

inline constexpr unsigned kMostHelpers = 31;  // of the process
inline constexpr Nanoseconds kStay = std::chrono::seconds(2);

// What helpers are called to. Its maker is a user; it goes with the last of them.
class Job {
 public:
  virtual void help(unsigned number) = 0;  // 1 for the first helper that was called, 2 for the next, ...
  void keep() { users_.fetch_add(1, std::memory_order_relaxed); }
  void drop() {
    if (users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  Job() = default;
  virtual ~Job() = default;

 private:
  std::atomic<unsigned> users_{1};
};

// Which helpers a call reached.
struct Called {
  struct One {
    unsigned helper;
    std::uint32_t word;  // its state since
  };
  std::array<One, kMostHelpers> all;
  unsigned count = 0;
};

enum class Reach { awake, everybody };  // everybody: those too that sleep, and new ones

// Calls at most `wanted` helpers to the job. Each stays awake for `linger` after it, in case there is another soon.
// Where no thread can be started there are fewer.
Called call_helpers(Job& job, unsigned wanted, Reach reach, Nanoseconds linger);

// Those that have not begun forget it.
void dismiss_helpers(Job& job, const Called& called);

// Helpers of this process now, asleep or not.
unsigned helpers_present();

}  // namespace shmsync
