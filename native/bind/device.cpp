// What a device does later, for Python: objects whose address and ticket its driver takes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "control.hpp"
#include "gil.hpp"
#include "shmsync/device_reads.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

extern "C" void shmsync_run_later(void* ticket) { run_later(ticket); }

// Waits without the GIL, at most one slice.
template <class Type>
bool wait(Type& self, std::int64_t timeout_ns) {
  const WithoutGil released;
  return self.wait(Nanoseconds(timeout_ns));
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<Later>(m, "HostCall",
                    "A step of the protocol that a device runs on one of its threads, after its earlier work: "
                    "it calls `function`, the address of a void(void*), with a ticket().")
      .def_prop_ro_static("function", [](nb::handle) { return reinterpret_cast<std::uintptr_t>(&shmsync_run_later); })
      .def(
          "ticket", [](Later& call) { return reinterpret_cast<std::uintptr_t>(call.ticket()); },
          "The argument of the call: an address, for one call.")
      .def("cancel", &Later::cancel, "True: it will not be done. False: it is done, or just being done.")
      .def("wait", &wait<Later>, "timeout_ns"_a, "Wait at most one slice. True when it is done.");

  nb::class_<DeviceReads>(m, "DeviceReads",
                          "What a device has still to read of the slots that one row's owner has used.")
      .def(nb::new_([](Control& control, std::uint32_t row, std::uint64_t me) {
             return std::make_shared<DeviceReads>(control.publication(), control.slot_count(), control.readers()[row],
                                                  control.reply(), me);
           }),
           "control"_a, "row"_a, "me"_a, nb::keep_alive<0, 2>())
      .def_prop_ro("idle", &DeviceReads::idle)
      .def("wait", &wait<DeviceReads>, "timeout_ns"_a, "Wait at most one slice. True when nothing is under way.");
}

}  // namespace shmsync::bind
