#include "shmsync/faults.hpp"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

namespace shmsync {
namespace {

// Everything that a handler uses is here, in fixed places: it may not take a lock, allocate or call the C library
// beyond the functions that POSIX names async-signal-safe.
struct Range {
  std::atomic<std::uintptr_t> begin{0};  // 0: free. Written last, and first when the range goes
  std::size_t bytes = 0;
  std::array<char, 512> line{};  // what is written of a fault; arena names have at most 200 characters
};
constexpr std::size_t kRanges = 4096;
Range g_ranges[kRanges];
std::mutex g_lock;  // of those who add and remove ranges

struct sigaction g_before = {};  // the handler to go on to
bool g_installed = false;        // under the lock

const Range* find(std::uintptr_t address) {
  for (const Range& range : g_ranges) {
    const auto begin = range.begin.load(std::memory_order_acquire);
    if (begin != 0 && address >= begin && address - begin < range.bytes) return &range;
  }
  return nullptr;
}

// Where this thread's last real fault was. A handler that was put in front of ours, as faulthandler's may be, goes on
// by raise(): that signal carries no address, but the kernel shows the registers of the last fault with every signal.
std::uintptr_t last_fault(const void* context) {
#if defined(__x86_64__)
  constexpr int kPageFault = 14;
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  return registers[REG_TRAPNO] == kPageFault ? static_cast<std::uintptr_t>(registers[REG_CR2]) : 0;
#elif defined(__aarch64__)
  return static_cast<std::uintptr_t>(static_cast<const ucontext_t*>(context)->uc_mcontext.fault_address);
#else
  static_cast<void>(context);
  return 0;
#endif
}

std::uintptr_t address_of(const siginfo_t& info, const void* context) {
  if (info.si_code > 0) return reinterpret_cast<std::uintptr_t>(info.si_addr);  // from the kernel
  return info.si_code == SI_TKILL && info.si_pid == getpid() ? last_fault(context) : 0;
}

// The handler that was there before is put back, and gets the signal as if ours had never been: a real fault comes
// again when the instruction is repeated, and one that was sent is sent again.
void on_fault(int, siginfo_t* info, void* context) {
  const int error = errno;
  if (const auto address = address_of(*info, context))
    if (const Range* range = find(address))  // in one write: lines of several processes do not mix
      if (write(STDERR_FILENO, range->line.data(), std::strlen(range->line.data())) < 0) errno = error;
  sigaction(SIGSEGV, &g_before, nullptr);
  if (info->si_code <= 0)
    syscall(SYS_rt_tgsigqueueinfo, getpid(), static_cast<pid_t>(syscall(SYS_gettid)), SIGSEGV, info);
  errno = error;
}

// Only the default handler may be replaced later: a handler that came after ours may go on to ours, and a circle of
// handlers would never end.
void install() {
  struct sigaction now = {};
  if (sigaction(SIGSEGV, nullptr, &now) != 0) return;
  const bool ours = (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault;
  const bool none = !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
  if (ours || (g_installed && !none)) return;
  g_before = now;
  g_installed = true;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;  // the usual stack may be what has overflowed
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace

bool watch_faults(std::uintptr_t begin, std::size_t bytes, std::string_view name) {
  const std::lock_guard lock(g_lock);
  for (Range& range : g_ranges) {
    if (range.begin.load(std::memory_order_relaxed) != 0) continue;
    range.bytes = bytes;
    std::snprintf(
        range.line.data(), range.line.size(),
        "shmsync: a write into the weights of arena '%.*s', which are read-only in this process, ends it "
        "(SIGSEGV). Change weights in the trainer, by publish() or inside update(); or change a private copy: "
        "sub.snapshot(), tensor.clone(), copy.deepcopy(module)\n",
        static_cast<int>(std::min<std::size_t>(name.size(), 200)), name.data());
    range.begin.store(begin, std::memory_order_release);
    install();
    return true;
  }
  return false;
}

void unwatch_faults(std::uintptr_t begin) {
  const std::lock_guard lock(g_lock);
  for (Range& range : g_ranges)
    if (range.begin.load(std::memory_order_relaxed) == begin) {
      range.begin.store(0, std::memory_order_release);
      return;
    }
}

bool is_watched(std::uintptr_t address) { return find(address) != nullptr; }

void faults_after_fork() { new (&g_lock) std::mutex; }

}  // namespace shmsync
