// Trace for Python.
#include "shmsync/trace.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {

void bind_trace(nb::module_& m) {
  nb::class_<Trace>(m, "Trace", "Appends what happens to a file, as JSON of the Trace Event Format.")
      .def(nb::init<int, std::string>(), "fd"_a, "arena"_a,
           "`fd`: a descriptor with O_APPEND, its own from now on. Texts are JSON strings without their quotes.")
      .def(
          "span",
          [](Trace& t, const std::string& what, double begin, std::uint64_t version) {
            t.span(what.c_str(), static_cast<std::uint64_t>(begin * 1e9), version);
          },
          "what"_a, "begin"_a, "version"_a, "Something that began at this time.perf_counter(), and ends now.")
      .def(
          "name_process", [](Trace& t, const std::string& name) { t.name_process(name.c_str()); }, "name"_a)
      .def_prop_ro("error", &Trace::error, "0, or the errno of the write that failed; nothing was written since.");
}

}  // namespace shmsync::bind
