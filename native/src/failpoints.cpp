#include "shmsync/failpoints.hpp"

#ifdef SHMSYNC_FAILPOINTS

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace shmsync {
namespace {

struct Armed {
  std::string name, action;
  unsigned long left;  // passages until the action is done
};

std::mutex mutex;
std::vector<Armed> armed;

Armed parsed(const std::string& text) {
  const auto equals = text.find('='), at = text.rfind('@');
  if (equals == std::string::npos) throw std::invalid_argument("a failpoint is name=action@n, not \"" + text + "\"");
  const auto end = at == std::string::npos || at < equals ? text.size() : at;
  Armed point{text.substr(0, equals), text.substr(equals + 1, end - equals - 1), 1};
  if (end != text.size()) point.left = std::strtoul(text.c_str() + end + 1, nullptr, 10);
  const bool known = point.action == "kill" || point.action == "stop" || point.action.rfind("pause:/", 0) == 0;
  if (!known || point.left == 0)
    throw std::invalid_argument("the action of a failpoint is kill, stop or pause:PATH, then @n, not \"" + text + "\"");
  return point;
}

int opened(const std::string& path, int how) {
  for (;;) {
    const int fd = open(path.c_str(), how | O_CLOEXEC);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

void pause_at(const std::string& path) {
  const int reached = opened(path, O_WRONLY);
  if (reached < 0 || write(reached, "r", 1) != 1) std::abort();  // the process that armed it would wait for nothing
  close(reached);
  close(opened(path + ".go", O_RDONLY));
}

}  // namespace

void arm_failpoints(const std::string& spec) {
  std::vector<Armed> points;
  std::istringstream parts(spec);
  for (std::string part; std::getline(parts, part, ',');)
    if (!part.empty()) points.push_back(parsed(part));
  const std::lock_guard lock(mutex);
  armed = std::move(points);
}

void pass_failpoint(const char* name) {
  std::string action;
  {
    const std::lock_guard lock(mutex);
    for (Armed& point : armed)
      if (point.left != 0 && point.name == name && --point.left == 0) action = point.action;
  }
  if (action.empty()) return;
  // raise(), since a signal for the whole process may first reach another thread, and this one would go on meanwhile.
  if (action == "kill")
    std::raise(SIGKILL);
  else if (action == "stop")
    std::raise(SIGSTOP);
  else
    pause_at(action.substr(sizeof("pause:") - 1));
}

}  // namespace shmsync

#endif
