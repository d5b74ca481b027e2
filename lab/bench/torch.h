// Times the PyTorch chain of bench/torch_chain.py on the points that were measured, in one run of
// Python. The chain gets the same activations, router and skew, so its gate chooses the same
// experts.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "bench/measure.h"
#include "bench/suite.h"
#include "results/row.h"
#include "switchyard/weights.h"

namespace switchyard::bench {

// A rival's time. `experts_hit` counts the experts that its own gate chose, which shows whether it
// had the same load.
struct TimedRival {
  results::Rival rival;
  int experts_hit = 0;
};

struct TorchOptions {
  std::string python = "python3";
  std::string script;    // empty: find_torch_script()
  std::string variants;  // empty: all
  std::chrono::seconds limit{420};
};

// Returns the script `given`. If that is empty, it looks for bench/torch_chain.py in the working
// directory and beside the build that this executable belongs to. Throws Error{kInvalidArgument}
// that says where it looked.
std::filesystem::path find_torch_script(const std::string& given);

// Returns why the chain cannot compute a layer in this type; empty if it can.
std::string torch_refusal(const LayerSpec& spec, DType compute);

// A job for the chain, put together step by step. Its layers have their inputs in files, and its
// points refer to the layers.
class TorchJob {
 public:
  TorchJob();   // makes a directory for its files
  ~TorchJob();  // removes it
  TorchJob(const TorchJob&) = delete;
  TorchJob& operator=(const TorchJob&) = delete;

  // Adds the layer of the points that follow. `compute` is bf16 or FP8. The activations [most
  // tokens, H] and the router must be bf16; both are copied.
  void add_layer(const BenchLayer& layer, const MoeWeights& weights, const MatrixView& activations,
                 DType compute);
  // Adds a point. run() returns its result under `tag`.
  void add_point(std::size_t tag, std::int64_t tokens, double beta, float skew, int repeats,
                 const Rotation& rotation);
  bool empty() const { return points_.elements().empty(); }

  // Runs the chain and returns its results by tag. Points are missing if the chain could not time
  // them, or did not reach them within the limit; `note` is told when the limit ended the run. The
  // chain prints its own progress to stdout.
  std::map<std::size_t, TimedRival> run(const TorchOptions& options,
                                        const std::function<void(const std::string&)>& note) const;

  Json to_json() const;

 private:
  std::filesystem::path directory_;
  Json layers_ = Json::array();
  Json points_ = Json::array();
};

}  // namespace switchyard::bench
