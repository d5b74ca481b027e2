// Ranks on GPUs in a build without CUDA.
#include "all_to_all/rank.h"
#include "switchyard/error.h"

namespace switchyard::all_to_all {

std::unique_ptr<Rank> make_gpu_rank(const World&, const Case&, const RankOptions&) {
  throw Error(ErrorCode::kUnsupported,
              "this build has no CUDA; configure it where nvcc and the CUTLASS headers are found, "
              "or use the CPU");
}

}  // namespace switchyard::all_to_all
