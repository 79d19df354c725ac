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
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), std::pair{address, ~std::uintptr_t{0}});
    return after != ranges_.begin() && address < std::prev(after)->second;
  }

  void set(Ranges ranges) {
    std::sort(ranges.begin(), ranges.end());
    ranges_ = std::move(ranges);
  }

 private:
  Ranges ranges_;  // by address; none overlaps another
};

}  // namespace shmsync::bind
