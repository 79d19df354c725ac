// A trace for Python.
#pragma once

#include <memory>
#include <optional>

#include "shmsync/trace.hpp"

namespace shmsync::bind {

// One Trace, held by Python too. The reference inside uses no Python: the last one may go on a thread of a device,
// which must not wait for the GIL.
struct HeldTrace {
  std::shared_ptr<Trace> trace;
};

// None for a null.
inline std::optional<HeldTrace> for_python(const std::shared_ptr<Trace>& trace) {
  return trace ? std::optional(HeldTrace{trace}) : std::nullopt;
}

}  // namespace shmsync::bind
