// Whether torch modules still have the submodules, and the dicts of parameters and buffers, that they had.
//
// A binding lives in a Subscriber that the module's guard holds, so it may hold no module: a cycle through native
// objects is never collected. A `_modules` dict holds modules, and so does a module's `__dict__`; both are looked up
// in each check.
#include <nanobind/nanobind.h>

#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

// What a weak reference refers to; invalid when it is gone.
nb::object referent(nb::handle reference) {
// The stable ABI that is built for is that of 3.12, whatever Python builds it, and has only the older function.
#if PY_VERSION_HEX >= 0x030D0000 && (!defined(Py_LIMITED_API) || Py_LIMITED_API >= 0x030D0000)
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference.ptr(), &found) < 0) throw nb::python_error();
  return nb::steal(found);
#else
  PyObject* found = PyWeakref_GetObject(reference.ptr());
  if (found == nullptr) throw nb::python_error();
  return found == Py_None ? nb::object() : nb::borrow(found);
#endif
}

class ModuleTree {
 public:
  // nodes: [(weak reference to a module, its _parameters, its _buffers, [(name, weak reference to a child), ...]), ...]
  explicit ModuleTree(nb::list nodes) {
    for (nb::handle item : nodes) {
      Node node{nb::object(item[0]), nb::object(item[1]), nb::object(item[2]), {}};
      for (nb::handle child : item[3]) node.children.push_back({nb::object(child[0]), nb::object(child[1])});
      nodes_.push_back(std::move(node));
    }
  }

  // A module that is gone counts as unchanged: what it owned is gone with it.
  bool unchanged() const {
    for (const Node& node : nodes_)
      if (!same(node)) return false;
    return true;
  }

 private:
  struct Child {
    nb::object name, reference;
  };
  struct Node {
    nb::object reference, parameters, buffers;
    std::vector<Child> children;
  };

  static bool same(const Node& node) {
    const nb::object module = referent(node.reference);
    if (!module.is_valid()) return true;
    const nb::object attributes = nb::steal(PyObject_GenericGetDict(module.ptr(), nullptr));
    if (!attributes.is_valid()) throw nb::python_error();
    static PyObject* const names[] = {PyUnicode_InternFromString("_parameters"), PyUnicode_InternFromString("_buffers"),
                                      PyUnicode_InternFromString("_modules")};
    const auto attribute = [&](int name) { return PyDict_GetItem(attributes.ptr(), names[name]); };
    if (attribute(0) != node.parameters.ptr() || attribute(1) != node.buffers.ptr()) return false;
    PyObject* const children = attribute(2);
    if (children == nullptr || !PyDict_Check(children)) return false;
    PyObject *name, *child;
    Py_ssize_t at = 0;
    for (const Child& expected : node.children)
      if (!PyDict_Next(children, &at, &name, &child) ||
          (name != expected.name.ptr() && !nb::handle(name).equal(expected.name)) ||
          !referent(expected.reference).is(child))
        return false;
    return !PyDict_Next(children, &at, &name, &child);
  }

  std::vector<Node> nodes_;
};

}  // namespace

void bind_module_tree(nb::module_& m) {
  nb::class_<ModuleTree>(m, "ModuleTree", "The shape of a torch module, as it was.")
      .def(nb::init<nb::list>(), "nodes"_a, nb::sig("def __init__(self, nodes: list) -> None"))
      .def("unchanged", &ModuleTree::unchanged, "Has each living module still these submodules and dicts?");
}

}  // namespace shmsync::bind
