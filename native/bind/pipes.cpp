// frames.hpp for Python: one Frames for each end of a pipe.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "gil.hpp"
#include "shmsync/frames.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// A bytes object that is filled before other code sees it.
class NewBytes {
 public:
  explicit NewBytes(std::size_t size)
      : bytes_(nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)))), size_(size) {
    if (!bytes_.is_valid()) throw nb::python_error();
  }
  char* data() { return PyBytes_AsString(bytes_.ptr()); }
  std::size_t size() const { return size_; }
  nb::bytes bytes() const { return bytes_; }
  void resize(std::size_t size) {  // _PyBytes_Resize() would lose what has come when there is no memory
    NewBytes larger(size);
    std::memcpy(larger.data(), data(), std::min(size_, size));
    *this = std::move(larger);
  }

 private:
  nb::bytes bytes_;
  std::size_t size_;
};

class Frames {
 public:
  explicit Frames(int fd) : fd_(fd) {}

  // Sends a message, and notes in `awaited` (a dict by tag, or None) that it will be answered and that those of its
  // group that it replaced will not: in the same call, so that no interrupt comes between.
  void send(nb::bytes payload, const std::string& group, nb::object tag, nb::object awaited) {
    for (const auto id : out_.replace(group)) {
      const auto replaced = tags_.extract(id);
      if (!awaited.is_none() && PyDict_Contains(awaited.ptr(), replaced.mapped().ptr()) == 1)
        PyDict_DelItem(awaited.ptr(), replaced.mapped().ptr());
    }
    if (!awaited.is_none() && PyDict_SetItem(awaited.ptr(), tag.ptr(), Py_True) != 0) throw nb::python_error();
    push(payload, group, tag);
    flush();
  }

  void flush() {
    if (!out_.flush(fd_)) ended_ = true;
    if (out_.empty()) tags_.clear();
  }

  // Appends the next message to `to` if all of it is there; was it? Reading and appending are one call, so that no
  // interrupt can lose the message.
  bool read_into(nb::list to) {
    switch (in_.read(fd_)) {
      case frames::Read::frame:
        to.append(in_.take().bytes());
        return true;
      case frames::Read::end:
        ended_ = true;
        return false;
      case frames::Read::garbage:
        garbage_ = true;
        return false;
      case frames::Read::nothing:
        break;
    }
    return false;
  }

  bool unsent() const { return !out_.empty(); }
  bool idle() const { return out_.empty() && in_.empty(); }
  bool ended() const { return ended_; }
  nb::object garbage() const { return garbage_ ? nb::object(nb::int_(number())) : nb::none(); }
  nb::object incoming() const {
    return in_.announced() == 0 ? nb::none() : nb::object(nb::make_tuple(in_.come(), in_.announced()));
  }
  int fd() const { return fd_; }

 private:
  std::int64_t number() const { return in_.number() < -1 ? in_.number() : static_cast<std::int64_t>(in_.announced()); }
  void push(const nb::bytes& payload, const std::string& group, const nb::object& tag) {
    std::shared_ptr<const void> owner(payload.ptr(), [](const void* object) {
      const nb::gil_scoped_acquire gil;
      Py_DECREF(static_cast<PyObject*>(const_cast<void*>(object)));
    });
    Py_INCREF(payload.ptr());
    if (!group.empty()) tags_[next_] = tag;
    out_.push({view(payload), std::move(owner)}, group, next_++);
  }

  int fd_;
  frames::Outbox out_;
  frames::Inbox<NewBytes> in_;
  std::map<std::uint64_t, nb::object> tags_;  // of messages that may be replaced
  std::uint64_t next_ = 0;
  bool ended_ = false;
  bool garbage_ = false;
};

std::vector<std::size_t> exchange(const std::vector<Frames*>& ends, const std::vector<nb::object>& awaited,
                                  const std::vector<int>& watched, const nb::bytes& message, const std::string& group,
                                  nb::object tag, const nb::bytes& answer, std::int64_t timeout_ns) {
  std::vector<int> fds;
  bool all_sent = true;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    ends[i]->send(message, group, tag, awaited.at(i));
    all_sent = all_sent && !ends[i]->unsent() && !ends[i]->ended();
    fds.push_back(ends[i]->fd());
  }
  if (!all_sent) return {};
  std::vector<std::size_t> done;
  {
    const std::string expected = frames::framed(view(answer));
    const WithoutGil released;
    done = frames::gather(fds, watched, expected, std::chrono::nanoseconds(timeout_ns));
  }
  for (const auto i : done)
    if (PyDict_DelItem(awaited[i].ptr(), tag.ptr()) != 0) throw nb::python_error();
  return done;
}

bool wait_readable(int fd, std::int64_t timeout_ns) {
  const WithoutGil released;
  return frames::wait_readable(fd, std::chrono::nanoseconds(timeout_ns));
}

}  // namespace

void bind_pipes(nb::module_& m) {
  nb::class_<Frames>(m, "Frames",
                     "One end of a pipe: whole messages in and out, never waiting. Borrows the descriptor.")
      .def(nb::init<int>(), "fd"_a)
      .def("send", &Frames::send, "payload"_a, "group"_a = "", "tag"_a = nb::none(), "awaited"_a = nb::none(),
           "Send a message, as far as the pipe takes it; flush() sends the rest. It takes the place of those of its "
           "group that have not begun to leave. In the dict `awaited` their tags go, and this one's comes.")
      .def("flush", &Frames::flush, "Send what the pipe takes now.")
      .def("read_into", &Frames::read_into, "to"_a, "Append the next message to a list, if all of it is there; was it?")
      .def_prop_ro("unsent", &Frames::unsent, "Is there something that flush() has to send?")
      .def_prop_ro("idle", &Frames::idle, "Is no message half sent or half read?")
      .def_prop_ro("garbage", &Frames::garbage, nb::sig("def garbage(self, /) -> int | None"),
                   "The size in a header that no message has, after which nothing can be read; None: no such one came.")
      .def_prop_ro("incoming", &Frames::incoming, nb::sig("def incoming(self, /) -> tuple[int, int] | None"),
                   "Of the message that is half read: bytes that have come, and bytes that it will have.")
      .def_prop_ro("ended", &Frames::ended, "Has reading or sending found the other end closed?");
  m.def("wait_readable", &wait_readable, "fd"_a, "timeout_ns"_a,
        "Wait at most so long. Is there something to read, or is the other end closed?");
  m.def("exchange", &exchange, "ends"_a, "awaited"_a, "watched"_a, "message"_a, "group"_a, "tag"_a.none(), "answer"_a,
        "timeout_ns"_a,
        "Send a message to each end, and wait for exactly this answer from each; the positions of those that gave it. "
        "Returns early when anything else arrives, or when a descriptor in `watched` becomes ready.");
}

}  // namespace shmsync::bind
