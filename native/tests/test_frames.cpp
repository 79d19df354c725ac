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

struct Text : std::string {
  explicit Text(std::size_t size) : std::string(size, '\0') {}
};

struct Pair {
  Pair() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0); }
  ~Pair() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  void write(std::string_view bytes) const { CHECK(::write(ends[1], bytes.data(), bytes.size()) > 0); }
  std::array<int, 2> ends;
};

// What a reader of a socket pair finds, a frame at a time.
struct Reader {
  frames::Read read() { return inbox.read(fd); }
  std::string next() {
    CHECK(read() == frames::Read::frame);
    return inbox.take();
  }
  int fd;
  frames::Inbox<Text> inbox{};
};

void a_frame_is_whole_whatever_parts_it_comes_in() {
  const Pair pair;
  Reader reader{pair.ends[0]};
  const std::string frame = frames::framed("hello");
  CHECK(frame.size() == 9 && frame[3] == 5);
  for (const char byte : frame) {
    CHECK(reader.read() == frames::Read::nothing);
    pair.write({&byte, 1});
  }
  pair.write(frames::framed("next") + frames::framed("") + frame.substr(0, 2));
  CHECK(reader.next() == "hello");
  CHECK(reader.next() == "next");
  CHECK(reader.next().empty());
  CHECK(reader.read() == frames::Read::nothing && !reader.inbox.empty());
  pair.write(frame.substr(2));
  CHECK(reader.next() == "hello" && reader.inbox.empty());
}

void no_byte_of_the_next_frame_is_taken() {
  const Pair pair;
  Reader reader{pair.ends[0]};
  pair.write(frames::framed("mine") + "rest");
  CHECK(reader.next() == "mine");
  std::array<char, 8> rest;
  CHECK(::read(pair.ends[0], rest.data(), rest.size()) == 4);
}

void a_long_header_has_twelve_bytes() {
  CHECK(frames::header_of(0x7fffffff) == std::string("\x7f\xff\xff\xff", 4));
  const std::string header = frames::header_of(0x80000000);
  CHECK(header == std::string("\xff\xff\xff\xff\0\0\0\0\x80\0\0\0", 12));
  const Pair pair;
  Reader reader{pair.ends[0]};
  pair.write(std::string("\xff\xff\xff\xff\0\0\0\0\0\0\0\x02", 12) + "hi");
  CHECK(reader.next() == "hi");
}

void a_header_that_no_message_has_is_garbage() {
  for (const auto& header : {std::string("\xff\xff\xff\xfb", 4), std::string("\x80\0\0\0", 4),
                             std::string("\xff\xff\xff\xff\x40\0\0\0\0\0\0\0", 12)}) {
    const Pair pair;
    Reader reader{pair.ends[0]};
    pair.write(header);
    CHECK(reader.read() == frames::Read::garbage);
    pair.write("more");
    CHECK(reader.read() == frames::Read::garbage);
  }
  const Pair pair;
  frames::Inbox<Text> inbox;
  pair.write(frames::framed("hello"));
  CHECK(inbox.read(pair.ends[0], 4) == frames::Read::garbage);
}

void room_grows_as_bytes_come() {
  const Pair pair;
  Reader reader{pair.ends[0]};
  std::string text(3 * frames::kFirstRoom, 'x');
  for (std::size_t i = 0; i < text.size(); i += 1000) text[i] = static_cast<char>('a' + i % 23);
  std::thread writer([&] {
    const std::string frame = frames::framed(text);
    for (std::size_t sent = 0; sent < frame.size();) {
      const auto more = ::write(pair.ends[1], frame.data() + sent, frame.size() - sent);
      CHECK(more > 0);
      sent += static_cast<std::size_t>(more);
    }
  });
  while (reader.read() != frames::Read::frame) {
    if (reader.inbox.announced() > 0) CHECK(reader.inbox.announced() == text.size());
    CHECK(frames::wait_readable(pair.ends[0], 10s));
  }
  writer.join();
  CHECK(reader.inbox.take() == text);
}

void the_end_is_told() {
  const Pair pair;
  Reader reader{pair.ends[0]};
  pair.write(frames::framed("last").substr(0, 6));
  ::shutdown(pair.ends[1], SHUT_WR);
  CHECK(reader.read() == frames::Read::end);
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
  CHECK(Reader{fds[0]}.next() == "mine");
  pairs[1].write(frames::framed("no!"));
  CHECK(frames::gather(fds, {}, yes, 10s).empty());
  CHECK(Reader{fds[1]}.next() == "no!");
  CHECK(frames::gather(fds, {}, yes, 1ms).empty());
}

void gathering_ends_when_a_watched_descriptor_speaks() {
  const Pair pair, watched;
  watched.write("x");
  const std::array<int, 1> fds{pair.ends[0]}, others{watched.ends[0]};
  CHECK(frames::gather(fds, others, frames::framed("yes"), 100s).empty());
}

frames::Payload owned(const std::string& text) {
  const auto kept = std::make_shared<std::string>(text);
  return {*kept, kept};
}

void what_a_socket_does_not_take_is_sent_later() {
  const Pair pair;
  frames::Outbox out;
  const std::string text(50'000, 'x');
  int pushed = 0;
  while (out.empty()) {
    out.push(owned(text + std::to_string(pushed++)), "", 0);
    CHECK(out.flush(pair.ends[1]));
  }
  Reader reader{pair.ends[0]};
  for (int i = 0; i < pushed; ++i) {
    while (reader.read() != frames::Read::frame) CHECK(out.flush(pair.ends[1]));
    CHECK(reader.inbox.take() == text + std::to_string(i));
  }
  CHECK(out.empty());
}

void newer_of_a_group_replaces_what_has_not_begun_to_leave() {
  const Pair pair;
  frames::Outbox out;
  const std::string large(1'000'000, 'x');  // more than the socket takes
  out.push(owned(large), "a", 1);
  CHECK(out.flush(pair.ends[1]) && !out.empty());
  out.push(owned("old"), "a", 2);
  out.push(owned("other"), "b", 3);
  CHECK(out.replace("a") == std::vector<std::uint64_t>{2});  // 1 has begun to leave
  CHECK(out.replace("").empty());
  out.push(owned("new"), "a", 4);
  Reader reader{pair.ends[0]};
  for (const auto& expected : {large, std::string("other"), std::string("new")}) {
    while (reader.read() != frames::Read::frame) CHECK(out.flush(pair.ends[1]));
    CHECK(reader.inbox.take() == expected);
  }
}

void a_closed_socket_takes_nothing() {
  const Pair pair;
  ::shutdown(pair.ends[1], SHUT_WR);
  frames::Outbox out;
  out.push(owned("x"), "", 0);
  CHECK(!out.flush(pair.ends[1]) && out.empty());
}

}  // namespace

int main() {
  a_frame_is_whole_whatever_parts_it_comes_in();
  no_byte_of_the_next_frame_is_taken();
  a_long_header_has_twelve_bytes();
  a_header_that_no_message_has_is_garbage();
  room_grows_as_bytes_come();
  the_end_is_told();
  gathering_takes_the_expected_and_nothing_else();
  gathering_ends_when_a_watched_descriptor_speaks();
  what_a_socket_does_not_take_is_sent_later();
  newer_of_a_group_replaces_what_has_not_begun_to_leave();
  a_closed_socket_takes_nothing();
}
