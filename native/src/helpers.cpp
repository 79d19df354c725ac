#include "shmsync/helpers.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>

#include "shmsync/spin.hpp"

namespace shmsync {
namespace {

constexpr std::size_t kStack = std::size_t{256} << 10;

enum Phase : std::uint32_t { absent, claimed, called, working, idle, asleep };
constexpr std::uint32_t kPhaseBits = 3, kPhaseMask = (1u << kPhaseBits) - 1;

constexpr Phase phase(std::uint32_t word) { return static_cast<Phase>(word & kPhaseMask); }
constexpr std::uint32_t with(std::uint32_t word, Phase phase) { return (word & ~kPhaseMask) | phase; }
// Each call has its own number, so that a caller takes back its own call and no later one.
constexpr std::uint32_t next_call(std::uint32_t word) { return (word & ~kPhaseMask) + (1u << kPhaseBits) + called; }

struct alignas(kLine) Helper {
  Word32 state;  // a number of the call and a Phase; futex: the helper sleeps on it
  // Of the call: written while the state is `claimed`, read by the helper that took the call.
  Job* job;
  unsigned number;
  Nanoseconds linger;
  int processor;  // on which the caller was
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
    // SYNC copy.call: acquire; pairs with call_helpers(). The job and its plan are seen as the caller made them.
    std::uint32_t word = me.state.load(std::memory_order_acquire);
    switch (phase(word)) {
      case called: {
        if (!me.state.compare_exchange_strong(word, with(word, working), std::memory_order_relaxed)) break;
        Job& job = *me.job;
        const Nanoseconds linger = me.linger;
        if (out_of_the_way(me)) job.help(me.number);
        job.drop();
        // SYNC copy.idle: release; pairs with call_helpers(). The next caller writes the call after we have read ours.
        me.state.store(with(word, idle), std::memory_order_release);
        spin_until([&me] { return phase(me.state.load(std::memory_order_relaxed)) != idle; }, linger);
        break;
      }
      case idle:
        me.state.compare_exchange_strong(word, with(word, asleep), std::memory_order_relaxed);
        break;
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

// In a forked child. What a helper of the parent was doing stays undone there, its job unfreed.
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

}  // namespace

Called call_helpers(Job& job, unsigned wanted, Reach reach, Nanoseconds linger) {
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
    if (was != idle && (reach == Reach::awake || (was != asleep && was != absent))) continue;
    // SYNC copy.idle: acquire; pairs with the helper's end of a job.
    if (!helper.state.compare_exchange_strong(word, with(word, claimed), std::memory_order_acquire)) continue;
    job.keep();
    helper.job = &job;
    helper.number = reached.count + 1;
    helper.linger = linger;
    helper.processor = processor;
    helper.allowed = allowed;
    const std::uint32_t call = next_call(word);
    // SYNC copy.call: release; pairs with the helper's look at its state.
    helper.state.store(call, std::memory_order_release);
    if (was == absent && !start(helper)) {
      helper.state.store(with(call, absent), std::memory_order_release);
      job.drop();
      break;
    }
    if (was == asleep) futex_wake_all(helper.state);
    reached.all[reached.count++] = {i, call};
  }
  return reached;
}

void dismiss_helpers(Job& job, const Called& reached) {
  for (unsigned i = 0; i < reached.count; ++i) {
    auto [helper, call] = reached.all[i];
    if (g_helpers[helper].state.compare_exchange_strong(call, with(call, idle), std::memory_order_release)) job.drop();
  }
}

unsigned helpers_present() {
  unsigned present = 0;
  for (const Helper& helper : g_helpers) present += phase(helper.state.load(std::memory_order_relaxed)) != absent;
  return present;
}

}  // namespace shmsync
