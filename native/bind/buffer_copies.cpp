// The buffers of a bound module: private copies, since forward passes write them.
//
// With each version they are put back into the dicts that own them, should something else have taken their place, and
// get the version's values in one call. It holds dicts of tensors, never a module: a binding lives in a Subscriber that
// the module's guard holds, and a cycle through native objects is never collected.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "gil.hpp"
#include "sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace shmsync::bind {
namespace {

class BufferCopies {
 public:
  // entries: [(dict that owns it or None, its name there, the buffer, its offset in a slot), ...]; they lie as their
  // leaves.
  explicit BufferCopies(nb::list entries) {
    for (nb::handle item : entries) {
      Entry entry{nb::object(item[0]), nb::object(item[1]), nb::object(item[2]), nb::cast<std::size_t>(item[3]), 0};
      DLTensor t;
      if (describe(entry.buffer.ptr(), t) && t.device_type == kCpu) {
        entry.bytes = extent(t) * t.bits / 8;
        sizes_.insert(sizes_.end(), t.shape, t.shape + t.ndim);
        sizes_.insert(sizes_.end(), t.strides, t.strides + t.ndim);
      } else {
        plain_ = false;
      }
      entries_.push_back(std::move(entry));
    }
  }

  void put_back() const {
    for (const Entry& entry : entries_)
      if (!entry.store.is_none() &&
          PyDict_GetItemWithError(entry.store.ptr(), entry.name.ptr()) != entry.buffer.ptr() &&
          PyDict_SetItem(entry.store.ptr(), entry.name.ptr(), entry.buffer.ptr()) != 0)
        throw nb::python_error();
  }

  // False: some of them are no plain memory of the host, or not as they were; nothing was copied.
  bool renew(std::uintptr_t slot) {
    if (!plain_) return false;
    ops_.clear();
    std::uint64_t total = 0;
    const std::int64_t* sizes = sizes_.data();
    for (const Entry& entry : entries_) {
      DLTensor t;
      if (!describe(entry.buffer.ptr(), t) || t.device_type != kCpu || extent(t) * t.bits / 8 != entry.bytes ||
          !std::equal(t.shape, t.shape + t.ndim, sizes) || !same_order(t, sizes + t.ndim))
        return false;
      sizes += 2 * t.ndim;
      ops_.push_back({static_cast<std::byte*>(t.data) + t.byte_offset,
                      reinterpret_cast<const std::byte*>(slot) + entry.offset, entry.bytes});
      total += entry.bytes;
    }
    const unsigned threads = copying_threads(total);
    const WithoutGil released;
    copy(ops_.data(), ops_.size(), CopyPath::automatic, threads);
    return true;
  }

 private:
  struct Entry {
    nb::object store, name, buffer;
    std::size_t offset, bytes;
  };
  std::vector<Entry> entries_;
  std::vector<std::int64_t> sizes_;  // and strides, one after the other
  std::vector<CopyOp> ops_;
  bool plain_ = true;
};

}  // namespace

void bind_buffer_copies(nb::module_& m) {
  nb::class_<BufferCopies>(m, "BufferCopies", "The private buffers of a bound module.")
      .def(nb::init<nb::list>(), "entries"_a, nb::sig("def __init__(self, entries: list) -> None"),
           "[(dict that owns it, its name there, the buffer, its offset in a slot), ...]; None: of no dict.")
      .def("put_back", &BufferCopies::put_back, "Put each back into its dict, where it was replaced.")
      .def(
          "renew", &BufferCopies::renew, "slot"_a,
          "Copy the slot at this address into them. False: they are no plain memory of the host, as they were; nothing "
          "was copied.");
}

}  // namespace shmsync::bind
