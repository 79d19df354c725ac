// What a fault does: each case runs in a separate child process, in which the fault happens.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "fixture.hpp"
#include "shmsync/faults.hpp"

using namespace shmsync;

namespace {

struct Outcome {
  int status;
  std::string text;  // what it wrote to stderr
};

template <class F>
Outcome in_child(F&& body) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    signal(SIGSEGV, SIG_DFL);  // a sanitizer has its own handlers
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return {status, text};
}

constexpr std::size_t kRegion = 4096;

volatile char* map(int protection) {
  void* at = mmap(nullptr, kRegion, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED);
  return static_cast<volatile char*>(at);
}

std::uintptr_t address(const volatile char* at) { return reinterpret_cast<std::uintptr_t>(at); }

bool dies(const Outcome& outcome, int number) {
  return WIFSIGNALED(outcome.status) && WTERMSIG(outcome.status) == number;
}

std::size_t lines(const Outcome& outcome) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = outcome.text.find("shmsync: ", at)) != std::string::npos; ++at) ++found;
  return found;
}

void set(int number, void (*handler)(int, siginfo_t*, void*), int flags) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  sigaddset(&action.sa_mask, SIGUSR1);
  CHECK(sigaction(number, &action, nullptr) == 0);
}

bool blocked(int number) {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return sigismember(&mask, number) == 1;
}

volatile char* g_at = nullptr;
volatile std::sig_atomic_t g_calls = 0;

void check_and_leave(int number, siginfo_t* info, void*) {
  const bool right = number == SIGSEGV && info->si_code == SEGV_ACCERR && info->si_addr == const_cast<char*>(g_at);
  _exit(right && blocked(SIGUSR1) && blocked(SIGSEGV) ? 7 : 8);
}

void put_right(int, siginfo_t*, void*) {
  g_calls = g_calls + 1;
  mprotect(const_cast<char*>(g_at), kRegion, PROT_READ | PROT_WRITE);
}

// As faulthandler does: restore the previous handler, and raise the signal again.
struct sigaction g_previous;
void raise_again(int number, siginfo_t*, void*) {
  sigaction(number, &g_previous, nullptr);
  CHECK(write(STDERR_FILENO, "theirs\n", 7) == 7);
  raise(number);
}

char g_stack[64 * 1024];
void on_which_stack(int, siginfo_t*, void*) {
  char here;
  const auto at = reinterpret_cast<std::uintptr_t>(&here);
  const auto begin = reinterpret_cast<std::uintptr_t>(g_stack);
  _exit(at >= begin && at < begin + sizeof g_stack ? 7 : 8);
}

Outcome stack_of(int flags) {
  return in_child([flags] {
    stack_t stack = {};
    stack.ss_sp = g_stack;
    stack.ss_size = sizeof g_stack;
    CHECK(sigaltstack(&stack, nullptr) == 0);
    set(SIGSEGV, on_which_stack, flags);
    auto* at = map(PROT_READ);
    CHECK(watch_faults(address(at), kRegion, "a"));
    at[0] = 1;
  });
}

bool exits(const Outcome& outcome, int code) {
  return WIFEXITED(outcome.status) && WEXITSTATUS(outcome.status) == code;
}

}  // namespace

int main() {
  // A fault in a range prints the arena's name once, and ends the process as before.
  const auto inside = in_child([] {
    auto *other = map(PROT_READ), *at = map(PROT_READ);
    CHECK(watch_faults(address(other), kRegion, "other"));
    CHECK(watch_faults(address(at), kRegion, "policy"));
    at[kRegion - 1] = 1;
  });
  CHECK(dies(inside, SIGSEGV) && lines(inside) == 1 && inside.text.find("arena 'policy'") != std::string::npos);

  // A fault outside of the ranges, or in one that was given back, or a signal that was only sent prints nothing.
  const auto outside = in_child([] {
    auto *at = map(PROT_READ), *other = map(PROT_READ);
    CHECK(watch_faults(address(at), kRegion, "a"));
    other[0] = 1;
  });
  CHECK(dies(outside, SIGSEGV) && lines(outside) == 0);
  const auto given_back = in_child([] {
    auto* at = map(PROT_READ);
    CHECK(watch_faults(address(at), kRegion, "a"));
    unwatch_faults(address(at));
    at[0] = 1;
  });
  CHECK(dies(given_back, SIGSEGV) && lines(given_back) == 0);
  const auto sent = in_child([] {
    CHECK(watch_faults(address(map(PROT_READ)), kRegion, "a"));
    kill(getpid(), SIGSEGV);
    _exit(5);
  });
  CHECK(dies(sent, SIGSEGV) && lines(sent) == 0);
  const auto ignored = in_child([] {
    signal(SIGSEGV, SIG_IGN);
    CHECK(watch_faults(address(map(PROT_READ)), kRegion, "a"));
    kill(getpid(), SIGSEGV);
    _exit(5);
  });
  CHECK(exits(ignored, 5));

  // The handler before gets the kernel's siginfo, under the mask and on the stack that it asked for.
  const auto called = in_child([] {
    set(SIGSEGV, check_and_leave, 0);
    g_at = map(PROT_READ);
    CHECK(watch_faults(address(g_at), kRegion, "a"));
    *g_at = 1;
  });
  CHECK(exits(called, 7) && lines(called) == 1);
  CHECK(exits(stack_of(SA_ONSTACK), 7));
  CHECK(exits(stack_of(0), 8));

  // After a handler that repairs the fault the thread goes on, with its signal mask.
  const auto mended = in_child([] {
    set(SIGSEGV, put_right, 0);
    g_at = map(PROT_READ);
    CHECK(watch_faults(address(g_at), kRegion, "a"));
    *g_at = 1;
    _exit(g_calls == 1 && !blocked(SIGSEGV) && !blocked(SIGUSR1) ? 7 : 8);
  });
  CHECK(exits(mended, 7) && lines(mended) == 1);

  // A handler with SA_RESETHAND is called once.
  const auto once = in_child([] {
    set(SIGSEGV, [](int, siginfo_t*, void*) { CHECK(write(STDERR_FILENO, "theirs\n", 7) == 7); }, SA_RESETHAND);
    g_at = map(PROT_READ);
    CHECK(watch_faults(address(g_at), kRegion, "a"));
    *g_at = 1;
  });
  CHECK(dies(once, SIGSEGV) && once.text.find("theirs") == once.text.rfind("theirs") && lines(once) == 1);

  // A later handler raises the signal again for ours: the address is that of the fault.
  const auto later = in_child([] {
    g_at = map(PROT_READ);
    CHECK(watch_faults(address(g_at), kRegion, "a"));
    CHECK(sigaction(SIGSEGV, nullptr, &g_previous) == 0);
    set(SIGSEGV, raise_again, SA_NODEFER);
    *g_at = 1;
  });
  CHECK(dies(later, SIGSEGV) && later.text.find("theirs") != std::string::npos && lines(later) == 1);

  // The table has an end, and its places are used again.
  const auto full = in_child([] {
    std::uintptr_t begin = 1 << 20;
    std::size_t count = 0;
    while (watch_faults(begin + kRegion * count, kRegion, "many")) ++count;
    CHECK(count >= 1024);
    unwatch_faults(begin);
    CHECK(watch_faults(begin, kRegion, std::string(1000, 'x')) && !watch_faults(1, 1, "none"));
  });
  CHECK(exits(full, 0));
}
