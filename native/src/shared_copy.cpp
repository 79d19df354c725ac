#include "shmsync/shared_copy.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "shmsync/spin.hpp"

namespace shmsync {
namespace {

constexpr std::size_t kMostHelpers = 31;
constexpr std::chrono::seconds kStay{2};
constexpr Nanoseconds kLookOn = std::chrono::microseconds(100);  // for the rest of a chunk
constexpr std::size_t kStack = std::size_t{256} << 10;

// Where the thread that asks for a copy runs, and may run.
struct Caller {
  Caller() {
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) others = static_cast<std::size_t>(CPU_COUNT(&allowed)) - 1;
  }
  int processor = sched_getcpu();
  cpu_set_t allowed{};
  std::size_t others = 0;  // processors beside this one; 0 where there are more than a set has room for
};

// The plan of a copy, of its caller and of the helpers that have begun it.
class Work {
 public:
  Work(const CopyOp* ops, std::size_t count, std::size_t total, std::size_t threads, CopyPieces copy,
       const Caller& caller)
      : ops_(ops), copy_(copy), caller_(caller) {
    const std::size_t chunk = std::clamp(total / (threads * 4), kLeastChunk, kChunk);
    cuts_.reserve(total / chunk + 2);
    std::size_t room = 0;  // left in the chunk
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t at = 0; at < ops[i].bytes;) {
        if (room == 0) {
          cuts_.push_back({i, at});
          room = chunk;
        }
        const std::size_t bytes = std::min(ops[i].bytes - at, room);
        at += bytes;
        room -= bytes;
      }
    }
    left_.store(static_cast<std::uint32_t>(cuts_.size()), std::memory_order_relaxed);
    cuts_.push_back({count, 0});
  }

  // Copies chunks until none is left to take: the caller from the first on, its helpers from the last, so that each
  // takes about the same ones in every copy of these bytes, which its processor's cache may still have.
  void take(bool from_the_first) {
    // SYNC seq.begin: fence(release); pairs with still(). The fence of begin() counts for what its own thread stores.
    std::atomic_thread_fence(std::memory_order_release);
    const std::size_t chunks = cuts_.size() - 1;
    while (taken_.fetch_add(1, std::memory_order_relaxed) < chunks) {  // so those of both ends never meet
      const std::size_t i = from_the_first ? first_.fetch_add(1, std::memory_order_relaxed)
                                           : chunks - 1 - last_.fetch_add(1, std::memory_order_relaxed);
      copy_chunk(cuts_[i], cuts_[i + 1]);
      // SYNC seq.begin: fence(acquire); pairs with begin(). That of still() counts for what its own thread loads.
      std::atomic_thread_fence(std::memory_order_acquire);
      // SYNC copy.done: release; pairs with await_others(). The caller's release of the version passes our stores on.
      if (left_.fetch_sub(1, std::memory_order_release) == 1) left_.notify_one();
    }
  }

  const Caller& caller() const { return caller_; }

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
  Caller caller_;
  std::vector<Cut> cuts_;  // the first of each chunk, and the end
  alignas(kLine) std::atomic<std::size_t> taken_{0};
  alignas(kLine) std::atomic<std::size_t> first_{0};   // by the caller
  alignas(kLine) std::atomic<std::size_t> last_{0};    // by helpers
  alignas(kLine) std::atomic<std::uint32_t> left_{0};  // chunks that are not done
};

// The helpers of this process. They wait for the plans of copies, and end when none has come for a while. The mutex is
// held for some steps only, never while bytes are copied.
struct Helpers {
  std::mutex mutex;
  std::condition_variable called;
  std::vector<std::shared_ptr<Work>> calls;  // one for each helper that is wanted
  std::size_t present = 0, busy = 0;
};
Helpers* g_helpers = new Helpers;  // never deleted: a helper may outlive main()

// Is this another processor than the caller's? A helper that was put there only keeps the caller from going on, so it
// moves to another one.
bool out_of_the_way(const Caller& caller) {
  const int here = sched_getcpu();
  if (here != caller.processor && here >= 0 && CPU_ISSET(static_cast<unsigned>(here), &caller.allowed)) return true;
  cpu_set_t others = caller.allowed;
  if (caller.processor >= 0) CPU_CLR(static_cast<unsigned>(caller.processor), &others);
  return sched_setaffinity(0, sizeof others, &others) == 0;
}

extern "C" void* shmsync_helper(void* argument) {
  Helpers& all = *static_cast<Helpers*>(argument);
  pthread_setname_np(pthread_self(), "shmsync-copy");
  std::unique_lock lock(all.mutex);
  while (all.called.wait_for(lock, kStay, [&] { return !all.calls.empty(); })) {
    std::shared_ptr<Work> work = std::move(all.calls.back());
    all.calls.pop_back();
    ++all.busy;
    lock.unlock();
    if (out_of_the_way(work->caller())) work->take(false);
    work.reset();
    lock.lock();
    --all.busy;
  }
  --all.present;
  return nullptr;
}

// In a forked child. What a helper of the parent was doing stays undone there, its plan unfreed.
void forget_all() { g_helpers = new Helpers; }

const bool g_forgets = pthread_atfork(nullptr, nullptr, forget_all) == 0;

// No signal is the thread's but what a faulty access raises.
bool start_helper(Helpers& all) {
  pthread_attr_t attributes;
  if (!g_forgets || pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStack);
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, shmsync_helper, &all) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return started;
}

}  // namespace

std::size_t helpers_present() {
  const std::lock_guard lock(g_helpers->mutex);
  return g_helpers->present;
}

void copy_by_several(const CopyOp* ops, std::size_t count, unsigned threads, CopyPieces copy) try {
  if (threads < 2) return copy(ops, count);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += ops[i].bytes;
  const Caller caller;
  const std::size_t wanted = std::min({std::size_t{threads}, total / kLeastChunk, kMostHelpers + 1, caller.others + 1});
  if (wanted < 2) return copy(ops, count);
  const auto work = std::make_shared<Work>(ops, count, total, wanted, copy, caller);
  Helpers& all = *g_helpers;
  {
    const std::lock_guard lock(all.mutex);
    // One for each other processor, shared by all callers: a caller that finds one at work goes without it.
    while (all.present < std::min(caller.others, all.busy + wanted - 1) && start_helper(all)) ++all.present;
    all.calls.insert(all.calls.end(), std::min(wanted - 1, all.present - all.busy), work);
  }
  for (std::size_t i = 1; i < wanted; ++i) all.called.notify_one();
  work->take(true);
  {
    const std::lock_guard lock(all.mutex);
    std::erase(all.calls, work);  // those that have not begun forget it
  }
  work->await_others();
} catch (const std::bad_alloc&) {
  copy(ops, count);
}

}  // namespace shmsync
