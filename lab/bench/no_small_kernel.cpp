// The small kernel in builds without CUDA.
#include "bench/small_kernel.h"
#include "switchyard/error.h"

namespace switchyard::bench {

void SmallKernel::enqueue(const gpu::Stream&, bool) const {
  throw Error(ErrorCode::kUnsupported, "this build has no CUDA, which bench chain needs");
}

}  // namespace switchyard::bench
