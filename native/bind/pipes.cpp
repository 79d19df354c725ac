// The common case of the schemes' pipes, without a Python object for each worker: small whole frames, read only when
// they are all there, so that whatever is unusual stays in the pipe for shmsync/schemes/_channel.py.
//
// A frame is that of multiprocessing.Connection: a big-endian int32, the number of bytes, and the bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

constexpr std::size_t kHeader = 4;
constexpr std::size_t kSmall = 4096;

std::string framed(const nb::bytes& payload) {
  const auto size = static_cast<std::uint32_t>(payload.size());
  std::string frame(kHeader + payload.size(), '\0');
  for (std::size_t i = 0; i < kHeader; ++i) frame[i] = static_cast<char>(size >> (8 * (kHeader - 1 - i)));
  std::memcpy(frame.data() + kHeader, payload.c_str(), payload.size());
  return frame;
}

// Sends one frame to each socket, without waiting. Those that did not take all of it: (position, bytes taken, or -1 if
// the other end is closed).
std::vector<std::pair<std::size_t, long>> send_frame(const std::vector<int>& fds, const std::string& frame) {
  std::vector<std::pair<std::size_t, long>> left;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    const auto sent = ::send(fds[i], frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(frame.size())) continue;
    const bool would_block = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    left.emplace_back(i, sent >= 0 ? sent : would_block ? 0 : -1);
  }
  return left;
}

// Takes one frame of at most kSmall bytes, if the next one in the socket is such a frame and all there; else None.
nb::object take_frame(int fd) {
  std::array<unsigned char, kSmall> bytes;
  const auto got = ::recv(fd, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got < static_cast<ssize_t>(kHeader)) return nb::none();
  std::uint32_t size = 0;
  for (std::size_t i = 0; i < kHeader; ++i) size = size << 8 | bytes[i];
  if (size == 0 || kHeader + size > static_cast<std::size_t>(got)) return nb::none();
  if (::recv(fd, bytes.data(), kHeader + size, MSG_DONTWAIT) != static_cast<ssize_t>(kHeader + size)) return nb::none();
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()) + kHeader, size);
}

bool wait_readable(int fd, std::int64_t timeout_ns) {
  nb::gil_scoped_release release;
  pollfd one{fd, POLLIN, 0};
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  return ::ppoll(&one, 1, &timeout, nullptr) > 0;
}

using Left = std::vector<std::pair<std::size_t, long>>;

// Waits until each socket has given exactly `expected`; ends early when one has anything else to say, or when something
// happens on `watched`. The positions of those that have.
std::vector<std::size_t> gather(const std::vector<int>& fds, const std::vector<int>& watched,
                                const std::string& expected, std::int64_t timeout_ns) {
  std::vector<std::size_t> done;
  std::vector<pollfd> polled;
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  for (const int fd : watched) polled.push_back({fd, POLLIN, 0});
  std::string found(expected.size(), '\0');
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  while (done.size() < fds.size()) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return done;
    const timespec timeout{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    if (::ppoll(polled.data(), polled.size(), &timeout, nullptr) <= 0) return done;
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      if (i >= fds.size()) return done;
      const auto peeked = ::recv(fds[i], found.data(), found.size(), MSG_PEEK | MSG_DONTWAIT);
      if (peeked != static_cast<ssize_t>(expected.size()) || found != expected) return done;
      if (::recv(fds[i], found.data(), found.size(), MSG_DONTWAIT) != peeked) return done;
      done.push_back(i);
      polled[i].fd = -1;  // poll() passes over it
    }
  }
  return done;
}

// Sends `message` to every socket, and gathers `answer` from each if all of them took it.
std::pair<Left, std::vector<std::size_t>> exchange_frames(const std::vector<int>& fds, const std::vector<int>& watched,
                                                          const nb::bytes& message, const nb::bytes& answer,
                                                          std::int64_t timeout_ns) {
  const std::string sent = framed(message), expected = framed(answer);
  nb::gil_scoped_release release;
  Left left = send_frame(fds, sent);
  if (!left.empty()) return {left, {}};
  return {left, gather(fds, watched, expected, timeout_ns)};
}

}  // namespace

void bind_pipes(nb::module_& m) {
  m.def(
      "send_frame",
      [](const std::vector<int>& fds, const nb::bytes& payload) {
        nb::list left;
        for (const auto& [position, sent] : send_frame(fds, framed(payload)))
          left.append(nb::make_tuple(position, sent));
        return left;
      },
      "fds"_a, "payload"_a, nb::sig("def send_frame(fds: Sequence[int], payload: bytes) -> list[tuple[int, int]]"),
      "Send a frame to each socket without waiting; (position, bytes taken or -1) of those that did not take all.");
  m.def("take_frame", &take_frame, "fd"_a, nb::sig("def take_frame(fd: int) -> bytes | None"),
        "The next frame of a socket, if it is small and all there.");
  m.def("wait_readable", &wait_readable, "fd"_a, "timeout_ns"_a, "Is there something to read, or the end?");
  m.def(
      "exchange_frames", &exchange_frames, "fds"_a, "watched"_a, "message"_a, "answer"_a, "timeout_ns"_a,
      "Send a frame to each socket, and wait until each has given exactly the answer. (what send_frame() returns, the "
      "positions of those that have answered). Ends early when something else comes, or happens on `watched`.");
}

}  // namespace shmsync::bind
