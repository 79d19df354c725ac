// Trace for Python.
#include "trace.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>

#include "shmsync/futex.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {

void bind_trace(nb::module_& m) {
  nb::class_<HeldTrace>(m, "Trace", "Appends what happens to a file, as JSON of the Trace Event Format.")
      .def(
          "__init__",
          [](HeldTrace* self, int fd, std::string arena, bool of_writer) {
            new (self) HeldTrace{std::make_shared<Trace>(fd, std::move(arena), of_writer)};
          },
          "fd"_a, "arena"_a, "of_writer"_a = false,
          "`fd`: a descriptor with O_APPEND; this object has a duplicate. Texts are JSON strings without their quotes. "
          "`of_writer`: events written here have a separate track, whatever the thread.")
      .def(
          "span",
          [](HeldTrace& t, const std::string& what, std::uint64_t begin, std::uint64_t version, std::uint64_t end) {
            t.trace->span(what.c_str(), begin, end == 0 ? monotonic_ns() : end, version);
          },
          "what"_a, "begin"_a, "version"_a, "end"_a = 0,
          "Something that began and ended at these values of time.perf_counter_ns(); 0: ends now.")
      .def_prop_ro_static(
          "LINE", [](nb::handle) { return Trace::kLine; }, "Lines are filled up to a multiple of so many bytes.")
      .def_prop_ro("fd", [](const HeldTrace& t) { return t.trace->fd(); })
      .def(
          "name_process", [](HeldTrace& t, const std::string& name) { t.trace->name_process(name.c_str()); }, "name"_a)
      .def_prop_ro(
          "error", [](const HeldTrace& t) { return t.trace->error(); },
          "0, or the errno of the write that failed; nothing was written since.");
}

}  // namespace shmsync::bind
