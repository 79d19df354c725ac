#include "shmsync/device_reads.hpp"

namespace shmsync {

std::shared_ptr<Later> DeviceReads::begin(std::uint32_t slot) {
  // Before anything is noted: memory may be out.
  auto read = std::make_shared<Later>([reads = shared_from_this(), slot] { reads->end(slot); });
  const std::lock_guard locked(mutex_);
  ++total_;
  if (under_way_[slot]++ == 0 && mine()) {
    // SYNC held.set: relaxed; the release that takes the pin away comes after it. Pairs with choose_slot(): a writer
    // that finds the pin gone finds this. An addition to the word, not a new one: it passes on what end() has released.
    row_.held.fetch_or(std::uint64_t{1} << slot, std::memory_order_relaxed);
  }
  return read;
}

void DeviceReads::end(std::uint32_t slot) {
  const std::lock_guard locked(mutex_);
  --total_;
  if (--under_way_[slot] == 0 && mine()) {
    // SYNC held.release: release; pairs with choose_slot(). The device's reads of the slot happened before the
    // writer's stores.
    row_.held.fetch_and(~(std::uint64_t{1} << slot), std::memory_order_release);
    ack_if_due();
    wake_writer(line_, reply_);
  }
  ended_.fetch_add(1, std::memory_order_release);
  futex_wake_all(ended_);
}

void DeviceReads::ack(std::uint64_t current) {
  const std::lock_guard locked(mutex_);
  due_ = current;
  ack_if_due();
  wake_writer(line_, reply_);
}

// Under the mutex.
void DeviceReads::ack_if_due() {
  if (due_ == 0 || !mine()) return;
  for (std::uint32_t k = 0; k < under_way_.size(); ++k)
    if (k != slot_of(due_) && under_way_[k] != 0) return;
  row_.acked.store(version_of(due_), std::memory_order_release);  // SYNC ack: pairs with wait_acks()
  due_ = 0;
}

bool DeviceReads::idle() const {
  const std::lock_guard locked(mutex_);
  return total_ == 0;
}

bool DeviceReads::wait(Nanoseconds timeout) {
  const std::uint32_t seen = ended_.load(std::memory_order_acquire);
  if (idle()) return true;
  futex_wait(ended_, seen, timeout);
  return idle();
}

}  // namespace shmsync
