// The small kernel between two layers of a chain: a residual addition and an RMS normalisation.
#pragma once

#include <cstdint>

#include "gpu/device.h"

namespace switchyard::bench {

// sum = residual + delta, and normal = sum / sqrt(mean(sum^2) + kEpsilon), row by row. All are
// device memory [tokens, hidden] in bf16, contiguous; `sum` may be `residual`. A model's weight of
// the normalisation is left out.
struct SmallKernel {
  static constexpr float kEpsilon = 1e-6f;

  const std::uint16_t *residual, *delta;
  std::uint16_t *sum, *normal;
  std::int64_t tokens;
  int hidden;  // a multiple of 8, for loads of 16 bytes

  // Enqueues it. `early`: its launch has the attribute of programmatic dependent launch, and it
  // invites the next kernel at once. Else it waits for the kernel before to end and invites nobody,
  // so that the kernel behind it cannot be early either. Throws Error{kSystem} if the launch fails,
  // and Error{kUnsupported} in a build without CUDA.
  void enqueue(const gpu::Stream& stream, bool early) const;
};

}  // namespace switchyard::bench
