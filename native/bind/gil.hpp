// The GIL, in threads that the process may leave behind.
//
// While the interpreter finalises, CPython before 3.14 ends a daemon thread that asks for the GIL by pthread_exit(),
// which unwinds its stack. C++ frames that may not throw, ours and nanobind's, turn that into an abort of the process.
// So the thread stays where it is until the process ends, which is what CPython itself does from 3.14 on.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <unordered_map>

namespace shmsync::bind {

// Call it from the handler that caught the unwinding: leaving the handler would abort.
[[noreturn]] inline void stay_for_ever() {
  for (;;) pause();
}

// Like nanobind's gil_scoped_release, for daemon threads too.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      stay_for_ever();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Calls a function of Python's C API that may run Python code. The C API returns Python's errors as results, so the
// only exception caught here is the unwinding.
template <class Function>
auto in_python(Function function) {
  try {
    return function();
  } catch (...) {
    stay_for_ever();
  }
}

// The interned string of a literal: the same address is the same name. Python finds attributes by it in a cache, which
// saves 0.2 us a call.
inline PyObject* interned(const char* literal) {
  static std::unordered_map<const char*, PyObject*> names;
  PyObject*& name = names[literal];
  if (name == nullptr && (name = PyUnicode_InternFromString(literal)) == nullptr) throw nanobind::python_error();
  return name;
}

// self.name(*arguments). Python code that waits must be called through this.
template <class... Arguments>
nanobind::object call_method(nanobind::handle self, const char* name, const Arguments&... arguments) {
  PyObject* const method = interned(name);
  PyObject* result =
      in_python([&] { return PyObject_CallMethodObjArgs(self.ptr(), method, arguments.ptr()..., nullptr); });
  if (result == nullptr) throw nanobind::python_error();
  return nanobind::steal(result);
}

// Raises an error of shmsync.errors.
[[noreturn]] inline void raise(const char* type, const char* message) {
  const nanobind::object text = nanobind::str(message);
  const nanobind::object error = call_method(nanobind::module_::import_("shmsync.errors"), type, text);
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nanobind::python_error();
}

}  // namespace shmsync::bind
