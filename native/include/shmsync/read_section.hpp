// The reader's side of the protocol: enter a section, move to the version it found, ack, leave.
//
//   try_enter() ── same ──────────────────────> read ──> leave()
//        ├──────── moved ──> move views, applied() ──> read ──> leave()
//        └──────── gated, poisoned ──> wait(), try again, or enter_after_death() once the writer is known to be dead
//
// INV: between a try_enter() that returned same or moved and leave(), `pinned` sections read one version's bytes.
// INV: no word of the segment leads outside of it: a slot number is compared with the number of slots before its use.
// INV: `acked` never runs ahead: it is stored when no section entered from now on uses anything older.
// One ReadSide serves one thread at a time; the caller holds a lock around each outermost section.
#pragma once

#include <memory>

#include "shmsync/futex.hpp"

namespace shmsync {

enum class Consistency : std::uint32_t { pinned = 0, optimistic = 1, live = 2 };

enum class Enter {
  same,      // entered, at the version already applied
  moved,     // entered, at a newer version: move the views, then call applied()
  gated,     // not entered: the writer is between versions; wait() and try again
  poisoned,  // not entered: the writer failed half way
  evicted,   // not entered: the row is no longer ours
  corrupt    // not entered: `current` names a slot that is not there
};

class DeviceReads;

// After a reader's release store (pin, ack, row): wakes the writer if it sleeps.
void wake_writer(const PublicationLine& line, ReplyLine& reply);

class ReadSide {
 public:
  ReadSide(const PublicationLine& line, const SlotLine* slots, std::uint32_t slot_count, ReaderRow& row,
           ReplyLine& reply, std::uint64_t me, Consistency consistency);

  // The slots lie on a device: what its reads hold back, and what it has still to read when a section is over. The
  // caller tells it before leave() or drop().
  void read_by(std::shared_ptr<DeviceReads> reads) { device_ = std::move(reads); }
  const std::shared_ptr<DeviceReads>& device() const { return device_; }

  Enter try_enter() { return try_enter(consistency_); }
  Enter try_enter(Consistency consistency);
  // After the writer is known to be dead: its last words are final. Gate or not, an even seq is a whole version.
  Enter enter_after_death();
  void applied();                  // the views show held(): ack it
  void forget();                   // what was applied may be torn: the next entry moves again
  bool torn_so_far() const;        // inside a section: have the bytes changed since it began?
  bool leave();                    // true: the section was torn
  void drop();                     // give up a pin that became no section
  void retire();                   // the row goes back: never touch it again, another Subscriber may have it next
  bool wait(Nanoseconds timeout);  // for `current` or the state to change, at most one slice
  // Waits for `version` to be published, at most one slice. True when it is there.
  bool wait_version(std::uint64_t version, Nanoseconds timeout);

  // Is a slot pinned that leave() or drop() would let go?
  bool holds_pin() const { return owns_row() && row_.pin.load(std::memory_order_relaxed) != 0; }
  bool pinned() const { return entered_as_ == Consistency::pinned; }
  std::uint64_t held() const { return held_; }  // packed `current` of the section
  std::uint64_t latest() const { return version_of(current()); }
  std::uint32_t shown_slot() const { return slot_of(current()); }  // whether it is there or not
  // SYNC state: acquire; pairs with the publication's stores of it.
  State state() const { return static_cast<State>(line_.state.load(std::memory_order_acquire)); }
  // Nothing newer than what was applied is complete; a closed gate alone is nothing new.
  bool unchanged() const { return (current() & ~kGate) == applied_; }
  // Slots = 1, writer dead: the version of the bytes, 0 when they are half written.
  std::uint64_t last_words() const {
    const std::uint64_t seq = slots_[0].seq.load(std::memory_order_acquire);  // SYNC seq.end
    return seq % 2 == 0 ? seq / 2 : 0;
  }
  void go_on_from(const ReadSide& before) {  // the same subscriber, in another arena: its counts go on
    reads_ = before.reads_;
    torn_ = before.torn_;
    retries_ = before.retries_;
  }
  void count_retry() { row_.retries.store(++retries_, std::memory_order_relaxed); }
  std::uint64_t reads() const { return reads_; }
  std::uint64_t torn() const { return torn_; }
  std::uint64_t retries() const { return retries_; }

 private:
  Enter enter_pinned();
  Enter enter_optimistic();
  Enter enter_live();
  Enter entered(std::uint64_t current);
  Enter refused();
  void unpin();
  bool is_there(std::uint64_t current) const { return slot_of(current) < slot_count_; }
  bool owns_row() const { return !retired_ && row_.owner.load(std::memory_order_relaxed) == me_; }
  // SYNC current.commit: acquire; pairs with commit(). A thread that sees the version sees its bytes.
  std::uint64_t current() const { return line_.current.load(std::memory_order_acquire); }
  // SYNC notify.bump: acquire; pairs with announce(). A later load of `current` finds what was announced.
  std::uint32_t notify() const { return line_.notify.load(std::memory_order_acquire); }

  const PublicationLine& line_;
  const SlotLine* slots_;
  std::uint32_t slot_count_;
  ReaderRow& row_;
  ReplyLine& reply_;
  std::uint64_t me_;
  Consistency consistency_;

  std::shared_ptr<DeviceReads> device_;  // null: in host memory
  Consistency entered_as_ = Consistency::pinned;
  std::uint64_t held_ = 0;
  std::uint64_t applied_ = 0;  // 0: nothing; a published `current` is never 0
  std::uint32_t seen_notify_ = 0;
  bool wants_ = false;
  bool retired_ = false;
  std::uint64_t reads_ = 0;
  std::uint64_t torn_ = 0;
  std::uint64_t retries_ = 0;
};

}  // namespace shmsync
