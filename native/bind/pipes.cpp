// frames.hpp for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "shmsync/frames.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

using Left = std::vector<std::pair<std::size_t, std::int64_t>>;

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

Left pairs(const std::vector<frames::Unsent>& unsent) {
  Left left;
  for (const auto& [position, taken] : unsent) left.emplace_back(position, taken);
  return left;
}

Left send_frame(const std::vector<int>& fds, const nb::bytes& payload) {
  return pairs(frames::send(fds, frames::framed(view(payload))));
}

nb::object take_frame(int fd) {
  const auto payload = frames::take(fd);
  return payload ? nb::object(nb::bytes(payload->data(), payload->size())) : nb::none();
}

bool wait_readable(int fd, std::int64_t timeout_ns) {
  nb::gil_scoped_release release;
  return frames::wait_readable(fd, std::chrono::nanoseconds(timeout_ns));
}

std::pair<Left, std::vector<std::size_t>> exchange_frames(const std::vector<int>& fds, const std::vector<int>& watched,
                                                          const nb::bytes& message, const nb::bytes& answer,
                                                          std::int64_t timeout_ns) {
  const std::string sent = frames::framed(view(message)), expected = frames::framed(view(answer));
  nb::gil_scoped_release release;
  Left left = pairs(frames::send(fds, sent));
  if (!left.empty()) return {left, {}};
  return {left, frames::gather(fds, watched, expected, std::chrono::nanoseconds(timeout_ns))};
}

}  // namespace

void bind_pipes(nb::module_& m) {
  m.def("send_frame", &send_frame, "fds"_a, "payload"_a,
        "Send a frame to each socket without waiting; (position, bytes taken or -1) of those that did not take all.");
  m.def("take_frame", &take_frame, "fd"_a, nb::sig("def take_frame(fd: int) -> bytes | None"),
        "The next frame of a socket, if it is small and all there.");
  m.def("wait_readable", &wait_readable, "fd"_a, "timeout_ns"_a, "Is there something to read, or the end?");
  m.def("exchange_frames", &exchange_frames, "fds"_a, "watched"_a, "message"_a, "answer"_a, "timeout_ns"_a,
        "Send a frame to each socket, and wait until each has given exactly the answer. (what send_frame() returns, "
        "the positions of those that have answered). Ends early when something else comes, or happens on `watched`.");
}

}  // namespace shmsync::bind
