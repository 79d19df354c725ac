// The writer's side of the protocol: choose a slot, begin, write, commit or abort.
//
//   begin() ── busy ──> wait_begin() ... ── ready ──> write slot() ──> commit()
//      └────────────────── abort() <──┘                         └──> poison()   (slots = 1)
//
// INV: the bytes of a published slot never change while a live reader's pin holds it, nor, on a device, its held bit.
// INV: a version number is published once; after abort() and poison() the next attempt uses it again.
// INV: the writer trusts only its own copies of its state; what readers can write is bounds-checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shmsync/futex.hpp"
#include "shmsync/reader_table.hpp"
#include "shmsync/spin.hpp"

namespace shmsync {

enum class Begin { ready, busy };

// A row that keeps the writer from the slot it needs.
struct Blocker {
  std::uint32_t row;
  std::uint64_t owner;
  std::uint64_t version;  // the pinned one
};

class PublicationWriter {
 public:
  // `on_device`: readers may hold slots after their sections, and there are at most kMaxDeviceSlots.
  PublicationWriter(PublicationLine& line, SlotLine* slots, std::uint32_t slot_count, ReaderTable readers,
                    ReplyLine& reply, std::uint64_t me, bool on_device = false);

  // Slots = 1: closes the gate. Then looks once whether a slot is free to write; marks it if so.
  Begin begin();
  // Slots = 1: will begin() give waiting readers a turn first?
  bool may_wait_for_readers() { return slot_count_ == 1 && !gate_closed_ && somebody_has_a_turn(); }
  // The same, and waits for a slot, at most `timeout` (capped at kSlice).
  Begin wait_begin(Nanoseconds timeout);
  // The rows in the way, after `busy`.
  std::vector<Blocker> blockers() const;

  // The next commit publishes this version instead of the one after the last, so that several arenas can share one
  // numbering. Between begin() and commit() it is too late. False: versions only grow, nothing changed.
  bool skip_to(std::uint64_t version);
  std::uint64_t commit();  // publishes what was written; the new version
  void abort();            // nothing was written, or not into a readable slot: as before begin()
  void poison();           // slots = 1: the bytes are half written; no reader enters until a commit
  void close();

  std::uint32_t slot() const { return slot_; }  // the one to write, after `ready`
  std::uint32_t current_slot() const { return current_slot_; }
  std::uint64_t version() const { return version_; }
  std::uint64_t next_version() const { return next_; }
  // Packed; the version and slot that readers find now, for a thread that does not write: a device may be about to
  // commit.
  // SYNC current.commit: acquire; pairs with commit(). A thread that sees the version sees its bytes.
  std::uint64_t published() const { return line_.current.load(std::memory_order_acquire); }
  bool poisoned() const { return poisoned_; }
  bool writing() const { return writing_; }  // from ready to commit(), abort() or poison()
  const ReaderTable& readers() const { return readers_; }
  ReaderTable& readers() { return readers_; }

  struct Awaited {
    std::uint32_t row;
    std::uint64_t owner;  // when the wait began
  };
  std::vector<Awaited> claimed_rows() const;
  // Waits until every row in `rows` has acked `version` or changed its owner; at most `timeout` (capped).
  // True when none is left; those that are done are removed. A row that changed its owner was released by its
  // reader, or taken from a dead one by a joiner that found the table full: either way no process is left to ack.
  bool wait_acks(std::uint64_t version, std::vector<Awaited>& rows, Nanoseconds timeout);

 private:
  Begin mark();        // seq odd: from here on the slot's bytes may change
  bool choose_slot();  // scan the pins, choose slot_
  bool garbage(std::uint64_t pin) const;
  void let_waiting_readers_in();  // fairness, slots = 1
  bool somebody_has_a_turn();
  void end_turns();
  void announce();  // notify++ and wake
  template <class Done>
  bool sleep_until(Done done, Nanoseconds timeout, Nanoseconds spin);

  PublicationLine& line_;
  SlotLine* slots_;
  std::uint32_t slot_count_;
  ReaderTable readers_;
  ReplyLine& reply_;
  std::uint64_t me_;
  bool on_device_;

  std::uint64_t version_ = 0;
  std::uint64_t next_ = 1;
  std::uint32_t current_slot_ = 0;
  std::uint32_t slot_ = 0;
  std::uint32_t notify_ = 0;
  bool gate_closed_ = false;
  bool poisoned_ = false;
  bool writing_ = false;
  SpinEstimate acks_take_;
  std::uint64_t acks_wait_for_ = 0;            // the version whose acks were waited for last
  std::uint64_t acks_since_ = 0;               // when that wait began
  std::vector<std::uint64_t> slot_version_;    // 0: never written, or aborted
  std::uint64_t written_ = 0;                  // on a device: the slots that were ever published
  std::uint64_t opened_at_ = 0;                // when the gate was opened last
  std::vector<std::uint64_t> no_turn_before_;  // per row, CLOCK_MONOTONIC ns; 0: it has one
};

}  // namespace shmsync
