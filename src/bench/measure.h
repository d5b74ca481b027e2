// One layer with its weights in place, timed on batch after batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/load.h"
#include "run/source.h"
#include "switchyard/layer.h"

namespace switchyard::bench {

// How passes follow each other when they are timed; {1, 1}: by themselves.
struct Rotation {
  int copies = 1;  // of the layer's weights
  int passes = 1;  // between two looks at the clock
};

struct MeasureOptions {
  Backend backend = Backend::kCpu;
  int ranks = 1;  // kCuda: threads of this process, dealt to the GPUs in turn
  // kCuda: SMs left free; empty: those of the other ranks on the GPU.
  std::optional<int> reserved_sms;
  bool uncooperative = false;  // kCuda
  bool traced = false;         // kCuda
  int repeat = 0;              // timed passes; 0: by their duration
  bool graph = true;           // kCuda: replay a graph
  bool no_graph = true;        // one call after the other
  bool cold = false;           // kCuda: each pass by itself, behind a flush of the L2 cache
  bool given_routing = false;
  bool verify = false;
};

struct Measured {
  // Microseconds of a pass, as often as it was repeated. kCuda: the device's time for `passes` of
  // them in a row, divided by their number; of several ranks, the slowest's device's. They take
  // turns on copies of the layer, as many as it takes for weights to have left the L2 cache when
  // their turn comes again. With `cold`, of one pass from the stream being free of earlier work to
  // its end; the flush before it is not timed. kCpu: wall time, caches as the pass before left
  // them.
  std::vector<double> graph_us, no_graph_us;
  Rotation rotation;
  std::vector<std::int64_t> tokens_per_expert;  // over all ranks
  Load load;                                    // of the most loaded rank
  std::optional<int> graph_nodes;
  std::optional<double> error, error_bound;
  // What is wrong with the results; empty if nothing was found.
  std::string problem;
};

class LayerBench {
 public:
  // `compute`: LayerOptions::compute; measure() takes activation_dtype(compute). `max_tokens`: of
  // each rank.
  // Throws Error{kUnsupported} where there is no such backend, and whatever MoeLayer throws.
  LayerBench(const run::Source& source, DType compute, std::int64_t max_tokens,
             const MeasureOptions& options);
  ~LayerBench();

  // Host activations, the same number of tokens for each rank, at most max_tokens: the first are
  // rank 0's.
  Measured measure(const MatrixView& activations);

  class Place;

 private:
  const run::Source& source_;
  DType compute_;
  MeasureOptions options_;
  std::unique_ptr<Place> place_;
};

// The type of activations and outputs of a layer that computes in `compute`: an FP8 layer quantises
// bf16 itself.
DType activation_dtype(DType compute);

// How often to time what takes `duration_us`, if no number was asked for.
int default_repeats(Backend backend, double duration_us);

}  // namespace switchyard::bench
