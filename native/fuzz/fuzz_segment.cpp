// A control segment of arbitrary bytes: publication, slots and reader rows, read by a subscriber and by the writer.
//
// The first bytes choose the sizes and what is done; the rest is written over lines that are exactly as large as the
// arena's, so that AddressSanitizer sees every step outside. Checked besides: a section that was entered shows a slot
// that is there, what a writer would overwrite is one too, and no call takes longer than its slice.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "check.hpp"
#include "shmsync/publication.hpp"
#include "shmsync/read_section.hpp"

namespace {

using namespace shmsync;

constexpr std::uint64_t kWriter = pack_owner(1, 1, 1), kReader = pack_owner(2, 7, 1);

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const auto first = left_.front();
    left_ = left_.subspan(1);
    return first;
  }
  template <class Word>
  Word word() {
    Word word{};
    over(&word, sizeof word);
    return word;
  }
  void over(void* to, std::size_t size) {
    size = std::min(size, left_.size());
    if (size == 0) return;
    std::memcpy(to, left_.data(), size);
    left_ = left_.subspan(size);
  }
  bool empty() const { return left_.empty(); }

 private:
  std::span<const std::uint8_t> left_;
};

// The memory of an arena, each part with its own redzones.
struct Arena {
  Arena(std::uint32_t slots_, std::uint32_t rows_)
      : slot_count(slots_),
        row_count(rows_),
        line(new PublicationLine{}),
        slots(new SlotLine[slots_]),
        rows(new ReaderRow[rows_]),
        reply(new ReplyLine{}) {
    table().format();
  }
  ReaderTable table() { return {reinterpret_cast<std::byte*>(rows.get()), row_count}; }

  std::uint32_t slot_count, row_count;
  std::unique_ptr<PublicationLine> line;
  std::unique_ptr<SlotLine[]> slots;
  std::unique_ptr<ReaderRow[]> rows;
  std::unique_ptr<ReplyLine> reply;
};

void scribble(Arena& arena, Input& input) {
  switch (input.byte() % 6) {
    case 0:
      arena.line->current = input.word<std::uint64_t>();
      break;
    case 1:
      input.over(static_cast<void*>(arena.line.get()), sizeof(PublicationLine));
      arena.line->waiting = 0;
      break;
    case 2:
      arena.slots[input.byte() % arena.slot_count].seq = input.word<std::uint64_t>();
      break;
    case 3:
      arena.rows[0].want = input.byte() == 1;  // rarely: the writer then waits 2 ms for the reader
      input.over(static_cast<void*>(&arena.rows[input.byte() % arena.row_count]), offsetof(ReaderRow, want));
      break;
    case 4:
      arena.rows[input.byte() % arena.row_count].pin = input.word<std::uint64_t>();
      break;
    case 5:
      arena.rows[input.byte() % arena.row_count].held = input.word<std::uint64_t>();
      break;
  }
}

void read(ReadSide& side, Arena& arena, Input& input) {
  const auto entered = side.try_enter(static_cast<Consistency>(input.byte() % 3));
  if (entered == Enter::same || entered == Enter::moved) {
    CHECK(slot_of(side.held()) < arena.slot_count);
    if (entered == Enter::moved) side.applied();
    scribble(arena, input);
    side.torn_so_far();
    side.leave();
  } else {
    side.drop();
  }
  side.last_words();
  side.unchanged();
}

void write(PublicationWriter& writer, Arena& arena, Input& input) {
  if (writer.begin() == Begin::ready || writer.wait_begin(Nanoseconds(0)) == Begin::ready) {
    CHECK(writer.slot() < arena.slot_count);
    scribble(arena, input);
    if (input.byte() % 4)
      writer.commit();
    else
      writer.abort();
  } else {
    for (const auto& blocker : writer.blockers()) CHECK(blocker.row < arena.row_count);
    writer.abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const std::uint32_t slots = input.byte() % 4 + 1, rows = input.byte() % 5 + 1;
  const bool on_device = input.byte() % 4 == 0;
  Arena arena(slots, rows);
  PublicationWriter writer(*arena.line, arena.slots.get(), slots, arena.table(), *arena.reply, kWriter, on_device);
  CHECK(writer.begin() == Begin::ready);
  writer.commit();
  auto table = arena.table();
  const auto row = table.claim(kReader, 0);
  CHECK(row && *row < rows);
  ReadSide side(*arena.line, arena.slots.get(), slots, table[*row], *arena.reply, kReader, Consistency::pinned);
  for (int step = 0; step < 24 && !input.empty(); ++step) {
    switch (input.byte() % 6) {
      case 0:
      case 1:
        scribble(arena, input);
        break;
      case 2:
        read(side, arena, input);
        break;
      case 3:
        write(writer, arena, input);
        break;
      case 4:
        for (std::uint32_t i = 0; i < rows; ++i) {
          const auto seen = table.look(i);
          if (i != *row && seen.owner != 0) table.reap(i, seen.owner, kWriter);
        }
        break;
      case 5: {
        const auto other = table.claim(pack_owner(3, input.byte(), 1), input.byte());
        CHECK(!other || *other < rows);
        break;
      }
    }
  }
  side.enter_after_death();
  side.retire();
  return 0;
}
