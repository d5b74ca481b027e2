// The operator GroupedGemm on the CPU: the layer's tiles and tasks, without the layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cpu/worker_pool.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::cpu {

class GroupedGemmEngine {
 public:
  // Spec and weights fit together; `compute` has been resolved.
  GroupedGemmEngine(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights, DType compute,
                    int num_threads);
  ~GroupedGemmEngine();

  // A call that has been checked, its indexes included. `ends` are those of the input.
  void run(const GroupedInput& input, const GroupedOutput& output,
           std::span<const std::int64_t> ends);

  int num_threads() const { return pool_.size(); }

 private:
  struct Problem;
  struct Tile;
  struct Call;
  class Worker;

  std::unique_ptr<Problem> problem_;
  std::uint64_t call_ = 0;
  std::vector<Worker> workers_;
  WorkerPool pool_;
};

}  // namespace switchyard::cpu
