// Where this torch keeps what must be known of a plain tensor: its flags, and how much memory its storage has.
//
// Asked through Python they cost ten times as much as the rest of the look at a tensor. Torch promises no layout, so
// none is assumed: learn() finds each word by tensors of which Python has told it, and what it does not find is asked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace shmsync::bind {

struct Look {
  std::uintptr_t begin;  // of the storage
  std::size_t bytes;     // that the storage has

  // Has it these? A tensor without elements needs none.
  bool has(const std::byte* address, std::size_t wanted) const {
    const auto first = reinterpret_cast<std::uintptr_t>(address);
    return wanted == 0 || (begin != 0 && first >= begin && begin + bytes >= first + wanted);
  }
};

// Of a tensor whose flags say that it is plain: neither lazy nor a wrapper. False says nothing: ask the tensor.
// The object is a torch.Tensor; call it with the GIL held.
bool look(PyObject* tensor, Look& out);

// Counts the tensors that had to be asked.
void count_asked();

}  // namespace shmsync::bind
