// The memory that traced kernels write their records to, and reading it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpu/device.h"
#include "gpu/pipeline/trace_record.h"

namespace switchyard::gpu {

// Puts events in the order of PassTrace: kernels do not write them in the order of time.
void sort_events(std::vector<TraceEvent>& events);

// Trace memory on the device that is current at construction.
class DeviceTrace {
 public:
  explicit DeviceTrace(unsigned blocks);

  TraceBuffer buffer(const std::optional<SlowRole>& slow) const;
  std::size_t bytes() const { return records_.bytes() + dropped_.bytes(); }
  // Reads the events of pass `epoch`, counted from 1, into `trace`. The pass must have ended. Asks
  // the device for its time. Resets the count of dropped events.
  void read(std::uint64_t epoch, PassTrace& trace);

 private:
  DeviceBuffer records_, dropped_;
};

}  // namespace switchyard::gpu
