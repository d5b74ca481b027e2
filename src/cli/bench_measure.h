// One layer with its weights in place, timed on batch after batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/ranks.h"
#include "cli/source.h"
#include "switchyard/layer.h"

namespace switchyard::cli {

struct MeasureOptions {
  Backend backend = Backend::kCpu;
  int reserved_sms = 0;  // kCuda
  int repeat = 0;        // timed passes; 0: by their duration
  bool graph = true;     // kCuda: replay a graph
  bool no_graph = true;  // one call after the other
  bool given_routing = false;
  bool verify = false;
};

struct Measured {
  // Microseconds of each pass. kCuda: the device's time from the stream being free of earlier work
  // to the end of the pass, with the L2 cache flushed before each and the flush not timed. kCpu:
  // wall time, caches as the pass before left them.
  std::vector<double> graph_us, no_graph_us;
  std::vector<std::int64_t> tokens_per_expert;
  std::optional<int> graph_nodes;
  std::optional<double> error, error_bound;
  // What is wrong with the results; empty if nothing was found.
  std::string problem;
};

class LayerBench {
 public:
  // Throws Error{kUnsupported} where there is no such backend, and whatever MoeLayer throws.
  LayerBench(const Source& source, DType compute, std::int64_t max_tokens,
             const MeasureOptions& options);
  ~LayerBench();

  // Host activations of at most max_tokens tokens.
  Measured measure(const MatrixView& activations);

  class Place;

 private:
  const Source& source_;
  DType compute_;
  MeasureOptions options_;
  std::unique_ptr<Place> place_;
};

// "NVIDIA H200, 132 SMs, CUDA 13.0", or the processor's name and its threads.
std::string bench_machine(Backend backend);

// How often to time passes of `median_us`, if no number was asked for.
int default_repeats(Backend backend, double median_us);

}  // namespace switchyard::cli
