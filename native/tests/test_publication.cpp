#include <algorithm>

#include "fixture.hpp"
#include "shmsync/seqlock.hpp"

using namespace shmsync;
using namespace shmsync::test;

namespace {

void publisher_never_reuses_a_pinned_slot() {
  Memory memory(3, 2);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  CHECK(reader.try_enter() == Enter::moved);
  const auto pinned = slot_of(reader.held());
  for (int i = 0; i < 10; ++i) {
    CHECK(writer.begin() == Begin::ready);
    CHECK(writer.slot() != pinned && writer.slot() != writer.current_slot());
    writer.commit();
  }
  CHECK(!reader.leave());
}

void the_oldest_free_slot_is_written() {
  Memory memory(4, 1);
  auto writer = memory.writer();
  for (int i = 0; i < 6; ++i) publish(writer);
  std::uint64_t oldest = ~std::uint64_t{0};
  for (const auto& slot : memory.slots) oldest = std::min(oldest, slot.seq.load());
  for (std::uint32_t k = 0; k < 4; ++k) {
    if (memory.slots[k].seq.load() != oldest) continue;
    CHECK(writer.begin() == Begin::ready);
    CHECK(writer.slot() == k);
    writer.commit();
    return;
  }
}

void no_free_slot_is_busy_and_writes_nothing() {
  Memory memory(2, 2);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  CHECK(reader.try_enter() == Enter::moved);
  publish(writer);
  CHECK(writer.begin() == Begin::busy);
  CHECK(writer.wait_begin(std::chrono::milliseconds(2)) == Begin::busy);
  CHECK(writer.blockers().size() == 1 && writer.blockers()[0].version == 1);
  writer.abort();
  CHECK(memory.line.waiting.load() == 0);
  CHECK(seqlock::complete(memory.slots[slot_of(reader.held())].seq, 1));
  CHECK(!reader.leave());
  CHECK(publish(writer) == 3);
}

void a_closed_gate_refuses_readers_and_an_abort_opens_it() {
  Memory memory(1, 2);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  auto late = memory.reader();
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  CHECK(writer.begin() == Begin::busy);
  CHECK(late.try_enter() == Enter::gated);
  const auto notify = memory.line.notify.load();
  writer.abort();
  CHECK(memory.line.notify.load() != notify);
  CHECK(late.try_enter() == Enter::moved);
  CHECK(version_of(late.held()) == 1);
  CHECK(!reader.leave() && !late.leave());
}

void poison_keeps_readers_out_until_a_commit_and_reuses_the_version() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  CHECK(writer.begin() == Begin::ready);
  writer.poison();
  CHECK(reader.try_enter() == Enter::poisoned);
  CHECK(reader.last_words() == 0);
  CHECK(writer.begin() == Begin::ready);
  CHECK(writer.commit() == 2);
  CHECK(reader.try_enter() == Enter::moved && version_of(reader.held()) == 2);
  CHECK(!reader.leave());
}

void an_abort_before_anything_was_written_gives_optimistic_readers_the_old_version_back() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader(Consistency::optimistic);
  CHECK(reader.try_enter() == Enter::moved);
  CHECK(writer.begin() == Begin::ready);
  writer.abort();
  CHECK(!reader.leave());  // not torn: no byte has changed
  CHECK(reader.try_enter() != Enter::gated);
  CHECK(version_of(reader.held()) == 1 && !reader.leave());
}

void an_abort_of_the_repair_leaves_the_arena_poisoned() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  CHECK(writer.begin() == Begin::ready);
  writer.poison();
  CHECK(writer.begin() == Begin::ready);
  writer.abort();
  CHECK(seqlock::writing(memory.slots[0].seq.load()));
  CHECK(reader.try_enter() == Enter::poisoned);
}

void versions_can_be_skipped_but_only_grow() {
  for (const std::uint32_t slots : {1u, 3u}) {
    Memory memory(slots, 1);
    auto writer = memory.writer();
    publish(writer);
    auto reader = memory.reader();
    CHECK(!writer.skip_to(1));
    CHECK(!writer.skip_to(kMaxVersion + 1));
    CHECK(writer.skip_to(7));
    CHECK(writer.next_version() == 7 && writer.version() == 1);
    CHECK(reader.try_enter() == Enter::moved && version_of(reader.held()) == 1);
    CHECK(!reader.leave());
    CHECK(writer.begin() == Begin::ready);
    CHECK(!writer.skip_to(9));  // too late: the slot is marked with 7
    CHECK(writer.commit() == 7);
    CHECK(reader.try_enter() == Enter::moved && version_of(reader.held()) == 7);
    CHECK(seqlock::complete(memory.slots[slot_of(reader.held())].seq, 7));
    CHECK(!reader.leave());
    CHECK(publish(writer) == 8);
    CHECK(writer.skip_to(20) && writer.begin() == Begin::ready);
    writer.abort();
    CHECK(writer.next_version() == 9);  // a number that was never published is free again
  }
}

void garbage_in_a_pin_evicts_its_row_and_blocks_nobody() {
  for (const std::uint64_t garbage :
       {~std::uint64_t{0}, pack_current(1, 5) + 1, pack_current(99, 0) + 1, pack_current(1, 0) + kGate + 1}) {
    Memory memory(1, 1);
    auto writer = memory.writer();
    publish(writer);
    auto reader = memory.reader();
    memory.table[0].pin.store(garbage);
    CHECK(publish(writer) == 2);
    CHECK(memory.table[0].owner.load() == 0);
    CHECK(reader.try_enter() == Enter::evicted);
  }
}

void an_ack_from_the_future_counts_for_nothing() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  auto rows = writer.claimed_rows();
  CHECK(rows.size() == 1);
  memory.table[0].acked.store(1000);
  CHECK(!writer.wait_acks(1, rows, std::chrono::milliseconds(1)));
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  CHECK(writer.wait_acks(1, rows, std::chrono::milliseconds(1)));
  CHECK(!reader.leave());
}

void optimistic_sections_say_when_they_were_torn() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader(Consistency::optimistic);
  CHECK(reader.try_enter() == Enter::moved);
  CHECK(!reader.leave());
  CHECK(reader.try_enter() == Enter::moved);
  publish(writer);
  CHECK(reader.torn_so_far());
  CHECK(reader.leave());
  CHECK(memory.table[0].torn.load() == 1);
  CHECK(writer.begin() == Begin::ready);
  CHECK(reader.try_enter() == Enter::gated);  // half written: there is nothing to read
  writer.commit();
}

// The parity of a reused slot is even, but for another version.
void a_reused_slot_is_not_mistaken_for_its_old_version() {
  Memory memory(2, 1);
  auto writer = memory.writer();
  publish(writer);
  const auto old = memory.line.current.load();
  publish(writer);
  publish(writer);
  CHECK(slot_of(memory.line.current.load()) == slot_of(old));
  CHECK(!seqlock::complete(memory.slots[slot_of(old)].seq, version_of(old)));
}

void a_dead_writers_whole_version_is_served_and_its_half_one_never() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  auto reader = memory.reader();
  CHECK(writer.begin() == Begin::ready);
  CHECK(reader.try_enter() == Enter::gated);
  CHECK(reader.enter_after_death() == Enter::poisoned);
  seqlock::end(memory.slots[0].seq, 2);  // it died after the last byte, before `current`
  CHECK(reader.enter_after_death() == Enter::moved && version_of(reader.held()) == 2);
  CHECK(!reader.leave());
}

void a_stopped_reader_that_wants_in_does_not_get_a_turn_with_every_version() {
  Memory memory(1, 1);
  auto writer = memory.writer();
  publish(writer);
  CHECK(memory.table.claim(reader_id(0), kNoWorker) == 0u);
  memory.table[0].want.store(1);
  publish(writer);  // gives it a turn of 2 ms, which it does not take
  const auto start = monotonic_ns();
  for (int i = 0; i < 1000; ++i) publish(writer);
  CHECK(monotonic_ns() - start < 1000 * 2'000'000ull);
}

}  // namespace

int main() {
  publisher_never_reuses_a_pinned_slot();
  the_oldest_free_slot_is_written();
  no_free_slot_is_busy_and_writes_nothing();
  a_closed_gate_refuses_readers_and_an_abort_opens_it();
  poison_keeps_readers_out_until_a_commit_and_reuses_the_version();
  an_abort_before_anything_was_written_gives_optimistic_readers_the_old_version_back();
  an_abort_of_the_repair_leaves_the_arena_poisoned();
  versions_can_be_skipped_but_only_grow();
  garbage_in_a_pin_evicts_its_row_and_blocks_nobody();
  an_ack_from_the_future_counts_for_nothing();
  optimistic_sections_say_when_they_were_torn();
  a_reused_slot_is_not_mistaken_for_its_old_version();
  a_dead_writers_whole_version_is_served_and_its_half_one_never();
  a_stopped_reader_that_wants_in_does_not_get_a_turn_with_every_version();
}
