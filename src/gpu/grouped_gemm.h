// The operator GroupedGemm on the GPU. It includes no CUDA header.
#pragma once

#include <memory>

#include "switchyard/grouped_gemm.h"

namespace switchyard::gpu {

class GroupedGemmEngine {
 public:
  // Spec, weights and options fit together; `compute` has been resolved. Throws Error{kUnsupported}
  // for what the kernels do not have, and in a build without CUDA.
  GroupedGemmEngine(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights, DType compute,
                    const GroupedGemmOptions& options);
  ~GroupedGemmEngine();
  GroupedGemmEngine(const GroupedGemmEngine&) = delete;
  GroupedGemmEngine& operator=(const GroupedGemmEngine&) = delete;

  // Runs a call that has been checked as far as that is possible without reading device memory.
  // Enqueues one kernel on the input's stream.
  void run(const GroupedInput& input, const GroupedOutput& output);

  // See GroupedGemm.
  void refresh(void* stream);
  bool copies() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::gpu
