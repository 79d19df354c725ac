// What torch says of a tensor without linking libtorch, and the bytes of a publish that come from tensors.
//
// describe() reads address, dtype and shape from torch's exchange table in 35 ns; where only Python refers to the
// tensor torch 2.13 takes a reference, and the GIL for it, which makes it 140 ns. is_lazy() and holds() ask the tensor
// for what that table does not show. SourcePlan (source_plan.cpp) finds the tensors of a published source again by
// these; Follower (follower.cpp) moves a bound module's.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
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

// Address, dtype and shape of a torch tensor, from torch's DLPack exchange table, without linking libtorch.
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

// tensor.data = view for each pair, by the attribute's own setter: a loop in Python costs half as much again.
void set_data(const nanobind::list& tensors, const nanobind::list& views);

// Copies so many bytes in all: by as many threads as torch uses, where several pay, and without the GIL, where the copy
// takes longer than another thread may keep it. Needs the GIL.
void copy_all(const std::vector<CopyOp>& ops, std::uint64_t bytes);

using Ranges = std::vector<std::pair<std::uintptr_t, std::uintptr_t>>;  // of addresses, [begin, end)

}  // namespace shmsync::bind
