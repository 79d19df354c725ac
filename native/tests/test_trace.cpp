// Traces: lines of many threads are whole, and a word of the publisher's says which trace it is.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fixture.hpp"

using namespace shmsync;
using namespace shmsync::test;

namespace {

constexpr int kThreads = 4, kLines = 500;

class File {
 public:
  File() : fd_(memfd_create("trace", MFD_CLOEXEC)) {
    CHECK(fd_ >= 0);
    CHECK(fcntl(fd_, F_SETFL, O_APPEND) == 0);
  }
  ~File() { close(fd_); }
  int fd() const { return fd_; }
  std::vector<std::string> lines() const {
    std::string text(static_cast<std::size_t>(lseek(fd_, 0, SEEK_END)), 0);
    CHECK(pread(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
    std::vector<std::string> found;
    for (std::size_t at = 0; at < text.size();) {
      CHECK(text.compare(at, 3, ",\n{") == 0);
      const std::size_t next = std::min(text.find(",\n", at + 2), text.size());
      found.push_back(text.substr(at + 2, next - at - 2));
      at = next;
    }
    return found;
  }

 private:
  int fd_;
};

bool has(const std::string& line, const char* words) { return line.find(words) != std::string::npos; }

void lines_of_many_threads_are_whole() {
  File file;
  Trace trace(file.fd(), "policy");
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < kLines; ++k) trace.span("section", 1'000'000 + k, 1'002'000 + k, 7);
    });
  for (auto& each : threads) each.join();
  const auto lines = file.lines();
  CHECK(lines.size() == kThreads * kLines);
  for (const auto& line : lines)
    CHECK(line.size() + 2 == Trace::kLine && has(line, "\"dur\":2.000,") &&
          has(line, "\"arena\":\"policy\",\"version\":7}}  "));
  CHECK(trace.whole());
}

void a_write_that_fails_ends_it() {
  const int full = open("/dev/full", O_WRONLY | O_APPEND);
  CHECK(full >= 0);
  Trace trace(full, "policy");
  close(full);
  trace.mark("ack", 1);
  CHECK(!trace.whole() && trace.error() == ENOSPC);
  File file;
  Trace longest(file.fd(), std::string(2000, 'x'));
  longest.mark("ack", 1);
  CHECK(longest.error() == ENAMETOOLONG && file.lines().empty());
}

// A reader writes what it does, from the word on by which it is asked for a trace.
void a_reader_and_a_writer_are_traced() {
  File file;
  Memory memory(2, 1);
  PublicationWriter writer = memory.writer();
  publish(writer);
  ReadSide reader = memory.reader();
  CHECK(!reader.should_change_trace());
  const auto trace = std::make_shared<Trace>(file.fd(), "policy");
  writer.write_trace(trace);
  memory.line.asked.store(1u << kTraceFdBits | 8);
  CHECK(reader.should_change_trace());
  reader.write_trace(reader.trace(), trace);
  CHECK(!reader.should_change_trace());
  publish(writer);
  CHECK(reader.try_enter() == Enter::moved);
  reader.applied();
  CHECK(!reader.leave());
  memory.line.asked.store(2u << kTraceFdBits | 8);  // another trace, in the same descriptor
  CHECK(reader.should_change_trace());
  memory.line.asked.store(0);
  CHECK(reader.should_change_trace());
  reader.write_trace(0, nullptr);
  CHECK(!reader.should_change_trace());
  publish(writer);
  CHECK(reader.try_enter() == Enter::moved);
  reader.leave();
  const auto lines = file.lines();
  CHECK(lines.size() == 4);
  CHECK(has(lines[0], "\"publish\"") && has(lines[0], "\"version\":2}"));
  CHECK(has(lines[1], "\"ack\"") && has(lines[2], "\"section\"") && has(lines[2], "\"version\":2}"));
  CHECK(has(lines[3], "\"publish\"") && has(lines[3], "\"version\":3}"));
}

}  // namespace

int main() {
  lines_of_many_threads_are_whole();
  a_write_that_fails_ends_it();
  a_reader_and_a_writer_are_traced();
}
