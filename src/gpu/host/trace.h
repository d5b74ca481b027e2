// The memory traced kernels write to, and what it says.
#pragma once

#include <cstdint>
#include <optional>

#include "gpu/device.h"
#include "gpu/pipeline/trace_record.h"

namespace switchyard::gpu {

// On the device that is current.
class DeviceTrace {
 public:
  explicit DeviceTrace(unsigned blocks);

  TraceBuffer buffer(const std::optional<SlowRole>& slow) const;
  std::size_t bytes() const { return records_.bytes() + dropped_.bytes(); }
  // The events of pass `epoch`, counted from 1, which has ended, into `trace`. Asks the device for
  // its time. What was dropped is counted anew from here on.
  void read(std::uint64_t epoch, PassTrace& trace);

 private:
  DeviceBuffer records_, dropped_;
};

}  // namespace switchyard::gpu
