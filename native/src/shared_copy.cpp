#include "shmsync/shared_copy.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace shmsync {
namespace {

constexpr std::size_t kStack = std::size_t{256} << 10;

// Belongs to the caller and to each helper: one that begins late finds it still there.
class Work {
 public:
  Work(const CopyOp* ops, std::size_t count, CopyPieces copy) : copy_(copy) {
    std::size_t room = 0;  // left in the chunk
    for (std::size_t i = 0; i < count; ++i) {
      for (CopyOp rest = ops[i]; rest.bytes != 0;) {
        if (room == 0) {
          chunks_.push_back(pieces_.size());
          room = kChunk;
        }
        const std::size_t bytes = std::min(rest.bytes, room);
        pieces_.push_back({rest.destination, rest.source, bytes});
        rest = {rest.destination + bytes, rest.source + bytes, rest.bytes - bytes};
        room -= bytes;
      }
    }
    left_.store(static_cast<int>(chunks_.size()), std::memory_order_relaxed);  // no helper yet
    chunks_.push_back(pieces_.size());
  }

  std::size_t chunks() const { return chunks_.size() - 1; }

  void take() {
    // SYNC seq.begin: fence(release); pairs with still(). The fence of begin() counts for what its own thread stores.
    std::atomic_thread_fence(std::memory_order_release);
    for (;;) {
      const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);  // the plan itself came with the thread
      if (i >= chunks()) return;
      copy_(pieces_.data() + chunks_[i], chunks_[i + 1] - chunks_[i]);
      // SYNC seq.begin: fence(acquire); pairs with begin(). The fence of still() counts for what its own thread loads.
      std::atomic_thread_fence(std::memory_order_acquire);
      // SYNC copy.done: release; pairs with await_others(). The caller's release of the version passes our stores on.
      if (left_.fetch_sub(1, std::memory_order_release) == 1) left_.notify_one();
    }
  }

  void await_others() {
    // SYNC copy.done: acquire; pairs with take(). A reader that sees the version sees what the helpers stored.
    for (int left; (left = left_.load(std::memory_order_acquire)) != 0;) left_.wait(left, std::memory_order_relaxed);
  }

 private:
  CopyPieces copy_;
  std::vector<CopyOp> pieces_;
  std::vector<std::size_t> chunks_;  // the first piece of each, and the end
  std::atomic<std::size_t> next_{0};
  std::atomic<int> left_{0};  // chunks that are not done
};

extern "C" void* shmsync_help_to_copy(void* argument) {
  const std::unique_ptr<std::shared_ptr<Work>> work(static_cast<std::shared_ptr<Work>*>(argument));
  (*work)->take();
  return nullptr;
}

// Signals are for the threads that were there before; what a faulty access raises stays with the thread that made it.
sigset_t all_but_faults() {
  sigset_t set;
  sigfillset(&set);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&set, fault);
  return set;
}

void start_helpers(const std::shared_ptr<Work>& work, std::size_t helpers) {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStack);
  const sigset_t blocked = all_but_faults();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  for (; helpers > 0; --helpers) {
    std::unique_ptr<std::shared_ptr<Work>> argument(new (std::nothrow) std::shared_ptr<Work>(work));
    pthread_t helper;
    if (!argument || pthread_create(&helper, &attributes, shmsync_help_to_copy, argument.get()) != 0) break;
    argument.release();  // it is the helper's now
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
}

std::shared_ptr<Work> work_for(const CopyOp* ops, std::size_t count, CopyPieces copy) try {
  return std::make_shared<Work>(ops, count, copy);
} catch (const std::bad_alloc&) {
  return nullptr;
}

}  // namespace

void copy_by_several(const CopyOp* ops, std::size_t count, unsigned threads, CopyPieces copy) {
  const std::shared_ptr<Work> work = threads > 1 ? work_for(ops, count, copy) : nullptr;
  if (!work || work->chunks() < 2) return copy(ops, count);
  start_helpers(work, std::min<std::size_t>(threads, work->chunks()) - 1);
  work->take();
  work->await_others();
}

}  // namespace shmsync
