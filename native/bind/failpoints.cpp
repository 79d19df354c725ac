// Failpoints for the tests' Python, in builds that have them.
#include "shmsync/failpoints.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdlib>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {

#ifdef SHMSYNC_FAILPOINTS
void bind_failpoints(nb::module_& m) {
  if (const char* spec = std::getenv("SHMSYNC_FAILPOINT")) arm_failpoints(spec);
  m.def("arm_failpoints", &arm_failpoints, "spec"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "pass_failpoint", [](const std::string& name) { pass_failpoint(name.c_str()); }, "name"_a,
      nb::call_guard<nb::gil_scoped_release>());
}
#else
void bind_failpoints(nb::module_&) {}
#endif

}  // namespace shmsync::bind
