// PublicationWriter for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "control.hpp"
#include "sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

class Writer : public PublicationWriter {
 public:
  Writer(Control& control, std::uint64_t me)
      : PublicationWriter(control.publication(), control.slots(), control.slot_count(), control.readers(),
                          control.reply(), me) {}
};

bool begin(Writer& writer) { return writer.begin() == Begin::ready; }

bool wait_begin(Writer& writer, std::int64_t timeout_ns) {
  nb::gil_scoped_release release;
  return writer.wait_begin(Nanoseconds(timeout_ns)) == Begin::ready;
}

using Rows = std::vector<std::tuple<std::uint32_t, std::uint64_t>>;

// Waits for the given (row, owner) pairs; returns those that still owe an ack after at most one slice.
Rows wait_acks(Writer& writer, std::uint64_t version, const Rows& rows, std::int64_t timeout_ns) {
  std::vector<PublicationWriter::Awaited> awaited;
  for (const auto& [row, owner] : rows) awaited.push_back({row, owner});
  {
    nb::gil_scoped_release release;
    writer.wait_acks(version, awaited, Nanoseconds(timeout_ns));
  }
  Rows left;
  for (const auto& a : awaited) left.emplace_back(a.row, a.owner);
  return left;
}

}  // namespace

void bind_writer(nb::module_& m) {
  nb::class_<Writer>(m, "Writer", "The writer's side of the protocol. Calls are not thread-safe: hold a lock.")
      .def(nb::init<Control&, std::uint64_t>(), "control"_a, "me"_a, nb::keep_alive<1, 2>())
      .def("begin", &begin, "Close the gate (slots = 1) and look for a slot once. True: write slot.")
      .def("wait_begin", &wait_begin, "timeout_ns"_a, "The same, waiting at most one slice.")
      .def(
          "commit", [](Writer& w) { return w.commit(); }, "Publish; the new version.")
      .def("abort", [](Writer& w) { w.abort(); })
      .def("poison", [](Writer& w) { w.poison(); })
      .def("close", [](Writer& w) { w.close(); })
      .def_prop_ro("slot", [](const Writer& w) { return w.slot(); })
      .def_prop_ro("current_slot", [](const Writer& w) { return w.current_slot(); })
      .def_prop_ro("version", [](const Writer& w) { return w.version(); })
      .def_prop_ro("writing", [](const Writer& w) { return w.writing(); })
      .def_prop_ro("poisoned", [](const Writer& w) { return w.poisoned(); })
      .def(
          "blockers",
          [](const Writer& w) {
            nb::list found;
            for (const auto& b : w.blockers()) found.append(nb::make_tuple(b.row, b.owner, b.version));
            return found;
          },
          nb::sig("def blockers(self) -> list[tuple[int, int, int]]"),
          "(row, owner, pinned version) of each row in the way.")
      .def("claimed_rows",
           [](const Writer& w) {
             Rows rows;
             for (const auto& a : w.claimed_rows()) rows.emplace_back(a.row, a.owner);
             return rows;
           })
      .def("wait_acks", &wait_acks, "version"_a, "rows"_a, "timeout_ns"_a,
           "Those of the (row, owner) pairs that have not acked after at most one slice.");
}

}  // namespace shmsync::bind
