#include "shmsync/frames.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace shmsync::frames {
namespace {

int poll_for(std::span<pollfd> polled, std::chrono::nanoseconds timeout) {
  const timespec limit{static_cast<time_t>(timeout.count() / 1'000'000'000),
                       static_cast<long>(timeout.count() % 1'000'000'000)};
  return ::ppoll(polled.data(), polled.size(), &limit, nullptr);
}

// Does this error of a socket mean that no process is at the other end? All others (no memory, no buffers) pass: the
// caller tries again when it looks the next time.
bool means_the_end(int error) {
  return error == ECONNRESET || error == EPIPE || error == ENOTCONN || error == ECONNABORTED || error == ESHUTDOWN ||
         error == ETIMEDOUT || error == EBADF || error == ENOTSOCK;
}

}  // namespace

std::string header_of(std::size_t size) {
  const bool is_long = size > 0x7fffffff;
  std::string header(is_long ? kHeader : 0, static_cast<char>(0xff));
  for (int shift = is_long ? 56 : 24; shift >= 0; shift -= 8) header.push_back(static_cast<char>(size >> shift & 0xff));
  return header;
}

std::size_t largest_message() {
  static const std::size_t largest = [] {
    struct sysinfo info{};
    if (::sysinfo(&info) != 0) return SIZE_MAX;
    return (static_cast<std::size_t>(info.totalram) + info.totalswap) * info.mem_unit;
  }();
  return largest;
}

std::string framed(std::string_view payload) { return header_of(payload.size()).append(payload); }

void Outbox::push(Payload payload, std::string group, std::uint64_t id) {
  std::string header = header_of(payload.bytes.size());
  frames_.push_back({std::move(header), std::move(payload), std::move(group), id});
}

std::vector<std::uint64_t> Outbox::replace(std::string_view group) {
  std::vector<std::uint64_t> replaced;
  std::erase_if(frames_, [&](const Frame& frame) {
    const bool goes = !group.empty() && frame.group == group && frame.sent == 0;
    if (goes) replaced.push_back(frame.id);
    return goes;
  });
  return replaced;
}

bool Outbox::flush(int fd) {
  for (std::size_t left = kAtOnce; !frames_.empty() && left > 0;) {
    Frame& frame = frames_.front();
    const std::string_view bytes = frame.payload.bytes;
    const std::size_t in_header = std::min(frame.sent, frame.header.size()), in_body = frame.sent - in_header;
    std::array<iovec, 2> parts{{{frame.header.data() + in_header, frame.header.size() - in_header},
                                {const_cast<char*>(bytes.data()) + in_body, std::min(bytes.size() - in_body, left)}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const auto sent = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (!means_the_end(errno)) return true;
      frames_.clear();
      return false;
    }
    frame.sent += static_cast<std::size_t>(sent);
    left -= std::min(left, static_cast<std::size_t>(sent));
    if (frame.sent == frame.header.size() + bytes.size()) frames_.pop_front();
  }
  return true;
}

std::int64_t receive(int fd, char* to, std::size_t size) {
  for (;;) {
    const auto got = ::recv(fd, to, size, MSG_DONTWAIT);
    if (got >= 0) return got;
    if (errno == EINTR) continue;
    return means_the_end(errno) ? 0 : -1;
  }
}

bool wait_readable(int fd, std::chrono::nanoseconds timeout) {
  std::array<pollfd, 1> one{{{fd, POLLIN, 0}}};
  return poll_for(one, timeout) > 0;
}

std::vector<std::size_t> gather(std::span<const int> fds, std::span<const int> watched, std::string_view frame,
                                std::chrono::nanoseconds timeout) {
  std::vector<std::size_t> done;
  std::vector<pollfd> polled;
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  for (const int fd : watched) polled.push_back({fd, POLLIN, 0});
  std::string found(frame.size(), '\0');
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (done.size() < fds.size()) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0 || poll_for(polled, left) <= 0) return done;
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      if (i >= fds.size()) return done;
      const auto peeked = ::recv(fds[i], found.data(), found.size(), MSG_PEEK | MSG_DONTWAIT);
      if (peeked != static_cast<ssize_t>(frame.size()) || found != frame) return done;
      if (::recv(fds[i], found.data(), found.size(), MSG_DONTWAIT) != peeked) return done;
      done.push_back(i);
      polled[i].fd = -1;  // poll() passes over it
    }
  }
  return done;
}

}  // namespace shmsync::frames
