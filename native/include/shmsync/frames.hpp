// The frames of the schemes' pipes: whole messages over a socket, in and out, without ever blocking on one.
//
// A frame is that of multiprocessing.Connection: a big-endian int32, the number of bytes, and the bytes. For 2 GiB and
// more the int32 is -1 and a big-endian uint64 follows.
//
// INV: between two calls Outbox and Inbox know exactly which bytes have left and come. Python's signal handlers run
//      between calls, so an interrupt never leaves a stream in an unknown place.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shmsync::frames {

inline constexpr std::size_t kHeader = 4;
inline constexpr std::size_t kLongHeader = 12;

std::string header_of(std::size_t size);
std::string framed(std::string_view payload);

// A payload that its owner keeps alive.
struct Payload {
  std::string_view bytes;
  std::shared_ptr<const void> owner;
};

// Messages on their way out of one socket.
class Outbox {
 public:
  // `group`: a later message of the same group replaces this one as long as no byte of it has been sent; "": never.
  void push(Payload payload, std::string group, std::uint64_t id);
  // Removes the messages of a group that have not begun to leave; their ids.
  std::vector<std::uint64_t> replace(std::string_view group);
  // Sends what the socket takes now. False: the other end is closed, and nothing is left to send.
  bool flush(int fd);
  bool empty() const { return frames_.empty(); }

 private:
  struct Frame {
    std::string header;
    Payload payload;
    std::string group;
    std::uint64_t id;
    std::size_t sent = 0;  // bytes, header included
  };
  std::deque<Frame> frames_;
};

// `garbage`: a header that no message has; nothing that follows can be understood.
enum class Read { frame, nothing, end, garbage };

inline constexpr std::size_t kFirstRoom = 1 << 20;  // for a body, until more of it has come
inline constexpr std::size_t kAtOnce = 16 << 20;    // of one call, so that its caller can look at the time

// No message is larger than the memory of this machine, swap included.
std::size_t largest_message();

// Reads up to `size` bytes without waiting: how many; 0 at the end, -1 when nothing is there.
std::int64_t receive(int fd, char* to, std::size_t size);

// The message that is half read from one socket. Takes no byte of the next one, so that a plain reader may go on.
// Room grows as bytes come: a header alone, whatever it announces, costs nothing.
template <class Buffer>  // Buffer(size), data(), size(), resize(size) that changes nothing if it throws
class Inbox {
 public:
  // Goes on reading; `frame`: take() gives a whole payload. `limit`: the largest that is taken.
  Read read(int fd, std::size_t limit = largest_message()) {
    while (have_ < need()) {
      const auto got = receive(fd, header_.data() + have_, need() - have_);
      if (got <= 0) return got == 0 ? Read::end : Read::nothing;
      have_ += static_cast<std::size_t>(got);
    }
    const std::size_t whole = size();
    if (is_negative() || whole > limit) return Read::garbage;
    if (!body_) body_.emplace(std::min(whole, kFirstRoom));
    for (std::size_t read = 0; filled_ < whole;) {
      if (filled_ == body_->size()) body_->resize(std::min(whole, 2 * filled_));
      const auto got = receive(fd, body_->data() + filled_, body_->size() - filled_);
      if (got <= 0) return got == 0 ? Read::end : Read::nothing;
      filled_ += static_cast<std::size_t>(got);
      read += static_cast<std::size_t>(got);
      if (read >= kAtOnce && filled_ < whole) return Read::nothing;
    }
    return Read::frame;
  }
  Buffer take() {
    Buffer whole = std::move(*body_);
    body_.reset();
    have_ = filled_ = 0;
    return whole;
  }
  bool empty() const { return have_ == 0; }
  // Of the message that is half read: how much of its body has come, and how much its header announces.
  std::size_t come() const { return filled_; }
  std::size_t announced() const { return have_ < need() ? 0 : size(); }
  // The number that the first bytes of the header make.
  std::int32_t number() const {
    std::uint32_t number = 0;
    for (std::size_t i = 0; i < kHeader; ++i) number = number << 8 | static_cast<unsigned char>(header_[i]);
    return static_cast<std::int32_t>(number);
  }

 private:
  bool is_negative() const { return number() < -1; }
  bool is_long() const {
    for (std::size_t i = 0; i < kHeader; ++i)
      if (header_[i] != static_cast<char>(0xff)) return false;
    return have_ >= kHeader;
  }
  std::size_t need() const { return is_long() ? kLongHeader : kHeader; }
  std::size_t size() const {
    std::size_t size = 0;
    for (std::size_t i = is_long() ? kHeader : 0; i < need(); ++i)
      size = size << 8 | static_cast<unsigned char>(header_[i]);
    return size;
  }

  std::array<char, kLongHeader> header_{};
  std::size_t have_ = 0;  // of the header
  std::optional<Buffer> body_;
  std::size_t filled_ = 0;
};

// Is there something to read, or the end, within that time?
bool wait_readable(int fd, std::chrono::nanoseconds timeout);

// Waits until each socket has given exactly this frame; ends early when one has anything else to say, or when something
// happens on `watched`. The positions of those that have given it.
std::vector<std::size_t> gather(std::span<const int> fds, std::span<const int> watched, std::string_view frame,
                                std::chrono::nanoseconds timeout);

}  // namespace shmsync::frames
