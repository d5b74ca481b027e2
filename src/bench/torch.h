// The PyTorch chain of bench/torch_chain.py on the points that were measured: the same activations,
// the same router, the same skew, so the same gate result, in one run of Python.
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

// A rival's time, and how many experts its own gate hit, to be seen that it had the same load.
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

// bench/torch_chain.py in the working directory or beside the build that this executable is of.
// Throws Error{kInvalidArgument} saying where it was looked for.
std::filesystem::path find_torch_script(const std::string& given);

// Why the chain cannot compute a layer in this type; empty if it can.
std::string torch_refusal(const LayerSpec& spec, DType compute);

// A job as it grows: layers with their inputs in files, points that refer to them.
class TorchJob {
 public:
  TorchJob();   // makes a directory for its files
  ~TorchJob();  // removes it
  TorchJob(const TorchJob&) = delete;
  TorchJob& operator=(const TorchJob&) = delete;

  // The layer of the points that follow, in bf16 or FP8 arithmetic. Activations [most tokens, H]
  // and router in bf16, copied.
  void add_layer(const BenchLayer& layer, const MoeWeights& weights, const MatrixView& activations,
                 DType compute);
  // `tag` is what the result is returned under.
  void add_point(std::size_t tag, std::int64_t tokens, double beta, float skew, int repeats,
                 const Rotation& rotation);
  bool empty() const { return points_.elements().empty(); }

  // What Python found, by tag; points that it could not time are missing, as are those that it did
  // not reach within the limit, of which `note` is told. Its own progress goes to stdout.
  std::map<std::size_t, TimedRival> run(const TorchOptions& options,
                                        const std::function<void(const std::string&)>& note) const;

  Json to_json() const;

 private:
  std::filesystem::path directory_;
  Json layers_ = Json::array();
  Json points_ = Json::array();
};

}  // namespace switchyard::bench
