#include "shmsync/publication.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "shmsync/failpoints.hpp"
#include "shmsync/seqlock.hpp"

namespace shmsync {
namespace {

constexpr Nanoseconds kSpin = SpinEstimate::kLeast;
constexpr Nanoseconds kTurn = std::chrono::milliseconds(2);  // how long the gate stays open for waiting readers
constexpr Nanoseconds kTurnNap = std::chrono::microseconds(200);
constexpr Nanoseconds kNextTurn = std::chrono::milliseconds(100);  // for a reader that let its turn pass

}  // namespace

PublicationWriter::PublicationWriter(PublicationLine& line, SlotLine* slots, std::uint32_t slot_count,
                                     ReaderTable readers, ReplyLine& reply, std::uint64_t me, bool on_device)
    : line_(line),
      slots_(slots),
      slot_count_(slot_count),
      readers_(readers),
      reply_(reply),
      me_(me),
      on_device_(on_device),
      slot_version_(slot_count, 0),
      no_turn_before_(readers.size(), 0) {}

Begin PublicationWriter::begin() {
  if (slot_count_ == 1 && !gate_closed_) {
    let_waiting_readers_in();
    line_.current.store(pack_current(version_, 0) | kGate, std::memory_order_release);
    gate_closed_ = true;
    SHMSYNC_FAILPOINT("begin.gated");
  }
  // SYNC gate.fence: seq_cst; pairs with pin.fence. Either the scan below sees a reader's pin, or that reader's
  // reload of `current` sees the gate (slots = 1) or the newer version (slots ≥ 2) and it backs off. With
  // release the scan could pass the store above, and both would go ahead.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return choose_slot() ? mark() : Begin::busy;
}

Begin PublicationWriter::wait_begin(Nanoseconds timeout) {
  return sleep_until([this] { return choose_slot(); }, timeout, kSpin) ? mark() : Begin::busy;
}

Begin PublicationWriter::mark() {
  writing_ = true;
  seqlock::begin(slots_[slot_].seq, next_);
  SHMSYNC_FAILPOINT("begin.marked");
  return Begin::ready;
}

bool PublicationWriter::choose_slot() {
  std::array<bool, kMaxSlots> pinned{};
  bool any = false;
  for (std::uint32_t i = 0; i < readers_.size(); ++i) {
    // SYNC pin.release, pin.store: acquire; pairs with unpin(): the reader's loads happened before our overwrite.
    const std::uint64_t pin = readers_[i].pin.load(std::memory_order_acquire);
    // SYNC held.set: after the pin; pairs with DeviceReads::begin(), which stores before the pin goes: we see one or
    // the other. SYNC held.release: acquire; pairs with DeviceReads::end(): the device's reads happened before our
    // overwrite.
    const std::uint64_t held = on_device_ ? readers_[i].held.load(std::memory_order_acquire) : 0;
    if (pin == 0 && held == 0) continue;
    if ((pin != 0 && garbage(pin)) || (held & ~written_) != 0) {
      // A live process wrote where it should not. Its row goes; the reader notices at its next entry.
      readers_.reap(i, readers_[i].owner.load(std::memory_order_acquire), me_);
      continue;
    }
    // A stale pin (its reader is about to back off) only delays reuse; it never permits it.
    if (pin != 0) pinned[slot_of(pin - 1)] = true;
    for (std::uint64_t left = held; left != 0; left &= left - 1) pinned[std::countr_zero(left)] = true;
    any = true;
  }
  if (slot_count_ == 1) {
    slot_ = 0;
    return !any;
  }
  bool found = false;
  for (std::uint32_t k = 0; k < slot_count_; ++k) {
    if (k == current_slot_ || pinned[k]) continue;
    // The oldest version: the newer ones stay longest for optimistic readers still inside them.
    if (!found || slot_version_[k] < slot_version_[slot_]) slot_ = k;
    found = true;
  }
  return found;
}

bool PublicationWriter::garbage(std::uint64_t pin) const {
  const std::uint64_t current = pin - 1;
  return gated(current) || slot_of(current) >= slot_count_ || version_of(current) > version_;
}

std::vector<Blocker> PublicationWriter::blockers() const {
  std::vector<Blocker> found;
  for (std::uint32_t i = 0; i < readers_.size(); ++i) {
    const std::uint64_t pin = readers_[i].pin.load(std::memory_order_acquire);  // SYNC pin.store: its owner, below
    // SYNC held.set: after the pin, as in choose_slot()
    const std::uint64_t held = on_device_ ? readers_[i].held.load(std::memory_order_acquire) & written_ : 0;
    const auto in_the_way = [this](std::uint32_t slot) { return slot_count_ == 1 || slot != current_slot_; };
    std::optional<std::uint64_t> version;
    for (std::uint64_t left = held; left != 0; left &= left - 1)
      if (const auto slot = std::countr_zero(left); in_the_way(slot)) version = slot_version_[slot];
    if (pin != 0 && in_the_way(slot_of(pin - 1))) version = version_of(pin - 1);
    if (version) found.push_back({i, readers_[i].owner.load(std::memory_order_acquire), *version});
  }
  return found;
}

bool PublicationWriter::skip_to(std::uint64_t version) {
  if (writing_ || version < next_ || version > kMaxVersion) return false;
  next_ = version;
  return true;
}

std::uint64_t PublicationWriter::commit() {
  SHMSYNC_FAILPOINT("commit.start");
  version_ = next_++;
  seqlock::end(slots_[slot_].seq, version_);
  SHMSYNC_FAILPOINT("commit.numbered");
  slot_version_[slot_] = version_;
  if (on_device_) written_ |= std::uint64_t{1} << slot_;
  current_slot_ = slot_;
  if (poisoned_) {
    // SYNC state: release; pairs with ReadSide::state(). Before the gate opens: a reader looks at the state only while
    // it finds the gate closed.
    line_.state.store(static_cast<std::uint32_t>(State::open), std::memory_order_release);
    poisoned_ = false;
  }
  // SYNC current.commit: release; pairs with ReadSide::current(). A thread that sees the version sees its bytes.
  line_.current.store(pack_current(version_, slot_), std::memory_order_release);
  SHMSYNC_FAILPOINT("commit.current");
  gate_closed_ = false;
  writing_ = false;
  announce();
  SHMSYNC_FAILPOINT("commit.announced");
  return version_;
}

void PublicationWriter::abort() {
  SHMSYNC_FAILPOINT("abort.start");
  if (!poisoned_) next_ = version_ + 1;
  // Slots = 1: the bytes are those of the old version, so its number goes back; optimistic readers wait for it.
  if (slot_count_ == 1 && writing_ && !poisoned_) seqlock::end(slots_[0].seq, version_);
  SHMSYNC_FAILPOINT("abort.numbered");
  writing_ = false;
  line_.waiting.store(0, std::memory_order_relaxed);
  if (slot_count_ > 1 || poisoned_ || !gate_closed_) {
    if (slot_count_ > 1 && slot_ != current_slot_) slot_version_[slot_] = 0;  // perhaps half written: reuse first
    return;
  }
  line_.current.store(pack_current(version_, current_slot_), std::memory_order_release);
  SHMSYNC_FAILPOINT("abort.opened");
  gate_closed_ = false;
  announce();
}

void PublicationWriter::poison() {
  writing_ = false;
  poisoned_ = true;
  // SYNC state: release; before `notify`, so a thread that it wakes sees it.
  line_.state.store(static_cast<std::uint32_t>(State::poisoned), std::memory_order_release);
  SHMSYNC_FAILPOINT("poison.state");
  announce();
}

void PublicationWriter::close() {
  // SYNC state: release; as in poison().
  line_.state.store(static_cast<std::uint32_t>(State::closed), std::memory_order_release);
  SHMSYNC_FAILPOINT("close.state");
  announce();
}

void PublicationWriter::announce() {
  // SYNC notify.bump: release, after `current`; pairs with ReadSide::notify(), which readers load before
  // `current`. A reader that saw the old `current` sleeps on the old number, and wakes.
  line_.notify.store(++notify_, std::memory_order_release);
  if (slot_count_ == 1) opened_at_ = monotonic_ns();
  futex_wake_all(line_.notify);
}

// Without this a writer that publishes without pause closes the gate again before a woken reader has run. A writer
// that had the gate open long enough while it computed something else waits for no reader.
void PublicationWriter::let_waiting_readers_in() {
  while (somebody_has_a_turn()) {
    const auto open_for = Nanoseconds(monotonic_ns() - opened_at_);
    if (open_for >= kTurn) {
      end_turns();
      return;
    }
    if (open_for < kSpin)
      yield_processor();
    else
      futex_wait(reply_.reply, reply_.reply.load(std::memory_order_relaxed), kTurnNap);
  }
}

bool PublicationWriter::somebody_has_a_turn() {
  bool waiting = false;
  std::uint64_t now = 0;
  for (std::uint32_t i = 0; i < readers_.size(); ++i) {
    if (readers_[i].want.load(std::memory_order_relaxed) == 0) {
      no_turn_before_[i] = 0;
      continue;
    }
    if (readers_[i].owner.load(std::memory_order_relaxed) == 0) continue;
    if (now == 0) now = monotonic_ns();
    if (no_turn_before_[i] <= now) waiting = true;
  }
  return waiting;
}

// A reader that let a turn pass is dead, stopped or preempted: it may have another, but not with every version.
void PublicationWriter::end_turns() {
  const std::uint64_t now = monotonic_ns();
  for (std::uint32_t i = 0; i < readers_.size(); ++i)
    if (no_turn_before_[i] <= now && readers_[i].want.load(std::memory_order_relaxed) != 0)
      no_turn_before_[i] = now + static_cast<std::uint64_t>(kNextTurn.count());
}

template <class Done>
bool PublicationWriter::sleep_until(Done done, Nanoseconds timeout, Nanoseconds spin) {
  const std::uint64_t start = monotonic_ns();
  timeout = std::min(timeout, kSlice);
  // With few cores the partner runs as soon as we yield; going to sleep would cost two context switches more.
  while (Nanoseconds(monotonic_ns() - start) < std::min(timeout, spin)) {
    if (done()) return true;
    yield_processor();
  }
  bool finished = false;
  for (;;) {
    line_.waiting.store(1, std::memory_order_relaxed);
    // SYNC wake.writer: seq_cst; pairs with wake.reader. Either we see what the reader stored (pin, ack), or the
    // reader sees `waiting` and bumps `reply` after we loaded it. With less, both miss, and we sleep without end.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::uint32_t seen = reply_.reply.load(std::memory_order_acquire);
    if (done()) {
      finished = true;
      break;
    }
    const auto waited = Nanoseconds(monotonic_ns() - start);
    if (waited >= timeout) break;
    SHMSYNC_FAILPOINT("writer.waits");
    futex_wait(reply_.reply, seen, timeout - waited);
  }
  line_.waiting.store(0, std::memory_order_relaxed);
  return finished;
}

std::vector<PublicationWriter::Awaited> PublicationWriter::claimed_rows() const {
  std::vector<Awaited> rows;
  for (std::uint32_t i = 0; i < readers_.size(); ++i)
    if (const auto owner = readers_[i].owner.load(std::memory_order_acquire)) rows.push_back({i, owner});
  return rows;
}

bool PublicationWriter::wait_acks(std::uint64_t version, std::vector<Awaited>& rows, Nanoseconds timeout) {
  const auto done = [&] {
    std::erase_if(rows, [&](Awaited& awaited) {
      const ReaderRow& row = readers_[awaited.row];
      // SYNC ack: acquire; pairs with applied(). The owner is loaded after it: an ack under a
      // new owner is not this reader's.
      const std::uint64_t acked = row.acked.load(std::memory_order_acquire);
      if (row.owner.load(std::memory_order_acquire) != awaited.owner) return true;
      return acked >= version && acked <= version_;  // an ack from the future is garbage
    });
    return rows.empty();
  };
  if (done()) return true;
  // A wait in several slices is one wait. Only its first slice spins longer than the least: by then the rest are late.
  const std::uint64_t now = monotonic_ns();
  const bool first = acks_wait_for_ != version;
  if (first) {
    acks_wait_for_ = version;
    acks_since_ = now;
  }
  const bool finished = sleep_until(done, timeout, first ? acks_take_.spin() : kSpin);
  if (finished || first) acks_take_.add(Nanoseconds(monotonic_ns() - acks_since_));
  return finished;
}

}  // namespace shmsync
