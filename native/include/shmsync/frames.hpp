// The common case of the schemes' pipes: small whole frames, read only when they are all there, so that whatever is
// unusual stays in the pipe for shmsync/schemes/_channel.py. Nothing here waits without a deadline.
//
// A frame is that of multiprocessing.Connection: a big-endian int32, the number of bytes, and the bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shmsync::frames {

inline constexpr std::size_t kHeader = 4;
inline constexpr std::size_t kSmall = 4096;  // the largest frame that take() takes, header included

std::string framed(std::string_view payload);

// A socket that did not take all of a frame.
struct Unsent {
  std::size_t position;
  std::int64_t taken;  // bytes; -1: the other end is closed
};

// Sends one frame to each socket, without waiting.
std::vector<Unsent> send(std::span<const int> fds, std::string_view frame);

// The payload of the next frame, if it is small and all there.
std::optional<std::string> take(int fd);

// Is there something to read, or the end, within that time?
bool wait_readable(int fd, std::chrono::nanoseconds timeout);

// Waits until each socket has given exactly this frame; ends early when one has anything else to say, or when something
// happens on `watched`. The positions of those that have given it.
std::vector<std::size_t> gather(std::span<const int> fds, std::span<const int> watched, std::string_view frame,
                                std::chrono::nanoseconds timeout);

}  // namespace shmsync::frames
