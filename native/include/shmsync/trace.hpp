// A trace: what the processes of an arena do, as JSON of the Trace Event Format, which Perfetto and Chrome show.
//
// Each event is one line and one write() to a file that was opened with O_APPEND, so that the lines of all processes
// stand in one file, and a process that is killed leaves what it did until then. Every line is filled up to a multiple
// of kLine bytes: the kernel may end the write() of a killed process between two pages, and most lines lie in one.
// Times are those of CLOCK_MONOTONIC, which all processes share. Viewers want the events of one track to nest or to
// follow one another. So a reader's events are on the track of its thread. Each writer has a separate track: one thread
// may write several arenas at once, and a device writes on no thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace shmsync {

class Trace {
 public:
  static constexpr std::size_t kLine = 256;  // divides a page

  // `fd`: the file; this object has a duplicate. `arena`: its name, as a JSON string without its quotes. `of_writer`:
  // events have a separate track. Throws std::system_error.
  Trace(int fd, std::string arena, bool of_writer = false);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Something that took from `begin` to `end`, ns.
  void span(const char* what, std::uint64_t begin, std::uint64_t end, std::uint64_t version) noexcept;
  // Something that happens now.
  void mark(const char* what, std::uint64_t version) noexcept;
  // How viewers name this process, and a writer's track; a JSON string without its quotes.
  void name_process(const char* name) noexcept;
  // False once a line could not be written whole; nothing is written after it.
  bool whole() const { return error_.load(std::memory_order_relaxed) == 0; }
  int fd() const { return fd_; }
  int error() const { return error_.load(std::memory_order_relaxed); }

 private:
  template <class... Values>
  void line(const char* format, Values... values) noexcept;
  long track() const;

  int fd_;
  std::string arena_;
  bool of_writer_;
  std::atomic<int> error_{0};
};

}  // namespace shmsync
