#include "shmsync/reader_table.hpp"

#include <new>

namespace shmsync {

void ReaderTable::format() {
  for (std::uint32_t i = 0; i < count_; ++i) clear(*new (&rows_[i]) ReaderRow{});
}

void ReaderTable::clear(ReaderRow& row) {
  row.pin.store(0, std::memory_order_relaxed);
  row.acked.store(0, std::memory_order_relaxed);
  row.want.store(0, std::memory_order_relaxed);
  row.worker.store(kNoWorker, std::memory_order_relaxed);
  row.pinned_at.store(0, std::memory_order_relaxed);
  row.reads.store(0, std::memory_order_relaxed);
  row.torn.store(0, std::memory_order_relaxed);
  row.retries.store(0, std::memory_order_relaxed);
}

std::optional<std::uint32_t> ReaderTable::claim(std::uint64_t me, std::int32_t worker) {
  for (std::uint32_t i = 0; i < count_; ++i) {
    std::uint64_t free = 0;
    // SYNC row.free: acquire; pairs with release(), so the cleared fields are seen.
    if (rows_[i].owner.load(std::memory_order_relaxed) == 0 &&
        rows_[i].owner.compare_exchange_strong(free, me, std::memory_order_acq_rel)) {
      rows_[i].worker.store(worker, std::memory_order_relaxed);
      return i;
    }
  }
  return std::nullopt;
}

bool ReaderTable::take_over(std::uint32_t row, std::uint64_t dead, std::uint64_t me, std::int32_t worker) {
  // The CAS comes first: until it succeeds the row is the dead owner's, and the writer or another joiner
  // may be taking it at this moment. In between, the dead owner's pin only delays reuse.
  if (!rows_[row].owner.compare_exchange_strong(dead, me, std::memory_order_acq_rel)) return false;
  clear(rows_[row]);
  rows_[row].worker.store(worker, std::memory_order_relaxed);
  return true;
}

bool ReaderTable::reap(std::uint32_t row, std::uint64_t dead, std::uint64_t me) {
  if (!rows_[row].owner.compare_exchange_strong(dead, me, std::memory_order_acq_rel)) return false;
  release(row);
  return true;
}

void ReaderTable::release(std::uint32_t row) {
  clear(rows_[row]);
  rows_[row].owner.store(0, std::memory_order_release);  // SYNC row.free: release; pairs with claim()
}

}  // namespace shmsync
