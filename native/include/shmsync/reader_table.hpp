// The reader table: who reads this arena, which version each holds pinned, which it has acked.
//
// INV: a process writes only rows that it owns. Ownership moves by one CAS on `owner`: from 0 (claim), from
//      a dead owner (take_over, reap), never from a live one except to evict a row that holds garbage.
// INV: a free row (owner 0) has pin 0, held 0 and want 0. Its last `acked` and `worker` stay until the next claim: the
//      writer may look for an ack only after the reader that gave it has left. It claims the row itself to take the
//      index off, when another process gets that index.
//
// The caller establishes with a pidfd whether an owner is dead; the table only acts on it.
#pragma once

#include <optional>

#include "shmsync/layout.hpp"

namespace shmsync {

inline constexpr std::int32_t kNoWorker = -1;
// The index in a row whose owner has not stored one yet. Not kNoWorker, which an owner may store: look() could find
// that before and after the ack of an owner that came and went in between.
inline constexpr std::int32_t kUnnamed = -2;

class ReaderTable {
 public:
  // `rows` points at `count` rows that outlive the table; fresh memory is all zero and needs format().
  ReaderTable(std::byte* rows, std::uint32_t count) : rows_(reinterpret_cast<ReaderRow*>(rows)), count_(count) {}

  // One row as others see it. `acked` belongs to `worker`, or is 0; the other words are each on their own.
  struct Row {
    std::uint32_t number;
    std::uint64_t owner, pin, acked;
    std::int32_t worker;
    std::uint64_t pinned_at, reads, torn, retries, held;
  };
  Row look(std::uint32_t row) const;

  void format();  // once, by the creator, before anyone else can see the memory

  std::uint32_t size() const { return count_; }
  ReaderRow& operator[](std::uint32_t i) { return rows_[i]; }
  const ReaderRow& operator[](std::uint32_t i) const { return rows_[i]; }

  // Takes a free row for process `me`; nullopt when none is free.
  std::optional<std::uint32_t> claim(std::uint64_t me, std::int32_t worker);

  // Takes the row of `before`, a process known to be dead, or 0; false when another process was quicker.
  bool take_over(std::uint32_t row, std::uint64_t before, std::uint64_t me, std::int32_t worker);

  // Frees the row of `dead`, pin included; false when another process was quicker.
  bool reap(std::uint32_t row, std::uint64_t dead, std::uint64_t me);

  // Takes the index and the ack of the last owner off a free row; a row that another process claims meanwhile has lost
  // them.
  void forget(std::uint32_t row, std::uint64_t me);

  // Frees a row that the caller owns. Its pin and held must be 0 already.
  void release(std::uint32_t row);

 private:
  void clear(ReaderRow& row);

  ReaderRow* rows_;
  std::uint32_t count_;
};

}  // namespace shmsync
