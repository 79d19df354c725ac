// torch.compile(): the Python code that is called from here may run below code that it compiles.
//
// Dynamo, its front end, compiles each Python frame that begins there. It must not compile ours, and must know what a
// guard is. Python's half registers that once (shmsync/engine/bind/compiled.py), as soon as Dynamo has been imported.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "gil.hpp"

namespace shmsync::bind {

namespace nb = nanobind;

inline nb::handle g_register;  // null: done
inline nb::handle
    g_compiling;  // tells whether Dynamo compiles the frames that begin now; null: this torch does not say

// Call it before Python code of ours runs. True: Dynamo was told in this call.
inline bool tell_dynamo() {
  if (!g_register.is_valid()) return false;
  static Py_ssize_t count = 0;  // of modules at the last look: Dynamo brings hundreds
  PyObject* const modules = PyImport_GetModuleDict();
  if (std::exchange(count, PyDict_Size(modules)) == PyDict_Size(modules)) return false;
  if (PyDict_GetItemWithError(modules, interned("torch._dynamo")) == nullptr) {
    if (PyErr_Occurred()) throw nb::python_error();
    return false;
  }
  const nb::object call = nb::borrow(g_register);
  call();
  g_register = nb::handle();
  return true;
}

// Then a hook may be called as it is. Else it is called through torch.compiler.disable(), which takes 2 µs.
inline bool nothing_compiles() {
  tell_dynamo();
  if (!g_compiling.is_valid()) return false;
  PyObject* const answer = PyObject_CallNoArgs(g_compiling.ptr());
  if (answer == nullptr) throw nb::python_error();
  Py_DECREF(answer);
  return answer == Py_None;
}

}  // namespace shmsync::bind
