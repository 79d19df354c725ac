// Entering several context managers as one, so that no interrupt lands between them.
//
// Python runs signal handlers between its own instructions. A `with` statement over one native object is one of them:
// either nothing is entered, or all of it will be left. The managers given here must be native too, or Python code runs
// in between after all.
#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

class Together {
 public:
  Together(nb::tuple makers, nb::object then) : makers_(std::move(makers)), then_(std::move(then)) {}

  // Some of them are entered when they are made already, so they are made here.
  void enter() {
    try {
      for (nb::handle make : makers_) {
        entered_.push_back(make());
        entered_.back().attr("__enter__")();
      }
      then_();
    } catch (...) {
      leave();
      throw;
    }
  }
  // The last one first, and each of them is gone before the next one.
  void leave() {
    while (!entered_.empty()) {
      const nb::object manager = std::move(entered_.back());
      entered_.pop_back();
      manager.attr("__exit__")(nb::none(), nb::none(), nb::none());
    }
  }

 private:
  nb::tuple makers_;
  nb::object then_;
  std::vector<nb::object> entered_;
};

}  // namespace

void bind_modes(nb::module_& m) {
  nb::class_<Together>(m, "Together",
                       "Makes and enters these native context managers, then calls `then`; leaves them together.")
      .def(nb::init<nb::tuple, nb::object>(), "makers"_a, "then"_a)
      .def("__enter__", &Together::enter)
      .def(
          "__exit__", [](Together& self, nb::handle, nb::handle, nb::handle) { self.leave(); }, "exc_type"_a.none(),
          "exc"_a.none(), "traceback"_a.none());
}

}  // namespace shmsync::bind
