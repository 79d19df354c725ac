#include "device.hpp"

#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

extern "C" void shmsync_run_later(void* ticket) { run_later(ticket); }

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<HostCall>(m, "HostCall",
                       "A step of the protocol that a device runs on one of its threads, after its earlier work: "
                       "it calls `function`, the address of a void(void*), with a ticket().")
      .def_prop_ro_static("function", [](nb::handle) { return reinterpret_cast<std::uintptr_t>(&shmsync_run_later); })
      .def(
          "ticket", [](HostCall& call) { return reinterpret_cast<std::uintptr_t>(call.later->ticket()); },
          "The argument of the call: an address, for one call.")
      .def(
          "cancel", [](HostCall& call) { return call.later->cancel(); },
          "True: it will not be done. False: it is done, or just being done.")
      .def(
          "wait",
          [](const HostCall& call, std::int64_t timeout_ns) {
            const WithoutGil released;
            return call.later->wait(Nanoseconds(timeout_ns));
          },
          "timeout_ns"_a, "Wait at most one slice. True when it is done.");

  nb::class_<RowReads>(m, "DeviceReads", "What a device has still to read of the slots that one row's owner has used.")
      .def(
          "__init__",
          [](RowReads* self, Control& control, std::uint32_t row, std::uint64_t me) {
            new (self) RowReads{std::make_shared<DeviceReads>(control.publication(), control.slot_count(),
                                                              control.readers()[row], control.reply(), me)};
          },
          "control"_a, "row"_a, "me"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("idle", [](const RowReads& self) { return self.reads->idle(); })
      .def(
          "wait",
          [](const RowReads& self, std::int64_t timeout_ns) {
            const WithoutGil released;
            return self.reads->wait(Nanoseconds(timeout_ns));
          },
          "timeout_ns"_a, "Wait at most one slice. True when nothing is under way.");
}

}  // namespace shmsync::bind
