#include "shmsync/trace.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "shmsync/futex.hpp"

namespace shmsync {
namespace {

// Microseconds, as the format wants them, with the nanoseconds behind the point.
struct Time {
  explicit Time(std::uint64_t ns)
      : micros(static_cast<unsigned long long>(ns / 1000)), nanos(static_cast<unsigned>(ns % 1000)) {}
  unsigned long long micros;
  unsigned nanos;
};

long this_thread() { return syscall(SYS_gettid); }

}  // namespace

Trace::Trace(int fd, std::string arena) : fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 3)), arena_(std::move(arena)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "a descriptor for a trace");
}

Trace::~Trace() { ::close(fd_); }

template <class... Values>
void Trace::line(const char* format, Values... values) noexcept {
  if (!whole()) return;
  std::array<char, 1024> text;
  const int length = std::snprintf(text.data(), text.size(), format, values...);
  if (length < 0 || static_cast<std::size_t>(length) >= text.size()) {
    error_.store(ENAMETOOLONG, std::memory_order_relaxed);
    return;
  }
  ssize_t written;
  do {
    written = ::write(fd_, text.data(), static_cast<std::size_t>(length));
  } while (written < 0 && errno == EINTR);
  if (written != length) error_.store(written < 0 ? errno : ENOSPC, std::memory_order_relaxed);
}

void Trace::span(const char* what, std::uint64_t begin, std::uint64_t end, std::uint64_t version,
                 bool beside) noexcept {
  constexpr long kNoThread = 1L << 22;  // the largest thread id that Linux gives
  const Time start(begin), took(end > begin ? end - begin : 0);
  line(
      ",\n{\"name\":\"%s\",\"cat\":\"shmsync\",\"ph\":\"X\",\"ts\":%llu.%03u,\"dur\":%llu.%03u,\"pid\":%ld,\"tid\":%ld,"
      "\"args\":{\"arena\":\"%s\",\"version\":%llu}}",
      what, start.micros, start.nanos, took.micros, took.nanos, static_cast<long>(getpid()),
      beside ? kNoThread + fd_ : this_thread(), arena_.c_str(), static_cast<unsigned long long>(version));
}

void Trace::mark(const char* what, std::uint64_t version) noexcept {
  const Time now(monotonic_ns());
  line(
      ",\n{\"name\":\"%s\",\"cat\":\"shmsync\",\"ph\":\"i\",\"s\":\"t\",\"ts\":%llu.%03u,\"pid\":%ld,\"tid\":%ld,"
      "\"args\":{\"arena\":\"%s\",\"version\":%llu}}",
      what, now.micros, now.nanos, static_cast<long>(getpid()), this_thread(), arena_.c_str(),
      static_cast<unsigned long long>(version));
}

void Trace::name_process(const char* name) noexcept {
  line(",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%ld,\"args\":{\"name\":\"%s\"}}",
       static_cast<long>(getpid()), name);
}

}  // namespace shmsync
