// For Python: which ranges of memory are an arena's weights, so that a fault in them is explained.
#include "shmsync/faults.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {

void bind_faults(nb::module_& m) {
  m.def("watch_faults", &watch_faults, "address"_a, "bytes"_a, "name"_a,
        "Have a fault in this range explained by the name of its arena; False when too many are watched.");
  m.def("unwatch_faults", &unwatch_faults, "address"_a, "The range that starts there is no arena's any more.");
}

}  // namespace shmsync::bind
