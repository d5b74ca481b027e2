// The suites of `switchyard bench`: their layers, token counts and balancedness.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "switchyard/layer_spec.h"
#include "switchyard/tensor.h"

namespace switchyard::bench {

struct BenchLayer {
  std::string model;
  LayerSpec spec;
  std::optional<DType> weights = {};  // in a suite of several types the one it has; empty: all

  bool has(DType type) const { return !weights || *weights == type; }
};

struct BenchTypes {
  DType weights, compute;

  friend bool operator==(const BenchTypes&, const BenchTypes&) = default;
};

// A plan measures every layer with every number of tokens (per rank) and every balancedness.
struct BenchPlan {
  std::string suite;
  bool over_ranks = false;     // two or more ranks, a GPU each
  bool given_routing = false;  // the gate is not timed
  // One rank or more, the gate in the time, and every point compared with fp64; rows say so.
  bool checked_with_gate = false;
  DType dtype = DType::kBF16;  // of the expert weights
  DType compute = DType::kBF16;
  // The types that the plan is measured in, one after the other. `dtype` and `compute` are the
  // first.
  std::vector<BenchTypes> types;
  std::vector<BenchLayer> layers;
  std::vector<std::int64_t> tokens;
  std::vector<double> betas;
};

// The share of DeepSeek-V3 that one of eight ranks has: 32 of its 256 experts. Tokens choose their
// 8 experts among these 32. So T tokens bring as many rows as this rank would get from T tokens on
// each of the eight ranks.
inline constexpr std::string_view kDeepseekRank = "deepseek-v3-ep8";

// A layer of the model table in the form in which kernels over several ranks are compared. It has
// only routed experts, and tokens choose among all of them.
struct RoutedAlone {
  std::string_view name, model;
};
inline constexpr RoutedAlone kRoutedAlone[] = {{"v4-flash-routed", "deepseek-v4-flash"},
                                               {"v4-pro-routed", "deepseek-v4-pro"},
                                               {"v3-routed", "deepseek-v3"},
                                               {"glm-5-routed", "glm-5"},
                                               {"kimi-k2-routed", "kimi-k2"}};

// Returns a layer of the model table, kDeepseekRank, or one of kRoutedAlone. Throws
// Error{kInvalidArgument} for unknown names and for layers whose experts do not come from the
// activations (hash routing).
BenchLayer bench_layer(std::string_view model, const ConfigOverrides& overrides = {});

// The suites of layers.
const std::vector<std::string>& bench_suite_names();

// Returns a suite of layers by name. Throws Error{kInvalidArgument} naming the suites that there
// are.
BenchPlan bench_suite(std::string_view name);

}  // namespace switchyard::bench
