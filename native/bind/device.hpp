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

// The commit of what a writer has written. While it is pending nobody else may call the writer; it lives longer.
std::shared_ptr<Later> commit_later(PublicationWriter& writer);

}  // namespace shmsync::bind
