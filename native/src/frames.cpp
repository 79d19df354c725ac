#include "shmsync/frames.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

namespace shmsync::frames {
namespace {

int poll_for(std::span<pollfd> polled, std::chrono::nanoseconds timeout) {
  const timespec limit{static_cast<time_t>(timeout.count() / 1'000'000'000),
                       static_cast<long>(timeout.count() % 1'000'000'000)};
  return ::ppoll(polled.data(), polled.size(), &limit, nullptr);
}

}  // namespace

std::string framed(std::string_view payload) {
  const auto size = static_cast<std::uint32_t>(payload.size());
  std::string frame;
  frame.reserve(kHeader + payload.size());
  for (int shift = 24; shift >= 0; shift -= 8) frame.push_back(static_cast<char>(size >> shift & 0xff));
  return frame.append(payload);
}

std::vector<Unsent> send(std::span<const int> fds, std::string_view frame) {
  std::vector<Unsent> left;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    const auto sent = ::send(fds[i], frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(frame.size())) continue;
    const bool later = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    left.push_back({i, sent >= 0 ? sent : later ? 0 : -1});
  }
  return left;
}

std::optional<std::string> take(int fd) {
  std::array<char, kSmall> bytes;
  const auto got = ::recv(fd, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got < static_cast<ssize_t>(kHeader)) return std::nullopt;
  std::uint32_t size = 0;
  for (std::size_t i = 0; i < kHeader; ++i) size = size << 8 | static_cast<unsigned char>(bytes[i]);
  if (size == 0 || kHeader + size > static_cast<std::size_t>(got)) return std::nullopt;
  if (::recv(fd, bytes.data(), kHeader + size, MSG_DONTWAIT) != static_cast<ssize_t>(kHeader + size))
    return std::nullopt;  // somebody else reads from it
  return std::string(bytes.data() + kHeader, size);
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
