// Reads that a device has still to do when a section is over: they hold their slot, and hold back the ack of what is
// newer.
//
//   in a section: begin(slot), then the pin goes ── ... ── on a thread of the device: end(slot)
//   move to a newer version: ack(current), now, or by the end() of the last read of an older one
//
// INV: while a read of a slot is under way, its bit in the row's `held` is set; it is set before the pin goes.
// INV: `acked` is stored when no read of anything older is under way.
#pragma once

#include <mutex>
#include <vector>

#include "shmsync/later.hpp"
#include "shmsync/publication.hpp"
#include "shmsync/read_section.hpp"

namespace shmsync {

class DeviceReads : public std::enable_shared_from_this<DeviceReads> {
 public:
  DeviceReads(const PublicationLine& line, std::uint32_t slots, ReaderRow& row, ReplyLine& reply, std::uint64_t me)
      : line_(line), row_(row), reply_(reply), me_(me), under_way_(slots, 0) {}

  // A read of this slot comes to an end when the Later is run. Call it while the slot is pinned.
  std::shared_ptr<Later> begin(std::uint32_t slot);
  void ack(std::uint64_t current);  // packed; see ReadSide::applied()
  bool idle() const;                // nothing is under way
  bool wait(Nanoseconds timeout);   // at most one slice. True when nothing is under way

 private:
  void end(std::uint32_t slot);
  void ack_if_due();
  bool mine() const { return row_.owner.load(std::memory_order_relaxed) == me_; }

  const PublicationLine& line_;
  ReaderRow& row_;
  ReplyLine& reply_;
  std::uint64_t me_;

  mutable std::mutex mutex_;  // never held while anything is waited for
  std::vector<std::uint32_t> under_way_;
  std::uint32_t total_ = 0;
  std::uint64_t due_ = 0;  // packed `current` to ack; 0: none
  Word32 ended_{0};        // how often; wait() sleeps on it
};

// The commit that a device makes, behind the copies of a version. While it is pending no other code may call the
// writer, which lives longer.
inline std::shared_ptr<Later> commit_later(PublicationWriter& writer) {
  return std::make_shared<Later>([&writer] { writer.commit(); });
}

}  // namespace shmsync
