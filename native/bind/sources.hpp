// What torch says of a tensor without linking libtorch, and the bytes of a publish that come from tensors.
//
// describe() reads address, dtype and shape from torch's exchange table in 50 ns. is_lazy() and holds() ask the tensor
// for what that table does not show. SourcePlan (source_plan.cpp) finds the tensors of a published source again by
// these; BufferCopies (buffer_copies.cpp) renews a module's buffers; Sources, below, is a flat table of tensors, which
// is checked again on every call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "shmsync/copy.hpp"

namespace shmsync::bind {

// The parts of DLPack 1.x that we read; the layout is fixed by its ABI (github.com/dmlc/dlpack).
struct DLTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

// Address, dtype and shape of a torch tensor in 50 ns, from torch's DLPack exchange table, without linking libtorch.
// False when this torch has no table (before 2.10) or the tensor cannot be exported: ask it in Python.
bool describe(PyObject* tensor, DLTensor& out);

// Is it a tensor with all of its elements in memory, as plain bytes, in any order? False is inconclusive. Call it while
// TorchFunctionOff lives.
bool surely_plain(PyObject* object);

inline constexpr std::int32_t kCpu = 1;  // device_type

// Where a tensor lies. No address says it: the memory of two devices may have the same addresses.
struct Place {
  std::int32_t type = 0, index = 0;
  bool operator==(const Place&) const = default;
};
inline Place place_of(const DLTensor& t) { return {t.device_type, t.device_id}; }

// Has it its elements at the same places as a tensor of its shape with these strides?
bool same_order(const DLTensor& t, const std::int64_t* strides);
std::size_t extent(const DLTensor& t);  // elements from the first to the last one in memory, gaps included
// While it lives, a tensor answers by torch's own code: no mode of the caller's is asked.
class TorchFunctionOff {
 public:
  TorchFunctionOff() : guard_(nanobind::borrow(made())()) { guard_.attr("__enter__")(); }
  TorchFunctionOff(const TorchFunctionOff&) = delete;
  TorchFunctionOff& operator=(const TorchFunctionOff&) = delete;
  ~TorchFunctionOff() { guard_.attr("__exit__")(nanobind::none(), nanobind::none(), nanobind::none()); }

 private:
  static nanobind::handle made() {
    static const nanobind::handle type =
        nanobind::object(nanobind::module_::import_("torch").attr("_C").attr("DisableTorchFunction")).release();
    return type;
  }
  nanobind::object guard_;
};

// These two call methods of torch for what DLPack does not show. Each takes 0.2 us. Call them while TorchFunctionOff
// lives.
// Is it lazily conjugated or negated? DLPack shows the plain bytes of such a tensor: the wrong values.
bool is_lazy(nanobind::handle tensor, std::uint8_t code);
// Has its storage these bytes? DLPack shows an address, and not how much memory is there: resize_(0) on a storage, as
// FSDP does it, takes it away; a wrapper that `p.data = x` has put into a parameter never had any.
bool holds(nanobind::handle tensor, const std::byte* address, std::size_t bytes);

// How many threads may copy so many bytes: as many as torch uses, asked only where several would pay. Needs the GIL.
unsigned copying_threads(std::uint64_t bytes);

using Ranges = std::vector<std::pair<std::uintptr_t, std::uintptr_t>>;  // of addresses, [begin, end)

class Sources {
 public:
  // guards: [(dict, [(key, value), ...], whole), ...]: the dicts in which the leaves were found, and what they held.
  // `whole`: the dict may hold nothing else.
  // leaves: [(tensor, offset in the slot, bytes), ...], dense, plain bytes in the order that the slot has. With 0 bytes
  // a tensor of any kind, which is only compared with what it was.
  Sources(nanobind::list guards, nanobind::list leaves);

  // True when every dict still holds the same objects in the same order and every tensor still has the type, place,
  // dtype, shape and memory order that it was checked with. Addresses of bytes that are copied may have moved, to
  // memory that holds the tensor: they are read again, and moved() is true.
  bool revalidate();
  bool moved() const { return moved_; }
  void copy_to(std::uintptr_t slot);

 private:
  struct Leaf {
    nanobind::object tensor;
    PyTypeObject* type;  // swap_tensors() puts another tensor into the same object, and its type with it
    const std::byte* address;
    std::size_t offset;
    std::size_t bytes;
    std::uint8_t code, bits;
    std::uint32_t first_size, dimensions;  // its shape, in sizes_, and its strides behind it
    Place place;
    bool lazy;  // of one that is only compared: is it conjugated or negated lazily?
  };
  struct Entry {
    nanobind::object key, value;
  };
  struct Guard {
    nanobind::dict dict;
    std::vector<Entry> entries;
    bool whole;
  };
  static bool unchanged(const Guard& guard);
  bool unchanged(Leaf& leaf);

  std::vector<Guard> guards_;
  std::vector<Leaf> leaves_;
  std::vector<std::int64_t> sizes_;  // and strides of all leaves, one after the other: saves each a cold cache line
  std::vector<CopyOp> ops_;
  bool moved_ = false;
  std::uint64_t bytes_ = 0;
};

}  // namespace shmsync::bind
