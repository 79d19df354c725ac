// Frames over real socket pairs.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "fixture.hpp"
#include "shmsync/frames.hpp"

using namespace shmsync;
using namespace std::chrono_literals;

namespace {

struct Pair {
  Pair() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0); }
  ~Pair() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  void write(std::string_view bytes) const { CHECK(::write(ends[1], bytes.data(), bytes.size()) > 0); }
  std::array<int, 2> ends;
};

void a_frame_is_taken_only_when_it_is_all_there() {
  const Pair pair;
  const std::string frame = frames::framed("hello");
  CHECK(frame.size() == 9 && frame[3] == 5);
  for (const char byte : frame) {
    CHECK(!frames::take(pair.ends[0]));
    pair.write({&byte, 1});
  }
  pair.write(frames::framed("next"));
  CHECK(frames::take(pair.ends[0]) == "hello");
  CHECK(frames::take(pair.ends[0]) == "next");
}

void a_large_frame_stays_in_the_pipe() {
  const Pair pair;
  pair.write(frames::framed(std::string(frames::kSmall, 'x')));
  CHECK(!frames::take(pair.ends[0]));
  CHECK(frames::wait_readable(pair.ends[0], 0ns));
}

void gathering_takes_the_expected_and_nothing_else() {
  const std::array<Pair, 3> pairs;
  const std::array<int, 3> fds{pairs[0].ends[0], pairs[1].ends[0], pairs[2].ends[0]};
  const std::string yes = frames::framed("yes");
  pairs[0].write(yes + frames::framed("mine"));
  pairs[2].write(yes);
  std::thread late([&] {
    std::this_thread::sleep_for(20ms);
    pairs[1].write(yes);
  });
  CHECK(frames::gather(fds, {}, yes, 10s).size() == 3);
  late.join();
  CHECK(frames::take(fds[0]) == "mine");
  pairs[1].write(frames::framed("no!"));
  CHECK(frames::gather(fds, {}, yes, 10s).empty());
  CHECK(frames::take(fds[1]) == "no!");
  CHECK(frames::gather(fds, {}, yes, 1ms).empty());
}

void gathering_ends_when_a_watched_descriptor_speaks() {
  const Pair pair, watched;
  watched.write("x");
  const std::array<int, 1> fds{pair.ends[0]}, others{watched.ends[0]};
  CHECK(frames::gather(fds, others, frames::framed("yes"), 100s).empty());
}

void what_a_socket_does_not_take_is_told() {
  const Pair pair;
  const std::array<int, 1> fds{pair.ends[0]};
  const std::string frame = frames::framed(std::string(50'000, 'x'));
  std::vector<frames::Unsent> left;
  while ((left = frames::send(fds, frame)).empty()) continue;
  CHECK(left[0].position == 0 && left[0].taken >= 0 && left[0].taken < static_cast<std::int64_t>(frame.size()));
  Pair closed;
  ::shutdown(closed.ends[0], SHUT_WR);
  CHECK(frames::send(std::array<int, 1>{closed.ends[0]}, frame)[0].taken == -1);
}

}  // namespace

int main() {
  a_frame_is_taken_only_when_it_is_all_there();
  a_large_frame_stays_in_the_pipe();
  gathering_takes_the_expected_and_nothing_else();
  gathering_ends_when_a_watched_descriptor_speaks();
  what_a_socket_does_not_take_is_told();
}
