// The memory that shows a subscriber's weights: the slab, and private copies that change with the version.
//
// A tensor that lies there changes with the next version, so a caller who keeps it needs a clone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "sources.hpp"

namespace shmsync::bind {

namespace nb = nanobind;

class WeightsMemory {
 public:
  // Does the tensor start there?
  bool aliases(nb::handle tensor) const {
    DLTensor t;
    std::uintptr_t address;
    if (describe(tensor.ptr(), t)) {
      address = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
    } else {
      if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
      try {
        address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());  // this torch has no exchange table
      } catch (nb::python_error&) {
        return false;  // it has no storage: a sparse tensor, or one under vmap, grad or functionalisation
      }
    }
    if (address >= slab_begin_ && address < slab_end_) return true;
    const auto after = std::upper_bound(copies_.begin(), copies_.end(), std::pair{address, ~std::uintptr_t{0}});
    return after != copies_.begin() && address < std::prev(after)->second;
  }

  // Private copies that change with the version.
  void set_copies(Ranges ranges) {
    std::sort(ranges.begin(), ranges.end());
    copies_ = std::move(ranges);
  }

  // The read-only mapping of the arena's slab.
  void set_slab(std::uintptr_t begin, std::uintptr_t end) {
    slab_begin_ = begin;
    slab_end_ = end;
  }

 private:
  std::uintptr_t slab_begin_ = 0, slab_end_ = 0;
  Ranges copies_;  // by address
};

}  // namespace shmsync::bind
