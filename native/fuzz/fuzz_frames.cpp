// Arbitrary bytes from a pipe, in pieces of arbitrary sizes: whole messages, garbage or nothing come of it, and never
// more memory than came, or than the first room of a message.
#include <sanitizer/asan_interface.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "shmsync/frames.hpp"

namespace {

using namespace shmsync;

std::size_t largest;  // that a body was made for

constexpr std::size_t kGuard = 4096;
// One for all: to get and fill 1 MiB takes longer than all else.
std::vector<char> room(2 * frames::kFirstRoom + kGuard);

// Memory of that size, and a guard behind it.
class Body {
 public:
  explicit Body(std::size_t size) { resize(size); }
  char* data() { return room.data(); }
  std::size_t size() const { return size_; }
  void resize(std::size_t size) {
    largest = std::max(largest, size);
    CHECK(size + kGuard <= room.size());
    ASAN_UNPOISON_MEMORY_REGION(room.data() + size_, kGuard);
    size_ = size;
    ASAN_POISON_MEMORY_REGION(room.data() + size_, kGuard);
  }

 private:
  std::size_t size_ = 0;
};

int ends[2] = {-1, -1};

void open_pipe() {
  for (int& end : ends)
    if (end >= 0) close(end);
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (ends[0] < 0) open_pipe();
  frames::Inbox<Body> inbox;
  largest = 0;
  std::size_t taken = 0, sent = 0;
  bool garbage = false;
  while (size > 0 && !garbage) {
    const std::size_t piece = std::min<std::size_t>(size - 1, data[0] % 64 + 1);
    ++data, --size;
    if (piece == 0) break;
    CHECK(write(ends[0], data, piece) == static_cast<ssize_t>(piece));
    data += piece, size -= piece, sent += piece;
    for (;;) {
      const auto read = inbox.read(ends[1]);
      CHECK(read != frames::Read::end);
      if (read == frames::Read::garbage) garbage = true;
      if (read != frames::Read::frame) break;
      Body whole = inbox.take();
      CHECK(frames::framed({whole.data(), whole.size()}).size() <= whole.size() + frames::kLongHeader);
      taken += frames::kHeader + whole.size();
      CHECK(taken <= sent);
    }
    CHECK(inbox.come() <= sent);
  }
  CHECK(largest <= std::max(2 * sent, frames::kFirstRoom));
  char rest[4096];
  while (recv(ends[1], rest, sizeof rest, MSG_DONTWAIT) > 0) {
  }
  return 0;
}
