// What a device does later, for Python: objects whose address and ticket its driver takes.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "control.hpp"
#include "shmsync/device_reads.hpp"
#include "shmsync/later.hpp"

namespace shmsync::bind {

// One Later, held by Python too.
struct HostCall {
  std::shared_ptr<Later> later;
};

// The reads of one row's owner.
struct RowReads {
  std::shared_ptr<DeviceReads> reads;
};

}  // namespace shmsync::bind
