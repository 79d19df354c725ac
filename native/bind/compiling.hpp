// torch.compile(): the Python code that is called from here may run below code that it compiles.
//
// Dynamo, its front end, must know what a guard is. Python's half registers that once
// (shmsync/engine/bind/compiled.py), as soon as Dynamo has been imported.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "gil.hpp"

namespace shmsync::bind {

namespace nb = nanobind;

inline nb::handle g_register;  // null: done

inline bool dynamo_knows_us() { return !g_register.is_valid(); }

// Call it before Python code of ours runs.
inline void tell_dynamo() {
  if (dynamo_knows_us()) return;
  static Py_ssize_t count = 0;  // of modules at the last look: Dynamo brings hundreds
  PyObject* const modules = PyImport_GetModuleDict();
  const Py_ssize_t now = PyDict_Size(modules);
  if (std::exchange(count, now) == now) return;
  if (PyDict_GetItemWithError(modules, interned("torch._dynamo")) == nullptr) {
    if (PyErr_Occurred()) throw nb::python_error();
    return;
  }
  const nb::object call = nb::borrow(g_register);
  call();
  g_register = nb::handle();
}

}  // namespace shmsync::bind
