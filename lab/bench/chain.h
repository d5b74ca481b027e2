// Times layers in a chain, with a small kernel before each, as a model has them: where every kernel
// waits for the one before it to end, and where it is launched while that one still runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/observer.h"
#include "bench/run_note.h"
#include "results/chain_row.h"
#include "switchyard/tensor.h"

namespace switchyard::bench {

inline constexpr const char* kChainSuite = "chain";

struct ChainModel {
  std::string name;            // see bench_layer()
  DType dtype = DType::kBF16;  // of the weights; the layer computes in default_compute() of it
  int experts = 0;             // 0: the model's

  bool operator==(const ChainModel&) const = default;
};

struct ChainOptions : RunNote {
  std::vector<ChainModel> models;
  std::vector<std::int64_t> tokens;
  int layers = 48;
  int repeat = 20;   // timed replays of each capture
  int captures = 3;  // of each kind of launch, in turn: some times stay for a graph's life
};

// The models and tokens that the suite has where the user gives none.
ChainOptions chain_suite();

using ChainObserver = Observer<results::ChainRow>;

class ChainSession {
 public:
  // Throws Error{kUnsupported} if there is no GPU, and Error{kInvalidArgument} for models that
  // bench_layer() does not have.
  ChainSession(ChainOptions options, ChainObserver& observer);

  const std::string& machine() const { return machine_; }
  // Measures the points. Those that fail are left out.
  void run();

 private:
  void measure(const ChainModel& model);

  ChainOptions options_;
  ChainObserver& observer_;
  std::string machine_;
  std::uint64_t done_ = 0;
};

}  // namespace switchyard::bench
