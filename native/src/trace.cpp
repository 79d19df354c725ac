#include "shmsync/trace.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
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

}  // namespace

Trace::Trace(int fd, std::string arena, bool of_writer)
    : fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 3)), arena_(std::move(arena)), of_writer_(of_writer) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "a descriptor for a trace");
}

Trace::~Trace() { ::close(fd_); }

long Trace::track() const {
  constexpr long kNoThread = 1L << 22;  // the largest thread id that Linux gives
  return of_writer_ ? kNoThread + fd_ : syscall(SYS_gettid);
}

template <class... Values>
void Trace::line(const char* format, Values... values) noexcept {
  if (!whole()) return;
  std::array<char, 4 * kLine> text;
  const int printed = std::snprintf(text.data(), text.size(), format, values...);
  if (printed < 0 || static_cast<std::size_t>(printed) >= text.size()) {
    error_.store(ENAMETOOLONG, std::memory_order_relaxed);
    return;
  }
  const auto end = static_cast<std::size_t>(printed), size = (end + kLine - 1) / kLine * kLine;
  std::memset(text.data() + end, ' ', size - end);
  for (std::size_t done = 0; done < size;) {  // what a full disk has not taken, the next try says why
    const ssize_t written = ::write(fd_, text.data() + done, size - done);
    if (written > 0) {
      done += static_cast<std::size_t>(written);
    } else if (written == 0 || errno != EINTR) {
      error_.store(written == 0 ? ENOSPC : errno, std::memory_order_relaxed);
      return;
    }
  }
}

void Trace::span(const char* what, std::uint64_t begin, std::uint64_t end, std::uint64_t version) noexcept {
  const Time start(begin), took(end > begin ? end - begin : 0);
  line(
      ",\n{\"name\":\"%s\",\"cat\":\"shmsync\",\"ph\":\"X\",\"ts\":%llu.%03u,\"dur\":%llu.%03u,\"pid\":%ld,\"tid\":%ld,"
      "\"args\":{\"arena\":\"%s\",\"version\":%llu}}",
      what, start.micros, start.nanos, took.micros, took.nanos, static_cast<long>(getpid()), track(), arena_.c_str(),
      static_cast<unsigned long long>(version));
}

void Trace::mark(const char* what, std::uint64_t version) noexcept {
  const Time now(monotonic_ns());
  line(
      ",\n{\"name\":\"%s\",\"cat\":\"shmsync\",\"ph\":\"i\",\"s\":\"t\",\"ts\":%llu.%03u,\"pid\":%ld,\"tid\":%ld,"
      "\"args\":{\"arena\":\"%s\",\"version\":%llu}}",
      what, now.micros, now.nanos, static_cast<long>(getpid()), track(), arena_.c_str(),
      static_cast<unsigned long long>(version));
}

void Trace::name_process(const char* name) noexcept {
  line(",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%ld,\"args\":{\"name\":\"%s\"}}",
       static_cast<long>(getpid()), name);
  if (of_writer_)
    line(",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%ld,\"tid\":%ld,\"args\":{\"name\":\"writer of %s\"}}",
         static_cast<long>(getpid()), track(), arena_.c_str());
}

}  // namespace shmsync
