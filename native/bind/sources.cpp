#include "sources.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

struct ExchangeTable {  // DLPackExchangeAPI, version 1
  std::uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_python;
  void* managed_to_python;
  int (*tensor_from_python)(void* object, DLTensor* out);
  void* current_stream;
};

const ExchangeTable* g_table = nullptr;
PyTypeObject* g_tensor_type = nullptr;

constexpr std::uint8_t kComplex = 5;

std::size_t elements(const DLTensor& t) {
  std::size_t n = 1;
  for (std::int32_t i = 0; i < t.ndim; ++i) n *= static_cast<std::size_t>(t.shape[i]);
  return n;
}

bool set_exchange_table(nb::handle tensor_type) {
  g_table = nullptr;
  if (!nb::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return false;
  nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (table->major != 1 || table->tensor_from_python == nullptr) return false;
  g_table = table;
  g_tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type.inc_ref().ptr());  // torch is never unloaded
  return true;
}

// A method of torch's own class, looked up once: torch is never unloaded.
PyObject* method_of(const char* type, const char* name) {
  return nb::object(nb::module_::import_("torch").attr("_C").attr(type).attr(name)).release().ptr();
}

nb::object answer(PyObject* method, nb::handle object) {
  PyObject* const self = object.ptr();
  nb::object found = nb::steal(PyObject_Vectorcall(method, &self, 1, nullptr));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

}  // namespace

bool same_order(const DLTensor& t, const std::int64_t* strides) {
  for (std::int32_t i = 0; i < t.ndim; ++i)
    if (t.shape[i] != 1 && t.strides[i] != strides[i]) return false;
  return true;
}

std::size_t extent(const DLTensor& t) {
  if (elements(t) == 0) return 0;
  std::int64_t last = 0;
  for (std::int32_t i = 0; i < t.ndim; ++i) last += (t.shape[i] - 1) * t.strides[i];
  return static_cast<std::size_t>(last) + 1;
}

bool is_lazy(nb::handle tensor, std::uint8_t code) {
  static PyObject* const is_neg = method_of("TensorBase", "is_neg");
  static PyObject* const is_conj = method_of("TensorBase", "is_conj");
  return answer(is_neg, tensor).is(Py_True) || (code == kComplex && answer(is_conj, tensor).is(Py_True));
}

bool holds(nb::handle tensor, const std::byte* address, std::size_t bytes) {
  static PyObject* const untyped_storage = method_of("TensorBase", "untyped_storage");
  static PyObject* const data_ptr = method_of("StorageBase", "data_ptr");
  static PyObject* const nbytes = method_of("StorageBase", "nbytes");
  if (bytes == 0) return true;
  if (address == nullptr) return false;
  const nb::object storage = answer(untyped_storage, tensor);
  const auto begin = nb::cast<std::uintptr_t>(answer(data_ptr, storage));
  const auto size = nb::cast<std::size_t>(answer(nbytes, storage));
  return begin + size >= reinterpret_cast<std::uintptr_t>(address) + bytes;
}

bool describe(PyObject* tensor, DLTensor& out) {
  if (g_table == nullptr || !PyObject_TypeCheck(tensor, g_tensor_type)) return false;
  if (g_table->tensor_from_python(tensor, &out) != 0) {
    PyErr_Clear();
    return false;
  }
  return true;
}

bool surely_plain(PyObject* tensor) {
  DLTensor t;
  if (!describe(tensor, t) || t.device_type != kCpu || t.data == nullptr || is_lazy(tensor, t.code)) return false;
  return holds(tensor, static_cast<const std::byte*>(t.data) + t.byte_offset, extent(t) * t.bits / 8);
}

void copy_all(const std::vector<CopyOp>& ops, std::uint64_t bytes) {
  constexpr std::uint64_t kBrief = 64 << 10;  // some 10 us
  if (bytes <= kBrief) return copy(ops.data(), ops.size(), CopyPath::automatic, 1);
  static const nb::handle get_num_threads = nb::object(nb::module_::import_("torch").attr("get_num_threads")).release();
  const unsigned threads = bytes < kShareAbove ? 1 : nb::cast<unsigned>(get_num_threads());
  const WithoutGil released;
  copy(ops.data(), ops.size(), CopyPath::automatic, threads);
}

void set_data(const nb::list& tensors, const nb::list& views) {
  static const nb::handle attribute =
      nb::object(nb::module_::import_("torch").attr("_C").attr("TensorBase").attr("data")).release();
  static const auto set = reinterpret_cast<descrsetfunc>(PyType_GetSlot(Py_TYPE(attribute.ptr()), Py_tp_descr_set));
  const std::size_t count = std::min(tensors.size(), views.size());
  for (std::size_t i = 0; i < count; ++i)
    if (set(attribute.ptr(), nb::handle(tensors[i]).ptr(), nb::handle(views[i]).ptr()) != 0) throw nb::python_error();
}

void bind_sources(nb::module_& m) {
  m.def("set_data", &set_data, "tensors"_a, "views"_a, nb::sig("def set_data(tensors: list, views: list) -> None"),
        "`tensor.data = view` for each pair.");
  m.def(
      "surely_plain",
      [](nb::handle object) {
        const TorchFunctionOff off;
        return surely_plain(object.ptr());
      },
      "object"_a, nb::sig("def surely_plain(object: object) -> bool"),
      "Is it a tensor of plain CPU memory that is there, in any order? False is inconclusive: then ask the tensor "
      "itself.");
  m.def("set_exchange_table", &set_exchange_table, "tensor_type"_a,
        nb::sig("def set_exchange_table(tensor_type: type) -> bool"),
        "Use the DLPack exchange table of this type. False: it has none, and no other one is used.");
  m.def(
      "copy",
      [](std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>> table) {
        std::vector<CopyOp> ops;
        std::uint64_t total = 0;
        for (const auto& [to, from, bytes] : table) {
          ops.push_back({reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from), bytes});
          total += bytes;
        }
        copy_all(ops, total);
      },
      "table"_a, "Copy each (destination, source, bytes); the GIL is released.");
}

}  // namespace shmsync::bind
