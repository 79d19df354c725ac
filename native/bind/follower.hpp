// The tensors of one bound module, and how they move to a version: the native half of Binding (engine/bind/binding.py).
//
// Parameters are views of the slot that is read: `param.data = view`. With one slot they stay where they are. Buffers
// are private copies, since forward passes write them. With each version they are put back into the dicts that own
// them, should something else have taken their place, and get the version's values in one call.
//
// INV: it holds tensors and dicts of tensors, never a module. A binding lives in a Subscriber that the module's guard
//      holds, and a cycle through native objects is never collected.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "sources.hpp"

namespace shmsync::bind {

namespace nb = nanobind;

class Follower {
 public:
  // module: a weak reference to what was bound.
  // parameters: they become views; `store` is the dict that owns the first of them, under `name`.
  // buffers: [(dict that owns it or None, its name there, the buffer, its offset in a slot), ...]; they lie as leaves.
  // counted: the buffers whose changes autograd counts.
  Follower(nb::object module, nb::list parameters, nb::dict store, nb::object name, nb::list buffers, nb::list counted);

  // The parameters take these views in this slot, which begins at this address.
  void learn(std::uint32_t slot, nb::list views, std::uintptr_t address);
  bool knows(std::uint32_t slot) const { return slot < slots_.size() && slots_[slot].views.is_valid(); }
  // Another arena: no slot is known.
  void forget();

  // Is the first parameter where it was put, in its module and in memory?
  bool in_place() const;
  void put_back() const;
  // Let the parameters show this slot, which is known.
  void show(std::uint32_t slot);
  // Copy this slot into the buffers. False: they are no plain memory of the host, as they were; nothing was copied.
  bool renew(std::uint32_t slot);
  // The parameters are private from now on.
  void hide() { shown_ = -1, address_ = 0; }

  // May all of a move to this slot be native?
  bool is_ready(std::uint32_t slot) const;

  bool simple = false;  // Python has nothing to do in a move: no device, nothing that only the first version fills

 private:
  struct Buffer {
    nb::object store, name, tensor;
    std::size_t offset, bytes;
  };
  struct Slot {
    nb::object views;
    std::uintptr_t address = 0;  // of the slot
    std::uintptr_t first = 0;    // of the first view
  };

  nb::object module_, store_, name_, first_;
  nb::list parameters_, counted_;
  std::vector<Slot> slots_;
  std::int64_t shown_ = -1;     // the slot that the parameters show
  std::uintptr_t address_ = 0;  // of the first parameter; 0: private memory
  std::vector<Buffer> buffers_;
  std::vector<std::int64_t> sizes_;  // and strides of the buffers, one after the other
  std::vector<CopyOp> ops_;
  bool plain_ = true;  // are the buffers plain memory of the host?
};

// Forget what autocast and parametrize have computed from the version before.
void clear_caches();

}  // namespace shmsync::bind
