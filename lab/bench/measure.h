// Times a layer with its weights in place on batch after batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/load.h"
#include "bench/timed_place.h"
#include "run/source.h"
#include "switchyard/layer.h"

namespace switchyard::bench {

struct MeasureOptions : TimingOptions {
  int ranks = 1;  // kCuda: threads of this process, dealt to the GPUs in turn
  // kCuda: SMs to leave free. If empty, a rank leaves the other ranks on its GPU their share.
  std::optional<int> reserved_sms;
  bool uncooperative = false;  // kCuda
  bool traced = false;         // kCuda
  bool given_routing = false;
  bool verify = false;
};

struct Measured {
  // The microseconds of a pass, one number for each repetition.
  //
  // With kCuda, the device's clock times `passes` passes in a row, and the time is divided by their
  // number. With several ranks, the slowest device counts. The passes take turns on copies of the
  // layer. There are so many copies that weights have left the L2 cache when their turn comes
  // again.
  //
  // With `cold`, each pass is timed alone. Its time runs from the moment when the stream has done
  // all earlier work to the end of the pass. The flush before it is not timed.
  //
  // With kCpu it is wall time, with caches as the previous pass left them.
  std::vector<double> graph_us, no_graph_us;
  Rotation rotation;
  std::vector<std::int64_t> tokens_per_expert;  // over all ranks
  Load load;                                    // of the most loaded rank
  // [tokens of all ranks, top_k] of a batch with given_routing.
  std::vector<std::int32_t> topk_ids;
  std::optional<int> graph_nodes;
  std::optional<double> error, error_bound;
  // A description of what is wrong with the results; empty if nothing was found.
  std::string problem;
};

class LayerBench {
 public:
  // `compute` is LayerOptions::compute, and measure() takes activation_dtype(compute). `max_tokens`
  // is per rank. Throws Error{kUnsupported} where there is no such backend, and whatever MoeLayer
  // throws.
  LayerBench(const run::Source& source, DType compute, std::int64_t max_tokens,
             const MeasureOptions& options);
  ~LayerBench();

  // Measures one batch of host activations. Each rank gets the same number of tokens, at most
  // max_tokens; the first tokens are rank 0's.
  Measured measure(const MatrixView& activations);

  class Place;

 private:
  const run::Source& source_;
  DType compute_;
  MeasureOptions options_;
  std::unique_ptr<Place> place_;
};

// The type that a layer computes in if LayerOptions::compute is empty.
DType default_compute(DType weights);

// The type of activations and outputs of a layer that computes in `compute`: an FP8 layer quantises
// bf16 itself.
DType activation_dtype(DType compute);

}  // namespace switchyard::bench
