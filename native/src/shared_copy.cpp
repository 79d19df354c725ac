#include "shmsync/shared_copy.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "shmsync/helpers.hpp"
#include "shmsync/spin.hpp"

namespace shmsync {
namespace {

constexpr Nanoseconds kLookOn = std::chrono::microseconds(100);  // for the rest of a chunk

std::size_t total_of(const CopyOp* ops, std::size_t count) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += ops[i].bytes;
  return total;
}

class Work final : public Job {
 public:
  Work(const CopyOp* ops, std::size_t count, std::size_t total, unsigned threads, CopyPieces copy)
      : ops_(ops), copy_(copy), chunk_(std::clamp(total / (threads * 4), kLeastChunk, kChunk)), shares_(threads) {
    cuts_.reserve(total / chunk_ + 2);
    std::size_t room = 0;  // left in the chunk
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t at = 0; at < ops[i].bytes;) {
        if (room == 0) {
          cuts_.push_back({i, at});
          room = chunk_;
        }
        const std::size_t bytes = std::min(ops[i].bytes - at, room);
        at += bytes;
        room -= bytes;
      }
    }
    const auto chunks = static_cast<std::uint32_t>(cuts_.size());
    cuts_.push_back({count, 0});
    for (unsigned i = 0; i < threads; ++i) {
      shares_[i].next.store(chunks * std::uint64_t{i} / threads, std::memory_order_relaxed);
      shares_[i].end = static_cast<std::uint32_t>(chunks * std::uint64_t{i + 1} / threads);
    }
    left_.store(chunks, std::memory_order_relaxed);
  }

  std::uint32_t chunks() const { return static_cast<std::uint32_t>(cuts_.size()) - 1; }

  // Called by a helper, with its plan in view: SYNC copy.call.
  void help(unsigned number) override { take(number); }

  void take(unsigned first) {
    // SYNC seq.begin: fence(release); pairs with still(). The fence of begin() counts for what its own thread stores.
    std::atomic_thread_fence(std::memory_order_release);
    for (std::size_t k = 0; k < shares_.size(); ++k) {
      Share& share = shares_[(first + k) % shares_.size()];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        const std::uint32_t i = share.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= share.end) break;
        copy_chunk(cuts_[i], cuts_[i + 1]);
        // SYNC seq.begin: fence(acquire); pairs with begin(). That of still() counts for what its own thread loads.
        std::atomic_thread_fence(std::memory_order_acquire);
        // SYNC copy.done: release; pairs with await_others(). The caller's release of the version passes our stores on.
        if (left_.fetch_sub(1, std::memory_order_release) == 1) left_.notify_one();
      }
    }
  }

  void await_others() {
    // SYNC copy.done: acquire; pairs with take(). A reader that sees the version sees what the helpers stored.
    if (spin_until([this] { return left_.load(std::memory_order_acquire) == 0; }, kLookOn)) return;
    // SYNC copy.done: acquire; the same.
    for (std::uint32_t left; (left = left_.load(std::memory_order_acquire)) != 0;)
      left_.wait(left, std::memory_order_relaxed);
  }

 private:
  struct Cut {  // where a chunk begins
    std::size_t op, at;
  };
  struct alignas(kLine) Share {
    std::atomic<std::uint32_t> next{0};
    std::uint32_t end = 0;
  };

  void copy_chunk(Cut from, Cut to) const {
    if (from.op == to.op) return copy_part(from.op, from.at, to.at);
    if (from.at != 0) {
      copy_part(from.op, from.at, ops_[from.op].bytes);
      ++from.op;
    }
    if (to.op > from.op) copy_(ops_ + from.op, to.op - from.op);
    if (to.at != 0) copy_part(to.op, 0, to.at);
  }

  void copy_part(std::size_t op, std::size_t from, std::size_t to) const {
    const CopyOp part{ops_[op].destination + from, ops_[op].source + from, to - from};
    copy_(&part, 1);
  }

  const CopyOp* ops_;  // the caller's: there as long as a chunk is left
  CopyPieces copy_;
  std::size_t chunk_;
  std::vector<Cut> cuts_;  // the first of each chunk, and the end
  std::vector<Share> shares_;
  alignas(kLine) std::atomic<std::uint32_t> left_{0};  // chunks that are not done
};

Work* work_for(const CopyOp* ops, std::size_t count, std::size_t total, unsigned threads, CopyPieces copy) try {
  return new Work(ops, count, total, threads, copy);
} catch (const std::bad_alloc&) {
  return nullptr;
}

// How long the process usually has nothing to copy between two copies. Several threads may add at once: it is a guess.
class Pause {
 public:
  void begins() { since_.store(monotonic_ns(), std::memory_order_relaxed); }
  void ends() {
    const std::uint64_t took = monotonic_ns() - since_.load(std::memory_order_relaxed);
    const auto usual = usual_.load(std::memory_order_relaxed);
    const auto now = static_cast<std::int64_t>(std::min<std::uint64_t>(took, 4 * kShort));
    usual_.store(usual + (now - usual) / 4, std::memory_order_relaxed);
  }
  // For how long a helper should look out for the next copy. 0: it is not to be expected so soon.
  Nanoseconds linger() const {
    const auto usual = usual_.load(std::memory_order_relaxed);
    return Nanoseconds(usual <= kShort ? 2 * usual : 0);
  }
  // A helper that lingers need not be woken. One that has gone to sleep, since others wanted its processor or the
  // copies came later, costs more to wake than it saves of a small copy, but may linger again after it.
  bool time_to_try() { return tries_.fetch_add(1, std::memory_order_relaxed) % 16 == 0; }

 private:
  static constexpr std::int64_t kShort = 100'000;  // ns
  std::atomic<std::uint64_t> since_{0};
  std::atomic<std::int64_t> usual_{4 * kShort};
  std::atomic<unsigned> tries_{0};
};
constinit Pause g_pause;

}  // namespace

void copy_by_several(const CopyOp* ops, std::size_t count, unsigned threads, CopyPieces copy) {
  if (threads < 2) return copy(ops, count);
  const std::size_t total = total_of(ops, count);
  threads = static_cast<unsigned>(std::min<std::size_t>({threads, total / kLeastChunk, kMostHelpers + 1}));
  Work* work = threads > 1 ? work_for(ops, count, total, threads, copy) : nullptr;
  if (work == nullptr) return copy(ops, count);
  g_pause.ends();
  const Nanoseconds linger = g_pause.linger();
  const bool wake = total >= kWakeAbove || (linger > Nanoseconds(0) && g_pause.time_to_try());
  const Reach reach = wake ? Reach::everybody : Reach::awake;
  const Called called = call_helpers(*work, threads - 1, reach, linger);
  work->take(0);
  dismiss_helpers(*work, called);
  work->await_others();
  work->drop();
  g_pause.begins();
}

}  // namespace shmsync
