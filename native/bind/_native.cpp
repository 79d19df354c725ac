// nanobind glue: convert, release the GIL, call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdlib>

#include "shmsync/failpoints.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
void bind_cover(nb::module_&);
void bind_device(nb::module_&);
void bind_memory(nb::module_&);
void bind_follower(nb::module_&);
void bind_header(nb::module_&);
void bind_sources(nb::module_&);
void bind_source_plan(nb::module_&);
void bind_writer(nb::module_&);
void bind_reader(nb::module_&);
}  // namespace shmsync::bind

NB_MODULE(_native, m) {
#ifdef NDEBUG
  // Globals and arguments of Processes may hold objects until the interpreter ends; nanobind would call them leaks.
  nb::set_leak_warnings(false);
#endif
  m.doc() = "The core of shmsync: bytes, ordering, waiting, copying. Not public; see shmsync.Publisher and Subscriber.";
#ifdef SHMSYNC_FAILPOINTS  // for the tests' Python
  if (const char* spec = std::getenv("SHMSYNC_FAILPOINT")) shmsync::arm_failpoints(spec);
  m.def("arm_failpoints", &shmsync::arm_failpoints, "spec"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "pass_failpoint", [](const std::string& name) { shmsync::pass_failpoint(name.c_str()); }, "name"_a,
      nb::call_guard<nb::gil_scoped_release>());
#endif
  shmsync::bind::bind_memory(m);
  shmsync::bind::bind_follower(m);
  shmsync::bind::bind_header(m);
  shmsync::bind::bind_sources(m);
  shmsync::bind::bind_source_plan(m);
  shmsync::bind::bind_device(m);
  shmsync::bind::bind_writer(m);
  shmsync::bind::bind_reader(m);
  shmsync::bind::bind_cover(m);
}
