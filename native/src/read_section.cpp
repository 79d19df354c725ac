#include "shmsync/read_section.hpp"

#include <algorithm>

#include "shmsync/device_reads.hpp"
#include "shmsync/failpoints.hpp"
#include "shmsync/seqlock.hpp"

namespace shmsync {
namespace {

// An optimiser step in place takes about this long. If readers slept through it, the writer would have to wake them,
// and they would preempt it (docs/adr/0008-readers-yield.md).
constexpr Nanoseconds kYield = std::chrono::microseconds(300);

}  // namespace

ReadSide::ReadSide(const PublicationLine& line, const SlotLine* slots, std::uint32_t slot_count, ReaderRow& row,
                   ReplyLine& reply, std::uint64_t me, Consistency consistency)
    : line_(line),
      slots_(slots),
      slot_count_(slot_count),
      row_(row),
      reply_(reply),
      me_(me),
      consistency_(consistency) {}

Enter ReadSide::try_enter(Consistency consistency) {
  if (!owns_row()) return Enter::evicted;
  entered_as_ = consistency;
  switch (consistency) {
    case Consistency::pinned:
      return enter_pinned();
    case Consistency::optimistic:
      return enter_optimistic();
    case Consistency::live:
      return enter_live();
  }
  return Enter::evicted;
}

Enter ReadSide::enter_pinned() {
  for (;;) {
    // Before `current`: if the writer bumps it after this load, wait() returns at once.
    seen_notify_ = notify();
    const std::uint64_t current = this->current();
    if (!is_there(current)) return Enter::corrupt;
    if (gated(current)) return refused();
    // SYNC pin.store: relaxed would do, the fence orders it; release, so that a writer that sees this pin also sees
    // who owns the row.
    row_.pin.store(current + 1, std::memory_order_release);
    SHMSYNC_FAILPOINT("pin.stored");
    // SYNC pin.fence: seq_cst; pairs with gate.fence. With release the reload could pass the pin store: the
    // writer would find no pin while we find the old `current`, and both would use the slot.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (this->current() == current) {
      if (wants_) {
        wants_ = false;
        row_.want.store(0, std::memory_order_relaxed);
      }
      row_.pinned_at.store(monotonic_ns(), std::memory_order_relaxed);
      return entered(current);
    }
    if (slot_count_ == 1) {
      wants_ = true;
      row_.want.store(1, std::memory_order_relaxed);  // before the pin goes, which is what the writer waits for
    }
    unpin();
    count_retry();
  }
}

// A version mismatch means that the slot is being written again: the newer `current` is about to appear.
Enter ReadSide::enter_optimistic() {
  seen_notify_ = notify();
  for (int attempt = 0; attempt < 4; ++attempt) {
    const std::uint64_t current = this->current() & ~kGate;
    if (!is_there(current)) return Enter::corrupt;
    if (seqlock::complete(slots_[slot_of(current)].seq, version_of(current))) return entered(current);
    count_retry();
  }
  return refused();
}

Enter ReadSide::enter_live() {
  const std::uint64_t current = this->current() & ~kGate;
  return is_there(current) ? entered(current) : Enter::corrupt;
}

Enter ReadSide::entered(std::uint64_t current) {
  held_ = current;
  row_.reads.store(++reads_, std::memory_order_relaxed);
  SHMSYNC_FAILPOINT("section.entered");
  return current == applied_ ? Enter::same : Enter::moved;
}

Enter ReadSide::refused() {
  // Poisoned and then closed stays poisoned for readers: nothing will repair it.
  const std::uint64_t current = this->current();
  if (!is_there(current)) return Enter::corrupt;
  const bool half_written = seqlock::writing(slots_[slot_of(current)].seq.load(std::memory_order_relaxed));
  if (half_written && state() != State::open) return Enter::poisoned;
  if (entered_as_ == Consistency::pinned && !wants_) {
    wants_ = true;
    row_.want.store(1, std::memory_order_relaxed);
  }
  SHMSYNC_FAILPOINT("gate.refused");
  return Enter::gated;
}

Enter ReadSide::enter_after_death() {
  if (slot_count_ > 1) return try_enter(Consistency::pinned);
  const std::uint64_t seq = slots_[0].seq.load(std::memory_order_acquire);  // SYNC seq.end
  if (seqlock::writing(seq)) return Enter::poisoned;
  entered_as_ = Consistency::pinned;
  return entered(pack_current(seq / 2, 0));
}

void ReadSide::applied() {
  applied_ = held_;
  if (device_) {
    device_->ack(held_);
    return;
  }
  SHMSYNC_FAILPOINT("ack.before");
  row_.acked.store(version_of(held_), std::memory_order_release);  // SYNC ack: pairs with wait_acks()
  SHMSYNC_FAILPOINT("ack.stored");
  wake_writer(line_, reply_);
}

void ReadSide::forget() { applied_ = 0; }

bool ReadSide::torn_so_far() const {
  return entered_as_ != Consistency::pinned && !seqlock::still(slots_[slot_of(held_)].seq, version_of(held_));
}

bool ReadSide::leave() {
  SHMSYNC_FAILPOINT("section.leaves");
  bool torn = false;
  if (entered_as_ == Consistency::pinned) {
    unpin();
  } else {
    torn = torn_so_far();
    if (torn) row_.torn.store(++torn_, std::memory_order_relaxed);
  }
  return torn;
}

void ReadSide::drop() {
  if (holds_pin()) unpin();
}

void ReadSide::retire() {
  drop();
  retired_ = true;
}

void ReadSide::unpin() {
  if (!owns_row()) return;  // evicted: the pin there is our successor's
  // SYNC pin.release: release; pairs with choose_slot(). Our loads of the slot happened before the writer's stores.
  row_.pin.store(0, std::memory_order_release);
  SHMSYNC_FAILPOINT("unpin.stored");
  wake_writer(line_, reply_);
}

void wake_writer(const PublicationLine& line, ReplyLine& reply) {
  // SYNC wake.reader: seq_cst; pairs with wake.writer. Our store (pin or ack) is visible before we look whether
  // the writer waits. Loading `waiting` before the store lets the writer sleep through it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (line.waiting.load(std::memory_order_relaxed) == 0) return;
  reply.reply.fetch_add(1, std::memory_order_release);
  futex_wake_all(reply.reply);
}

bool ReadSide::wait(Nanoseconds timeout) {
  const std::uint64_t start = monotonic_ns();
  while (Nanoseconds(monotonic_ns() - start) < std::min(timeout, kYield)) {
    if (notify() != seen_notify_) return true;
    yield_processor();
  }
  futex_wait(line_.notify, seen_notify_, timeout);
  return notify() != seen_notify_;
}

bool ReadSide::wait_version(std::uint64_t version, Nanoseconds timeout) {
  timeout = std::min(timeout, kSlice);
  const std::uint64_t start = monotonic_ns();
  for (;;) {
    const std::uint32_t seen = notify();
    if (latest() >= version) return true;
    const auto waited = Nanoseconds(monotonic_ns() - start);
    if (waited >= timeout || state() == State::closed) return false;
    SHMSYNC_FAILPOINT("version.waits");
    futex_wait(line_.notify, seen, timeout - waited);
  }
}

}  // namespace shmsync
