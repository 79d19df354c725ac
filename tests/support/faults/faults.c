// Makes one system call of this process fail, once: the n-th of its kind from the moment it is armed. Preloaded by tests.
//
// Only what a test asks for is counted, so that torch's import and what the interpreter does are left alone. Mappings
// count if they are of a file: the others are the memory of the interpreter.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static const char* const kNames[] = {
    "open",  "shm_open", "shm_unlink", "memfd_create", "ftruncate", "posix_fallocate", "mmap",    "madvise", "fcntl",
    "flock", "pidfd_open", "futex",    "read",         "pread",     "write",           "pwrite",  "poll",    "ppoll",
    "close", "dup",      "dup2",       "stat",         "fstat",     "socket",          "connect", "sendmsg", "recvmsg",
    "recv",  "send",     "opendir",    "fork",         "kill",      "getsockopt",      "unlink",  "accept",
};
enum { kCalls = sizeof kNames / sizeof *kNames };

static volatile int armed, error_number, counting;
static volatile long nth;
static volatile long seen[kCalls];
static volatile int fired;

static int id_of(const char* name) {
  for (int i = 0; i < kCalls; ++i)
    if (strcmp(kNames[i], name) == 0) return i;
  return -1;
}

// From here on, count; and have the n-th call of this name (from 1) fail. n = 0: only count.
int faults_arm(const char* name, int error, long n) {
  const int id = id_of(name);
  for (int i = 0; i < kCalls; ++i) seen[i] = 0;
  armed = id, error_number = error, nth = n, fired = 0;
  __atomic_store_n(&counting, 1, __ATOMIC_SEQ_CST);
  return id;
}

// Stop. Did the call fail?
int faults_disarm(void) {
  __atomic_store_n(&counting, 0, __ATOMIC_SEQ_CST);
  return fired;
}

long faults_seen(const char* name) { return seen[id_of(name)]; }

static int fails(const char* name) {
  if (!counting) return 0;
  static __thread int inside;
  if (inside) return 0;
  inside = 1;
  const int id = id_of(name);
  const long number = __atomic_add_fetch(&seen[id], 1, __ATOMIC_SEQ_CST);
  inside = 0;
  if (id != armed || number != nth) return 0;
  fired = 1;
  errno = error_number;
  return 1;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void* real(const char* name) { return dlsym(RTLD_NEXT, name); }

static mode_t mode_of(int flags, va_list list) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; }

#define OPEN(symbol)                             \
  int symbol(const char* path, int flags, ...) { \
    va_list list;                                \
    va_start(list, flags);                       \
    const mode_t mode = mode_of(flags, list);    \
    va_end(list);                                \
    if (fails("open")) return -1;                \
    return REAL(symbol)(path, flags, mode);      \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(symbol)                                       \
  int symbol(int folder, const char* path, int flags, ...) { \
    va_list list;                                            \
    va_start(list, flags);                                   \
    const mode_t mode = mode_of(flags, list);                \
    va_end(list);                                            \
    if (fails("open")) return -1;                            \
    return REAL(symbol)(folder, path, flags, mode);          \
  }
OPENAT(openat)
OPENAT(openat64)

#define PASS(kind, result, symbol, parameters, arguments) \
  result symbol parameters {                              \
    if (fails(kind)) return (result)-1;                   \
    return REAL(symbol) arguments;                        \
  }
PASS("shm_open", int, shm_open, (const char* name, int flags, mode_t mode), (name, flags, mode))
PASS("shm_unlink", int, shm_unlink, (const char* name), (name))
PASS("unlink", int, unlink, (const char* name), (name))
PASS("memfd_create", int, memfd_create, (const char* name, unsigned flags), (name, flags))
PASS("ftruncate", int, ftruncate, (int fd, off_t size), (fd, size))
PASS("ftruncate", int, ftruncate64, (int fd, off64_t size), (fd, size))
PASS("madvise", int, madvise, (void* at, size_t size, int advice), (at, size, advice))
PASS("flock", int, flock, (int fd, int how), (fd, how))
PASS("read", ssize_t, read, (int fd, void* to, size_t size), (fd, to, size))
PASS("pread", ssize_t, pread, (int fd, void* to, size_t size, off_t at), (fd, to, size, at))
PASS("pread", ssize_t, pread64, (int fd, void* to, size_t size, off64_t at), (fd, to, size, at))
PASS("write", ssize_t, write, (int fd, const void* from, size_t size), (fd, from, size))
PASS("pwrite", ssize_t, pwrite, (int fd, const void* from, size_t size, off_t at), (fd, from, size, at))
PASS("pwrite", ssize_t, pwrite64, (int fd, const void* from, size_t size, off64_t at), (fd, from, size, at))
PASS("poll", int, poll, (struct pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
PASS("ppoll", int, ppoll,
     (struct pollfd * fds, nfds_t count, const struct timespec* timeout, const sigset_t* mask),
     (fds, count, timeout, mask))
PASS("dup", int, dup, (int fd), (fd))
PASS("dup2", int, dup2, (int fd, int to), (fd, to))
PASS("dup2", int, dup3, (int fd, int to, int flags), (fd, to, flags))
PASS("stat", int, stat, (const char* path, struct stat* to), (path, to))
PASS("stat", int, stat64, (const char* path, struct stat64* to), (path, to))
PASS("stat", int, fstatat, (int folder, const char* path, struct stat* to, int flags), (folder, path, to, flags))
PASS("stat", int, fstatat64, (int folder, const char* path, struct stat64* to, int flags), (folder, path, to, flags))
PASS("fstat", int, fstat, (int fd, struct stat* to), (fd, to))
PASS("fstat", int, fstat64, (int fd, struct stat64* to), (fd, to))
PASS("socket", int, socket, (int family, int type, int protocol), (family, type, protocol))
PASS("connect", int, connect, (int fd, const struct sockaddr* to, socklen_t size), (fd, to, size))
PASS("accept", int, accept4, (int fd, struct sockaddr* from, socklen_t* size, int flags), (fd, from, size, flags))
PASS("sendmsg", ssize_t, sendmsg, (int fd, const struct msghdr* message, int flags), (fd, message, flags))
PASS("recvmsg", ssize_t, recvmsg, (int fd, struct msghdr* message, int flags), (fd, message, flags))
PASS("recv", ssize_t, recv, (int fd, void* to, size_t size, int flags), (fd, to, size, flags))
PASS("send", ssize_t, send, (int fd, const void* from, size_t size, int flags), (fd, from, size, flags))
PASS("fork", pid_t, fork, (void), ())
PASS("kill", int, kill, (pid_t pid, int signal), (pid, signal))
PASS("getsockopt", int, getsockopt, (int fd, int level, int option, void* to, socklen_t* size),
     (fd, level, option, to, size))

int posix_fallocate(int fd, off_t at, off_t size) {
  if (fails("posix_fallocate")) return error_number;
  return REAL(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
  if (fails("posix_fallocate")) return error_number;
  return REAL(posix_fallocate64)(fd, at, size);
}

void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) {
  if (fd >= 0 && fails("mmap")) return MAP_FAILED;
  return REAL(mmap)(at, size, protection, flags, fd, offset);
}
void* mmap64(void* at, size_t size, int protection, int flags, int fd, off64_t offset) {
  if (fd >= 0 && fails("mmap")) return MAP_FAILED;
  return REAL(mmap64)(at, size, protection, flags, fd, offset);
}

#define FCNTL(symbol)                   \
  int symbol(int fd, int command, ...) { \
    va_list list;                       \
    va_start(list, command);            \
    void* argument = va_arg(list, void*); \
    va_end(list);                       \
    if (fails("fcntl")) return -1;      \
    return REAL(symbol)(fd, command, argument); \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

// Linux gives the descriptor back whatever close() reports. Files in memory have nothing to write back, so it never
// reports anything of them; only of them seals can be read.
int close(int fd) {
  const int error = errno, in_memory = REAL(fcntl)(fd, F_GET_SEALS) >= 0;
  errno = error;
  const int result = REAL(close)(fd);
  return !in_memory && fails("close") ? -1 : result;
}

DIR* opendir(const char* path) { return fails("opendir") ? NULL : REAL(opendir)(path); }
DIR* fdopendir(int fd) { return fails("opendir") ? NULL : REAL(fdopendir)(fd); }

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_pidfd_open && fails("pidfd_open")) return -1;
  if (number == SYS_futex && fails("futex")) return -1;
  return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
int pidfd_open(pid_t pid, unsigned flags) {
  if (fails("pidfd_open")) return -1;
  return (int)((__typeof__(&syscall))real("syscall"))(SYS_pidfd_open, pid, flags);
}
