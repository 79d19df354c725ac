#include "shmsync/shared_copy.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "shmsync/spin.hpp"

namespace shmsync {
namespace {

constexpr unsigned kMostHelpers = 31;  // of the process
constexpr Nanoseconds kStay = std::chrono::seconds(2);
constexpr Nanoseconds kLookOn = std::chrono::microseconds(100);  // for the rest of a chunk
constexpr std::size_t kStack = std::size_t{256} << 10;

std::size_t total_of(const CopyOp* ops, std::size_t count) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += ops[i].bytes;
  return total;
}

// The plan of a copy. Its maker is a user; it goes with the last of them.
class Work {
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

  void keep() { users_.fetch_add(1, std::memory_order_relaxed); }
  void drop() {
    if (users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // `first`: whose share comes first. A helper has the plan in view: SYNC copy.call.
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

  std::atomic<unsigned> users_{1};
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

// The helpers.

enum Phase : std::uint32_t { absent, claimed, called, working, asleep };
constexpr std::uint32_t kPhaseBits = 3, kPhaseMask = (1u << kPhaseBits) - 1;

constexpr Phase phase(std::uint32_t word) { return static_cast<Phase>(word & kPhaseMask); }
constexpr std::uint32_t with(std::uint32_t word, Phase phase) { return (word & ~kPhaseMask) | phase; }
// Each call has its own number, so that a caller takes back its own call and no later one.
constexpr std::uint32_t next_call(std::uint32_t word) { return (word & ~kPhaseMask) + (1u << kPhaseBits) + called; }

struct alignas(kLine) Helper {
  Word32 state;  // a number of the call and a Phase; futex: the helper sleeps on it
  // Of the call: written while the state is `claimed`, read by the helper that took the call.
  Work* work;
  unsigned number;  // 1 for the first helper that was called, 2 for the next, ...
  int processor;    // on which the caller was
  cpu_set_t allowed;
};
constinit std::array<Helper, kMostHelpers> g_helpers{};  // no destructor: a helper may outlive main()

// Is this another processor than the caller's? A helper that was put there only keeps the caller from going on, so it
// moves to another one.
bool out_of_the_way(const Helper& me) {
  const int here = sched_getcpu();
  if (here != me.processor && here >= 0 && CPU_ISSET(static_cast<unsigned>(here), &me.allowed)) return true;
  cpu_set_t others = me.allowed;
  if (me.processor >= 0) CPU_CLR(static_cast<unsigned>(me.processor), &others);
  return sched_setaffinity(0, sizeof others, &others) == 0;
}

extern "C" void* shmsync_helper(void* argument) {
  Helper& me = *static_cast<Helper*>(argument);
  pthread_setname_np(pthread_self(), "shmsync-copy");
  for (;;) {
    // SYNC copy.call: acquire; pairs with call_helpers(). The plan is seen as the caller made it.
    std::uint32_t word = me.state.load(std::memory_order_acquire);
    switch (phase(word)) {
      case called: {
        if (!me.state.compare_exchange_strong(word, with(word, working), std::memory_order_relaxed)) break;
        Work& work = *me.work;
        if (out_of_the_way(me)) work.take(me.number);
        work.drop();
        // SYNC copy.idle: release; pairs with call_helpers(). The next caller writes the call after we have read ours.
        me.state.store(with(word, asleep), std::memory_order_release);
        break;
      }
      case asleep:
        if (!futex_park(me.state, word, kStay) &&
            me.state.compare_exchange_strong(word, with(word, absent), std::memory_order_release))
          return nullptr;
        break;
      default:  // claimed: a thread is about to call
        relax_processor();
    }
  }
}

// Signals are for the threads that were there before; what a faulty access raises stays with the thread that made it.
sigset_t all_but_faults() {
  sigset_t set;
  sigfillset(&set);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&set, fault);
  return set;
}

// In a forked child. What a helper of the parent was doing stays undone there, its plan unfreed.
void forget_all() {
  for (Helper& helper : g_helpers) helper.state.store(absent, std::memory_order_relaxed);
}

const bool g_forgets = pthread_atfork(nullptr, nullptr, forget_all) == 0;

bool start(Helper& helper) {
  pthread_attr_t attributes;
  if (!g_forgets || pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStack);
  const sigset_t blocked = all_but_faults();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, shmsync_helper, &helper) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return started;
}

// Which helpers a call reached.
struct Called {
  struct One {
    unsigned helper;
    std::uint32_t word;  // its state since
  };
  std::array<One, kMostHelpers> all;
  unsigned count = 0;
};

// Calls at most `wanted` helpers. Where no thread can be started there are fewer.
Called call_helpers(Work& work, unsigned wanted) {
  Called reached;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return reached;  // more processors than it has room for
  // One for each other processor, shared by all callers: a caller that finds one at work goes without it.
  const unsigned most = std::min(kMostHelpers, static_cast<unsigned>(CPU_COUNT(&allowed)) - 1);
  const int processor = sched_getcpu();
  for (unsigned i = 0; i < most && reached.count < wanted; ++i) {
    Helper& helper = g_helpers[i];
    std::uint32_t word = helper.state.load(std::memory_order_relaxed);
    const Phase was = phase(word);
    if (was != asleep && was != absent) continue;
    // SYNC copy.idle: acquire; pairs with the helper's end of a copy.
    if (!helper.state.compare_exchange_strong(word, with(word, claimed), std::memory_order_acquire)) continue;
    work.keep();
    helper.work = &work;
    helper.number = reached.count + 1;
    helper.processor = processor;
    helper.allowed = allowed;
    const std::uint32_t call = next_call(word);
    // SYNC copy.call: release; pairs with the helper's look at its state.
    helper.state.store(call, std::memory_order_release);
    if (was == absent && !start(helper)) {
      helper.state.store(with(call, absent), std::memory_order_release);
      work.drop();
      break;
    }
    if (was == asleep) futex_wake_all(helper.state);
    reached.all[reached.count++] = {i, call};
  }
  return reached;
}

// Those that have not begun forget it.
void dismiss_helpers(Work& work, const Called& reached) {
  for (unsigned i = 0; i < reached.count; ++i) {
    auto [helper, call] = reached.all[i];
    if (g_helpers[helper].state.compare_exchange_strong(call, with(call, asleep), std::memory_order_release))
      work.drop();
  }
}

}  // namespace

unsigned helpers_present() {
  unsigned present = 0;
  for (const Helper& helper : g_helpers) present += phase(helper.state.load(std::memory_order_relaxed)) != absent;
  return present;
}

void copy_by_several(const CopyOp* ops, std::size_t count, unsigned threads, CopyPieces copy) {
  if (threads < 2) return copy(ops, count);
  const std::size_t total = total_of(ops, count);
  threads = static_cast<unsigned>(std::min<std::size_t>({threads, total / kLeastChunk, kMostHelpers + 1}));
  Work* work = threads > 1 ? work_for(ops, count, total, threads, copy) : nullptr;
  if (work == nullptr) return copy(ops, count);
  const Called called = call_helpers(*work, threads - 1);
  work->take(0);
  dismiss_helpers(*work, called);
  work->await_others();
  work->drop();
}

}  // namespace shmsync
