// Plain memory shaped like an arena, and a check that survives NDEBUG.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "shmsync/device_reads.hpp"
#include "shmsync/publication.hpp"
#include "shmsync/read_section.hpp"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

namespace shmsync::test {

inline constexpr std::uint64_t kWriter = pack_owner(1, 1, 1);

inline std::uint64_t reader_id(std::uint32_t i) { return pack_owner(100 + i, 7, 1); }

struct Memory {
  explicit Memory(std::uint32_t slot_count, std::uint32_t reader_count)
      : slots(slot_count), rows(reader_count), table(reinterpret_cast<std::byte*>(rows.data()), reader_count) {
    table.format();
  }

  PublicationWriter writer(bool on_device = false) {
    return {line, slots.data(), static_cast<std::uint32_t>(slots.size()), table, reply, kWriter, on_device};
  }

  // The reader of row i, which it claims.
  ReadSide reader(Consistency consistency = Consistency::pinned) {
    const auto row = table.claim(reader_id(next_), kNoWorker);
    CHECK(row.has_value());
    return {line,       slots.data(), static_cast<std::uint32_t>(slots.size()), table[*row], reply, reader_id(next_++),
            consistency};
  }

  // The same, of an arena on a device.
  ReadSide device_reader(Consistency consistency = Consistency::pinned) {
    ReadSide side = reader(consistency);
    const std::uint32_t row = next_ - 1;
    side.read_by(std::make_shared<DeviceReads>(line, static_cast<std::uint32_t>(slots.size()), table[row], reply,
                                               reader_id(row)));
    return side;
  }

  PublicationLine line{};
  std::vector<SlotLine> slots;
  std::vector<ReaderRow> rows;
  ReplyLine reply{};
  ReaderTable table;

 private:
  std::uint32_t next_ = 0;
};

// One publication in which nothing is in the way.
inline std::uint64_t publish(PublicationWriter& writer) {
  CHECK(writer.begin() == Begin::ready);
  return writer.commit();
}

}  // namespace shmsync::test
