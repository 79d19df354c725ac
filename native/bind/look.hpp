// Where this torch keeps what must be known of a plain tensor: its flags, and how much memory its storage has.
//
// Asked through Python they cost ten times as much as the rest of the look at a tensor. Torch promises no layout, so
// none is assumed: learn() finds each word by tensors of which Python has told it, and what it does not find is asked.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
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

// What a tensor was at a look: every word of it that may tell its dtype, shape, strides, place and flags, and where its
// storage begins and ends. While none has changed, neither has what was found out about the tensor.
class Seen {
 public:
  // Is this plain tensor exactly as the one that was remembered? False says nothing.
  bool still(PyObject* tensor) const;
  // Remembers a plain tensor of so many dimensions, of which look() has found this, if its words tell all of it.
  void remember(PyObject* tensor, const Look& found, std::int32_t dimensions);
  void forget() { set_ = false; }

 private:
  static constexpr std::size_t kWords = 20;  // without the first two: what it can do, and who holds it
  std::array<std::uint64_t, kWords> words_;
  Look look_;
  bool set_ = false;
};

// Counts the tensors that had to be asked.
void count_asked();

}  // namespace shmsync::bind
