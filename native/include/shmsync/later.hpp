// Later: a step of the protocol that a device does once, on one of its threads, after all work that it was given
// before.
//
// The device gets run_later() and a ticket(). It calls run_later(ticket), or never does if it has failed.
// Uses no Python and none of the device's functions: drivers forbid both in such a call.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "shmsync/futex.hpp"

namespace shmsync {

class Later : public std::enable_shared_from_this<Later> {
 public:
  explicit Later(std::function<void()> work) : work_(std::move(work)) {}
  Later(const Later&) = delete;
  Later& operator=(const Later&) = delete;

  // What the device passes to run_later(). It keeps this alive until then; call it once.
  void* ticket();
  // True: it will not be done. False: it is done, or just being done.
  bool cancel();
  // At most one slice. True when it is done.
  bool wait(Nanoseconds timeout) const;

 private:
  friend void run_later(void* ticket);
  enum : std::uint32_t { kPending, kRunning, kDone, kCancelled };
  void run() noexcept;

  const std::function<void()> work_;
  Word32 state_{kPending};
};

// On a thread of the device.
void run_later(void* ticket);

}  // namespace shmsync
