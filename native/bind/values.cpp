// A dict or TensorDict of tensors that is like one seen before: same keys, and tensors of the same places, dtypes and
// shapes.
//
// Each state_dict() is a new dict of new tensors. This finds their places again, and checks each tensor again: its
// type, flags, strides and address show whether it can be copied as bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

enum class Kind : std::uint8_t { bytes, converted, left_out };

class Outline {
 public:
  // tree: [(key, position of a leaf, or the list of a level below), ...].
  // leaves: by position, (tensor, kind, row in the table of sources or -1, position of the leaf that it is one with).
  // types: (torch.Tensor, Parameter); levels: (dict, OrderedDict); tensordict: its class, None: not imported.
  Outline(nb::list tree, nb::list leaves, nb::tuple types, nb::tuple levels, nb::object tensordict)
      : types_(types), levels_(levels), tensordict_(tensordict) {
    add(tree);
    const TorchFunctionOff off;
    for (nb::handle item : leaves) {
      DLTensor t;
      Leaf leaf{static_cast<Kind>(nb::cast<int>(item[1])), nb::cast<int>(item[2]), nb::cast<int>(item[3])};
      if (leaf.kind == Kind::left_out) {
        leaves_.push_back(std::move(leaf));
        continue;
      }
      if (!describe(nb::object(item[0]).ptr(), t)) throw nb::value_error("a leaf of an outline is no plain tensor");
      leaf.lazy = is_lazy(nb::object(item[0]), t.code);
      leaf.code = t.code;
      leaf.bits = t.bits;
      leaf.place = place_of(t);
      leaf.sizes.assign(t.shape, t.shape + t.ndim);
      leaf.strides.assign(t.strides, t.strides + t.ndim);
      leaf.address = static_cast<const std::byte*>(t.data) + t.byte_offset;
      leaves_.push_back(std::move(leaf));
    }
  }

  // Does `source` fit? Then the table has its tensors, and `converted` those that are no bytes to copy.
  bool fill(nb::handle source, Sources& table, nb::list converted) {
    moved_ = !settled_;
    settled_ = false;
    const TorchFunctionOff off;
    if (!fits(0, source, table, converted)) return false;
    for (const Leaf& leaf : leaves_)
      if (leaf.first >= 0 && leaf.address != leaves_[static_cast<std::size_t>(leaf.first)].address) return false;
    settled_ = true;
    return true;
  }
  bool moved() const { return moved_; }
  // Does one of the tensors that fill() has put into `converted` begin in one of these ranges?
  bool converts_within(const Ranges& ranges) const {
    for (const auto& [begin, end] : ranges)
      for (const Leaf& leaf : leaves_) {
        const auto address = reinterpret_cast<std::uintptr_t>(leaf.address);
        if (leaf.kind == Kind::converted && begin <= address && address < end) return true;
      }
    return false;
  }

 private:
  struct Leaf {
    Kind kind;
    int row, first;
    std::uint8_t code = 0, bits = 0;
    std::vector<std::int64_t> sizes, strides;
    const std::byte* address = nullptr;
    Place place;
    bool lazy = false;
  };
  struct Entry {
    nb::object key;
    std::size_t at;  // of a leaf, or of a level
    bool level;
  };

  std::size_t add(nb::handle tree) {
    const std::size_t number = levels_below_.size();
    levels_below_.emplace_back();
    for (nb::handle item : tree) {
      nb::object child(item[1]);
      const bool level = nb::isinstance<nb::list>(child);
      const std::size_t at = level ? add(child) : nb::cast<std::size_t>(child);
      levels_below_[number].push_back({nb::object(item[0]), at, level});
    }
    return number;
  }

  // The plain dict of a level; none for a type that may answer in its own way.
  nb::object dict_of(nb::handle source) const {
    const nb::handle type = source.type();
    if (type.is(levels_[0]) || type.is(levels_[1])) return nb::borrow(source);
    if (!type.is(tensordict_)) return {};
    const nb::object attributes = nb::steal(PyObject_GenericGetDict(source.ptr(), nullptr));
    if (!attributes.is_valid()) throw nb::python_error();
    static PyObject* const name = PyUnicode_InternFromString("_tensordict");
    PyObject* const inner = PyDict_GetItem(attributes.ptr(), name);
    return inner != nullptr && nb::handle(inner).type().is(levels_[0]) ? nb::borrow(inner) : nb::object();
  }

  // INV: nothing in the loop runs code of Python's. A question to a tensor may let another thread run, so the tensor is
  // held meanwhile.
  bool fits(std::size_t number, nb::handle source, Sources& table, nb::list& converted) {
    const nb::object dict = dict_of(source);
    const std::vector<Entry>& entries = levels_below_[number];
    if (!dict.is_valid() || static_cast<std::size_t>(PyDict_Size(dict.ptr())) != entries.size()) return false;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    for (const Entry& entry : entries) {
      if (!PyDict_Next(dict.ptr(), &at, &key, &value)) return false;
      if (key != entry.key.ptr() && (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, entry.key.ptr()) != 0))
        return false;
      const nb::object held = nb::borrow(value);
      if (entry.level ? !fits(entry.at, held, table, converted) : !takes(leaves_[entry.at], held, table, converted))
        return false;
    }
    return true;
  }

  bool takes(Leaf& leaf, nb::handle value, Sources& table, nb::list& converted) {
    const nb::handle type = value.type();
    if (!type.is(types_[0]) && !type.is(types_[1])) return false;
    if (leaf.kind == Kind::left_out) return true;
    if (!looks_right(leaf, value)) return false;
    if (leaf.kind == Kind::converted)
      converted.append(value);
    else if (leaf.row >= 0)
      table.put(static_cast<std::size_t>(leaf.row), value, leaf.address);
    return true;
  }

  bool looks_right(Leaf& leaf, nb::handle value) {
    DLTensor t;
    if (!describe(value.ptr(), t) || place_of(t) != leaf.place || t.code != leaf.code || t.bits != leaf.bits ||
        static_cast<std::size_t>(t.ndim) != leaf.sizes.size() ||
        !std::equal(leaf.sizes.begin(), leaf.sizes.end(), t.shape))
      return false;
    if (!same_order(t, leaf.strides.data())) return false;
    if (is_lazy(value, t.code) != leaf.lazy) return false;  // no bytes to copy are lazy
    const std::byte* const address = static_cast<const std::byte*>(t.data) + t.byte_offset;
    const std::size_t bytes = extent(t) * t.bits / 8;
    // Asked each time: the tensor that had this address before is gone, and its memory may be another's by now.
    if (!holds(value, address, bytes)) return false;
    if (address != leaf.address) {
      moved_ = true;
      leaf.address = address;
    }
    return true;
  }

  nb::tuple types_, levels_;
  nb::object tensordict_;
  std::vector<std::vector<Entry>> levels_below_;
  std::vector<Leaf> leaves_;
  bool moved_ = false;
  bool settled_ = false;  // did the last source fit? Else some addresses have not been looked at by the caller
};

}  // namespace

void bind_values(nb::module_& m) {
  nb::class_<Outline>(m, "Outline", "The keys, places, dtypes and shapes of a dict or TensorDict of tensors.")
      .def(nb::init<nb::list, nb::list, nb::tuple, nb::tuple, nb::object>(), "tree"_a, "leaves"_a, "types"_a,
           "levels"_a, "tensordict"_a.none(),
           nb::sig("def __init__(self, tree: list, leaves: list, types: tuple, levels: tuple, tensordict: type | None) "
                   "-> None"))
      .def("fill", &Outline::fill, "source"_a, "table"_a, "converted"_a,
           nb::sig("def fill(self, source: object, table: Sources, converted: list) -> bool"),
           "Put the tensors of a source into the table, and into the list those to convert. False: it does not fit.")
      .def("converts_within", &Outline::converts_within, "ranges"_a,
           "Does a tensor of those to convert begin in one of these ranges of addresses?")
      .def_prop_ro("moved", &Outline::moved, "Has some tensor another address than the last time?");
}

}  // namespace shmsync::bind
