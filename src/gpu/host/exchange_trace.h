// The memory that the kernels of a traced exchange write their records to, and reading it.
#pragma once

#include <cstdint>

#include "gpu/device.h"
#include "gpu/dispatch/params.h"

namespace switchyard::gpu {

// Trace memory on the device that is current at construction.
class ExchangeTrace {
 public:
  explicit ExchangeTrace(unsigned blocks);  // the most of a kernel

  ExchangeRecords records() const;
  // Reads into `trace` the events of dispatch `dispatch` and, if it followed that, of combine
  // `combine`. Both must have ended. The copy is on `stream`, which must wait for nothing else.
  // Asks the device for its time.
  void read(std::uint64_t dispatch, std::uint64_t combine, const Stream& stream,
            PassTrace& trace) const;

 private:
  std::uint32_t blocks_;
  DeviceBuffer records_;
};

}  // namespace switchyard::gpu
