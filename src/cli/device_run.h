// Running a layer on a GPU.
#pragma once

#include "cli/batch.h"
#include "cli/ranks.h"
#include "cli/source.h"

namespace switchyard::cli {

// One rank on the current device: the batch is copied there, the passes are timed by the device
// with the L2 cache flushed before each, and the results are copied back. Throws
// Error{kUnsupported} where there is no GPU, and whatever MoeLayer throws.
RunResult run_on_device(const Source& source, const Batch& batch, const RankOptions& options);

}  // namespace switchyard::cli
