// An arena on a device: copies and reads that are done later, on threads of the device, in the order of a queue.
#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

#include "fixture.hpp"

using namespace shmsync;
using namespace shmsync::test;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kPublications = 200;
#else
constexpr int kPublications = 2000;
#endif
constexpr int kReaders = 3;
constexpr std::size_t kWords = 64;

void run(const std::shared_ptr<Later>& later) { run_later(later->ticket()); }

void a_read_that_is_not_done_holds_its_slot() {
  Memory memory(2, 1);
  auto writer = memory.writer(true);
  publish(writer);
  auto reader = memory.device_reader();
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  const auto first = reader.device()->begin(slot_of(reader.held()));
  const auto second = reader.device()->begin(slot_of(reader.held()));
  CHECK(!reader.leave());
  CHECK(memory.table.look(0).pin == 0);
  publish(writer);
  CHECK(writer.begin() == Begin::busy);
  CHECK(writer.blockers().size() == 1 && writer.blockers()[0].version == 1);
  run(first);
  CHECK(writer.wait_begin(std::chrono::milliseconds(1)) == Begin::busy);
  run(second);
  CHECK(reader.device()->idle());
  CHECK(writer.wait_begin(std::chrono::milliseconds(1)) == Begin::ready);
  CHECK(writer.commit() == 3);
}

void an_ack_waits_for_reads_of_older_versions() {
  Memory memory(3, 1);
  auto writer = memory.writer(true);
  publish(writer);
  auto reader = memory.device_reader();
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  CHECK(memory.table.look(0).acked == 1);
  const auto old = reader.device()->begin(slot_of(reader.held()));
  CHECK(!reader.leave());
  publish(writer);
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  const auto newer = reader.device()->begin(slot_of(reader.held()));
  CHECK(!reader.leave());
  CHECK(memory.table.look(0).acked == 1);
  auto rows = writer.claimed_rows();
  CHECK(!writer.wait_acks(2, rows, std::chrono::milliseconds(1)));
  run(old);
  CHECK(memory.table.look(0).acked == 2);  // reads of the acked version itself may go on
  CHECK(writer.wait_acks(2, rows, std::chrono::milliseconds(1)));
  run(newer);
}

void in_place_the_writer_waits_for_reads() {
  Memory memory(1, 1);
  auto writer = memory.writer(true);
  publish(writer);
  auto reader = memory.device_reader();
  CHECK(reader.try_enter() == Enter::moved);
  const auto read = reader.device()->begin(0);
  CHECK(!reader.leave());
  CHECK(writer.begin() == Begin::busy);
  run(read);
  CHECK(writer.wait_begin(std::chrono::milliseconds(1)) == Begin::ready);
  writer.abort();
}

void garbage_evicts_and_a_lost_row_is_left_alone() {
  Memory memory(2, 2);
  auto writer = memory.writer(true);
  publish(writer);
  auto reader = memory.device_reader();
  CHECK(reader.try_enter() == Enter::moved);
  const auto read = reader.device()->begin(slot_of(reader.held()));
  CHECK(!reader.leave());
  memory.table[0].held.store(~std::uint64_t{0});  // slots that were never written
  CHECK(writer.begin() == Begin::ready);
  writer.abort();
  CHECK(memory.table.look(0).owner == 0 && memory.table.look(0).held == 0);
  CHECK(memory.table.claim(reader_id(1), 7) == 0u);
  run(read);  // the row has another owner now
  CHECK(memory.table.look(0).acked == 0 && memory.table.look(0).held == 0);
  CHECK(reader.try_enter() == Enter::evicted);
  // In host memory no code looks at the word.
  Memory host(2, 1);
  auto plain = host.writer();
  publish(plain);
  host.table[0].held.store(~std::uint64_t{0});
  CHECK(publish(plain) == 2);
}

void a_commit_is_made_once_or_cancelled() {
  Memory memory(2, 1);
  auto writer = memory.writer(true);
  CHECK(writer.begin() == Begin::ready);
  auto commit = commit_later(writer);
  void* const late = commit->ticket();
  CHECK(!commit->wait(std::chrono::milliseconds(1)));
  CHECK(commit->cancel() && !commit->cancel());
  run_later(late);
  CHECK(writer.version() == 0 && !commit->wait(Nanoseconds(0)));
  writer.abort();
  CHECK(writer.begin() == Begin::ready);
  commit = commit_later(writer);
  void *const once = commit->ticket(), *const twice = commit->ticket();
  run_later(once);
  run_later(twice);
  CHECK(writer.version() == 1 && !commit->cancel() && commit->wait(Nanoseconds(0)));
}

// One thread that does what it is given, in order.
class Queue {
 public:
  ~Queue() {
    give(nullptr);
    thread_.join();
  }
  void give(std::function<void()> work) {
    const std::lock_guard locked(mutex_);
    line_.push_back(std::move(work));
    bell_.notify_one();
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock locked(mutex_);
      bell_.wait(locked, [this] { return !line_.empty(); });
      const auto work = std::move(line_.front());
      line_.pop_front();
      locked.unlock();
      if (!work) return;
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable bell_;
  std::deque<std::function<void()>> line_;
  std::thread thread_{[this] { serve(); }};
};

// Plain words: a slot that is written while a read of it is under way is a race, and a wrong value.
void copies_and_reads_on_queues(std::uint32_t slot_count) {
  Memory memory(slot_count, kReaders);
  auto writer = memory.writer(true);
  std::vector<std::array<std::uint64_t, kWords>> slab(slot_count);
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> read{0};
  std::vector<ReadSide> sides;
  for (int i = 0; i < kReaders; ++i) sides.push_back(memory.device_reader());
  {
    Queue copies;
    const auto publish_later = [&](std::uint64_t version) {
      Begin begun = writer.begin();
      while (begun == Begin::busy) begun = writer.wait_begin(kSlice);
      copies.give([&slab, version, slot = writer.slot()] { slab[slot].fill(version); });
      auto commit = commit_later(writer);
      copies.give([ticket = commit->ticket()] { run_later(ticket); });
      while (!commit->wait(kSlice)) {
      }
    };
    publish_later(1);
    std::vector<std::thread> readers;
    for (auto& side : sides)
      readers.emplace_back([&] {
        Queue kernels;
        for (int mine = 0; !over.load() || mine == 0;) {
          const Enter outcome = side.try_enter();
          if (outcome == Enter::gated) {
            side.wait(kSlice);
            continue;
          }
          CHECK(outcome == Enter::same || outcome == Enter::moved);
          if (outcome == Enter::moved) side.applied();
          const auto slot = slot_of(side.held());
          kernels.give([&slab, &read, slot, version = version_of(side.held())] {
            for (const auto word : slab[slot]) CHECK(word == version);
            ++read;
          });
          kernels.give([ticket = side.device()->begin(slot)->ticket()] { run_later(ticket); });
          CHECK(!side.leave());
          if (++mine % 64 == 0)
            while (!side.device()->wait(kSlice)) {
            }
        }
        while (!side.device()->wait(kSlice)) {
        }
      });
    for (int i = 0; i < kPublications; ++i) {
      publish_later(writer.version() + 1);
      if (i % 16 == 0) {
        auto rows = writer.claimed_rows();
        while (!writer.wait_acks(writer.version(), rows, kSlice)) {
        }
      }
    }
    over = true;
    writer.close();
    for (auto& reader : readers) reader.join();
  }
  CHECK(writer.version() == kPublications + 1);
  std::printf("slots=%u: %llu reads on queues\n", slot_count, static_cast<unsigned long long>(read.load()));
}

}  // namespace

int main() {
  a_read_that_is_not_done_holds_its_slot();
  an_ack_waits_for_reads_of_older_versions();
  in_place_the_writer_waits_for_reads();
  garbage_evicts_and_a_lost_row_is_left_alone();
  a_commit_is_made_once_or_cancelled();
  for (const std::uint32_t slots : {1u, 2u, 3u}) copies_and_reads_on_queues(slots);
}
