#include "follower.hpp"

#include <algorithm>

#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

std::uintptr_t address_of(nb::handle tensor) {
  DLTensor t;
  if (describe(tensor.ptr(), t)) return reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  return nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());  // this torch has no exchange table
}

}  // namespace

Follower::Follower(nb::object module, nb::list parameters, nb::dict store, nb::object name, nb::list buffers,
                   nb::list counted)
    : module_(std::move(module)),
      store_(std::move(store)),
      name_(std::move(name)),
      parameters_(std::move(parameters)),
      counted_(std::move(counted)) {
  if (parameters_.size() != 0) first_ = parameters_[0];
  for (nb::handle item : buffers) {
    Buffer buffer{nb::object(item[0]), nb::object(item[1]), nb::object(item[2]), nb::cast<std::size_t>(item[3]), 0};
    DLTensor t;
    if (describe(buffer.tensor.ptr(), t) && t.device_type == kCpu) {
      buffer.bytes = extent(t) * t.bits / 8;
      sizes_.insert(sizes_.end(), t.shape, t.shape + t.ndim);
      sizes_.insert(sizes_.end(), t.strides, t.strides + t.ndim);
    } else {
      plain_ = false;
    }
    buffers_.push_back(std::move(buffer));
  }
}

void Follower::learn(std::uint32_t slot, nb::list views, std::uintptr_t address) {
  if (slots_.size() <= slot) slots_.resize(slot + 1);
  const std::uintptr_t first = views.size() == 0 ? 0 : address_of(views[0]);
  slots_[slot] = {std::move(views), address, first};
}

void Follower::forget() {
  slots_.clear();
  shown_ = -1;
}

bool Follower::in_place() const {
  if (address_ == 0) return true;
  return PyDict_GetItemWithError(store_.ptr(), name_.ptr()) == first_.ptr() && address_of(first_) == address_;
}

void Follower::put_back() const {
  for (const Buffer& each : buffers_)
    if (!each.store.is_none() && PyDict_GetItemWithError(each.store.ptr(), each.name.ptr()) != each.tensor.ptr() &&
        PyDict_SetItem(each.store.ptr(), each.name.ptr(), each.tensor.ptr()) != 0)
      throw nb::python_error();
}

void Follower::show(std::uint32_t slot) {
  if (shown_ == slot) return;  // with one slot they show it already
  const Slot known = slots_.at(slot);
  set_data(parameters_, nb::list(known.views));
  shown_ = slot;
  address_ = known.first;
}

bool Follower::renew(std::uint32_t slot) {
  if (!plain_) return false;
  if (buffers_.empty()) return true;
  ops_.clear();
  std::uint64_t total = 0;
  const std::int64_t* sizes = sizes_.data();
  const auto* const from = reinterpret_cast<const std::byte*>(slots_.at(slot).address);
  for (const Buffer& each : buffers_) {
    DLTensor t;
    if (!describe(each.tensor.ptr(), t) || t.device_type != kCpu || extent(t) * t.bits / 8 != each.bytes ||
        !std::equal(t.shape, t.shape + t.ndim, sizes) || !same_order(t, sizes + t.ndim))
      return false;
    sizes += 2 * t.ndim;
    ops_.push_back({static_cast<std::byte*>(t.data) + t.byte_offset, from + each.offset, each.bytes});
    total += each.bytes;
  }
  copy_all(ops_, total);
  if (counted_.size() != 0) {  // as copy_() does, for autograd's checks
    static const nb::handle increment =
        nb::object(nb::module_::import_("torch.autograd.graph").attr("increment_version")).release();
    increment(counted_);
  }
  return true;
}

bool Follower::is_ready(std::uint32_t slot) const {
  return simple && knows(slot) && !module_().is_none() && in_place();
}

void clear_caches() {
  static const nb::handle clear = nb::object(nb::module_::import_("torch").attr("clear_autocast_cache")).release();
  static const nb::handle parametrize =
      nb::object(nb::module_::import_("torch.nn.utils.parametrize").attr("__dict__")).release();
  clear();
  PyObject* const cache = PyDict_GetItemWithError(parametrize.ptr(), interned("_cache"));
  if (cache != nullptr && PyDict_Check(cache)) PyDict_Clear(cache);
}

void bind_follower(nb::module_& m) {
  nb::class_<Follower>(m, "Follower", "The tensors of a bound module, which move with the version.",
                       nb::is_weak_referenceable())
      .def(nb::init<nb::object, nb::list, nb::dict, nb::object, nb::list, nb::list>(), "module"_a, "parameters"_a,
           "store"_a, "name"_a, "buffers"_a, "counted"_a,
           nb::sig("def __init__(self, module: object, parameters: list, store: dict, name: str, buffers: list, "
                   "counted: list) -> None"),
           "`module`: a weak reference. `store` is the dict that owns the first parameter, under `name`. `buffers`: "
           "[(dict that owns it, its name there, the buffer, its offset in a slot), ...]; None: of no dict. `counted`: "
           "those whose changes autograd counts.")
      .def("learn", &Follower::learn, "slot"_a, "views"_a, "address"_a,
           nb::sig("def learn(self, slot: int, views: list, address: int) -> None"),
           "The parameters take these views in this slot, which begins at this address.")
      .def("knows", &Follower::knows, "slot"_a, "Was learn() called for it, since forget()?")
      .def("forget", &Follower::forget, "It shows another arena: no slot is known.")
      .def("in_place", &Follower::in_place, "Is the first parameter where it was put, in its module and in memory?")
      .def("put_back", &Follower::put_back, "Put each buffer back into its dict, where it was replaced.")
      .def("show", &Follower::show, "slot"_a, "Let the parameters show this slot, which is known.")
      .def("renew", &Follower::renew, "slot"_a,
           "Copy this slot, which is known, into the buffers. False: they are no plain memory of the host, as they "
           "were; nothing was copied.")
      .def("hide", &Follower::hide, "The parameters are private from now on.")
      .def_rw("simple", &Follower::simple, "A move needs no Python.");
  m.def("clear_caches", &clear_caches, "Forget what autocast and parametrize have computed from the version before.");
}

}  // namespace shmsync::bind
