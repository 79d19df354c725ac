#include "shmsync/reader_table.hpp"

#include <new>

#include "shmsync/failpoints.hpp"

namespace shmsync {

namespace {

// Before anything else in a row that was claimed: while its new owner stands still here, it must not be shown, or named
// as late, under the index of the row's previous owner.
void unname(ReaderRow& row) {
  row.acked.store(0, std::memory_order_relaxed);
  row.worker.store(kUnnamed, std::memory_order_release);  // SYNC worker: after acked = 0
}

}  // namespace

void ReaderTable::format() {
  for (std::uint32_t i = 0; i < count_; ++i) {
    clear(*new (&rows_[i]) ReaderRow{});
    rows_[i].worker.store(kNoWorker, std::memory_order_relaxed);
  }
}

void ReaderTable::clear(ReaderRow& row) {
  // SYNC pin.release: release. A writer that finds this 0 never sees the one of the last owner's unpin(); row.free has
  // ordered that before us, and we pass it on.
  row.pin.store(0, std::memory_order_release);
  // SYNC held.release: release; the same.
  row.held.store(0, std::memory_order_release);
  row.acked.store(0, std::memory_order_relaxed);
  row.want.store(0, std::memory_order_relaxed);
  row.pinned_at.store(0, std::memory_order_relaxed);
  row.reads.store(0, std::memory_order_relaxed);
  row.torn.store(0, std::memory_order_relaxed);
  row.retries.store(0, std::memory_order_relaxed);
}

std::optional<std::uint32_t> ReaderTable::claim(std::uint64_t me, std::int32_t worker) {
  for (std::uint32_t i = 0; i < count_; ++i)
    if (rows_[i].owner.load(std::memory_order_relaxed) == 0 && take_over(i, 0, me, worker)) return i;
  return std::nullopt;
}

bool ReaderTable::take_over(std::uint32_t row, std::uint64_t before, std::uint64_t me, std::int32_t worker) {
  // The CAS comes first: until it succeeds the row is free or the dead owner's, and the writer or another joiner
  // may be taking it at this moment. In between, the dead owner's pin only delays reuse.
  // SYNC row.free: acquire; pairs with release(). What it cleared is seen, or the pin that the dead owner stored, and
  // what others did to the row before.
  if (!rows_[row].owner.compare_exchange_strong(before, me, std::memory_order_acq_rel)) return false;
  SHMSYNC_FAILPOINT("claim.owner");
  unname(rows_[row]);
  clear(rows_[row]);
  SHMSYNC_FAILPOINT("claim.cleared");
  rows_[row].worker.store(worker, std::memory_order_release);  // SYNC worker: after acked = 0
  SHMSYNC_FAILPOINT("claim.worker");
  return true;
}

bool ReaderTable::reap(std::uint32_t row, std::uint64_t dead, std::uint64_t me) {
  // SYNC row.free: acquire; as in take_over().
  if (!rows_[row].owner.compare_exchange_strong(dead, me, std::memory_order_acq_rel)) return false;
  SHMSYNC_FAILPOINT("reap.owner");
  release(row);
  return true;
}

void ReaderTable::forget(std::uint32_t row, std::uint64_t me) {
  std::uint64_t free = 0;
  if (!rows_[row].owner.compare_exchange_strong(free, me, std::memory_order_acq_rel)) return;  // SYNC row.free
  unname(rows_[row]);
  release(row);
}

ReaderTable::Row ReaderTable::look(std::uint32_t row) const {
  const ReaderRow& r = rows_[row];
  const auto acquire = std::memory_order_acquire, relaxed = std::memory_order_relaxed;
  Row look{};
  look.number = row;
  look.owner = r.owner.load(acquire);
  look.pin = r.pin.load(acquire);  // SYNC pin.store: callers act on it
  // SYNC worker: acquire; pairs with claim(). A thread that sees the new worker sees acked = 0 or its own ack.
  const std::int32_t worker = r.worker.load(acquire);
  look.worker = worker == kUnnamed ? kNoWorker : worker;
  look.acked = r.acked.load(acquire);  // SYNC ack: callers act on it
  // If that was the ack of a later owner, this sees that owner's worker, which was stored before the ack, or a later
  // one. An index that came back is the same process's: the ack is of a version that it holds under this one too.
  if (worker == kUnnamed || r.worker.load(relaxed) != worker || r.owner.load(relaxed) != look.owner) look.acked = 0;
  look.pinned_at = r.pinned_at.load(relaxed);
  look.reads = r.reads.load(relaxed);
  look.torn = r.torn.load(relaxed);
  look.retries = r.retries.load(relaxed);
  look.held = r.held.load(relaxed);
  return look;
}

void ReaderTable::release(std::uint32_t row) {
  // SYNC pin.release: release; as in clear(). Another thread than ours may have been in the row's last section.
  rows_[row].pin.store(0, std::memory_order_release);
  // SYNC held.release: release; the same.
  rows_[row].held.store(0, std::memory_order_release);
  rows_[row].want.store(0, std::memory_order_relaxed);
  SHMSYNC_FAILPOINT("release.pin");
  rows_[row].owner.store(0, std::memory_order_release);  // SYNC row.free: release; pairs with claim()
}

}  // namespace shmsync
