// Where the tensors of a source lie, found again at each publish without asking torch.
//
// A source is a tree: modules, TensorDicts and dicts, with tensors as leaves. The first publish checks all of it in
// Python. This remembers what that check was about: the keys, the class of each object, and what torch's exchange table
// shows of each tensor: dtype, shape, strides and device. Later publishes read the tree anew from its root, so nothing
// of the source is kept alive, and compare these facts. An address that differs is taken over; only then is the tensor
// asked whether its storage is there and its values are plain (0.3 us). Anything else that differs needs a new check.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

#include "gil.hpp"
#include "sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

constexpr std::uint8_t kComplex = 5;
constexpr int kDeepest = 200;  // levels: a tree that contains itself has no end

// An attribute of a package's module that is never unloaded.
nb::handle never_unloaded(const char* module, const char* name) {
  return nb::object(nb::module_::import_(module).attr(name)).release();
}

// What describe() gives, asked of the tensor itself where torch has no exchange table (before 2.10): 2 us.
bool described(PyObject* tensor, DLTensor& out) {
  if (describe(tensor, out)) return true;
  static std::vector<std::int64_t> sizes;  // under the GIL
  static std::vector<PyObject*> dtypes;    // they are never freed
  try {
    const nb::handle asked(tensor);
    const auto shape = nb::cast<std::vector<std::int64_t>>(nb::tuple(asked.attr("shape")));
    const auto strides = nb::cast<std::vector<std::int64_t>>(nb::tuple(asked.attr("stride")()));
    sizes = shape;
    sizes.insert(sizes.end(), strides.begin(), strides.end());
    const nb::object dtype = asked.attr("dtype"), device = asked.attr("device");
    auto known = std::find(dtypes.begin(), dtypes.end(), dtype.ptr());
    if (known == dtypes.end()) known = dtypes.insert(known, dtype.ptr());
    const bool on_host = nb::cast<std::string>(device.attr("type")) == "cpu";
    out = {reinterpret_cast<void*>(nb::cast<std::uintptr_t>(asked.attr("data_ptr")())),
           on_host ? kCpu : kCpu + 1,
           device.attr("index").is_none() ? 0 : nb::cast<std::int32_t>(device.attr("index")),
           static_cast<std::int32_t>(shape.size()),
           nb::cast<bool>(dtype.attr("is_complex")) ? kComplex : std::uint8_t{0},
           static_cast<std::uint8_t>(8 * nb::cast<int>(dtype.attr("itemsize"))),
           static_cast<std::uint16_t>(known - dtypes.begin()),
           sizes.data(),
           sizes.data() + shape.size(),
           0};
    return true;
  } catch (nb::python_error&) {  // of another layout, or without memory
    return false;
  }
}

class SourcePlan {
 public:
  // roles: {id of a tensor in the source: ([(offset in the slot, bytes), ...], [place in `converted`, ...], home,
  // id of the tensor that it is one with)}. A tensor without a role is left out. Raises ValueError for a source in
  // which some of them are not found.
  SourcePlan(nb::handle source, nb::dict roles) : roles_(std::move(roles)) {
    const TorchFunctionOff off;
    root_ = node_of(source, 0);
    if (seen_.size() != roles_.size()) throw nb::value_error("some tensors are not in dicts of the source");
    for (const auto& [leaf, other] : later_) twins_.emplace_back(leaf, seen_.at(other));
    roles_.clear();
    seen_.clear();
    later_.clear();
    converted_.resize(converted_places_);
  }
  ~SourcePlan() { release(); }
  SourcePlan(const SourcePlan&) = delete;
  SourcePlan& operator=(const SourcePlan&) = delete;

  // Is this source as the first one was? Then rows and `converted` have its tensors, until release().
  // INV: no code of Python's runs between the look at a dict and the use of what it has, but by a question to a tensor
  // that has moved; that tensor is held.
  bool match(nb::handle source) {
    release();
    moved_ = !settled_;
    away_ = false;
    std::optional<TorchFunctionOff> off;
    const bool found =
        fits(root_, source.ptr(), off) && std::all_of(twins_.begin(), twins_.end(), [this](const auto& pair) {
          return leaves_[pair.first].bytes == 0 || leaves_[pair.first].address == leaves_[pair.second].address;
        });
    settled_ = found || !moved_;
    return found;
  }

  void release() {
    for (PyObject* each : held_) Py_DECREF(each);
    held_.clear();
    std::fill(converted_.begin(), converted_.end(), nullptr);
  }

  void copy_to(std::uintptr_t slot) {
    ops_.clear();
    for (const Row& row : rows_)
      ops_.push_back({reinterpret_cast<std::byte*>(slot) + row.offset, leaves_[row.leaf].address, row.bytes});
    copy_all(ops_, bytes_);
  }

  bool overlaps(const Ranges& ranges) const {
    for (const Leaf& leaf : leaves_) {
      if (leaf.bytes == 0 || leaf.home != nullptr) continue;
      const auto first = reinterpret_cast<std::uintptr_t>(leaf.address);
      for (const auto& [begin, end] : ranges)
        if (first < end && first + leaf.bytes > begin) return true;
    }
    return false;
  }

  nb::list converted() const {
    nb::list found;
    for (PyObject* each : converted_)
      if (each != nullptr) found.append(nb::borrow(each));
    return found;
  }
  bool moved() const { return moved_; }
  bool away() const { return away_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  enum class Kind : std::uint8_t { leaf, ignored, dict, object };
  struct Node {
    PyTypeObject* type = nullptr;  // held by types_
    Kind kind = Kind::ignored;
    std::uint32_t at = 0;  // a leaf, or a level
  };
  struct Entry {
    nb::object key;
    Node node;
  };
  struct Row {
    std::uint32_t leaf;
    std::size_t offset, bytes;
  };
  struct Leaf {
    const std::byte* address;
    const std::byte* home;                 // where an adopted parameter belongs; null: anywhere
    std::size_t bytes;                     // from its first to its last element
    std::uint32_t first_size, dimensions;  // its shape in sizes_, its strides behind it
    std::uint32_t first_place, places;     // in converted_, by places_
    std::uint8_t code, bits;
    std::uint16_t lanes;
    bool lazy;
    Place place;
  };

  Node node_of(nb::handle value, int depth) {
    if (depth > kDeepest) throw nb::value_error("the source is too deep");
    static const nb::handle tensor_type = never_unloaded("torch", "Tensor");
    static const nb::handle module_type = never_unloaded("torch.nn", "Module");
    static const nb::handle ordered = never_unloaded("collections", "OrderedDict");
    PyTypeObject* const type = Py_TYPE(value.ptr());
    types_.push_back(nb::borrow(value.type()));
    if (PyObject_IsInstance(value.ptr(), tensor_type.ptr()) == 1) return leaf_of(value, type);
    const bool is_dict = PyDict_CheckExact(value.ptr()) || value.type().is(ordered);
    const bool is_module = !is_dict && PyObject_IsInstance(value.ptr(), module_type.ptr()) == 1;
    if (value.is_none()) return {type};
    const Node node{type, is_dict ? Kind::dict : Kind::object, static_cast<std::uint32_t>(levels_.size())};
    levels_.emplace_back();
    const auto add = [&](nb::object key, nb::object below) {
      const Node found = node_of(below, depth + 1);
      levels_[node.at].push_back({std::move(key), found});
    };
    if (is_dict) {
      const nb::object items = nb::steal(PyDict_Items(value.ptr()));
      for (nb::handle item : items) add(item[0], item[1]);
      return node;
    }
    // A module, a TensorDict or a tensorclass: the attributes that it keeps its tensors in.
    const nb::object attributes = attributes_of(value);
    const auto names = is_module ? std::vector{"_parameters", "_buffers", "_modules"} : std::vector{"_tensordict"};
    for (const char* name : names) {
      PyObject* const key = interned(name);
      PyObject* const store =
          attributes.is_valid() && PyDict_Check(attributes.ptr()) ? PyDict_GetItem(attributes.ptr(), key) : nullptr;
      if (store == nullptr) throw nb::value_error("an object of the source may hold tensors, and is not known");
      add(nb::borrow(key), nb::borrow(store));
    }
    return node;
  }

  Node leaf_of(nb::handle tensor, PyTypeObject* type) {
    const nb::int_ id(reinterpret_cast<std::uintptr_t>(tensor.ptr()));
    PyObject* const role = PyDict_GetItem(roles_.ptr(), id.ptr());
    if (role == nullptr) return {type};
    DLTensor t;
    if (!described(tensor.ptr(), t)) throw nb::value_error("a tensor does not say where it lies");
    const auto number = static_cast<std::uint32_t>(leaves_.size());
    Leaf leaf{static_cast<const std::byte*>(t.data) + t.byte_offset,
              nullptr,
              extent(t) * t.bits / 8,
              static_cast<std::uint32_t>(sizes_.size()),
              static_cast<std::uint32_t>(t.ndim),
              static_cast<std::uint32_t>(places_.size()),
              0,
              t.code,
              t.bits,
              t.lanes,
              is_lazy(tensor, t.code),
              place_of(t)};
    sizes_.insert(sizes_.end(), t.shape, t.shape + t.ndim);
    sizes_.insert(sizes_.end(), t.strides, t.strides + t.ndim);
    const nb::handle told(role);
    leaf.home = reinterpret_cast<const std::byte*>(nb::cast<std::uintptr_t>(told[2]));
    const auto [known, fresh] = seen_.try_emplace(nb::cast<std::uintptr_t>(id), number);
    if (!fresh) {
      twins_.emplace_back(number, known->second);
    } else {
      for (const auto& [offset, bytes] : nb::cast<std::vector<std::pair<std::size_t, std::size_t>>>(told[0])) {
        rows_.push_back({number, offset, bytes});
        bytes_ += bytes;
      }
      for (const std::size_t place : nb::cast<std::vector<std::size_t>>(told[1])) {
        places_.push_back(static_cast<std::uint32_t>(place));
        converted_places_ = std::max(converted_places_, place + 1);
        ++leaf.places;
      }
      if (const auto other = nb::cast<std::uintptr_t>(told[3]); other != 0) later_.emplace_back(number, other);
    }
    leaves_.push_back(leaf);
    return {type, Kind::leaf, number};
  }

  static nb::object attributes_of(nb::handle object) {
    nb::object found = nb::steal(PyObject_GenericGetDict(object.ptr(), nullptr));
    if (!found.is_valid()) PyErr_Clear();
    return found;
  }

  bool fits(const Node& node, PyObject* value, std::optional<TorchFunctionOff>& off) {
    if (Py_TYPE(value) != node.type) return false;
    switch (node.kind) {
      case Kind::leaf:
        return takes(leaves_[node.at], value, off);
      case Kind::ignored:
        return true;
      case Kind::dict: {
        const std::vector<Entry>& entries = levels_[node.at];
        if (PyDict_Size(value) != static_cast<Py_ssize_t>(entries.size())) return false;
        if (entries.empty()) return true;
        const nb::object held = nb::borrow(value);
        return fits_dict(entries, value, off);
      }
      case Kind::object:
        break;
    }
    const nb::object held = nb::borrow(value);
    const nb::object attributes = attributes_of(value);
    if (!attributes.is_valid()) return false;
    for (const Entry& entry : levels_[node.at]) {
      PyObject* const store = PyDict_GetItemWithError(attributes.ptr(), entry.key.ptr());
      if (store == nullptr) PyErr_Clear();
      if (store == nullptr || !fits(entry.node, store, off)) return false;
    }
    return true;
  }

  bool fits_dict(const std::vector<Entry>& entries, PyObject* dict, std::optional<TorchFunctionOff>& off) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    for (const Entry& entry : entries) {
      if (!PyDict_Next(dict, &at, &key, &value)) return false;
      if (key != entry.key.ptr() && (!PyUnicode_CheckExact(key) || !PyUnicode_CheckExact(entry.key.ptr()) ||
                                     PyUnicode_Compare(key, entry.key.ptr()) != 0))
        return false;
      if (!fits(entry.node, value, off)) return false;
    }
    return true;
  }

  bool takes(Leaf& leaf, PyObject* value, std::optional<TorchFunctionOff>& off) {
    Py_INCREF(value);
    held_.push_back(value);
    DLTensor t;
    if (!described(value, t) || place_of(t) != leaf.place || t.code != leaf.code || t.bits != leaf.bits ||
        t.lanes != leaf.lanes || static_cast<std::uint32_t>(t.ndim) != leaf.dimensions)
      return false;
    const std::int64_t* const sizes = sizes_.data() + leaf.first_size;
    if (!std::equal(t.shape, t.shape + t.ndim, sizes) || !same_order(t, sizes + leaf.dimensions)) return false;
    const std::byte* const address = static_cast<const std::byte*>(t.data) + t.byte_offset;
    if ((address != leaf.address || t.code == kComplex) && leaf.bytes != 0) {
      if (!off) off.emplace();
      if (is_lazy(value, t.code) != leaf.lazy || !holds(value, address, leaf.bytes)) return false;
      moved_ |= address != leaf.address;
      leaf.address = address;
    }
    away_ |= leaf.home != nullptr && leaf.home != address && leaf.bytes != 0;
    for (std::uint32_t i = 0; i < leaf.places; ++i) converted_[places_[leaf.first_place + i]] = value;
    return true;
  }

  nb::dict roles_;                                          // while it is made
  std::unordered_map<std::uintptr_t, std::uint32_t> seen_;  // the same: ids, and their first leaves
  std::vector<std::pair<std::uint32_t, std::uintptr_t>> later_;
  std::size_t converted_places_ = 0;
  std::vector<nb::object> types_;
  std::vector<std::vector<Entry>> levels_;
  std::vector<Leaf> leaves_;
  std::vector<std::int64_t> sizes_;  // and strides of all leaves, one after the other: saves each a cold cache line
  std::vector<std::uint32_t> places_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> twins_;  // leaves that have to be at one address
  std::vector<Row> rows_;
  std::vector<CopyOp> ops_;
  Node root_;
  std::vector<PyObject*> converted_;  // held by held_
  std::vector<PyObject*> held_;
  bool moved_ = false, away_ = false;
  bool settled_ = false;  // has the caller looked at all addresses? Not at those of a source that did not fit
  std::uint64_t bytes_ = 0;
};

}  // namespace

void bind_source_plan(nb::module_& m) {
  nb::class_<SourcePlan>(m, "SourcePlan", "The keys, classes and tensors of a checked source, found again.")
      .def(
          nb::init<nb::handle, nb::dict>(), "source"_a, "roles"_a,
          nb::sig("def __init__(self, source: object, roles: collections.abc.Mapping[int, tuple[list[tuple[int, int]], "
                  "list[int], int, int]]) -> None"),
          "Remember a source. `roles`: for each of its tensors that is published, by id: the (offset in the slot, "
          "bytes) "
          "that are copied from it, its places in `converted`, the address where it belongs (0: anywhere), and the id "
          "of the tensor before it that it is one with (0: none). Raises ValueError where some are not in plain dicts.")
      .def("match", &SourcePlan::match, "source"_a, nb::sig("def match(self, source: object) -> bool"),
           "Has this source the same keys, classes, dtypes, shapes, strides and devices? Then its tensors are the ones "
           "to copy, and are kept until release().")
      .def("copy_to", &SourcePlan::copy_to, "slot"_a, "Copy each row to its offset from the address `slot`.")
      .def("overlaps", &SourcePlan::overlaps, "ranges"_a,
           "Does a tensor, but for those at their own place, lie in one of these ranges of addresses?")
      .def("release", &SourcePlan::release, "Keep no tensor alive; call match() before the next copy_to().")
      .def_prop_ro("converted", &SourcePlan::converted, nb::sig("def converted(self) -> list"),
                   "The tensors of the last match() that cannot be copied as bytes.")
      .def_prop_ro("moved", &SourcePlan::moved, "Did the last match() find a tensor at another address?")
      .def_prop_ro("away", &SourcePlan::away, "Is a tensor that has its own place not there?")
      .def_prop_ro("bytes", &SourcePlan::bytes, "What copy_to() copies.");
}

}  // namespace shmsync::bind
