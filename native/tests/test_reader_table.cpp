#include <set>
#include <thread>
#include <vector>

#include "fixture.hpp"

using namespace shmsync;
using namespace shmsync::test;

namespace {

void a_full_table_refuses() {
  Memory memory(1, 2);
  CHECK(memory.table.claim(reader_id(0), 5) == 0u);
  CHECK(memory.table.claim(reader_id(1), kNoWorker) == 1u);
  CHECK(!memory.table.claim(reader_id(2), 0).has_value());
  CHECK(memory.table[0].worker.load() == 5);
}

void a_claim_shows_nothing_of_its_predecessor() {
  Memory memory(1, 1);
  CHECK(memory.table.claim(reader_id(0), 3).has_value());
  memory.table[0].pin.store(257);
  memory.table[0].acked.store(9);
  memory.table[0].want.store(1);
  memory.table.release(0);
  CHECK(memory.table.claim(reader_id(1), kNoWorker) == 0u);
  CHECK(memory.table[0].pin.load() == 0 && memory.table[0].acked.load() == 0 && memory.table[0].want.load() == 0);
}

void an_ack_outlives_its_reader_until_the_next_claim() {
  Memory memory(1, 1);
  CHECK(memory.table.claim(reader_id(0), 3).has_value());
  memory.table[0].acked.store(9);
  memory.table.release(0);
  const auto left = memory.table.look(0);
  CHECK(left.owner == 0 && left.worker == 3 && left.acked == 9 && left.pin == 0);
  CHECK(memory.table.claim(reader_id(1), 4) == 0u);
  const auto next = memory.table.look(0);
  CHECK(next.worker == 4 && next.acked == 0);
}

void a_row_is_forgotten_only_when_nobody_has_it() {
  Memory memory(1, 2);
  PublicationWriter writer = memory.writer();
  publish(writer);
  ReadSide reader = memory.reader();
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  reader.leave();
  const std::int32_t worker = memory.table.look(0).worker;
  memory.table.forget(0, kWriter);
  CHECK(memory.table.look(0).worker == worker && memory.table.look(0).acked == 1);
  reader.retire();
  memory.table.release(0);
  CHECK(memory.table.look(0).acked == 1);  // the writer may look for it only now
  memory.table.forget(0, kWriter);
  const auto look = memory.table.look(0);
  CHECK(look.owner == 0 && look.worker == kNoWorker && look.acked == 0);
  CHECK(memory.table.claim(reader_id(5), 1) == 0u);
}

// Neither the ack of the previous owner, nor of one that came and went during the look.
void an_owner_without_an_index_yet_has_no_ack() {
  Memory memory(1, 1);
  CHECK(memory.table.claim(reader_id(0), 3) == 0u);
  memory.table[0].acked.store(9);
  memory.table[0].worker.store(kUnnamed);
  const auto look = memory.table.look(0);
  CHECK(look.owner == reader_id(0) && look.worker == kNoWorker && look.acked == 0);
}

// Owners come and go while another thread looks: it never takes one worker's ack for another's.
void an_ack_is_never_taken_for_another_workers() {
  constexpr int kRounds = 20000;
  Memory memory(1, 1);
  std::atomic<bool> done{false};
  std::thread looker([&] {
    while (!done.load()) {
      const auto look = memory.table.look(0);
      CHECK(look.acked == 0 || look.acked == static_cast<std::uint64_t>(look.worker));
    }
  });
  for (int round = 1; round <= kRounds; ++round) {
    ReaderTable table = memory.table;
    CHECK(table.claim(reader_id(1), round) == 0u);
    table[0].acked.store(static_cast<std::uint64_t>(round), std::memory_order_release);
    table.release(0);
  }
  done = true;
  looker.join();
}

void reaping_takes_only_the_dead_owners_row() {
  Memory memory(1, 1);
  CHECK(memory.table.claim(reader_id(0), kNoWorker).has_value());
  memory.table[0].pin.store(257);
  CHECK(!memory.table.reap(0, reader_id(1), kWriter));
  CHECK(memory.table[0].pin.load() == 257);
  CHECK(memory.table.reap(0, reader_id(0), kWriter));
  CHECK(memory.table[0].pin.load() == 0 && memory.table[0].owner.load() == 0);
  CHECK(!memory.table.reap(0, reader_id(0), kWriter));  // a second reaper comes too late
}

void an_owner_word_tells_programs_and_processes_apart() {
  constexpr std::uint64_t kPid = 4'194'303, kTicks = 0x3ff'ffff'ffff, kImage = 0xf'ffff;
  constexpr auto owner = pack_owner(kPid, kTicks, kImage);
  CHECK(pid_of(owner) == kPid && image_of(owner) == kImage);
  CHECK(may_be_same_owner(owner, owner));
  CHECK(!may_be_same_owner(owner, pack_owner(kPid - 1, kTicks, kImage)));
  CHECK(!may_be_same_owner(owner, pack_owner(kPid, kTicks - 1, kImage)));
  CHECK(!may_be_same_owner(owner, pack_owner(kPid, kTicks, kImage - 1)));
  CHECK(may_be_same_owner(owner, pack_owner(kPid, kTicks, 0)));
  CHECK(may_be_same_owner(pack_owner(kPid, kTicks, 0), owner));
  CHECK(!may_be_same_owner(owner, pack_owner(kPid, kTicks - 1, 0)));
}

// Every word counts, none may be hidden, and the image fits and is never 0.
void an_image_comes_from_all_of_its_words() {
  using Words = std::vector<std::uint64_t>;
  std::set<std::uint64_t> images;
  constexpr std::uint64_t kBegin = 0x5555'5555'4000, kPage = 4096;
  for (std::uint64_t i = 0; i < 1000; ++i)
    images.insert(image_from(Words{kBegin + i * kPage, kBegin + (i + 9) * kPage, 0x7ffc'0000'0000 - 16 * i}));
  CHECK(images.size() > 990);
  CHECK(*images.begin() > 0 && *images.rbegin() < 1u << kImageBits);
  CHECK(image_from(Words{2, 3, 4}) != image_from(Words{2, 3, 5}) &&
        image_from(Words{2, 3, 4}) != image_from(Words{3, 2, 4}));
  CHECK(image_from(Words{0, 3, 4}) == 0 && image_from(Words{2, 3, 1}) == 0);
}

// Claimers, a reaper and take-overs at once: a row never has two owners that both think they got it.
void one_winner_per_row() {
  constexpr std::uint32_t kRows = 4, kThreads = 4, kRounds = 3000;
  Memory memory(1, kRows);
  std::vector<std::atomic<int>> holders(kRows);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      ReaderTable table = memory.table;
      for (std::uint32_t round = 0; round < kRounds; ++round) {
        const auto row = table.claim(reader_id(t), kNoWorker);
        if (!row) continue;
        CHECK(holders[*row].fetch_add(1) == 0);
        CHECK(table[*row].acked.load() == 0);
        table[*row].acked.store(t + 1);
        CHECK(holders[*row].fetch_sub(1) == 1);
        if (round % 2)
          table.release(*row);
        else  // as if this process had died and another one found out
          CHECK(table.take_over(*row, reader_id(t), reader_id(t + 50), kNoWorker) &&
                table.reap(*row, reader_id(t + 50), kWriter));
      }
    });
  for (auto& thread : threads) thread.join();
  for (std::uint32_t i = 0; i < kRows; ++i) CHECK(memory.table[i].owner.load() == 0);
}

}  // namespace

int main() {
  a_row_is_forgotten_only_when_nobody_has_it();
  a_full_table_refuses();
  a_claim_shows_nothing_of_its_predecessor();
  an_ack_outlives_its_reader_until_the_next_claim();
  an_owner_without_an_index_yet_has_no_ack();
  an_ack_is_never_taken_for_another_workers();
  reaping_takes_only_the_dead_owners_row();
  an_owner_word_tells_programs_and_processes_apart();
  an_image_comes_from_all_of_its_words();
  one_winner_per_row();
}
