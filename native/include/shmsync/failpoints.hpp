// Failpoints: places between two steps of the protocol, at which a test pauses, stops or kills the process.
//
// They are there in builds with -DSHMSYNC_FAILPOINTS=ON only, which are for tests. In all others SHMSYNC_FAILPOINT() is
// nothing: no call, no branch, and its name is not in the library.
#pragma once

#ifdef SHMSYNC_FAILPOINTS

#include <string>

#define SHMSYNC_FAILPOINT(name) ::shmsync::pass_failpoint(name)

namespace shmsync {

// Arms these points and disarms all others: "name=action@n,...", where the action is done at the n-th passage from now
// on, once. Without "@n" at the first. Actions:
//   kill, stop   SIGKILL or SIGSTOP, raised by the thread that passes
//   pause:PATH   the thread writes a byte into the FIFO PATH, and goes on when another process opens PATH.go for
//   writing
// Throws std::invalid_argument.
void arm_failpoints(const std::string& spec);

void pass_failpoint(const char* name);

}  // namespace shmsync

#else
#define SHMSYNC_FAILPOINT(name) static_cast<void>(0)
#endif
