// One writer and several readers on one buffer, without pause. Under ThreadSanitizer a data race on the bytes of a
// pinned section, or on anything else that acquire and release should order, is an error. (Fences are invisible to
// it: the orderings that only a fence gives, pin against gate and the wake, are proven in litmus/.)
//
// Pinned: plain bytes. Optimistic: relaxed atomic words, since reading them while they change is the point.
#include <array>
#include <thread>

#include "fixture.hpp"
#include "shmsync/seqlock.hpp"

using namespace shmsync;
using namespace shmsync::test;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kPublications = 100;
constexpr std::size_t kWords = 64;
#else
constexpr int kPublications = 300;
constexpr std::size_t kWords = 512;
#endif
constexpr int kReaders = 3;

template <class Word>
using Slab = std::vector<std::array<Word, kWords>>;

void store(std::uint64_t& word, std::uint64_t value) { word = value; }
void store(std::atomic<std::uint64_t>& word, std::uint64_t value) { word.store(value, std::memory_order_relaxed); }
std::uint64_t load(const std::uint64_t& word) { return word; }
std::uint64_t load(const std::atomic<std::uint64_t>& word) { return word.load(std::memory_order_relaxed); }

template <class Word>
void run(std::uint32_t slot_count, Consistency consistency) {
  Memory memory(slot_count, kReaders);
  auto writer = memory.writer();
  Slab<Word> slab(slot_count);
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> accepted{0}, torn{0};

  const auto write = [&](std::uint64_t version) {
    for (auto& word : slab[writer.slot()]) store(word, version);
  };
  CHECK(writer.begin() == Begin::ready);
  write(1);
  writer.commit();

  std::vector<ReadSide> sides;
  for (int i = 0; i < kReaders; ++i) sides.push_back(memory.reader(consistency));
  std::vector<std::thread> readers;
  for (auto& side : sides)
    readers.emplace_back([&] {
      std::uint64_t mine = 0, newest = 0;
      while (!done.load() || mine == 0) {
        const Enter outcome = side.try_enter();
        if (outcome == Enter::gated) {
          side.wait(kSlice);
          continue;
        }
        CHECK(outcome == Enter::same || outcome == Enter::moved);
        const std::uint64_t version = version_of(side.held());
        bool whole = true;
        for (const auto& word : slab[slot_of(side.held())]) whole &= load(word) == version;
        if (outcome == Enter::moved) side.applied();
        if (side.leave()) {
          ++torn;
          continue;
        }
        CHECK(whole);              // never torn
        CHECK(version >= newest);  // never backwards
        newest = version;
        ++mine;
      }
      accepted += mine;
    });

  for (int i = 0; i < kPublications; ++i) {
    Begin begun = writer.begin();
    while (begun == Begin::busy) begun = writer.wait_begin(kSlice);
    write(writer.version() + 1);
    const auto version = writer.commit();
    if (i % 16 == 0) {
      auto rows = writer.claimed_rows();
      while (!writer.wait_acks(version, rows, kSlice)) {
      }
    }
  }
  done = true;
  writer.close();
  for (auto& reader : readers) reader.join();
  CHECK(writer.version() == kPublications + 1);
  std::printf("slots=%u consistency=%u: %llu sections accepted, %llu torn and rejected\n", slot_count,
              static_cast<unsigned>(consistency), static_cast<unsigned long long>(accepted.load()),
              static_cast<unsigned long long>(torn.load()));
}

// Readers take turns at one row, for a section each. What a section has loaded it had loaded before the writer's next
// store, whichever process has cleared the row's pin in between. The turn orders nothing: only the row does.
void rows_change_hands(std::uint32_t slot_count) {
  Memory memory(slot_count, 1);
  auto writer = memory.writer();
  Slab<std::uint64_t> slab(slot_count);
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> sections{0}, turn{0};
  const auto write = [&](std::uint64_t version) {
    for (auto& word : slab[writer.slot()]) word = version;
  };
  CHECK(writer.begin() == Begin::ready);
  write(1);
  writer.commit();
  std::vector<std::thread> readers;
  for (std::uint32_t i = 0; i < kReaders; ++i)
    readers.emplace_back([&, i] {
      ReaderTable table = memory.table;
      while (!done.load(std::memory_order_relaxed)) {
        const bool mine = turn.load(std::memory_order_relaxed) % kReaders == i;
        const auto row = mine ? table.claim(reader_id(i), kNoWorker) : std::nullopt;
        if (!row) {
          yield_processor();
          continue;
        }
        {
          ReadSide side(memory.line, memory.slots.data(), slot_count, table[*row], memory.reply, reader_id(i),
                        Consistency::pinned);
          if (side.try_enter() != Enter::gated) {
            const std::uint64_t version = version_of(side.held());
            for (const std::uint64_t word : slab[slot_of(side.held())]) CHECK(word == version);
            side.leave();
            sections.fetch_add(1, std::memory_order_relaxed);
          }
          side.retire();
        }
        table.release(*row);
        turn.fetch_add(1, std::memory_order_relaxed);
      }
    });
  std::uint64_t published = 1;
  while (published < kPublications || sections.load(std::memory_order_relaxed) < kPublications) {
    Begin begun = writer.begin();
    while (begun == Begin::busy) begun = writer.wait_begin(kSlice);
    write(writer.version() + 1);
    published = writer.commit();
  }
  done = true;
  for (auto& reader : readers) reader.join();
}

}  // namespace

int main() {
  for (const std::uint32_t slots : {1u, 2u, 3u}) rows_change_hands(slots);
  for (const std::uint32_t slots : {1u, 2u, 3u}) {
    run<std::uint64_t>(slots, Consistency::pinned);
    run<std::atomic<std::uint64_t>>(slots, Consistency::optimistic);
  }
}
