// One line for a write into weights that are read-only here, before the process dies of it as it would anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shmsync {

// A fault in [begin, begin + bytes) is one in the memory of arena `name` from now on. The first call puts a handler of
// SIGSEGV in front of the one that is there. Returns false, and watches nothing, when there is no room.
bool watch_faults(std::uintptr_t begin, std::size_t bytes, std::string_view name);

// The range that starts there is not watched any more. Call it before the memory is unmapped.
void unwatch_faults(std::uintptr_t begin);

bool is_watched(std::uintptr_t address);

// In a forked child: the lock may have been held by a thread that is not here.
void faults_after_fork();

}  // namespace shmsync
