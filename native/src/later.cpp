#include "shmsync/later.hpp"

#include <algorithm>

namespace shmsync {

void* Later::ticket() { return new std::shared_ptr<Later>(shared_from_this()); }

void run_later(void* ticket) {
  const std::unique_ptr<std::shared_ptr<Later>> held(static_cast<std::shared_ptr<Later>*>(ticket));
  (*held)->run();
}

void Later::run() noexcept {
  std::uint32_t pending = kPending;
  if (!state_.compare_exchange_strong(pending, kRunning, std::memory_order_acquire)) return;
  work_();
  // SYNC later.done: release; pairs with wait(). A thread that sees it sees what the work has done.
  state_.store(kDone, std::memory_order_release);
  futex_wake_all(state_);
}

bool Later::cancel() {
  std::uint32_t pending = kPending;
  return state_.compare_exchange_strong(pending, kCancelled, std::memory_order_acquire);
}

bool Later::wait(Nanoseconds timeout) const {
  const std::uint64_t start = monotonic_ns();
  for (;;) {
    const std::uint32_t seen = state_.load(std::memory_order_acquire);  // SYNC later.done: pairs with run()
    if (seen == kDone) return true;
    const auto waited = Nanoseconds(monotonic_ns() - start);
    if (seen == kCancelled || waited >= std::min(timeout, kSlice)) return false;
    futex_wait(state_, seen, timeout - waited);
  }
}

}  // namespace shmsync
